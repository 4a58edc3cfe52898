"""Trees of task directories: nothing is lost, nothing inside a task is taken for a task."""

from pathlib import Path

import pytest

from termrsi import tasks
from termrsi.errors import TaskError
from termrsi.tasks import bundled


def test_one_directory_or_a_tree(tmp_path: Path) -> None:
    paths = bundled.generate(tmp_path / "a" / "b", seeds=[0], families=["copy", "move"], levels=[1])
    assert [task.id for task in tasks.load_dir(paths[0]).tasks] == [paths[0].name]
    assert [task.id for task in tasks.load_dir(tmp_path).tasks] == [path.name for path in paths]


def test_a_task_inside_a_task_is_data(tmp_path: Path) -> None:
    [path] = bundled.generate(tmp_path, seeds=[0], families=["copy"], levels=[1])
    (path / "environment" / "files" / "task.toml").write_text("")
    assert len(tasks.load_dir(tmp_path).tasks) == 1


def test_broken_ones_are_listed(tmp_path: Path) -> None:
    paths = bundled.generate(tmp_path, seeds=[0], families=["copy", "move", "sort"], levels=[1])
    (paths[1] / "tests" / "test.sh").unlink()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "task.yaml").write_text("")
    result = tasks.load_dir(tmp_path)
    assert [task.id for task in result.tasks] == [paths[0].name, paths[2].name]
    assert {Path(item.path).name: item.reason for item in result.skipped} == {
        paths[1].name: "tests/test.sh is missing",
        "old": "task.yaml is empty",
    }


def test_two_of_one_name(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        bundled.generate(tmp_path / folder, seeds=[0], families=["copy"], levels=[1])
    result = tasks.load_dir(tmp_path)
    assert [task.id for task in result.tasks] == ["copy-1-train-0000", "y/copy-1-train-0000"]
    assert "is taken" in result.notes[0]


def test_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no task in it"):
        tasks.load_dir(tmp_path)
    with pytest.raises(TaskError, match="no such directory"):
        tasks.load_dir(tmp_path / "missing")


def test_links_are_followed_to_a_task_and_told_else(tmp_path: Path) -> None:
    [path] = bundled.generate(tmp_path / "real", seeds=[0], families=["copy"], levels=[1])
    (tmp_path / "collection" / "tree").mkdir(parents=True)
    (tmp_path / "collection" / "linked").symlink_to(path)
    (tmp_path / "collection" / "tree" / "above").symlink_to(tmp_path / "collection")
    result = tasks.load_dir(tmp_path / "collection")
    assert [Path(task.path).name for task in result.tasks] == ["linked"]
    assert [(Path(item.path).name, item.reason) for item in result.skipped] == [
        ("above", "a link to a directory that is no task is not followed")
    ]


def test_the_older_file_beside_the_newer_is_told(tmp_path: Path) -> None:
    [path] = bundled.generate(tmp_path, seeds=[0], families=["copy"], levels=[1])
    (path / "task.yaml").write_text("instruction: x\n")
    assert any("task.yaml is passed over" in note for note in tasks.load_dir(tmp_path).notes)


def test_what_may_not_be_read_takes_nothing_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = bundled.generate(tmp_path, seeds=[0], families=["copy", "move"], levels=[1])
    (tmp_path / "closed").mkdir()
    listed = Path.iterdir

    def refusing(folder: Path) -> object:
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refusing)
    result = tasks.load_dir(tmp_path)
    assert len(result.tasks) == len(paths)
    assert [(Path(item.path).name, item.reason) for item in result.skipped] == [("closed", "may not be read")]
