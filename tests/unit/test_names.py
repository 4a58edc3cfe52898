"""Names that checks from outside the repository import: where they are, and what they are called with."""

import importlib
import inspect

import pytest

# module, name, parameters in order; `*` stands before the keyword-only ones, `...` for any that follow
FUNCTIONS = [
    (
        "termrsi.algo.advantage",
        "turn_boundary_gae",
        "rewards values turn_ids action_mask * gamma lam credit truncated bootstrap_value ...",
    ),
    ("termrsi.algo.advantage", "turn_boundary_gae_batch", "..."),
    ("termrsi.algo.advantage", "group_relative", "rewards * std_floor normalise"),
    ("termrsi.algo.advantage", "repetition_penalty", "commands observations * threshold penalty"),
    ("termrsi.algo.loss", "dppo_mask", "logp sampler_logp advantages * delta divergence"),
    (
        "termrsi.algo.loss",
        "policy_loss",
        "kind logp old_logp advantages mask * clip_low clip_high delta max_tokens denominator ...",
    ),
    ("termrsi.reward.shaping", "shape", "progress strict * kind beta delta tau"),
    ("termrsi.reward.shaping", "FamilyScale.fit", "tasks * calibration ..."),
    ("termrsi.reward.shaping", "FamilyScale.progress", "self task passed"),
    ("termrsi.reward.reports", "parse", "directory ..."),
    ("termrsi.queues.recovery", "RecoveryQueue", "capacity"),
    ("termrsi.queues.recovery", "RecoveryQueue.push", "self point ..."),
    ("termrsi.queues.recovery", "RecoveryQueue.take", "self n"),
    ("termrsi.tasks.harbor", "load", "path ..."),
    ("termrsi.tasks.terminal_bench", "load", "path ..."),
    ("termrsi.tasks", "load_dir", "path ..."),
    ("termrsi.sandbox", "make", "backend options"),
    ("termrsi.harness.render", "Transcript", "tokenizer"),
    ("termrsi.harness.render", "Transcript.prompt", "self ids"),
    ("termrsi.harness.render", "Transcript.sampled", "self ids logprobs"),
    ("termrsi.harness.render", "Transcript.next_prompt", "self ids"),
    ("termrsi.harness.render", "ChatFormat.messages_of", "self ids"),
    ("termrsi.datasets", "write", "path rows"),
    ("termrsi.datasets", "DataSet", "path"),
]
DEFAULTS = {
    ("turn_boundary_gae", "credit"): "tb",
    ("turn_boundary_gae", "truncated"): False,
    ("turn_boundary_gae", "bootstrap_value"): 0.0,
    ("group_relative", "std_floor"): 1e-6,
    ("group_relative", "normalise"): True,
    ("repetition_penalty", "threshold"): 0.8,
    ("repetition_penalty", "penalty"): 0.05,
    ("dppo_mask", "delta"): 0.1,
    ("dppo_mask", "divergence"): "tv",
    ("policy_loss", "denominator"): None,
    ("FamilyScale.fit", "calibration"): "family",
    ("make", "backend"): "local",
}


def find(module: str, name: str) -> object:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def words(function: object) -> list[str]:
    assert callable(function)
    out: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in out:
            out.append("*")
        out.append(parameter.name)
    return out


@pytest.mark.parametrize(("module", "name", "parameters"), FUNCTIONS, ids=[f"{m}.{n}" for m, n, _ in FUNCTIONS])
def test_parameters(module: str, name: str, parameters: str) -> None:
    wanted = parameters.split()
    got = words(find(module, name))
    if wanted[-1] == "...":
        assert got[: len(wanted) - 1] == wanted[:-1]
    else:
        assert got == wanted


@pytest.mark.parametrize(("name", "parameter"), DEFAULTS, ids=[f"{n}.{p}" for n, p in DEFAULTS])
def test_defaults(name: str, parameter: str) -> None:
    module = next(m for m, n, _ in FUNCTIONS if n == name)
    function = find(module, name)
    assert callable(function)
    assert inspect.signature(function).parameters[parameter].default == DEFAULTS[name, parameter]


def test_fields_and_attributes() -> None:
    from termrsi.queues.recovery import RecoveryQueue
    from termrsi.records import CommandResult, LoadResult
    from termrsi.reward.reports import Report

    assert {"passed", "failed", "skipped", "source"} <= set(inspect.signature(Report).parameters)
    assert {"exit_code", "output", "timed_out"} <= set(inspect.signature(CommandResult).parameters)
    assert {"tasks", "skipped"} <= set(inspect.signature(LoadResult).parameters)
    assert list(RecoveryQueue(2).evicted) == []


def test_what_a_sandbox_can_do() -> None:
    from termrsi import sandbox

    made = sandbox.make(backend="local")
    for name, parameters in {
        "start": [],
        "run": ["command", "timeout_s"],
        "snapshot": [],
        "fork": ["n"],
        "put": ["source", "target"],
        "get": ["source", "target"],
        "close": [],
    }.items():
        method = getattr(made, name)
        assert inspect.iscoroutinefunction(method)
        assert list(inspect.signature(method).parameters)[: len(parameters)] == parameters


def test_a_transcript_shows_its_chunk() -> None:
    from termrsi.harness.render import Transcript

    class Bytes:
        eos_token_id = None

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

    transcript = Transcript(Bytes())
    transcript.prompt([1])
    transcript.sampled([2], [-0.5])
    assert (transcript.ids, transcript.mask, transcript.turn_ids, transcript.logprobs) == ([1, 2], [0, 1], [0, 0], [-0.5])
    assert len(transcript.chunks) == 1
    assert dict(transcript.cases) == {}


def test_the_command_line_is_there() -> None:
    from termrsi import driver

    assert callable(driver.main)
    commands = (
        "experiment=NAME",
        "stage=NAME",
        "doctor",
        "tasks list",
        "tasks check",
        "tasks audit",
        "data export",
        "report RUN_DIR",
    )
    for command in commands:
        assert command in driver.USAGE
