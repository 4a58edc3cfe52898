"""Against the real Harbor, under its own interpreter: its models read our trials, its loader agrees with ours, its command line
runs our agent and our sandbox. Skipped where `launch/test.sh` found no Python 3.12 for it.
"""

import csv
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from termrsi import tasks
from termrsi.driver import main
from termrsi.harness import variants
from termrsi.interop import trials
from termrsi.records import CollectedArtifact, KeptFiles
from termrsi.reward.verifier import load_spec, solution_environment
from termrsi.sandbox import check
from termrsi.tasks import bundled
from tests.written import two_steps

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-harbor"
CORPUS = Path(os.environ.get("TERMRSI_CORPUS", ROOT.parent / "shared" / "corpus"))
pytestmark = [
    pytest.mark.harbor,
    pytest.mark.skipif(not (VENV / "bin" / "harbor").is_file(), reason="no Harbor: launch/test.sh found no Python 3.12"),
]


def harbor(*arguments: str, timeout_s: float = 240.0, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment}
    env.pop("VIRTUAL_ENV", None)
    return subprocess.run(
        [str(VENV / "bin" / "python"), *arguments], capture_output=True, text=True, env=env, timeout=timeout_s, check=False
    )


def side(verb: str, *paths: Path) -> Any:  # Any: parsed JSON
    done = harbor(str(ROOT / "tests" / "harbor_side.py"), verb, *map(str, paths))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_trials_of_a_run_are_harbors(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["experiment=terminal_rsi", "scale=dry", "trials=true", f"run_dir={run}", "stage=base_eval"]) == 0
    trials = sorted(path.parent for path in run.glob("stages/base_eval/trials/*/result.json"))
    assert len(trials) >= 8
    assert side("trials", *trials) == [path.name for path in trials]
    (job,) = side("jobs", run / "stages" / "base_eval" / "trials")
    assert job["trials"] == len(trials)
    assert any("2" in passes for passes in job["passes"].values()), job


