"""Items of a stage, each done once: what is finished is a line on disk, and a run that was killed goes on with the others.

A line is whole or it is dropped: a kill in the middle of writing costs the item that it was of. Nothing but keys is kept in memory.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from termrsi.durable import Lines
from termrsi.errors import StageError

Item = TypeVar("Item")
Value = Any  # Any: what json takes


class Journal:
    """`add` writes an item's line to the end; `values` reads them back. One owner at a time."""

    def __init__(self, path: Path) -> None:
        """Takes up what is there. Raises StageError for a line that is no item of a journal."""
        self._path = path
        self._file = Lines(path)
        try:
            self._keys = {key for key, _ in self._lines()}
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: str, value: Value) -> None:
        """On disk on return. Raises ValueError for a key that is there: no item is done twice."""
        if key in self._keys:
            raise ValueError(f"{key!r} is finished already")
        self._file.add(json.dumps({"key": key, "value": value}), sync=True)  # ASCII: a model's text may hold half a character
        self._keys.add(key)

    def keep(self, keys: Collection[str]) -> None:
        """Drops the lines of all other keys: those items are undone. Whole on disk on return, or as it was."""
        if self._keys <= set(keys):
            return
        draft = self._path.with_name(f"{self._path.name}.part")
        draft.unlink(missing_ok=True)
        with Lines(draft) as file:
            for key, value in self._lines():
                if key in keys:
                    file.add(json.dumps({"key": key, "value": value}))
            file.sync()
        self._file.close()
        draft.rename(self._path)
        self._file = Lines(self._path)
        self._keys &= set(keys)

    def items(self) -> Iterator[tuple[str, Value]]:
        """All that is finished, line by line, in the order in which they ended."""
        yield from self._lines()

    def values(self, keys: Iterable[str]) -> Iterator[tuple[str, Value]]:
        """Those of the finished among `keys`, in the order of `keys` and not of their ends: the same whoever was first."""
        places = self._places()
        with self._path.open("rb") as file:
            for key in keys:
                if key in places:
                    file.seek(places[key])
                    yield key, json.loads(file.readline())["value"]

    def _places(self) -> dict[str, int]:
        places, at = {}, 0
        with self._path.open("rb") as file:
            for line in file:
                places[json.loads(line)["key"]] = at
                at += len(line)
        return places

    def _lines(self) -> Iterator[tuple[str, Value]]:
        if not self._path.is_file():
            return
        with self._path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    entry = json.loads(line)
                    yield entry["key"], entry["value"]
                except (ValueError, KeyError, TypeError) as error:
                    raise StageError(
                        f"line {number} is no finished item: {error}", str(self._path), "move the stage's directory away"
                    ) from error


async def each(
    journal: Journal,
    items: Iterable[tuple[str, Item]],
    work: Callable[[Item], Awaitable[Value]],
    *,
    at_once: int,
    done: Callable[[str], Awaitable[None]],
) -> None:
    """`work` on each item whose key the journal does not have, up to `at_once` at a time, in the order given; its value is added.

    None is no value: the machine lost the item, and it is tried again when the stage goes on. `done` is told of each.

    Items are drawn as workers become free, so that no more than `at_once` of them and their results exist. Each worker waits for
    its own item's work alone. The first error cancels the other items, waits for their clean-up, and is raised; what was added
    stays.
    """
    left = iter(items)

    async def worker() -> None:
        for key, item in left:
            if key in journal:
                await done("finished before")
            elif (value := await work(item)) is None:
                await done("lost")
            else:
                journal.add(key, value)
                await done("")

    workers = [asyncio.ensure_future(worker()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
