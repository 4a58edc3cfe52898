"""The words that configuration may choose from."""

import enum


class Credit(enum.StrEnum):
    tb = "tb"
    skip = "skip"
    token = "token"


class TokenSteps(enum.StrEnum):
    """What the arm `token` of credit takes for a step."""

    all = "all"
    action = "action"


class Author(enum.StrEnum):
    """Who writes synthesised tasks: the generator of the bundled suite, or the model of the role `author`."""

    procedural = "procedural"
    policy = "policy"


class LimitEnds(enum.StrEnum):
    terminal = "terminal"
    truncate = "truncate"


class Chunks(enum.StrEnum):
    link = "link"
    cut = "cut"


class Reward(enum.StrEnum):
    binary = "binary"
    count = "count"  # type: ignore[assignment]  # shadows str.count, which no one calls on a reward
    official = "official"  # what the task's verifier gives, in [0, 1]
    fdr = "fdr"
    saturation = "saturation"
    offset = "offset"
    spr = "spr"


class Loss(enum.StrEnum):
    ppo = "ppo"
    grpo = "grpo"
    dapo = "dapo"
    dr_grpo = "dr_grpo"
    gspo = "gspo"
    dppo = "dppo"
    reterm = "reterm"


class Correction(enum.StrEnum):
    tis = "tis"
    icepop = "icepop"
    sequence = "sequence"


class Divergence(enum.StrEnum):
    tv = "tv"
    kl = "kl"


class DppoForm(enum.StrEnum):
    ratio = "ratio"
    capped = "capped"


class KlKind(enum.StrEnum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class CriticInit(enum.StrEnum):
    inherit = "inherit"
    reset = "reset"


class Schedule(enum.StrEnum):
    alternate = "alternate"
    continue_rpr = "continue_rpr"


class Warmup(enum.StrEnum):
    on = "on"
    off = "off"


Calibration = enum.StrEnum("Calibration", {"family": "family", "global": "global"})  # a word that no class body can hold
BY_FAMILY = Calibration("family")