def test_the_manifest_of_what_a_task_publishes_is_harbors(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    spec, result = two_steps(str(tmp_path / "task"))
    entries = (
        CollectedArtifact("/logs/artifacts", "artifacts/logs/artifacts", "directory", "empty"),
        CollectedArtifact("/app/out", "artifacts/out", "directory", "ok", ("*.o",)),
    )
    kept = KeptFiles(artifacts=(("out/a", b"a"),), manifest=entries)
    parts = tuple(replace(part, kept=kept) for part in result.verdict.parts)
    trial, _ = trials.write(tmp_path / "trials", spec, replace(result, verdict=replace(result.verdict, parts=parts)), model="m")
    assert side("trials", trial) == [trial.name]
    assert len(json.loads((trial / "steps" / "one" / "artifacts" / "manifest.json").read_text())) == 2
    assert (trial / "steps" / "one" / "artifacts" / "out" / "a").read_text() == "a"


def test_the_trial_of_a_task_of_steps_is_harbors(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    trial, _ = trials.write(tmp_path / "trials", *two_steps(str(tmp_path / "task")), model="m")
    assert side("trials", trial) == [trial.name]


def agreeing(scratch: Path) -> list[Path]:
    """Corpus tasks that Harbor's loader accepts. An environment/ that is empty is not in every copy: made here."""
    index = CORPUS / "index.tsv"
    if not index.is_file():
        return []
    with index.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    found = []
    for row in rows:
        folder = CORPUS / row["kind"] / row["id"]
        if row["format"] == "harbor" and " rejects" not in row["reference"]:
            if not (folder / "environment").is_dir():
                folder = Path(shutil.copytree(folder, scratch / row["id"]))
                (folder / "environment").mkdir()
            found.append(folder)
    return found


def reward_of(least: float | dict[str, float] | None) -> float | None:
    """A step's least reward, of which only the key "reward" is compared here."""
    return least.get("reward") if isinstance(least, dict) else least


def test_our_fields_are_harbors(cache: Path, tmp_path: Path) -> None:
    ours = bundled.ensure(cache / "tasks", split="train", seeds=range(1), levels=[1])
    paths = [*agreeing(tmp_path), *(path.parent for path in sorted(ours.rglob("task.toml"))[:5])]
    for path, theirs in side("fields", *paths).items():
        assert "error" not in theirs, (path, theirs)
        (task,) = tasks.load_dir(path, strict=True).tasks
        environment = task.environment
        if not theirs["steps"]:
            assert task.instruction.strip() == theirs["instruction"].strip(), path
        assert (task.id, task.agent_timeout_s) == (theirs["name"], theirs["agent_timeout"]), path
        assert (environment.cpus, environment.memory_mb, environment.storage_mb) == (
            theirs["cpus"],
            theirs["memory_mb"],
            theirs["storage_mb"],
        ), path
        assert (environment.docker_image, environment.workdir) == (theirs["docker_image"], theirs["workdir"]), path
        assert (dict(environment.env), environment.build_timeout_s) == (theirs["env"], theirs["build_timeout"]), path
        assert environment.network == theirs["network"], path
        if not any("${" in value for value in theirs["verifier_env"].values()):  # ours are resolved already
            spec = load_spec(path)
            user = theirs["verifier_user"]
            assert (spec.timeout_s, spec.env) == (theirs["verifier_timeout"], theirs["verifier_env"]), path
            assert spec.user == (None if user is None else str(user)), path
        steps = [[step.name, step.agent_timeout_s, step.min_reward, step.instruction.strip()] for step in task.steps]
        assert steps == [[name, limit, reward_of(least), told.strip()] for name, limit, least, told in theirs["steps"]], path
        for step, (limit, health) in zip(task.steps, theirs["step_verifiers"], strict=True):
            assert load_spec(path, step.name).timeout_s == limit, path
            assert (step.healthcheck and asdict(step.healthcheck)) == health, path
        assert (environment.healthcheck and asdict(environment.healthcheck)) == theirs["healthcheck"], path
        assert task.last_step_counts == theirs["last_step_counts"], path
        if not any("${" in value for value in theirs["solution_env"].values()):
            assert solution_environment(path) == theirs["solution_env"], path


def test_strict_refuses_what_harbor_refuses(tmp_path: Path) -> None:
    """The same damage, shown to both."""
    good = {"instruction.md": "Do it.\n", "environment/Dockerfile": "FROM a\n", "tests/test.sh": "#!/bin/bash\n"}
    damage = {
        "fine": "",
        "numbers-as-text": '[agent]\ntimeout_sec = "60"\n[environment]\nmemory_mb = "512"\n',
        "name": '[task]\nname = "no slash"\n',
        "version": "version = 1.0\n",
        "memory": '[environment]\nmemory = "2GB"\n',
        "memory-number": "[environment]\nmemory = 512\n",
        "environment": "[environment.env]\nA = 1\n",
        "network": '[environment]\nnetwork_mode = "none"\n',
        "hosts": '[environment]\nallowed_hosts = ["a"]\n',
        "metadata": "metadata = 1\n",
        "shared": '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n',
        "unknown": "[environment]\nflavour = 1\n",
    }
    for name, config in damage.items():
        for file, text in (good | {"task.toml": config}).items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
    theirs = side("fields", *(tmp_path / name for name in damage))
    for name in damage:
        refused = "error" in theirs[str(tmp_path / name)]
        assert bool(tasks.load_dir(tmp_path / name, strict=True).skipped) == refused, (name, theirs[str(tmp_path / name)])


# Each key by each value: the table it stands in (what must be beside it), the key.
TABLES = {
    "": "schema_version version source artifacts multi_step_reward_strategy steps metadata task agent environment solution",
    "[task]\nname = 'a/b'\n": "version description authors keywords",
    "[task]\n": "name",
    "[agent]\n": "timeout_sec user network_mode allowed_hosts",
    "[agent]\nnetwork_mode = 'allowlist'\n": "allowed_hosts",
    "[verifier]\n": "timeout_sec user network_mode allowed_hosts env environment_mode environment collect",
    "[[verifier.collect]]\ncommand = 'x'\n": "service timeout_sec user",
    "[[verifier.collect]]\n": "command",
    "[verifier.environment]\n": "os memory memory_mb network_mode",
    "[solution]\n": "env",
    "[environment]\n": "build_timeout_sec docker_image os cpus memory_mb storage_mb memory storage gpus gpu_types tpu network_mode"
    " allowed_hosts allow_internet env mcp_servers skills_dir healthcheck workdir",
    "[environment]\nmemory = '1G'\n": "memory_mb",
    "[environment.tpu]\ntype = 'v4'\n": "topology",
    "[environment.healthcheck]\ncommand = 'x'\n": "interval_sec retries",
    "[environment.healthcheck]\n": "command",
    "[[environment.mcp_servers]]\nname = 'x'\n": "url command transport",
    "[[environment.mcp_servers]]\nname = 'x'\nurl = 'u'\n": "transport headers args",
    "[[environment.mcp_servers]]\nname = 'x'\nurl = 'u'\n[environment.mcp_servers.headers]\n": "X-Plain Authorization API_KEY",
    "[[artifacts]]\nsource = '/x'\n": "destination exclude service",
    "[[artifacts]]\n": "source",
    "[[artifacts]]\nservice = 'db'\n": "source",
    "[[steps]]\nname = 'one'\n": "agent verifier min_reward healthcheck artifacts",
    "[[steps]]\n": "name",
    "[[steps]]\nname = 'one'\n[[steps]]\n": "name",
}
VALUES = [
    *(
        "60",
        "10.5",
        "'60'",
        "' 60 '",
        "'10.5'",
        "-1",
        "nan",
        "inf",
        "'nan'",
        "true",
        "'true'",
        "''",
        "'x'",
        "'a/b'",
        "'/x'",
        "'../x'",
    ),
    *("[]", "['x']", "[1]", "[['x']]", "{}", "{a = 1}", "{a = 'x'}", "{name = 'x'}", "{command = 'x'}", "{source = '/x'}", "[{}]"),
    *(
        "[{source = 'x'}]",
        "[{name = 'x'}]",
        "[{command = 'x', service = '-'}]",
        "'public'",
        "'allowlist'",
        "'separate'",
        "'shared'",
    ),
    *(
        "'mean'",
        "'final'",
        "'Linux'",
        "'windows'",
        "'1024M'",
        "1024",
        "'2GB'",
        "'2g'",
        "'2x4'",
        "'0x4'",
        "'http'",
        "'stdio'",
        "'main'",
    ),
    *(
        "['a.b', '*.c.d', '1.2.3.4', '::1', '10.0.0.0/8']",
        "['10.0.0.1/8']",
        "['http://a']",
        "['a:80']",
        "['*']",
        "['a.*.b']",
        "['*.']",
    ),
    *(
        "['*.1.2.3.4']",
        "[' A. ']",
        "['']",
        "['a_b']",
        "'manifest.json'",
        "'a\\b'",
        "'${A}'",
        "'Bearer ${A}'",
        "'${A:-b}'",
        "'${A:-}'",
    ),
    *(
        "'${A_KEY:-b}'",
        "'${'",
        "'Bearer x'",
        "'one'",
        "'ONE'",
        "'con'",
        "'a.'",
        "'a:b'",
        "2026-01-01",
        "'a b'",
        "'..'",
        "'.'",
        "9e99",
    ),
]


# Numbers that Harbor takes, and cannot keep: refused here where they are read.
NO_NUMBERS = re.compile(
    r"^(timeout_sec|build_timeout_sec|cpus|memory_mb|storage_mb|min_reward|interval_sec|retries) = ('?nan'?|inf|true)$",
    re.MULTILINE,
)


def test_strict_agrees_with_harbor_key_by_key_and_value_by_value(tmp_path: Path) -> None:
    configs = [f"{table}{key} = {value}\n" for table, keys in TABLES.items() for key in keys.split() for value in VALUES]
    good = {
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM a\n",
        "tests/test.sh": "#!/bin/bash\n",
        "tests/test.bat": "\n",
        "steps/one/instruction.md": "Do it.\n",
    }
    root = tmp_path / "collection"
    for i, config in enumerate(configs):
        for file, text in (good | {"task.toml": config}).items():
            (root / f"t{i:05d}" / file).parent.mkdir(parents=True, exist_ok=True)
            (root / f"t{i:05d}" / file).write_text(text)
    (refused,) = side("refused", root)
    ours = {Path(task.path).name: task.reason for task in tasks.load_dir(root, strict=True).skipped}
    differ = [
        (config, f"ours {ours.get(name)!r}, Harbor's {refused.get(name)!r}")
        for i, config in enumerate(configs)
        if ((name := f"t{i:05d}") in ours) != (name in refused) and not (name in ours and NO_NUMBERS.search(config))
    ]
    assert not differ, "\n".join(map(str, differ[:40]))
    assert 0.2 < len(refused) / len(configs) < 0.9


TEST = """#!/bin/bash
echo "in $PWD as $(id -un)"
if [ "$(cat /app/answer 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture
def one_task(tmp_path: Path) -> Path:
    root = tmp_path / "collection" / "one-task"
    files = {
        "task.toml": 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n',
        "instruction.md": "Write 42 to /app/answer.\n",
        "environment/Dockerfile": "FROM debian:bookworm\nWORKDIR /app\nRUN echo built > /built\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": "#!/bin/bash\ncat /built\necho 42 > /app/answer\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def trial_of(jobs: Path) -> tuple[Path, dict[str, Any]]:
    (file,) = jobs.glob("*/*/result.json")
    return file.parent, json.loads(file.read_text())


def run_harbor(task: Path, jobs: Path, *more: str) -> tuple[Path, dict[str, Any]]:
    if reasons := check.missing("local"):
        pytest.skip("; ".join(reasons))
    command = [str(VENV / "bin" / "harbor"), "run", "-p", str(task), "-o", str(jobs), "-y", "-n", "1"]
    done = harbor(*command, "-e", "termrsi.interop.harbor:Environment", *more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return trial_of(jobs)


def test_harbors_oracle_in_our_sandbox(one_task: Path, tmp_path: Path) -> None:
    trial, result = run_harbor(one_task, tmp_path / "jobs", "-a", "oracle")
    assert result["exception_info"] is None, result["exception_info"]
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert (trial / "verifier" / "test-stdout.txt").read_text() == "in /app as root\n"


REACT = ["```bash\necho 42 > /app/answer; cd /tmp; x=5\n```", "```bash\npwd; echo $x; export x\n```", "no block", "DONE"]
CALL = '<tool_call>{"name": "bash", "arguments": {"command": "%s"}}</tool_call>'
KEYS = {"analysis": "a", "plan": "p", "commands": [{"keystrokes": "echo 42 > /app/answer\n", "duration": 1}]}
CLAIM = json.dumps({"analysis": "a", "plan": "p", "commands": [], "task_complete": True})
OTHERS = {
    "vanillux": [f"THOUGHT: so\n{CALL % 'echo 42 > /app/answer'}", f"THOUGHT: done\n{CALL % f'echo {variants.MARKER}'}"],
    "terminus_json": [json.dumps(KEYS), CLAIM, CLAIM],
}


@pytest.fixture
def server(embedded: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Speaks as vLLM does, with replies that were written before: real token ids of the embedded model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded)
    replies = list(getattr(request, "param", REACT))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            ids = [*tokenizer.encode(replies.pop(0), add_special_tokens=False), tokenizer.eos_token_id]
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": "stop"}
            body = json.dumps({"choices": [choice], "usage": {"prompt_tokens_details": None}}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1"
        httpd.shutdown()
        thread.join()


def test_our_agent_in_our_sandbox_under_harbor(one_task: Path, tmp_path: Path, server: str, embedded: Path) -> None:
    options = [f"url={server}", f"tokenizer={embedded}", "harness=react", "max_turns=6"]
    more = [word for option in options for word in ("--ak", option)]
    trial, result = run_harbor(one_task, tmp_path / "jobs", "-a", "termrsi.interop.harbor:Agent", "-m", "termrsi/smollm2", *more)
    assert result["exception_info"] is None, result["exception_info"]
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert (result["agent_info"]["name"], result["agent_result"]["metadata"]) == ("termrsi", {"stop": "done", "turns": 4})
    details = result["agent_result"]["rollout_details"][0]
    assert [len(ids) for ids in details["completion_token_ids"]] == [len(logprobs) for logprobs in details["logprobs"]]
    trajectory = json.loads((trial / "agent" / "trajectory.json").read_text())
    seen = [step["observation"]["results"][0]["content"] for step in trajectory["steps"] if "observation" in step]
    assert seen[:2] == ["[exit 0]", "[exit 0]\n/tmp"]  # the directory lasts; a variable that is not exported does not
    assert "no command" in seen[2]


@pytest.mark.parametrize(("server", "harness"), [(replies, name) for name, replies in OTHERS.items()], indirect=["server"])
def test_other_harnesses_under_harbor(one_task: Path, tmp_path: Path, server: str, embedded: Path, harness: str) -> None:
    """One that calls a tool, and one that types into a terminal."""
    options = [f"url={server}", f"tokenizer={embedded}", f"harness={harness}", "max_turns=6"]
    more = [word for option in options for word in ("--ak", option)]
    trial, result = run_harbor(one_task, tmp_path / "jobs", "-a", "termrsi.interop.harbor:Agent", "-m", "termrsi/smollm2", *more)
    assert result["exception_info"] is None, result["exception_info"]
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert result["agent_result"]["metadata"] == {"stop": "done", "turns": len(OTHERS[harness])}
    trajectory = json.loads((trial / "agent" / "trajectory.json").read_text())
    assert any("echo 42" in json.dumps(step.get("tool_calls", [])) for step in trajectory["steps"])


def test_a_wrong_option_is_told_before_a_trial(one_task: Path, tmp_path: Path) -> None:
    command = [str(VENV / "bin" / "harbor"), "run", "-p", str(one_task), "-o", str(tmp_path / "jobs"), "-y"]
    done = harbor(*command, "-e", "termrsi.interop.harbor:Environment", "-a", "termrsi.interop.harbor:Agent", "--ak", "url=x")
    said = done.stdout + done.stderr + "".join(path.read_text() for path in (tmp_path / "jobs").rglob("exception.txt"))
    assert "needs --ak tokenizer" in said.replace("\n", " ")


def test_nothing_is_left(tmp_path: Path) -> None:
    """Of the sandboxes of the tests above: Harbor's process has ended, and so have they."""
    from termrsi.sandbox import local

    assert local.reap("harbor") == []
