"""Verbs of the command line and their options: what is taken and what `--help` says are both made from one table."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from termrsi.errors import ConfigError

NUMBER = "N"  # a whole number from 1 on
FLAG = "true|false"
WIDTH = 132


@dataclass(frozen=True, slots=True)
class Option:
    """`form`: what stands after `=`; NUMBER, or words with bars between, are checked. `what`: in a few words, for `--help`."""

    name: str
    form: str
    what: str = ""

    def value(self, text: str, where: str) -> str | int | bool:
        """Raises ConfigError for what its form does not take."""
        if self.form == NUMBER:
            if not text.isdigit() or int(text) < 1:
                raise ConfigError(f"{self.name} is {text!r}", where, "valid: a whole number from 1 on")
            return int(text)
        if self.form == FLAG and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if "|" in self.form and text not in self.form.split("|"):
            raise ConfigError(f"{self.name} is {text!r}", where, f"valid: {' or '.join(self.form.split('|'))}")
        return text


@dataclass(frozen=True, slots=True)
class Verb:
    """`name`: its words after `termrsi`; `takes`: what stands after them; `what`: it does."""

    name: str
    takes: str
    what: str
    options: tuple[Option, ...] = ()

    def read(self, words: Sequence[str], others: Sequence["Verb"] = ()) -> dict[str, Any]:  # Any: str, int or bool, by its option
        """Values by name, of `key=value`. Raises ConfigError that names the nearest key, all of them, or what a value must be.

        `others`: verbs beside it, an option of which is told from a misspelt one.
        """
        known = {option.name: option for option in self.options}
        where, found = f"termrsi {self.name}", {}
        for word in words:
            key, given, value = word.partition("=")
            if given and key in known:
                found[key] = known[key].value(value, where)
                continue
            takes = f"it takes {', '.join(f'{name}=' for name in known)}" if known else "it takes no options"
            elsewhere = [verb.name for verb in others if key in {option.name for option in verb.options}]
            if elsewhere and key not in known:
                raise ConfigError(f"{key}= is an option of {', '.join(elsewhere)}", where, takes)
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(f"unknown option {word!r}", where, f"nearest: {near[0]}=" if near else takes)
        return found


def usage(verbs: Sequence[Verb]) -> str:
    """Each verb with a line of what it does, and its options."""
    lines: list[str] = []
    for verb in verbs:
        call = f"termrsi {' '.join(filter(None, (verb.name, verb.takes)))}"
        lines += [f"       {call:<43} {verb.what}"] if len(call) <= 43 else [f"       {call}", f"{'':51}{verb.what}"]
        told = " ".join(f"[{option.name}={option.form}]" for option in verb.options)
        lines += [f"{'':17}{line}" for line in wrap(told, WIDTH - 17, break_on_hyphens=False)]
    return "\n".join(lines)


def help_of(verb: Verb) -> str:
    """All of one verb."""
    head = f"termrsi {' '.join(filter(None, (verb.name, verb.takes)))}: {verb.what}"
    return "\n".join([head, *(f"  {f'{option.name}={option.form}':<32} {option.what}".rstrip() for option in verb.options)])
