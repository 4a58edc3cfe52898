import threading
from pathlib import Path

from termrsi.sandbox import cgroups


def test_a_group_whose_processes_take_a_moment_to_end_is_removed(tmp_path: Path) -> None:
    busy = tmp_path / "group" / "busy"  # as EBUSY does, it keeps rmdir from succeeding
    busy.mkdir(parents=True)
    threading.Timer(0.05, busy.rmdir).start()
    assert cgroups.end([tmp_path / "group"])
    assert not (tmp_path / "group").exists()
