"""What `--help` lists is what is taken: of the whole command line, and of each verb."""

from dataclasses import fields

import pytest

from termrsi import commands, driver, plan_command, task_options
from termrsi.commands import VERBS
from termrsi.errors import ConfigError
from termrsi.options import FLAG, NUMBER, Option, Verb
from termrsi.plan_command import split
from termrsi.sizing.rates import Rates
from termrsi.sizing.work import Assumed

TAKING = [verb for verb in VERBS if verb.options]


def example(option: Option) -> str:
    return {NUMBER: "2", "NUMBER": "0.5", "1,2": "1,2"}.get(option.form, option.form.split("|")[0])


def test_help_lists_each_verb_with_all_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["--help"]) == 0
    text = capsys.readouterr().out
    at = [text.index(f"       termrsi {' '.join(filter(None, (verb.name, verb.takes)))}") for verb in VERBS]
    assert at == sorted(at)
    for verb, start, end in zip(VERBS, at, [*at[1:], len(text)], strict=True):
        for option in verb.options:
            assert f"[{option.name}={option.form}]" in text[start:end]
    assert max(map(len, text.splitlines())) <= 132


@pytest.mark.parametrize("verb", TAKING, ids=lambda verb: verb.name)
def test_each_verb_tells_its_own(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main([*verb.name.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {line.split("=")[0].strip() for line in lines if line.startswith("  ")}
    assert {option.name for option in verb.options} <= told


def test_help_of_a_group_is_that_of_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["tasks", "-h"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("termrsi ")] == [
        f"termrsi {verb.name} {verb.takes}: {verb.what}" for verb in task_options.VERBS
    ]
    assert driver.main(["experiment=rsr", "--help"]) == 0
    assert "usage: termrsi experiment=NAME" in capsys.readouterr().out


@pytest.mark.parametrize("verb", TAKING, ids=lambda verb: verb.name)
def test_what_is_listed_is_taken_and_nothing_else(verb: Verb) -> None:
    words = [f"{option.name}={example(option)}" for option in verb.options]
    if verb.name == "plan":  # other words are those of the run
        assert split(words)[1] == []
        return
    assert set(verb.read(words)) == {option.name for option in verb.options}
    with pytest.raises(ConfigError, match="it takes " + verb.options[0].name):
        verb.read(["zzzz=1"])


def test_every_option_of_the_tasks_verbs_has_a_field_and_every_field_a_verb() -> None:
    taken = {option.name for verb in task_options.VERBS for option in verb.options}
    assert taken == {one.name for one in fields(task_options.Options)}


def test_every_figure_of_a_plan_can_be_given() -> None:
    names = {option.name for option in plan_command.verb().options}
    assert {one.name for one in fields(Rates)} <= names
    assert len(names) == 2 + len(fields(Rates)) + len(fields(Assumed))


def test_values_have_the_type_of_their_form() -> None:
    verb = Verb("v", "", "", (Option("n", NUMBER), Option("f", FLAG), Option("c", "a|b"), Option("t", "TEXT")))
    assert verb.read(["n=3", "f=True", "c=b", "t=x=y"]) == {"n": 3, "f": True, "c": "b", "t": "x=y"}
    with pytest.raises(ConfigError, match="v: c is 'd'; valid: a or b"):
        verb.read(["c=d"])
