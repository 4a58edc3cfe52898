"""The bundled suite as text: determinism, disjoint splits, short instructions, whole task directories."""

import json
import re
import stat
import tomllib
from pathlib import Path

import pytest

from termrsi import tasks
from termrsi.errors import ConfigError
from termrsi.tasks import bundled
from termrsi.tasks.bundled.recipe import Draw
from termrsi.tasks.bundled.words import SPLITS, pool

SEEDS = range(3)


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    root = tmp_path_factory.mktemp("suites")
    return {split: bundled.generate(root / split, split=split, seeds=SEEDS) for split in SPLITS}


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (stat.S_IMODE(path.stat().st_mode), path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_size(suites: dict[str, list[Path]]) -> None:
    assert len(bundled.families()) >= 14
    assert all(len(paths) == len(bundled.families()) * 3 * len(SEEDS) for paths in suites.values())


def test_same_request_same_bytes(suites: dict[str, list[Path]], tmp_path: Path) -> None:
    bundled.generate(tmp_path, split="train", seeds=SEEDS)
    assert contents(tmp_path) == contents(suites["train"][0].parent)


def test_seeds_differ(tmp_path: Path) -> None:
    """No two tasks of a family alike, as far as the smallest pool of words goes."""
    for split in SPLITS:
        paths = bundled.generate(tmp_path / split, split=split, seeds=range(32), levels=[1])
        texts = [(path / "instruction.md").read_text() for path in paths]
        assert len(set(texts)) == len(texts)


def test_splits_share_no_instruction_no_seed_and_no_wording(suites: dict[str, list[Path]]) -> None:
    texts: dict[str, set[str]] = {}
    keys: dict[str, set[tuple[object, ...]]] = {}
    for split, paths in suites.items():
        texts[split] = {(path / "instruction.md").read_text() for path in paths}
        data = [tomllib.loads((path / "task.toml").read_text())["metadata"] for path in paths]
        assert all(item["split"] == split for item in data)
        keys[split] = {(item["template"], item["seed"]) for item in data}
    for a, b in (("train", "validation"), ("train", "heldout"), ("validation", "heldout")):
        assert not texts[a] & texts[b]
        assert not {seed for _, seed in keys[a]} & {seed for _, seed in keys[b]}
        assert not {template for template, _ in keys[a]} & {template for template, _ in keys[b]}
        assert not set(pool(a)) & set(pool(b))
    assert {int(str(template)) % 5 for template, _ in keys["train"]} == {0, 1, 2}


def test_every_wording_says_it_in_its_own_words() -> None:
    """Wordings come in fives, three for train and one for each other split, and none stands twice in a recipe."""
    for family, makers in bundled.RECIPES.items():
        for level, maker in enumerate(makers, 1):
            wordings = maker(Draw(family, level, "train", 0)).wordings
            assert len(wordings) % 5 == 0, (family, level)
            assert len({w.lower() for w in wordings}) == len(wordings), (family, level)


def test_seeds_go_through_the_wordings_of_their_split(tmp_path: Path) -> None:
    for split, expected in (("train", {0, 1, 2, 5, 6, 7, 10, 11, 12}), ("validation", {3, 8, 13}), ("heldout", {4, 9, 14})):
        paths = bundled.generate(tmp_path / split, split=split, seeds=range(9), levels=[1], families=["move"])
        assert {tomllib.loads((path / "task.toml").read_text())["metadata"]["template"] for path in paths} == expected


def test_level_one_is_short_and_names_its_files(suites: dict[str, list[Path]]) -> None:
    for path in (path for paths in suites.values() for path in paths if "-1-" in path.name):
        text = (path / "instruction.md").read_text()
        assert len(text.split()) <= 30, text
        solution = (path / "solution" / "solve.sh").read_text()
        named = set(re.findall(r"\b[a-z]+\.(?:txt|sh|csv|log|conf|json|py|tar)\b", solution))
        assert named <= set(re.findall(r"\b[a-z]+\.[a-z]+\b", text)), text


def test_no_word_of_a_pool_hides_in_another() -> None:
    for split in SPLITS:
        words = pool(split)
        assert not [(a, b) for a in words for b in words if a != b and a in b]


def test_every_directory_loads(suites: dict[str, list[Path]]) -> None:
    for split, paths in suites.items():
        result = tasks.load_dir(paths[0].parent)
        assert (len(result.tasks), result.skipped, result.notes) == (len(paths), (), ())
        for task in result.tasks:
            assert task.family in bundled.families()
            assert task.split == split
            assert task.level in (1, 2, 3)
            assert not task.environment.network
            assert task.environment.memory_mb == 512


def test_three_to_six_checks_and_scripts_that_run_on_bash(suites: dict[str, list[Path]]) -> None:
    for path in (path for paths in suites.values() for path in paths):
        script = path / "tests" / "test.sh"
        assert script.stat().st_mode & 0o111
        names = re.findall(r"^check_(\w+)\(\)", script.read_text(), re.MULTILINE)
        assert 3 <= len(names) <= 6
        assert f'names="{" ".join(names)}"' in script.read_text()
        if not path.name.startswith("python_repair"):
            assert "python" not in script.read_text()


def test_ensure_makes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"split": "validation", "seeds": [1, 2], "families": ["copy", "sort"], "levels": [1]}
    folder = bundled.ensure(tmp_path, **request)
    assert sorted(path.name for path in folder.iterdir()) == [
        "copy-1-validation-0001",
        "copy-1-validation-0002",
        "sort-1-validation-0001",
        "sort-1-validation-0002",
    ]
    monkeypatch.setattr(bundled, "generate", lambda *args, **kwargs: pytest.fail("made twice"))
    assert bundled.ensure(tmp_path, **request) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_failed_making_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        bundled.ensure(tmp_path, split="validation", seeds=[-1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"split": "test"}, "unknown split 'test'.*heldout"),
        ({"families": ["kopy"]}, "unknown family 'kopy'.*copy"),
        ({"levels": [4]}, "unknown level 4"),
        ({"seeds": [1_000_000]}, "seed 1000000 out of range"),
    ],
)
def test_requests_that_make_no_sense(tmp_path: Path, request_: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bundled.generate(tmp_path, **({"split": "train", "seeds": [0]} | request_))  # pyright: ignore[reportArgumentType]


def test_json_of_a_task_is_json(suites: dict[str, list[Path]]) -> None:
    files = [file for paths in suites.values() for path in paths for file in path.glob("environment/files/*.json")]
    assert files
    for file in files:
        json.loads(file.read_text())
