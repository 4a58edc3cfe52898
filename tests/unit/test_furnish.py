"""What is there and answers before an agent begins."""

from dataclasses import replace
from pathlib import Path

import pytest

from termrsi.errors import SandboxError
from termrsi.furnish import furnish, unhealthy
from termrsi.records import EnvironmentSpec, Healthcheck
from tests.folder_sandbox import FolderSandbox

QUICK = Healthcheck("", interval_s=0.001, timeout_s=5.0, start_interval_s=0.001, retries=3)


@pytest.fixture
def box(tmp_path: Path) -> FolderSandbox:
    (tmp_path / "machine" / "app").mkdir(parents=True)
    return FolderSandbox(tmp_path / "machine")


def tried(count: Path, succeeds_at: int) -> str:
    return f"echo x >> {count}; [ $(wc -l < {count}) -ge {succeeds_at} ]"


@pytest.mark.parametrize(("succeeds_at", "retries", "tries"), [(1, 3, 1), (3, 3, 3), (2, 5, 2)])
async def test_it_may_fail_fewer_times_than_its_retries(
    box: FolderSandbox, tmp_path: Path, succeeds_at: int, retries: int, tries: int
) -> None:
    assert await unhealthy(box, replace(QUICK, command=tried(tmp_path / "count", succeeds_at), retries=retries)) == ""
    assert len((tmp_path / "count").read_text().splitlines()) == tries


async def test_it_fails_for_good(box: FolderSandbox, tmp_path: Path) -> None:
    check = replace(QUICK, command=f"echo why; {tried(tmp_path / 'count', 9)}")
    assert (await unhealthy(box, check)).startswith("its healthcheck fails, with exit code 1: 'why")
    assert len((tmp_path / "count").read_text().splitlines()) == 3
    with pytest.raises(SandboxError, match="its healthcheck fails"):
        await furnish(box, EnvironmentSpec(healthcheck=check))


async def test_failures_of_its_start_do_not_count(box: FolderSandbox, tmp_path: Path) -> None:
    check = replace(QUICK, command=tried(tmp_path / "count", 6), retries=1, start_period_s=60.0)
    assert await unhealthy(box, check) == ""
    assert len((tmp_path / "count").read_text().splitlines()) == 6


@pytest.mark.parametrize(("files", "there"), [((), True), (("Dockerfile",), False), (("docker-compose.yaml",), False)])
async def test_files_beside_a_ready_image_go_into_the_working_directory(
    box: FolderSandbox, tmp_path: Path, files: tuple[str, ...], there: bool
) -> None:
    context = tmp_path / "environment"
    for name in ("data.json", *files):
        context.mkdir(exist_ok=True)
        (context / name).write_text("x")
    await furnish(box, EnvironmentSpec(context=str(context), docker_image="python:3.11", workdir="/app"))
    assert (box.root / "app" / "data.json").is_file() is there
    await furnish(box, EnvironmentSpec(context=str(context), workdir="/other"))
    assert not (box.root / "other").exists()
