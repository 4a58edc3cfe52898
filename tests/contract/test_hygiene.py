"""No forger scores: what an agent may leave behind for the verifier, on every backend, with the real verifier."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi import sandbox
from termrsi.errors import SandboxSpoiled
from termrsi.ports import Sandbox
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.reward.verifier import HarborVerifier
from tests.contract.backends import OWNER, Kit, Make, local_kit

TEST = """#!/bin/bash
if [ "$(cat /app/answer 2>/dev/null)" = 42 ]; then r=1; else r=0; fi
/usr/bin/python3 -c 'print("python ran")'
if [ -f /conftest.py ] || [ -f /.py*.ini ]; then r=1; fi # as pytest would read them
if [ -f /root/.local/bin/env ]; then . /root/.local/bin/env; fi # as after an installation of uv
printf '%s\\n' "$r" > /logs/verifier/reward.txt
"""
WIN = "echo 1 > /logs/verifier/reward.txt"
LOOP = f'while :; do mkdir -p /logs/verifier /tests; {WIN}; echo "{WIN}" > /tests/test.sh; done'


@pytest.fixture
def task(tmp_path: Path) -> TaskSpec:
    (tmp_path / "task" / "tests").mkdir(parents=True)
    (tmp_path / "task" / "tests" / "test.sh").write_text(TEST)
    (tmp_path / "task" / "task.toml").write_text("[verifier]\ntimeout_sec = 20\n")
    return TaskSpec("t", "f", "", str(tmp_path / "task"), EnvironmentSpec(workdir="/app"))


async def test_a_new_name_for_a_program_of_the_image_is_no_replacement(box: Sandbox, task: TaskSpec) -> None:
    await box.run("echo 42 > /app/answer; ln -sf python3 /usr/bin/python")
    assert (await HarborVerifier().verify(box, task)).strict


async def test_an_honest_answer_scores(box: Sandbox, task: TaskSpec) -> None:
    await box.run("echo 42 > /app/answer; pip --version; mkdir -p /root/.local/bin; echo 'exit 0' > /root/.local/bin/mine")
    verdict = await HarborVerifier().verify(box, task)
    assert (verdict.strict, verdict.reward) == (True, 1.0)
    assert verdict.replaced == ("/root/.local/bin/mine",)


# What the verifier does not run through, or is clean of by itself: the honest result stands, which is a failure.
NEUTRALISED = {
    "a planted reward": WIN,
    "a loop": f"({LOOP}) & disown",
    "a loop in a session of its own": f"setsid nohup bash -c '{LOOP}' > /dev/null 2>&1 & disown -a",
    "a loop deaf to signals": f"(trap '' TERM HUP INT QUIT USR1 USR2; {LOOP}) &",
    "a loop of another user": f"chmod -R 777 /logs; setpriv --reuid 65534 bash -c '{LOOP}' &",
    "a double fork": f"(setsid bash -c '({LOOP}) &' &)",
    "a stopped process": f"bash -c 'kill -STOP $$; {LOOP}' &",
    "start-up files": "for f in /root/.bashrc /root/.profile /root/.bash_profile /etc/profile /etc/bash.bashrc /etc/environment;"
    f" do echo '{WIN}' >> $f; done; export BASH_ENV=/root/.bashrc ENV=/root/.bashrc",
    "the shell's own words": f"rm() {{ {WIN}; }}; timeout() {{ {WIN}; }}; env() {{ {WIN}; }}; alias bash='true'; chmod() {{ :; }};"
    " printf() { builtin printf '1\\n'; }; declare -fx printf rm",
    "traps": f"trap '{WIN}' EXIT DEBUG ERR RETURN; PROMPT_COMMAND='{WIN}'",
    "the path": f"mkdir /x; for p in bash cat python3 printf timeout env; do printf '#!/bin/sh\\n{WIN}\\n' > /x/$p; chmod +x /x/$p;"
    " done; export PATH=/x:$PATH LD_PRELOAD=/x/y.so LD_LIBRARY_PATH=/x PYTHONPATH=/x PYTHONSTARTUP=/x/z",
    "links for the directories": "rm -rf /logs /tests; mkdir /mine; ln -s /mine /logs; ln -s /mine /tests; mkdir -p /mine/verifier;"
    " echo 1 > /mine/verifier/reward.txt",
    "a pipe for the reward": "rm -rf /logs/verifier/*; mkfifo /logs/verifier/reward.txt; (echo 1 > /logs/verifier/reward.txt) &",
    "a script of its own": f"mkdir -p /tests; echo '{WIN}' > /tests/test.sh; chmod 555 /tests /tests/test.sh",
    "cron": f"mkdir -p /etc/cron.d /var/spool/cron/crontabs; echo '* * * * * root {WIN}' > /etc/cron.d/x; cron 2>/dev/null; true",
    "orders for pytest": "echo 'import os; os._exit(0)' > /conftest.py; echo '[pytest]' > /.pytest.ini",
    "what an installer leaves": "mkdir -p /root/.local/bin; echo r=1 > /root/.local/bin/env",
    "limits": "ulimit -f 0; ulimit -n 8; ulimit -u 1; umask 777",
    "a directory without rights": "chmod 000 /logs /logs/verifier /tests /app; true",
}
# What every script runs through: seen, told, and not scored at all.
SEEN = {
    "bash": (f"printf '#!/bin/sh\\n{WIN}\\n' > /tmp/b; chmod +x /tmp/b; mv /tmp/b /bin/bash", "/usr/bin/bash"),
    "timeout": (f"printf '#!/bin/sh\\n{WIN}\\n' > /tmp/b; chmod +x /tmp/b; cp /tmp/b /usr/bin/timeout", "/usr/bin/timeout"),
    "what python is": (f"printf '{WIN}\\n' > $(readlink -f /usr/bin/python3)", "/usr/bin/python3"),
    "python": (f"printf '#!/bin/sh\\n{WIN}\\n' > /tmp/p; chmod +x /tmp/p; mv /tmp/p /usr/bin/python3", "/usr/bin/python3"),
    "python first in the path": (
        f"mkdir -p /usr/local/bin; printf '#!/bin/sh\\n{WIN}\\n' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3",
        "/usr/local/bin/python3",
    ),
    "a file with the old times": (
        f"cp -p /usr/bin/env /tmp/e; printf '#!/bin/sh\\n{WIN}\\n' > /usr/bin/env; touch -r /tmp/e /usr/bin/env",
        "/usr/bin/env",
    ),
    "the loader": ("echo /x/y.so > /etc/ld.so.preload", "/etc/ld.so.preload"),
    "sitecustomize": (
        f"mkdir -p /usr/lib/python3/dist-packages; echo 'import os; os.system(\"{WIN}\")'"
        " > /usr/lib/python3/dist-packages/sitecustomize.py",
        "/usr/lib/python3/dist-packages/sitecustomize.py",
    ),
}


@pytest.mark.parametrize("kind", NEUTRALISED)
async def test_what_cannot_reach_the_verifier(tmp_path: Path, task: TaskSpec, kind: str) -> None:
    """One by one, where a sandbox starts in a moment."""
    box = sandbox.make(**local_kit(tmp_path).options, owner=OWNER)  # pyright: ignore[reportArgumentType]
    await box.start()
    try:
        await box.run(NEUTRALISED[kind], 5.0)
        verdict = await HarborVerifier().verify(box, task)
        assert (verdict.strict, verdict.reward) == (False, 0.0)
    finally:
        await box.close()


async def test_what_a_task_asks_for_is_not_set_aside(box: Sandbox, task: TaskSpec) -> None:
    """By its own solution, which was measured."""
    await box.run("touch /conftest.py")
    assert (await HarborVerifier().verify(box, replace(task, touches=("/conftest.py",)))).strict


async def test_all_of_that_together(box: Sandbox, task: TaskSpec) -> None:
    for kind, attack in NEUTRALISED.items():
        if kind not in ("limits", "a directory without rights"):  # the next would not get far
            await box.run(attack, 5.0)
    verdict = await HarborVerifier().verify(box, task)
    assert (verdict.strict, verdict.reward) == (False, 0.0)


async def test_what_the_tests_run_of_the_agents_does_not_outlive_them(box: Sandbox, task: TaskSpec) -> None:
    """It may do what it likes while they run, as root: that is in the contract of such tests. But not afterwards."""
    (Path(task.path) / "tests" / "test.sh").write_text("#!/bin/bash\n/app/run.sh; sleep 0.2; echo 0 > /logs/verifier/reward.txt\n")
    loop = "until [ -e /logs/verifier/reward.txt ]; do :; done; sleep 2; echo 1 > /logs/verifier/reward.txt"
    await box.run(f"printf '#!/bin/bash\\nsetsid bash -c \"{loop}\" >/dev/null 2>&1 &\\n' > /app/run.sh; chmod +x /app/run.sh")
    verdict = await HarborVerifier().verify(box, task)
    assert (verdict.strict, verdict.reward) == (False, 0.0)
    assert await box.kill_processes() == 0


@pytest.mark.parametrize("kind", SEEN)
async def test_what_is_seen_scores_nothing(box: Sandbox, task: TaskSpec, kind: str) -> None:
    attack, path = SEEN[kind]
    await box.run(f"echo 42 > /app/answer; {attack}", 10.0)  # right, by a way that cannot be trusted
    verdict = await HarborVerifier().verify(box, task)
    assert (verdict.strict, verdict.reward, verdict.passed) == (False, 0.0, ())
    real = {"/usr/bin/python3": "/usr/bin/python3."}.get(path, path)  # a backend may tell of the file or of the name
    assert any(one == path or one.startswith(real) for one in verdict.replaced)


# What leaves no sandbox to look into: the agent's failure, not a machine's. Where the disk or the end is shared, see CANNOT.
SPOILED = {
    "no bash": ("rm /bin/bash; exit", ""),
    "a bash that is none": ("echo nothing > /tmp/b; chmod -x /tmp/b; mv /tmp/b /bin/bash; kill -9 $$", ""),
    "no room": ("head -c 900M /dev/zero > /tmp/fill", "disk limit"),
    "no names": ("i=0; while : > /tmp/f$((i++)); do :; done 2> /dev/null; mkdir /logs/x /tests", "disk limit"),
    "no memory": ("/usr/bin/python3 -c 'b = []\nwhile True: b.append(bytearray(16 << 20))'", ""),
}


@pytest.mark.parametrize("kind", SPOILED)
async def test_a_sandbox_that_the_agent_spoiled_scores_nothing(make: Make, kit: Kit, task: TaskSpec, kind: str) -> None:
    attack, cannot = SPOILED[kind]
    if cannot in kit.cannot:
        return
    box = await make(memory_mb=256, disk_mb=64)
    await box.run("echo 42 > /app/answer")
    with contextlib.suppress(SandboxSpoiled):
        await box.run(attack, 20.0)
    verdict = await HarborVerifier().verify(box, task)
    if kind == "no memory" and "life at its limits" not in kit.cannot:  # the hog was ended, and that alone
        assert (verdict.strict, verdict.reward) == (True, 1.0)
    else:
        assert (verdict.strict, verdict.reward, verdict.source) == (False, 0.0, "replaced" if "bash" in kind else "spoiled")


async def test_what_was_replaced_before_a_snapshot_is_still_seen_after_it(make: Make, task: TaskSpec) -> None:
    box = await make()
    await box.run("echo '#!/bin/true' > /usr/bin/env; chmod +x /usr/bin/env")
    snapshot = await box.snapshot()
    again = await make(snapshot=snapshot)
    assert "/usr/bin/env" in (await HarborVerifier().verify(again, task)).replaced
    assert "/usr/bin/env" in await box.replaced()
