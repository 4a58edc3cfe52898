"""`termrsi plan`: what it takes, what it prints, and what it refuses. Small loops, no engine."""

import json
from pathlib import Path

import pytest

from termrsi import plan_command
from termrsi.driver import main
from termrsi.errors import ConfigError
from termrsi.plan_command import split
from termrsi.sizing.rates import Rates
from termrsi.sizing.work import Assumed

QUICK = (
    "experiment=reterm", "cluster=node", "turns=2", "reply=20", "stages.reterm.original_groups=2", "sandbox.concurrency=4",
)  # fmt: skip
NO_SANDBOX = ("command_s=0.0001", "verify_s=0.0001", "start_s=0.0001", "turn_s=0.0001")


def test_options_of_the_plan_and_words_of_the_run() -> None:
    options, words = split(["experiment=rsr", "price=2.5", "json=true", "flops=989e12", "train_tasks=50", "seed=3", "solved=0.2"])
    assert words == ["experiment=rsr", "seed=3"]
    assert (options.json, options.price, options.figures.flops) == (True, 2.5, 989e12)
    assert (options.assumed.tasks, options.assumed.solved) == (50, 0.2)
    assert options.given == {"flops", "train_tasks", "solved"}


def test_no_option_hides_a_key_of_a_run() -> None:
    from termrsi.config.schema import Config

    renamed = plan_command._RENAMED
    names = {*plan_command._OPTIONS, *Rates.__dataclass_fields__, *Assumed.__dataclass_fields__, *renamed} - set(renamed.values())
    keys = {*Config.__dataclass_fields__, "stage"}
    assert not names & keys
    assert split([f"{key}=1" for key in keys])[1] == [f"{key}=1" for key in keys], "none is taken for a misspelt option"


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("price=-1", "price is '-1'"),
        ("flops=fast", "flops is 'fast'"),
        ("train_tasks=1.5", "train_tasks is '1.5'"),
        ("json=maybe", "json is 'maybe'"),
        ("solved=2", "solved is 2"),
        ("prices=3", "nearest: price="),
        ("turn_sigma=2", "nearest: turns_sigma="),
        ("--json", "unknown option '--json'"),
        ("reply=inf", "reply is 'inf'"),
    ],
)
def test_bad_options_are_refused(word: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split(["experiment=rsr", word])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUICK, "price=2"]) == 0
    said = capsys.readouterr().out
    assert "policy: " in said
    assert "weights 0.1" in said or "weights 0.3" in said
    assert "Nothing below was measured on this cluster" in said
    assert "given" in said, "what the user set is not told as assumed"
    assert all(name in said for name in ("base_eval", "recovery", "sft", "reterm", "final_eval", "GPU hours", "cost", "bound by"))


def test_a_plan_for_programs_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUICK, "price=2", "json=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [one["stage"] for one in plan["stages"]] == ["base_eval", "recovery", "sft", "reterm", "final_eval"]
    assert plan["gpus"] == 8
    assert plan["gpu_hours"] == pytest.approx(sum(one["seconds"] for one in plan["stages"]) / 3600 * 8)
    assert plan["cost"] == pytest.approx(2 * plan["gpu_hours"])
    assert plan["model"]["parameters"] == 134_515_008
    for role in plan["memory"]:
        assert role["bytes"] == sum(role["parts"].values()) <= role["of_bytes"]
    assert plan["assumptions"]["turns"] == {"value": 2.0, "source": "given"}
    assert plan["assumptions"]["learn_share"]["source"] == "assumed"
    (loop,) = [one for one in plan["stages"] if one["step_s"]]
    assert loop["parts_s"]["generation"] <= loop["step_s"]
    assert loop["bottleneck"] in ("generation", "learning", "weights", "sandboxes")
    assert loop["parts_s"]["sandboxes"] * 4 == pytest.approx(loop["parts_s"]["commands"] + loop["parts_s"]["verification"])
    assert loop["with_a_sandbox_for_each_s"] < loop["step_s"]


