"""The command as a user runs it: help without heavy imports, one line for bad input, a dry pipeline that resumes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "termrsi"]


def _run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, env={**os.environ, **(env or {})})


def _metrics(run: Path) -> dict[str, list[dict]]:
    """The lines of a run's metrics, by stage."""
    stages: dict[str, list[dict]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        figures = json.loads(line)
        stages.setdefault(figures.pop("stage"), []).append(figures)
    return stages


def _not_in_the_table(run: Path) -> set[str]:
    """Files of a run that the README's table of run directories does not name."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    table = text.partition("holds:\n")[2].partition("\n\n**Data sets.**")[0]
    cells = [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    named = [name.replace("<name>", "*") for row in cells for name in row]
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    patterns = [pattern for name in named for pattern in (name, f"{name}/*", f"stages/*/{name}", f"stages/*/{name}/*")]
    return {file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)}


def test_help_names_the_experiments_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from termrsi.driver import main; main(['--help']); "
        "print(sorted({'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "terminal_rsi" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["experiment=terminal_rsi", "tasks.path=/nowhere"], "no task directory at '/nowhere'"),
        (["experiment=terminal_rsi", "model.path=/nowhere"], "no model at '/nowhere'"),
        (["experiment=terminal_rsi", "pipeline=[nonsense]"], "unknown stage 'nonsense'"),
        (["experiment=terminal_rsi", "stage=nonsense"], "unknown stage 'nonsense'"),
        (["experiment=terminal_rsi", "stages.rpr_1.critic=rpr_2"], "which no earlier stage writes"),
        (["experiment=terminal_rsi", "stages.rpr_1.stepz=3"], "nearest valid key: stages.rpr_1.steps"),
        (["experiment=reterm", "scale=dry", "stages.recovery.teacher_harness=retry"], "its words would be trained on"),
        (["experiment=terminal_rsi", "scale=dry", "stages.rsr_1.execute_harness=retry"], "its words would be trained on"),
        (["experiment=nonsense"], "unknown experiment 'nonsense'"),
        (["experiment=rsr", "credit=skip"], "no stage of this pipeline has it"),
        (["nonsense"], "unknown command 'nonsense'"),
        (["tasks", "list"], "and the path of a directory of tasks"),
        (["report"], "needs a run directory, or several"),
        (["report", "nosuch"], "no run directory at 'nosuch'"),
        (["report", "errors", "nosuch"], "no run directory at 'nosuch'"),
        (["report", "errors", "nosuch", "stage=errors"], "no run directory at 'nosuch'; valid: "),
        (["tasks", "check", ".", "mutants=3"], "mutants= is an option of tasks audit"),
        (["experiment=terminal_rsi", "model.max_model_len=9000"], "model.max_model_len=9000 exceeds the 8192 positions"),
        (["experiment=terminal_rsi", "stages.rpr_1.steps=0"], "stages.rpr_1.steps=0 is too small"),
        (["experiment=reterm", "model.max_model_len=2048", "cluster.gpus_learner=64"], "and this machine has"),
        (["experiment=reterm", "scale=dry", "stage=sft"], "stage 'sft' reads 'recovery', which has not been run"),
        (["plan", "experiment=rsr", "price=free"], "price is 'free'"),
        (["plan", "experiment=rsr", "cluster=node", "cluster.generators=80"], "do not hold that"),
        (["experiment=terminal_rsi", "cluster.nodes=1", "cluster.cpus=2"], "1 x 2 CPUs do not hold that"),
        (["experiment=terminal_rsi", "min_free_gib=1000000000"], "disk full"),
    ],
)
def test_bad_input_gets_one_line_and_a_code_of_2(arguments: list[str], part: str, tmp_path: Path) -> None:
    where = [f"run_dir={tmp_path}/run"] if "=" in arguments[0] else []
    done = _run(*arguments, *where, env={"TERMRSI_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("there", "part"), [("file", "run: is not a directory"), ("file/run", "file is not a directory")])
def test_a_run_directory_that_cannot_be_is_one_line(there: str, part: str, tmp_path: Path) -> None:
    place = tmp_path / there.replace("file", "run")
    (tmp_path / "run").write_text("mine")
    done = _run("experiment=reterm", "scale=dry", f"run_dir={place}", env={"TERMRSI_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 2
    assert part.replace("file", f"{tmp_path}/run") in done.stderr or part in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "run").read_text() == "mine"


def test_a_run_directory_that_may_only_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    termrsi = f"{' '.join(COMMAND)} experiment=reterm scale=dry run_dir={tmp_path}/run"
    script = f"mount -t tmpfs -o ro disk {tmp_path}/run && exec env TERMRSI_CACHE={tmp_path}/cache {termrsi}"
    done = _in_namespace(script, "--mount")
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [
        f"termrsi: ConfigError: {tmp_path}/run: cannot be written; give run_dir=DIR, where this user may write"
    ]


def _in_namespace(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """As root of a user namespace: limits and mounts of its own, without the machine's."""
    command = ["unshare", "--user", "--map-root-user", *flags, "bash", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_without_namespaces_the_run_stops_before_any_engine(tmp_path: Path) -> None:
    termrsi = f"{' '.join(COMMAND)} experiment=terminal_rsi run_dir={tmp_path}/run min_free_gib=0"
    done = _in_namespace(f"echo 0 >/proc/sys/user/max_mnt_namespaces && exec env TERMRSI_CACHE={tmp_path}/cache {termrsi}")
    assert done.returncode == 2, done.stderr
    assert "no mount namespace" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run" / "stages").exists()


def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    termrsi = f"{' '.join(COMMAND)} experiment=reterm scale=dry run_dir={run}"
    # Room for some stages; then as much as it takes, and the same command goes on.
    done = _in_namespace(
        f"mount -t tmpfs -o size=200k disk {run} && {{ {termrsi}; echo first $?; ls {run}/stages/*/manifest.json | wc -l;"
        f" mount -o remount,size=64m {run}; {termrsi}; echo second $?; ls {run}/stages/*/manifest.json | wc -l; }}",
        "--mount",
    )
    lines = done.stdout.splitlines()
    first, second = lines.index("first 1"), lines.index("second 0")
    assert int(lines[second + 1]) == 5
    assert int(lines[first + 1]) < 5
    assert [line for line in done.stderr.splitlines() if "the disk is full" in line]
    assert "Traceback" not in done.stderr


def test_a_dry_pipeline_writes_ledger_and_records(tmp_path: Path) -> None:
    done = _run("experiment=terminal_rsi", "scale=dry", f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    entries = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert [e["stage"] for e in entries] == [
        "base_eval", "rsr_1", "sft_1", "warmup", "rpr_1", "rsr_2", "sft_2", "rpr_2", "final_eval",
    ]  # fmt: skip
    assert entries[-1]["summary"]["gain_low"] > 0
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["torch"] != "not installed"
    assert "stages" in (tmp_path / "run" / "config.yaml").read_text()
    assert "| base_eval |" in (tmp_path / "run" / "ledger.md").read_text()
    assert _not_in_the_table(tmp_path / "run") == set()
    done_lines = [line for line in done.stderr.splitlines() if "stage rpr_1 done:" in line]
    assert [line.count("retained") for line in done_lines] == [1]
    watched = {"stop/done", "stop/dropped", "early_failure", "reward/files", "checks/data", "advantage_var/turns_left_0"}
    names = {stage: set().union(*lines) for stage, lines in _metrics(tmp_path / "run").items()}
    for stage in ("warmup", "rpr_1", "rpr_2"):
        assert watched | {f"{name}/mean5" for name in watched} <= names[stage]


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    """`termrsi ... 2>&1 | head -1`: what was started is also ended, and the ledger is written."""
    run = tmp_path / "run"
    command = f"set -o pipefail; {' '.join(COMMAND)} experiment=reterm scale=dry run_dir={run} 2>&1 | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert len(json.loads((run / "ledger.json").read_text())) == 5


def test_a_pipeline_goes_on_at_its_first_unfinished_stage(tmp_path: Path) -> None:
    arguments = ("experiment=reterm", "scale=dry", f"run_dir={tmp_path}/run")
    assert _run(*arguments).returncode == 0
    stages = tmp_path / "run" / "stages"
    before = {p.parent.name: p.read_text() for p in stages.glob("*/manifest.json")}
    (stages / "reterm" / "manifest.json").unlink()
    (stages / "final_eval" / "manifest.json").unlink()
    assert _run(*arguments).returncode == 0
    after = {p.parent.name: p.read_text() for p in stages.glob("*/manifest.json")}
    assert {n for n in after if after[n] == before[n]} == {"base_eval", "recovery", "sft"}
    assert set(after) == set(before)
    steps = [line for line in _metrics(tmp_path / "run")["reterm"] if "stop/done" in line]
    begun = [i for i, line in enumerate(steps) if line["step"] == 1]
    assert len(begun) == 2  # both tries are in the file, and the second one's curves begin anew
    assert steps[begun[1]]["stop/done/mean5"] == steps[begun[1]]["stop/done"]
    assert steps[begun[1] + 1]["original/mean5"] == pytest.approx(sum(line["original"] for line in steps[begun[1] :][:2]) / 2)


def test_synthesis_goes_on_item_by_item_and_is_trained_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("experiment=tmax", "scale=dry", f"run_dir={run}")
    environment = {"TERMRSI_CACHE": str(tmp_path / "cache")}
    done = _run(*arguments, env=environment)
    assert done.returncode == 0, done.stderr
    made = run / "stages" / "synthesise"
    trained = [
        json.loads(line)["rollout"]["task_id"] for line in (run / "stages" / "dppo" / "rollouts.jsonl").read_text().splitlines()
    ]
    ids = {task for task in trained if not task.startswith("validation-")}
    assert ids <= {folder.name for folder in (made / "tasks").iterdir()}
    assert ids
    whole = (made / "items.jsonl").read_text().splitlines(keepends=True)
    for stage in ("synthesise", "base_eval", "dppo", "final_eval"):  # as if stopped in the fourth item
        (run / "stages" / stage / "manifest.json").unlink()
    (made / "items.jsonl").write_text("".join(whole[:3]) + whole[3][:40])
    assert _run(*arguments, env=environment).returncode == 0
    again = (made / "items.jsonl").read_text().splitlines(keepends=True)
    assert again[:3] == whole[:3]
    assert sorted(again) == sorted(whole)
    assert not (run / "stages" / "synthesise.stopped-1").exists()
    assert (run / "stages" / "dppo.stopped-1").exists()
    (made / "manifest.json").unlink()
    for stage in ("base_eval", "dppo", "final_eval"):
        (run / "stages" / stage / "manifest.json").unlink()
    assert _run(*arguments, "stages.synthesise.rl_v2=3", env=environment).returncode == 0
    assert len((made / "items.jsonl").read_text().splitlines()) == 9
    assert (run / "stages" / "synthesise.stopped-1").exists(), "of other settings: begun again"


def test_results_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    arguments = ("experiment=reterm", "scale=dry", f"run_dir={tmp_path}/run")
    assert _run(*arguments).returncode == 0
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    done = _run(*arguments, "seed=1", "limits.max_turns=3")
    assert done.returncode == 2
    assert "stage 'base_eval'" in done.stderr
    assert "another configuration: limits.max_turns=4, now 3, seed=0, now 1; take another run_dir" in done.stderr
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before


def test_a_changed_task_pool_is_refused(tmp_path: Path) -> None:
    """Rewards are calibrated on it."""
    run = tmp_path / "run"
    arguments = ("experiment=reterm", "scale=dry", f"run_dir={run}")
    assert _run(*arguments).returncode == 0
    (run / "stages" / "final_eval" / "manifest.json").unlink()
    pool = json.loads((run / "pool.json").read_text())
    (run / "pool.json").write_text(json.dumps(pool | {"train": pool["train"][1:]}))
    done = _run(*arguments)
    assert done.returncode == 2
    assert "differs in: train" in done.stderr


def test_a_stage_on_other_inputs_is_another_stage(tmp_path: Path) -> None:
    """What a finished stage read belongs to its settings: changing it there is noticed downstream."""
    arguments = ("experiment=reterm", "scale=dry", f"run_dir={tmp_path}/run")
    assert _run(*arguments).returncode == 0
    done = _run(*arguments, "stage=final_eval", "stages.sft.lr=1e-3")
    assert done.returncode == 2
    assert "another configuration: stages.sft.lr=" in done.stderr
    assert ", now 0.001; take" in done.stderr


def test_wandb_offline_writes_its_run(tmp_path: Path) -> None:
    done = _run("experiment=reterm", "scale=dry", "logger=wandb_offline", f"run_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_a_signal_ends_the_run_with_its_code(tmp_path: Path) -> None:
    """Many validation rounds keep the dry run busy; the signal comes once its first stage is written."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*COMMAND, "experiment=reterm", "scale=dry", "stages.reterm.steps=100000", f"run_dir={run}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    manifest = run / "stages" / "sft" / "manifest.json"
    deadline = time.monotonic() + 60
    while not manifest.is_file() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in text
    assert manifest.is_file()
    assert not (run / "stages" / "reterm" / "manifest.json").exists()


def test_a_run_takes_what_another_has_finished_on_the_same_settings(tmp_path: Path) -> None:
    base, arm = tmp_path / "base", tmp_path / "arm"
    common = ("experiment=terminal_rsi", "scale=dry")
    assert _run(*common, f"run_dir={base}").returncode == 0
    done = _run(*common, f"run_dir={arm}", f"reuse={base}", "reward=offset")
    assert done.returncode == 0, done.stderr
    assert f"taken from {base}: base_eval, rsr_1, sft_1, warmup, rpr_1, rsr_2, sft_2" in done.stderr
    assert "stage rpr_2 (rpr)" in done.stderr
    assert "stage rpr_1 (rpr)" not in done.stderr
    table = _run("report", str(base), str(arm))
    assert table.returncode == 0
    assert "| reward=offset | 1 |" in table.stdout
    again = _run(*common, f"run_dir={tmp_path}/other", f"reuse={base}", "seed=1")
    assert "taken from" in again.stderr
    assert "nothing more" in again.stderr
    same = _run(*common, f"run_dir={tmp_path}/same", f"reuse={base}")
    assert "every stage is finished" in same.stderr
    assert (tmp_path / "same" / "ledger.md").read_text() == (base / "ledger.md").read_text()
    assert _run("report", str(base), str(tmp_path / "same")).returncode == 0
    (tmp_path / "arm" / "pool.json").write_text("{}")
    other = _run(*common, f"run_dir={arm}", f"reuse={base}", "reward=offset")
    assert other.returncode == 2
    assert "another task pool" in other.stderr
    refused = _run(*common, f"run_dir={tmp_path}/none", f"reuse={tmp_path}/nowhere")
    assert refused.returncode == 2
    assert "no run at" in refused.stderr


def test_nothing_is_taken_from_another_line(tmp_path: Path) -> None:
    """Of a run that has made its own rpr_1, what stands behind the other's is of no use."""
    base, arm = tmp_path / "base", tmp_path / "arm"
    common = ("experiment=terminal_rsi", "scale=dry")
    assert _run(*common, f"run_dir={base}").returncode == 0
    assert _run(*common, f"run_dir={arm}", "stage=base_eval").returncode == 0
    done = _run(*common, f"run_dir={arm}", f"reuse={base}")
    assert done.returncode == 0, done.stderr
    assert "nothing more" in done.stderr
    assert "stage rpr_2 (rpr)" in done.stderr


def test_error_analysis_is_added_by_overrides_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pipeline = "pipeline=[base_eval,recovery,sft,reterm,final_eval,errors]"
    stage = ("+stage@stages.errors=dry/analyse", "stages.errors.of=final_eval", "stages.errors.against=base_eval")
    arguments = ("experiment=reterm", "scale=dry", f"run_dir={run}", pipeline, *stage)
    done = _run(*arguments)
    assert done.returncode == 0, done.stderr
    folder = run / "stages" / "errors"
    found = json.loads((folder / "errors.json").read_text())
    assert (found["of"]["judged"], found["against"]["judged"]) == (12, 12)
    table = _run("report", "errors", str(run), "stage=errors")
    assert table.returncode == 0, table.stderr
    assert "Errors of final_eval: 12 runs judged" in table.stdout
    assert "final_eval less base_eval, paired by task" in table.stdout
    assert "errors less errors" in _run("report", "errors", str(run), "stage=errors", "against=errors").stdout
    option = "it takes stage=, against="
    for words, told in ((), "analyse"), (("stage=sft",), "analyse"), (("stage=errors", "of=sft"), option), (("errors",), option):
        refused = _run("report", "errors", str(run), *words)
        assert (refused.returncode, told in refused.stderr) == (2, True)
    # Killed half-way through the fifth line: the first four stay as they are, and nothing is set aside.
    whole = (folder / "judgements.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "manifest.json").unlink()
    (folder / "judgements.jsonl").write_bytes(b"".join(whole[:4]) + whole[4][:50])
    assert _run(*arguments).returncode == 0
    again = (folder / "judgements.jsonl").read_bytes().splitlines(keepends=True)
    assert again[:4] == whole[:4]
    assert sorted(again) == sorted(whole)
    assert not list((run / "stages").glob("errors.stopped-*"))
    # Asked otherwise, it begins anew.
    (folder / "manifest.json").unlink()
    assert _run(*arguments, "stages.errors.rounds=1").returncode == 0
    assert len(list((run / "stages").glob("errors.stopped-*"))) == 1
