"""What test scripts ask for, in each of the ways they ask, and what the stand-ins for installers answer."""

import subprocess
import sys
from pathlib import Path

import pytest

from termrsi.errors import ConfigError, TaskError
from termrsi.reward import kit, kit_shims

PYTEST, CTRF = kit.ALWAYS


def script(tmp_path: Path, text: str, **files: str) -> Path:
    (tmp_path / "tests").mkdir(exist_ok=True)
    (tmp_path / "tests" / "test.sh").write_text(text)
    for name, content in files.items():
        (tmp_path / "tests" / name.replace("_dot_", ".")).write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("echo 1 > /logs/verifier/reward.txt\n", None),
        ("pytest /tests\n", None),  # the image's own
        ("curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh\nsource $HOME/.local/bin/env\n", ()),
        ("uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 pytest --ctrf x /tests/test_outputs.py -rA\n", ()),
        (
            "uvx \\\n  -p 3.13 \\\n  -w pytest==8.3.4 \\\n  --with numpy==2.3.1 \\\n  pytest /tests -rA\n",
            ("numpy==2.3.1", "pytest==8.3.4"),
        ),
        ("if uvx --with=requests pytest; then echo 1; else echo 0; fi\n", ("requests",)),
        ("uvx --with 'a==1,b[x]==2' pytest\n", ("a==1", "b[x]==2")),
        ("uvx pytest@8.4.2 /tests\n", ("pytest==8.4.2",)),
        ("pip install pytest==8.4.1 'requests>=2' && pytest /tests\n", ("requests>=2",)),
        ("python3 -m pip install --quiet -i https://x/simple pandas\n", ("pandas",)),
        ("sudo pip3 install --break-system-packages pyyaml==6.0\n", ("pyyaml==6.0",)),
        ("PIP_NO_CACHE_DIR=1 pip install pillow\n", ("pillow",)),
        ("uv pip install --system -r /tests/requirements.txt rich\n", ("flask==3.0", "rich", "scipy")),
        ("uv init\nuv add pytest==8.4.1 numpy\nuv run pytest $TEST_DIR/test_outputs.py\n", ("numpy",)),
        ("uv run --with lxml pytest\n", ("lxml",)),
        ("cat <<'X'\npip install \"never\nX\npip install click\n", ("click",)),
        ("pip install -e . ./wheels/x.whl $PACKAGES\n", ()),
    ],
)
def test_what_a_script_asks_for(tmp_path: Path, text: str, found: tuple[str, ...] | None) -> None:
    task = script(tmp_path, text, requirements_dot_txt="# pinned\nflask==3.0\nscipy\n-r other.txt\n")
    if found is None:
        assert kit.requirements(task) is None
        return
    named = {kit_shims.key_of(one)[0] for one in found}
    assert kit.requirements(task) == tuple(sorted([*found, *(one for one in kit.ALWAYS if kit_shims.key_of(one)[0] not in named)]))


def test_a_script_that_another_runs_is_read_too(tmp_path: Path) -> None:
    task = script(tmp_path, "source $TEST_DIR/setup.sh\nbash /tests/lib/more.sh\n")
    for name, text in (
        ("setup.sh", "pip install rich\n"),
        ("lib/more.sh", "pip install click\n"),
        ("unused.sh", "pip install flask\n"),
    ):
        (task / "tests" / name).parent.mkdir(exist_ok=True)
        (task / "tests" / name).write_text(text)
    assert kit.requirements(task) == tuple(sorted(["click", "rich", *kit.ALWAYS]))


def test_a_task_without_a_script_asks_for_nothing(tmp_path: Path) -> None:
    assert kit.requirements(tmp_path) is None


