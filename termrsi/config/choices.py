"""The words that configuration may choose from."""

import enum

# What models are asked to play beside the policy. Each is the policy too, unless a model is configured for it.
ROLES = (
    "solver",  # plays the episodes whose successes are rewritten
    "planner",  # writes runbooks
    "critic",  # refuses runbooks that give a test or a secret away
    "teacher",  # goes on where the policy failed
    "judge",  # reads what others did
    "author",  # writes tasks
)


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


class Admission(enum.StrEnum):
    """Which groups a step is made of: those that were begun first, or those that finish first."""

    fair = "fair"
    first = "first"


class LimitEnds(enum.StrEnum):
    terminal = "terminal"
    truncate = "truncate"


class BootstrapAt(enum.StrEnum):
    """The token of the next turn whose value credit links to."""

    first = "first"
    last = "last"


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
    tvpo = "tvpo"
    dis = "dis"
    reterm = "reterm"


TO_SAMPLER = frozenset({Loss.dppo, Loss.tvpo, Loss.dis})  # their one ratio is to the sampler, and nothing is clipped


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


class RefitValueHead(enum.StrEnum):
    """What an inherited critic's values are fitted to before its phase's first update, where the scale of rewards has changed."""

    off = "off"
    affine = "affine"


class Schedule(enum.StrEnum):
    alternate = "alternate"
    continue_rpr = "continue_rpr"
    rollback = "rollback"


class JudgeUncertain(enum.StrEnum):
    """What becomes of a recovery of which its judge is not certain."""

    reject = "reject"
    keep = "keep"


class Workflow(enum.StrEnum):
    """What ReTerm's teacher is told to do: the four steps, or a short form with worked examples that a small model can follow."""

    full = "full"
    short = "short"


class Warmup(enum.StrEnum):
    on = "on"
    off = "off"


Calibration = enum.StrEnum("Calibration", {"family": "family", "global": "global"})  # a word that no class body can hold
BY_FAMILY = Calibration("family")
