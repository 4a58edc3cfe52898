"""Counts of episodes and updates of real pipelines, by hand from their files."""

import pytest

from termrsi.config.load import load
from termrsi.sizing import work
from termrsi.sizing.work import Assumed, Updates, Work


def found(*overrides: str, **assumed: float) -> dict[str, Work]:
    return {one.name: one for one in work.of(load(overrides), Assumed(**assumed))}  # type: ignore[arg-type]  # as the tests give them


@pytest.mark.parametrize("scale", ["laptop", "node", "full"])
@pytest.mark.parametrize("experiment", ["terminal_rsi", "reterm", "rsr", "t1", "tmax", "river", "comparisons"])
def test_every_stage_of_every_pipeline_is_counted(experiment: str, scale: str) -> None:
    config = load((f"experiment={experiment}", f"scale={scale}"))
    assert [one.name for one in work.of(config, Assumed())] == config.pipeline


def test_bundled_tasks_are_counted_and_others_assumed_or_capped(tmp_path: object) -> None:
    config = load(("experiment=rsr",))
    assert [work.tasks(config, split, Assumed()) for split in ("train", "validation", "heldout")] == [96, 48, 48]
    config = load(("experiment=rsr", "tasks=directory", f"tasks.path={tmp_path}", "tasks.validation=30"))
    assert [work.tasks(config, split, Assumed(tasks=700)) for split in ("train", "validation", "heldout")] == [700, 30, 100]


def test_the_suite_has_as_many_families_as_are_counted() -> None:
    from termrsi.tasks import bundled

    assert len(bundled.families()) == work.FAMILIES


def test_rewriting() -> None:
    """Two harnesses at every task; four runbooks of each that one of them solved, executed four times."""
    number = work.tasks(load(("experiment=rsr", "scale=full")), "train", Assumed())
    assert number == 23 * 4
    assert found("experiment=rsr", "scale=full", solved=0.5)["rsr"].episodes == number * 2 + number * 0.75 * 4 * 4


def test_updates_of_a_phase_with_a_critic() -> None:
    one = found("experiment=terminal_rsi", "scale=full")["rpr_1"].updates
    # forward, backward, checkpointing; the policy's old log-probabilities, the critic's values
    assert one == Updates(20, 256, 1, 0, 5.0, 5.0, 0.0)


def test_what_runs_beyond_a_step_is_part_of_its_updates() -> None:
    changed = ("stages.dppo.oversample=2", "stages.dppo.admission=first")
    one = found("experiment=tmax", "scale=full", *changed)["dppo"].updates
    assert one is not None
    assert (one.max_staleness, one.extra, one.first) == (4, 2, True)


def test_a_loss_against_the_sampler_takes_no_pass_before(tmp_path: object) -> None:
    one = found("experiment=tmax", "scale=full")["dppo"]
    assert one.updates == Updates(500, 8, 32, 4, 4.0, 0.0, 0.0)
    reference = found("experiment=tmax", "scale=full", "stages.dppo.optim.kl=0.1")["dppo"].updates
    assert reference is not None
    assert reference.reference == 1.0


def test_recoveries_and_what_is_kept_of_them() -> None:
    more = ("stages.recovery.tasks=0", "stages.recovery.attempts=2", "stages.recovery.teacher_attempts=3")
    made = found("experiment=reterm", *more, solved=0.25)
    failed = 96 * 2 * 0.75
    assert made["recovery"].episodes == 96 * 2 + failed * 3
    config = load(("experiment=reterm",))
    epochs = getattr(config.stages["sft"], "epochs", 0)
    assert made["sft"].samples == pytest.approx(failed * 0.25 * epochs)


def test_one_stage_alone() -> None:
    assert list(found("experiment=reterm", "stage=base_eval")) == ["base_eval"]
