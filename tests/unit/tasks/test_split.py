"""Splits: declared ones are kept, drawn ones are stable, and no instruction is on two sides."""

from dataclasses import replace

import pytest

from termrsi.errors import ConfigError, TaskError
from termrsi.records import EnvironmentSpec, TaskSpec
from termrsi.tasks.split import split


def task(i: int, name: str = "", text: str = "") -> TaskSpec:
    return TaskSpec(f"t{i}", "f", text or f"Do number {i}.", "/t", EnvironmentSpec(), split=name)


POOL = [task(i) for i in range(400)]


def test_declared_splits_are_kept() -> None:
    parts = split([task(0, "heldout"), task(1, "train"), task(2, "validation")])
    assert [[t.id for t in part] for part in (parts.train, parts.validation, parts.heldout)] == [["t1"], ["t2"], ["t0"]]


def test_drawn_splits_cover_the_pool_in_about_the_shares() -> None:
    parts = split(POOL, validation=0.1, heldout=0.2)
    assert sorted(t.id for part in (parts.train, parts.validation, parts.heldout) for t in part) == sorted(t.id for t in POOL)
    assert 20 <= len(parts.validation) <= 60  # 40 expected, standard deviation 6
    assert 48 <= len(parts.heldout) <= 112  # 80 expected, standard deviation 8
    assert all(t.split == "heldout" for t in parts.heldout)


def test_drawing_is_stable_under_more_tasks_and_depends_on_the_seed() -> None:
    few, many = split(POOL[:200]), split([*POOL[::-1]])
    assert {t.id for t in few.heldout} == {t.id for t in many.heldout} & {t.id for t in POOL[:200]}
    assert split(POOL, seed=1).heldout != split(POOL, seed=0).heldout


def test_equal_instructions_fall_together() -> None:
    pool = [replace(t, instruction=f" Do  number\n{int(t.id[1:]) % 50}. ") for t in POOL]
    parts = split(pool)
    sides = [{" ".join(t.instruction.split()) for t in part} for part in (parts.train, parts.validation, parts.heldout)]
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]


def test_overlaps_are_refused() -> None:
    with pytest.raises(TaskError, match="same instruction"):
        split([task(0, "train", "Do it."), task(1, "heldout", " Do  it.\n")])
    with pytest.raises(TaskError, match="same id"):
        split([task(0, "train"), task(0, "train", "Something else.")])
    with pytest.raises(TaskError, match="unknown split 'test'"):
        split([task(0, "test")])


def test_shares() -> None:
    with pytest.raises(ConfigError, match="shares"):
        split(POOL, validation=0.6, heldout=0.6)
    assert len(split(POOL, validation=0.0, heldout=0.0).train) == len(POOL)
