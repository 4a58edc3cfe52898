"""The author without a model: tasks of the bundled suite that fit a blueprint, as far as they can, and their directories."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from termrsi.config.axes import AxesConfig
from termrsi.tasks import bundled, harbor
from termrsi.tasks.synthesis.axes import ANY, AXES, Blueprint, draw
from termrsi.tasks.synthesis.procedural import FAMILIES, LEVELS, compose
from termrsi.tasks.synthesis.write import Draft, dockerfile, write

BLUEPRINT = draw(0, 0, "legacy", AxesConfig().weights())


def blueprint(index: int = 0, **values: str) -> Blueprint:
    return replace(BLUEPRINT, index=index, **values)


def test_each_family_is_of_one_domain() -> None:
    mapped = [family for group in FAMILIES.values() for family in group]
    assert sorted(mapped) == sorted(bundled.families())
    assert set(FAMILIES) < set(AxesConfig().domain)


@pytest.mark.parametrize("domain", AxesConfig().domain)
def test_the_family_fits_the_domain_if_one_does(domain: str) -> None:
    found = [compose(blueprint(i, domain=domain)) for i in range(20)]
    if domain in FAMILIES:
        assert {draft.family for draft, _ in found} <= set(FAMILIES[domain])
    assert {axes["domain"] for _, axes in found} == {domain if domain in FAMILIES else ANY}
    assert len({draft.family for draft, _ in found}) > 1


def test_complexities_are_levels_and_intricate_has_none() -> None:
    for complexity, level in LEVELS.items():
        draft, axes = compose(blueprint(complexity=complexity))
        assert (draft.level, axes["complexity"]) == (level, complexity)
    draft, axes = compose(blueprint(complexity="intricate"))
    assert (draft.level, axes["complexity"]) == (3, ANY)
    assert {axis for axis in AXES if axes[axis] != ANY} <= {"domain"}


def test_a_choice_of_families_is_kept_to() -> None:
    for i in range(20):
        draft, axes = compose(blueprint(i, domain="debugging"), ["copy", "sort"])
        assert draft.family in ("copy", "sort")
        assert axes["domain"] == ANY
        draft, axes = compose(blueprint(i, domain="data_processing"), ["copy", "sort"])
        assert (draft.family, axes["domain"]) == ("sort", "data_processing")


def test_items_of_a_run_differ_and_come_again() -> None:
    made = [compose(blueprint(i, domain="file_operations", complexity="short"), ["create"])[0] for i in range(60)]
    assert made == [compose(blueprint(i, domain="file_operations", complexity="short"), ["create"])[0] for i in range(60)]
    assert len({draft.solution for draft in made}) == 60


def test_a_directory_is_a_harbor_task_with_its_blueprint(tmp_path: Path) -> None:
    draft, axes = compose(BLUEPRINT)
    write(tmp_path / "one", draft, {"index": 0, "seed": 3, "corpus": "legacy", **axes})
    result = harbor.load(tmp_path / "one", strict=True)
    assert (result.skipped, result.notes) == ((), ())
    (task,) = result.tasks
    assert (task.id, task.family, task.level, task.split) == ("one", draft.family, draft.level, "train")
    assert task.instruction == draft.instruction
    data = tomllib.loads((tmp_path / "one" / "task.toml").read_text())
    assert data["metadata"]["blueprint"] == {"index": 0, "seed": 3, "corpus": "legacy", **axes}


def test_any_text_survives_in_a_directory(tmp_path: Path) -> None:
    odd = 'a "quoted" \\ back\tslash \x7f é 😀'
    draft = Draft(
        instruction="Do it.", initial_test="true\n", checks={"a": "bash /tests/checks/a.sh"}, scripts={"checks/a.sh": "true\n"},
        dockerfile=dockerfile("img", files=True, setup=True), family=odd, level=4, agent_timeout_s=60.0, truth="42\n",
        files={"d/run.sh": "#!/bin/sh\n", "e": ""}, setup="true\n", compose="services: {}\n",
    )  # fmt: skip
    write(tmp_path / "one", draft, {"persona": odd, "primitives": (odd, "b")})
    data = tomllib.loads((tmp_path / "one" / "task.toml").read_text())["metadata"]
    assert (data["family"], data["blueprint"]) == (odd, {"persona": odd, "primitives": [odd, "b"]})
    files = {str(p.relative_to(tmp_path / "one")): p for p in (tmp_path / "one").rglob("*") if p.is_file()}
    assert sorted(files) == [
        "environment/Dockerfile", "environment/docker-compose.yaml", "environment/files/d/run.sh", "environment/files/e",
        "environment/setup.sh", "initial/test.sh", "instruction.md", "task.toml", "tests/checks/a.sh", "tests/test.sh", "truth.md",
    ]  # fmt: skip
    assert files["environment/files/d/run.sh"].stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "one" / "environment" / "Dockerfile").read_text().splitlines() == [
        "FROM img", "WORKDIR /app", "COPY files/ /app/", "COPY setup.sh /tmp/setup.sh",
        "RUN bash /tmp/setup.sh && rm /tmp/setup.sh",
    ]  # fmt: skip