def test_no_kit_and_a_set_that_it_lacks_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no verification kit"):
        kit.opened(tmp_path)
    with pytest.raises(ConfigError, match=r"valid: a version like 3\.11"):
        kit.build(tmp_path / "kit", [], python="three")
    built = kit.build(tmp_path / "kit", [], python="3.11")
    assert kit.opened(tmp_path / "kit") == built
    assert built.part(script(tmp_path, "true\n")) is None
    with pytest.raises(TaskError, match=r"lacks numpy==2\.3\.1, pytest-json-ctrf==0\.3\.5, pytest==8\.4\.1.*termrsi tasks kit"):
        built.part(script(tmp_path, "pip install numpy==2.3.1\n"))


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """A set of two packages, as `build` lays it out, with stand-ins that run."""
    root = tmp_path / "part"
    (root / "bin").mkdir(parents=True)
    (root / "provided.txt").write_text("pytest==8.4.1\npytest-json-ctrf==0.3.5\n")
    for name in kit.NAMES:
        (root / "bin" / name).write_bytes(Path(kit_shims.__file__).read_bytes())
        (root / "bin" / name).chmod(0o755)
    (root / "bin" / "pytest").write_text('#!/bin/sh\necho "pytest $*"; exit 3\n')
    (root / "bin" / "pytest").chmod(0o755)
    return root


def sh(part: Path, command: str) -> tuple[int, str]:
    home = part.parent / "home"
    home.mkdir(exist_ok=True)
    env = {"PATH": f"{part}/bin:{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(home)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, cwd=home, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("uvx -p 3.13 -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 pytest --ctrf x -rA", 3, "pytest --ctrf x -rA"),
        ("uvx --with=pytest pytest@latest a", 3, "pytest a"),
        ("uvx -w pytest==8.3.4 pytest", 1, "the verification kit lacks pytest==8.3.4"),
        ("uvx -w numpy pytest", 1, "lacks numpy"),
        ("uvx nothing-like-it", 127, "there is no nothing-like-it"),
        ("uv run pytest a", 3, "pytest a"),
        ("uv run --with pytest python -c 'print(1)'", 0, "1"),
        ("uv tool run pytest a", 3, "pytest a"),
        ("uv init && uv add pytest==8.4.1 && uv sync", 0, ""),
        ("uv add numpy", 1, "lacks numpy"),
        ("uv pip install --system pytest Pytest_JSON.ctrf==0.3.5", 0, ""),
        ("uv venv .v && source .v/bin/activate && python -c 'print(2)' && deactivate", 0, "2"),
        ("uv publish", 1, "not something"),
        ("uv --version", 0, "uv 0"),
        ("pip install -q --index-url https://x pytest pytest-json-ctrf==0.3.5", 0, ""),
        ("pip install 'pytest==8.4.1; python_version > \"3\"' --timeout 5", 0, ""),
        ("pip3 install requests", 1, "lacks requests"),
        ("echo 'scipy' > r.txt; pip install -r r.txt", 1, "lacks scipy"),
        ("mkdir p; pip install pytest ./p", 1, "./p could not be installed with what is in the image"),
        ("mkdir p; uv pip install ./p", 1, "could not be installed"),
        ("pip list", 0, "pytest==8.4.1"),
        ("pip wheel x", 1, "not something"),
        ("apt-get update && apt-get install -y curl ca-certificates bash", 0, ""),
        ("apt-get install -y no-such-package", 100, "E: Unable to locate package no-such-package"),
        ("curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh && source $HOME/.local/bin/env && uvx pytest a", 3, "pytest a"),
        ("wget -qO- https://astral.sh/uv/install.sh | sh && . ~/.local/bin/env && uv run pytest b", 3, "pytest b"),
        ("curl -o i.sh https://astral.sh/uv/install.sh && sh i.sh && ls ~/.local/bin", 0, "uvx"),
    ],
)
def test_stand_ins(part: Path, command: str, code: int, said: str) -> None:
    found, output = sh(part, command)
    assert (found, said in output) == (code, True), output


BACKEND = """import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    info = "mine-1.0.dist-info"
    with zipfile.ZipFile(f"{folder}/mine-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mine.py", "print('mine')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: mine\\nVersion: 1.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return "mine-1.0-py3-none-any.whl"
"""


def test_a_project_is_installed_by_the_images_own_pip(part: Path) -> None:
    """Without a network, if all that its build needs is there."""
    (part / "site" / "pip").mkdir(parents=True)
    (part / "site" / "pip" / "__init__.py").write_text("")
    project = part.parent / "home" / "project"
    project.mkdir(parents=True)
    (project / "backend.py").write_text(BACKEND)
    (project / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
    code, output = sh(
        part,
        "python3 -m venv v && PATH=${PATH%%:*}:$PWD/v/bin:${PATH#*:} && pip install ./project && v/bin/python -c 'import mine'",
    )
    assert (code, "mine" in output) == (0, True), output
