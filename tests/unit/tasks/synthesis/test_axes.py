"""Draws: reproducible, independent, in the shares that the corpus kinds ask for; balance by hand."""

import math
import os
import subprocess
import sys
from collections import Counter

import pytest

from termrsi.config.axes import AxesConfig
from termrsi.errors import ConfigError
from termrsi.tasks.synthesis import axes
from termrsi.tasks.synthesis.axes import ANY, AXES, Tally, balance_index, draw, shares, support
from termrsi.tasks.synthesis.domains import DOMAINS

WEIGHTS = AxesConfig().weights()
MANY = 4000


def drawn(axis: str, corpus: str = "legacy", n: int = MANY) -> Counter[str]:
    return Counter(getattr(draw(i, 5, corpus, WEIGHTS), axis) for i in range(n))


def test_the_taxonomy_has_the_published_sizes() -> None:
    assert list(DOMAINS) == list(WEIGHTS["domain"])
    assert len(DOMAINS) == 9
    for domain in DOMAINS.values():
        assert 4 <= len(domain.skills) <= 7
        assert 20 <= len(domain.primitives) <= 40
        assert 5 <= len(domain.personas) <= 18
        assert sum(len(group) for group in domain.skills.values()) == len(domain.primitives), "none comes twice"
    assert sum(WEIGHTS["language"].values()) == pytest.approx(1.0)


def test_the_same_item_is_the_same_blueprint_and_another_is_another() -> None:
    assert draw(7, 1, "legacy", WEIGHTS) == draw(7, 1, "legacy", WEIGHTS)
    others = [draw(8, 1, "legacy", WEIGHTS), draw(7, 2, "legacy", WEIGHTS)]
    assert all(one.axes() != draw(7, 1, "legacy", WEIGHTS).axes() for one in others)


