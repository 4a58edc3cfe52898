"""Verifiers that install uv, pytest and pytest-json-ctrf when they test, in each way that published ones do, without a network."""

from pathlib import Path

import pytest

from termrsi import task_commands
from termrsi.errors import VerifierError
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.reward import kit
from termrsi.reward.verifiers import TaskVerifier
from tests.contract.backends import OWNER

CHECKS = """from pathlib import Path

def test_there():
    assert Path("/app/done").exists()

def test_always():
    assert True
"""
EPILOGUE = "if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n"
CTRF = "--ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA"
UV = "apt-get update\napt-get install -y curl\ncurl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh\nsource $HOME/.local/bin/env\n"
PINS = ("pytest==8.4.1", "pytest-json-ctrf==0.3.5")
GUARD = 'if [ "$PWD" = "/" ]; then echo "no working directory"; exit 1; fi\n'
WAYS = {
    "apt, curl, uv, uvx": f"{UV}{GUARD}uvx \\\n -p 3.13 \\\n -w {PINS[0]} \\\n -w {PINS[1]} \\\n pytest {CTRF}\n",
    "pip": f"pip install pytest==8.4.1 pytest-json-ctrf==0.3.5\npytest {CTRF}\n",
    "python -m pip": f"python3 -m pip install --quiet pytest==8.4.1 pytest-json-ctrf==0.3.5\npython3 -m pytest {CTRF}\n",
    "uv pip": f"{UV}uv venv .tbench\nsource .tbench/bin/activate\nuv pip install {' '.join(PINS)}\npytest {CTRF}\n",
    "uv add": f"{UV}uv init\nuv add pytest==8.4.1 pytest-json-ctrf\nuv run pytest {CTRF}\n",
    "a script beside it": f"source /tests/prepare.sh\npytest {CTRF}\n",
    "requirements": f"pip3 install -r /tests/requirements.txt\npython3 -m pytest {CTRF}\n",
}


def task(root: Path, way: str) -> TaskSpec:
    files = {"tests/test.sh": f"#!/bin/bash\n{way}{EPILOGUE}", "tests/test_outputs.py": CHECKS, "instruction.md": "Do it."}
    files |= {"tests/prepare.sh": "pip install pytest==8.4.1 pytest-json-ctrf==0.3.5\n"} if "prepare.sh" in way else {}
    files |= {"tests/requirements.txt": "pytest==8.4.1\npytest-json-ctrf==0.3.5\n", "task.toml": "[verifier]\ntimeout_sec = 60\n"}
    files |= {"environment/Dockerfile": "FROM python:3.13-slim\nWORKDIR /app\n", "solution/solve.sh": "touch /app/done\n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return TaskSpec(root.name, "f", "Do it.", str(root), EnvironmentSpec(context=str(root / "environment"), workdir="/app"))


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kit") / "tasks"
    for number, way in enumerate(WAYS.values()):
        task(root / f"way-{number}", way)
    return root


@pytest.fixture(scope="module")
def built(collection: Path) -> Path:
    out = collection.parent / "kit"
    assert task_commands.run(["kit", str(collection), f"out={out}"]) == 0
    return out


def test_all_of_them_ask_for_one_set(collection: Path, built: Path) -> None:
    assert {kit.requirements(path) for path in collection.iterdir()} == {
        ("pytest-json-ctrf", "pytest==8.4.1"),  # one does not pin it
        ("pytest-json-ctrf==0.3.5", "pytest==8.4.1"),
    }
    assert len(list((built / "sets").iterdir())) == 2


def test_each_verifies_without_a_network(collection: Path, built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert task_commands.run(["check", str(collection), f"kit={built}", "jobs=2"]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert f"{len(WAYS)} of {len(WAYS)} pass with their solution and fail without" in out
    rows = [line.split("│") for line in out.splitlines() if "│ way-" in line and "1/1" in line]
    assert [row[4].strip() for row in rows] == ["2"] * len(WAYS)  # both checks are counted, from the CTRF report


async def test_without_the_kit_it_has_not_run_and_with_it_an_agent_does_not_see_it(
    collection: Path, built: Path, tmp_path: Path
) -> None:
    from termrsi import sandbox

    one = task(tmp_path / "one", WAYS["apt, curl, uv, uvx"])
    box = sandbox.make("local", state_dir=tmp_path / "state", owner=OWNER)
    await box.start()
    try:
        assert (await box.run(f"ls {kit.PLACE}")).exit_code != 0
        with pytest.raises(VerifierError, match="never ran its tests"):
            await TaskVerifier().verify(box, one)
        planted = f"mkdir -p {kit.PLACE}/bin; printf '#!/bin/sh\\nexit 0\\n' > {kit.PLACE}/bin/uvx; chmod +x {kit.PLACE}/bin/uvx"
        await box.run(planted)
        verdict = await TaskVerifier(kit=built).verify(box, one)
        assert (verdict.strict, verdict.passed, verdict.failed) == (
            False,
            ("test_outputs.py::test_always",),
            ("test_outputs.py::test_there",),
        )
    finally:
        await box.close()


async def test_what_the_kit_lacks_is_not_a_zero(built: Path, tmp_path: Path) -> None:
    from termrsi import sandbox

    script = "P='left-pad-for-python==1.0'\npip install pytest==8.4.1 pytest-json-ctrf==0.3.5 $P && pytest /tests\n"
    one = task(tmp_path / "one", script)
    box = sandbox.make("local", state_dir=tmp_path / "state", owner=OWNER)
    await box.start()
    try:
        with pytest.raises(VerifierError, match="never ran its tests"):
            await TaskVerifier(kit=built).verify(box, one)
    finally:
        await box.close()
