"""`termrsi data show|stats|export|import`: what a data set holds, and data sets from and to other programs' chat messages."""

import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from termrsi.errors import ConfigError
from termrsi.options import FLAG, NUMBER, Option, Verb

if TYPE_CHECKING:
    from termrsi.datasets import Row
    from termrsi.harness.render import ChatFormat

_OUT = Console(highlight=False, soft_wrap=True)
_TOKENIZER = Option("tokenizer", "DIR", "a policy's directory, or any with a chat template")
VERBS = (
    Verb(
        "data show",
        "FILE|RUN_DIR",
        "rows of the data sets that stages write: lineage, counts, text",
        (
            Option("rows", NUMBER, "of each file; 3 if not given"),
            Option("text", FLAG, "true: decoded, with what is trained on marked"),
            _TOKENIZER,
        ),
    ),
    Verb("data stats", "FILE|RUN_DIR", "rows, tasks, families, tokens, turns, rewards, rows per lineage"),
    Verb("data export", "FILE OUT.jsonl", "to chat messages, as other programs read them", (_TOKENIZER,)),
    Verb("data import", "IN.jsonl OUT.parquet", "from chat messages, of any program", (_TOKENIZER,)),
)
VALID = "termrsi data --help lists what each takes"
QUANTILES = {"least": 0.0, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "most": 1.0}
LINEAGE = ("kind", "run", "experiment", "stage", "harness", "runbook", "seed", "checkpoint")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a command printed could give orders to a terminal


@dataclass(slots=True, kw_only=True)
class Options:
    rows: int = 3  # to show of each file
    text: bool = False  # decoded, with what is trained on marked
    tokenizer: str = ""  # a directory: a policy's, or any with a chat template

    @classmethod
    def of(cls, verb: str, words: list[str]) -> "Options":
        """From `key=value`. Raises ConfigError that names the nearest key, or what a value must be."""
        options = cls(**next(one for one in VERBS if one.name == f"data {verb}").read(words, VERBS))
        if (options.text or verb in ("export", "import")) and not options.tokenizer:
            raise ConfigError("needs a tokenizer", f"termrsi data {verb}", "tokenizer=DIR, a policy's directory for example")
        if verb == "show" and options.tokenizer and not options.text:
            raise ConfigError("tokenizer has no effect", "termrsi data show", "text=true shows the text")
        return options


def run(arguments: list[str]) -> int:
    """Non-zero if a row was left out. Raises ConfigError."""
    match arguments:
        case ["show" | "stats" as verb, place, *words] if "=" not in place:
            options = Options.of(verb, words)
            files = _files(Path(place))
            return _show(files, options) if verb == "show" else _stats(files)
        case ["export", source, target, *words] if "=" not in source + target:
            return _export(Path(source), _free(Path(target)), _chat(Options.of("export", words)))
        case ["import", source, target, *words] if "=" not in source + target:
            return _import(Path(source), _free(Path(target)), _chat(Options.of("import", words)))
    raise ConfigError("needs show, stats, export or import, and the files they name", "termrsi data", VALID)


def _files(place: Path) -> list[Path]:
    """A file, or those that the stages of a run left."""
    if not place.is_dir():
        return [place]
    if found := sorted(place.glob("stages/*/data.parquet")):
        return found
    raise ConfigError("no stage of it has written a data set", str(place), "valid: a *.parquet file, or a run directory")


def _free(target: Path) -> Path:
    if target.exists():
        raise ConfigError("is there already", str(target), "give another name, or remove it")
    if not target.absolute().parent.is_dir():
        raise ConfigError("no such directory", str(target.parent))
    return target