def test_another_process_draws_the_same() -> None:
    code = (
        "from termrsi.config.axes import AxesConfig; from termrsi.tasks.synthesis.axes import draw; "
        "print([draw(i, 3, 'rl_v2', AxesConfig().weights()) for i in range(5)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == str([draw(i, 3, "rl_v2", WEIGHTS) for i in range(5)])


def test_what_hangs_on_the_domain_is_of_it() -> None:
    for i in range(300):
        blueprint = draw(i, 0, "rl_v2", WEIGHTS)
        domain = DOMAINS[blueprint.domain]
        name, _, skill = blueprint.skill.partition("/")
        assert name == blueprint.domain
        assert skill in domain.skills
        assert blueprint.persona in domain.personas
        assert set(blueprint.primitives) <= set(domain.primitives)
        assert 3 <= len(set(blueprint.primitives)) == len(blueprint.primitives) <= 5


def test_languages_come_in_their_shares() -> None:
    found = drawn("language")
    for name, share in WEIGHTS["language"].items():
        spread = math.sqrt(share * (1 - share) / MANY)
        assert abs(found[name] / MANY - share) < 4 * spread, name


def test_another_weight_moves_no_other_axis() -> None:
    changed = {**WEIGHTS, "language": {"rust": 1.0}}
    for i in range(50):
        before, after = draw(i, 0, "legacy", WEIGHTS).axes(), draw(i, 0, "legacy", changed).axes()
        assert after.pop("language") == "rust"
        before.pop("language")
        assert after == before


def test_corpus_kinds_set_new_values_against_old() -> None:
    legacy, sft, rl = (shares("complexity", corpus, WEIGHTS) for corpus in ("legacy", "sft_v2", "rl_v2"))
    assert legacy == pytest.approx({"short": 1 / 3, "moderate": 1 / 3, "complex": 1 / 3})
    assert sft["intricate"] == pytest.approx(2 / 3)
    assert rl["intricate"] == pytest.approx(3 / 4)
    for axis, old in (("fixture", "text_only"), ("verifier", "exact_text")):
        assert shares(axis, "legacy", WEIGHTS) == {old: 1.0}
        assert shares(axis, "sft_v2", WEIGHTS)[old] == pytest.approx(1 / 3)
        assert old not in shares(axis, "rl_v2", WEIGHTS)
        assert sum(shares(axis, "rl_v2", WEIGHTS).values()) == pytest.approx(1.0)


def test_two_to_one_of_legacy_and_rl_v2_gives_a_quarter_of_each_complexity() -> None:
    legacy, rl = shares("complexity", "legacy", WEIGHTS), shares("complexity", "rl_v2", WEIGHTS)
    for name in WEIGHTS["complexity"]:
        assert (10 * legacy.get(name, 0.0) + 5 * rl[name]) / 15 == pytest.approx(0.25)


def test_weights_count_inside_old_and_new() -> None:
    weights = {**WEIGHTS, "complexity": {"short": 3.0, "moderate": 1.0, "complex": 0.0, "intricate": 1.0}}
    assert shares("complexity", "rl_v2", weights) == pytest.approx({"short": 3 / 16, "moderate": 1 / 16, "intricate": 3 / 4})


def test_a_corpus_kind_without_a_value_to_draw_is_refused() -> None:
    with pytest.raises(ConfigError, match="no new value has a weight, and rl_v2 draws them"):
        draw(0, 0, "rl_v2", {**WEIGHTS, "verifier": {"exact_text": 1.0}})
    with pytest.raises(ConfigError, match="no old value"):
        shares("fixture", "legacy", {**WEIGHTS, "fixture": {"image": 1.0, "text_only": 0.0}})


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"domain": {"cooking": 1.0}}, "unknown domain 'cooking'"),
        ({"language": {"python": -1.0, "c": 2.0}}, "python=-1.0"),
        ({"language": {"python": math.inf}}, "python=inf"),
        ({"verifier": {"exact_text": 0.0}}, "every weight is 0"),
    ],
)
def test_weights_that_mean_nothing_are_refused(given: dict[str, dict[str, float]], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        AxesConfig(**given)


def test_how_many_values_can_be_drawn() -> None:
    legacy = support(["legacy"], WEIGHTS)
    assert {axis: legacy[axis] for axis in ("domain", "language", "complexity", "fixture", "verifier")} == {
        "domain": 9, "language": 8, "complexity": 3, "fixture": 1, "verifier": 1,
    }  # fmt: skip
    both = support(["legacy", "rl_v2"], WEIGHTS)
    assert (both["complexity"], both["fixture"], both["verifier"]) == (4, 7, 5)
    one = support(["legacy"], {**WEIGHTS, "domain": {"security": 1.0}})
    assert (one["skill"], one["primitives"], one["persona"]) == (5, 25, 7)


def test_the_balance_index_by_hand() -> None:
    assert balance_index({"a": 5, "b": 5}, 2) == pytest.approx(1.0)
    assert balance_index({"a": 5, "b": 5}, 4) == pytest.approx(0.5)
    assert balance_index({"a": 7, "b": 0}, 2) == pytest.approx(0.5)
    # entropy of 3/4, 1/4: 0.75 ln(4/3) + 0.25 ln 4 = 0.562335; exp = 1.754765
    assert balance_index({"a": 3, "b": 1}, 2) == pytest.approx(0.877383, abs=1e-6)
    assert balance_index({}, 2) is None


def test_what_is_any_is_left_out_of_its_axis() -> None:
    tally = Tally()
    for domain, skills in (("security", ("x", "y")), (ANY, ("x", "y")), ("debugging", ("x", "x"))):
        tally.add({**dict.fromkeys(AXES, ANY), "domain": domain, "primitives": skills})
    found = tally.balance(dict.fromkeys(AXES, 2))
    assert found["domain"] == pytest.approx(1.0), "one security, one debugging"
    assert tally.counts["primitives"] == Counter(x=4, y=2)
    assert [axis for axis, index in found.items() if index is None] == [a for a in AXES if a not in ("domain", "primitives")]


def test_what_is_drawn_is_balanced_over_domains() -> None:
    tally = Tally()
    for i in range(MANY):
        tally.add(draw(i, 0, "legacy", WEIGHTS).axes())
    index = tally.balance(support(["legacy"], WEIGHTS))["domain"]
    assert index is not None
    assert index > 0.995, "4,000 draws of nine equal ones"
    assert set(axes.CORPORA) == {"legacy", "sft_v2", "rl_v2"}
