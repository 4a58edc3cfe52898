"""What differs between the settings of a finished stage and those of now, in one line."""

from termrsi.config.settings import differences, flat


def test_values_by_the_path_at_which_they_are_set() -> None:
    parts = [("stages.a", {"lr": 1.0, "optim": {"clip": 2}, "of": [1, 2], "extra": {}}), ("seed", 3)]
    assert flat(parts) == {"stages.a.lr": 1.0, "stages.a.optim.clip": 2, "stages.a.of": [1, 2], "stages.a.extra": {}, "seed": 3}


def test_both_values_are_told() -> None:
    assert differences({"seed": 0, "tasks.kit": "a"}, {"seed": 1, "tasks.kit": "a"}) == "seed=0, now 1"
    assert differences({"seed": 0}, {"seed": 0}) == ""


def test_what_one_side_lacks_is_not_set_there() -> None:
    assert differences({"roles.critic": ["m"], "seed": 0}, {"seed": 0, "model.critic_layers": 2}) == (
        "model.critic_layers=not set, now 2, roles.critic=['m'], now not set"
    )


def test_a_few_then_a_count() -> None:
    assert differences({f"k{i}": i for i in range(7)}, {f"k{i}": -1 for i in range(7)}) == (
        "k0=0, now -1, k1=1, now -1, k2=2, now -1, k3=3, now -1, 3 more"
    )


def test_a_long_value_is_cut() -> None:
    told = differences({"a": "x" * 200}, {"a": "y"})
    assert told == f"a={'x' * 57}..., now y"


def test_of_a_stage_that_kept_no_settings_nothing_is_known() -> None:
    assert differences({}, {"seed": 1}) == ""