def test_few_sandboxes_with_slow_commands_are_what_a_step_is_bound_by(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    slow = ("command_s=5", "verify_s=20")
    for name, more in {"few": ("sandbox.concurrency=2", *slow), "enough": ("sandbox.concurrency=500", *slow)}.items():
        assert main(["plan", *QUICK[:-1], "json=true", *more]) == 0
        (found[name],) = [one for one in json.loads(capsys.readouterr().out)["stages"] if one["step_s"]]
    assert found["few"]["bottleneck"] == "sandboxes"
    assert found["few"]["with_a_sandbox_for_each_s"] == found["enough"]["step_s"] == found["enough"]["with_a_sandbox_for_each_s"]
    assert found["few"]["step_s"] > 3 * found["enough"]["step_s"]
    assert main(["plan", *QUICK[:-1], "json=true", "sandbox.concurrency=500", "reply=40", *NO_SANDBOX]) == 0
    (quick,) = [one for one in json.loads(capsys.readouterr().out)["stages"] if one["step_s"]]
    assert quick["bottleneck"] != "sandboxes"


def test_what_the_configuration_says_is_not_assumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUICK, "json=true"]) == 0
    told = json.loads(capsys.readouterr().out)["assumptions"]
    assert told["train_tasks"] == {"value": 96, "source": "the bundled suite"}
    assert told["turns"] == {"value": 2.0, "source": "given"}
    assert told["command_s"]["source"] == "assumed", "a second is below the limit"
    assert told["observation"] == {"value": 100.0, "source": "limits.observation_chars"}
    assert told["prompt"]["source"].startswith("the bundled suite")
    assert 50 < told["prompt"]["value"] < 500


def test_a_directory_of_tasks_is_counted_where_it_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("train",) * 5 + ("validation", "heldout")):
        folder = tmp_path / "corpus" / f"task-{number}"
        (folder / "tests").mkdir(parents=True)
        (folder / "environment").mkdir()
        (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
        (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        (folder / "task.toml").write_text(f'version = "1.0"\n[metadata]\nsplit = "{name}"\n')
        (folder / "instruction.md").write_text(f"Make file {number}. {'More of it. ' * 400}")
    words = ("tasks=directory", "json=true", *QUICK)
    assert main(["plan", f"tasks.path={tmp_path / 'corpus'}", *words]) == 0
    told = json.loads(capsys.readouterr().out)["assumptions"]
    assert told["train_tasks"] == {"value": 5, "source": "the tasks in corpus"}
    assert 1200 < told["prompt"]["value"] < 1500
    assert main(["plan", f"tasks.path={tmp_path / 'corpus'}", "train_tasks=70", *words]) == 0
    assert json.loads(capsys.readouterr().out)["assumptions"]["train_tasks"] == {"value": 70, "source": "given"}
    (tmp_path / "empty").mkdir()
    assert main(["plan", f"tasks.path={tmp_path / 'empty'}", *words]) == 0
    told = json.loads(capsys.readouterr().out)["assumptions"]
    assert (told["train_tasks"]["source"], told["prompt"]["source"]) == ("assumed", "assumed")


def test_what_is_in_no_figure_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "experiment=tmax", "cluster=node", "turns=2", "reply=20", "sandbox.concurrency=4", "stage=dppo"]
    few = [*words, "stages.dppo.steps=1"]
    assert main([*few, "stages.dppo.replace_zero_variance=5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not counted: dppo samples up to 5 groups of a step again" in said
    assert main([*few, "stages.dppo.replace_zero_variance=0"]) == 0
    assert "not counted" not in capsys.readouterr().out


def test_a_number_that_the_suite_has_is_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUICK, "train_tasks=20"]) == 2
    assert "train_tasks has no effect on the bundled suite" in capsys.readouterr().err


def test_more_of_a_machine_is_less_time(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for more in ((), ("bandwidth=4e12", "flops=624e12")):
        assert main(["plan", *QUICK, "json=true", "reply=200", *NO_SANDBOX, *more]) == 0
        seconds.append(sum(one["seconds"] for one in json.loads(capsys.readouterr().out)["stages"]))
    assert seconds[1] < 0.6 * seconds[0]


def test_a_laptop_has_memory_and_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "experiment=reterm"]) == 0
    said = capsys.readouterr().out
    assert "the node's" in said
    assert "no time is estimated" in said


def test_what_does_not_fit_is_told_after_its_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert main(["plan", "experiment=reterm", "cluster=node", f"model.path={tmp_path}"]) == 2
    out, err = capsys.readouterr()
    assert "8.19e9 parameters" in out
    assert len(err.strip().splitlines()) == 1
    assert "valid: cluster.learner_processes=4" in err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "nothing to run"),
        (["experiment=nonsense"], "unknown experiment"),
        (["experiment=rsr", "limits.max_turn=1"], "max_turns"),
    ],
)
def test_a_run_that_cannot_be_is_no_plan_either(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert part in capsys.readouterr().err