def _chat(options: Options) -> "ChatFormat":
    place = Path(options.tokenizer)
    if not any((place / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        raise ConfigError(f"no tokenizer in {options.tokenizer!r}", "tokenizer", "valid: a Hugging Face directory")
    from transformers import AutoTokenizer

    from termrsi.harness.render import ChatFormat

    tokenizer = AutoTokenizer.from_pretrained(place)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the one in {options.tokenizer!r} has no chat template", "tokenizer", "that of an instruct model has one"
        )
    return ChatFormat(tokenizer)


def _show(files: list[Path], options: Options) -> int:
    from termrsi.datasets import DataSet

    chat = _chat(options) if options.text else None
    for path in files:
        with DataSet(path) as data:
            _say(f"{path}: {len(data)} rows")
            for number in range(min(options.rows, len(data))):
                _row(number, data[number], chat)
    return 0


def _row(number: int, row: "Row", chat: "ChatFormat | None") -> None:
    sample, lineage = row.sample, row.lineage
    table = Table(title=f"row {number}", show_header=False, title_justify="left")
    for name, value in [
        ("rollout", sample.rollout_id),
        ("task, family", ", ".join(filter(None, (sample.group_id, row.family)))),
        ("reward", "not known" if row.reward is None else f"{row.reward:g}{', strict' if row.strict else ''}"),
        ("turns, tokens", f"{row.turns} turns, {row.trained} tokens trained, {row.context} of context"),
        ("kind", lineage.kind.value),
        ("run, stage", " ".join(filter(None, (lineage.run, lineage.stage)))),
        ("harness", lineage.harness),
        ("runbook, seed", f"{_known(lineage.runbook)}, {_known(lineage.seed)}"),
        ("made by", lineage.checkpoint),
        ("parent", lineage.parent),
    ]:
        table.add_row(name, Text(_printable(value or "not known")))
    _OUT.print(table)
    if chat is not None:
        pieces = groupby(zip(sample.ids, sample.mask, strict=True), key=lambda pair: pair[1])
        texts = [(trained, chat.tokenizer.decode([token for token, _ in pairs])) for trained, pairs in pieces]
        _say("".join(f"⟦{text}⟧" if trained else text for trained, text in texts))
        _say("(trained tokens stand in ⟦ ⟧)")


def _stats(files: list[Path]) -> int:
    import numpy as np

    from termrsi.datasets import DataSet

    counts: dict[str, array[int]] = {name: array("q") for name in ("turns", "trained_tokens", "context_tokens")}
    values: dict[str, Counter[object]] = {name: Counter() for name in ("family", *LINEAGE)}
    tasks: set[str] = set()
    rewards: Counter[float] = Counter()
    strict = 0
    for path in files:
        with DataSet(path) as data:
            for task, reward, full, *rest in data.select("task", "reward", "strict", *counts, *values):
                tasks.add(task)
                rewards.update([] if reward is None else [reward])
                strict += full is True
                for name, value in zip((*counts, *values), rest, strict=True):
                    counts[name].append(value) if name in counts else values[name].update([value])
    rows, known = len(counts["turns"]), rewards.total()
    _say(f"{rows} rows of {len(tasks)} tasks in {len(files)} {'file' if len(files) == 1 else 'files'}")
    if not rows:
        return 0
    mean = sum(reward * times for reward, times in rewards.items()) / known if known else 0.0
    _say(f"reward: known of {known}" + (f", mean {mean:.3f}, {strict} strict" if known else ""))
    table = Table("per row", "sum", *QUANTILES)
    for name, column in counts.items():
        at = np.quantile(np.frombuffer(column, dtype=np.int64), list(QUANTILES.values()), method="inverted_cdf")
        table.add_row(name.replace("_", " "), str(sum(column)), *(str(int(value)) for value in at))
    _OUT.print(table)
    table = Table("", "value", "rows")
    for name, found in values.items():
        for value, times in sorted(found.items(), key=lambda pair: (-pair[1], str(pair[0]))):
            table.add_row(name, Text(_printable(_known(value))), str(times))
    _OUT.print(table)
    return 0


def _export(source: Path, target: Path, chat: "ChatFormat") -> int:
    """A row whose tokens are none of this tokenizer's template is told and left out."""
    from termrsi.datasets import DataSet, chat_lines

    draft, left_out = target.with_name(f".{target.name}.draft"), 0
    try:
        with DataSet(source) as data, draft.open("w", encoding="utf-8") as file:
            for number, row in enumerate(data):
                try:
                    file.write(chat_lines.to_line(chat, row) + "\n")
                except ConfigError as error:
                    left_out += 1
                    _say(f"left out row {number}: {error}")
            if left_out == len(data):
                raise ConfigError("no row could be written" if left_out else "the data set is empty", str(source))
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    _say(f"{target}: {len(data) - left_out} lines")
    return 1 if left_out else 0


def _import(source: Path, target: Path, chat: "ChatFormat") -> int:
    """All lines or none: each malformed one is told."""
    from termrsi import datasets

    if not source.is_file():
        raise ConfigError("no such file", str(source))
    rows = datasets.write(target, _read(source, chat))
    _say(f"{target}: {rows} rows")
    return 0


def _read(source: Path, chat: "ChatFormat") -> Iterator["Row"]:
    from termrsi.datasets import chat_lines

    lines = malformed = 0
    with source.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            lines += 1
            try:
                row = chat_lines.from_line(chat, raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                malformed += 1
                _say(f"line {number}: is no UTF-8")
            except ConfigError as error:
                malformed += 1
                _say(f"line {number}: {error}")
            else:
                yield row
    if malformed or not lines:
        what = f"{malformed} of {lines} lines are malformed" if lines else "no line in it"
        raise ConfigError(f"{what}, so nothing was written", str(source))


def _known(value: object) -> str:
    return "not known" if value in ("", None) else str(value)


def _printable(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _say(text: str) -> None:
    _OUT.print(_printable(text), markup=False)
