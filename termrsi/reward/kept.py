"""What a verification left behind, as bytes that travel with its verdict to whoever writes a trial's directory.

Within a bound for each of the two kinds, smallest files first: a report is worth more than a core dump. Placement and manifest as
Harbor 0.26 has them.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from termrsi.records import CollectedArtifact, KeptFiles
from termrsi.reward.apart import Fetched

MANIFEST = "manifest.json"
MOST_FILES = 1000  # of each kind: names take room too
MOST_NAMES = 100  # of those left out


def artifacts(found: Sequence[Fetched], room: int) -> KeptFiles:
    """Files of the copies within `room` bytes, placed below artifacts/, and what became of each entry."""
    placed: list[tuple[Fetched, PurePosixPath]] = []
    for one in found:
        place = _destination(one)
        claimed = any(place == other or place in other.parents or other in place.parents for _, other in placed)
        placed.append((dataclasses.replace(one, copy=None, skipped=True) if claimed else one, place))  # the first is kept
    taken, left_out = _within(((place / path, file) for one, place in placed if one.copy for path, file in _files(one.copy)), room)
    entries = tuple(_entry(one, place, taken, left_out) for one, place in placed)
    return KeptFiles(artifacts=taken, manifest=entries, left_out=tuple(f"artifacts/{path}" for path in left_out))


def with_logs(kept: KeptFiles, logs: Path, room: int) -> KeptFiles:
    """And the files of a copy of the verifier's log directory, within `room` bytes."""
    taken, left_out = _within(_files(logs), room)
    return dataclasses.replace(kept, logs=taken, left_out=(*kept.left_out, *(f"verifier/{path}" for path in left_out)))


def _destination(one: Fetched) -> PurePosixPath:
    """Below artifacts/; never out of it, and never in the place of the manifest."""
    for given in (one.artifact.destination, one.artifact.source, one.place.name):
        if parts := [part for part in PurePosixPath(given).parts if part not in ("/", "..")]:
            return PurePosixPath(*(["_"] if parts[0] == MANIFEST else []), *parts)
    return PurePosixPath("root")


def _entry(one: Fetched, place: PurePosixPath, taken: Sequence[tuple[str, bytes]], left_out: Sequence[str]) -> CollectedArtifact:
    folder = one.copy.is_dir() if one.copy else not place.suffix

    def mine(path: str) -> bool:
        return PurePosixPath(path) == place or place in PurePosixPath(path).parents

    if one.skipped:
        status = "skipped"
    elif one.copy is None:
        status = "failed"
    elif any(mine(path) for path, _ in taken):
        status = "ok"
    else:
        status = "skipped" if any(mine(path) for path in left_out) else "empty"
    kind = "directory" if folder else "file"
    return CollectedArtifact(one.artifact.source, f"artifacts/{place}", kind, status, one.artifact.exclude if folder else ())


def _files(copy: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    """Regular files of a copied directory, or the one that it is; links stay where they are."""
    if copy.is_file() and not copy.is_symlink():
        yield PurePosixPath(), copy
    for path in sorted(copy.rglob("*")) if copy.is_dir() else []:
        if path.is_file() and not path.is_symlink():
            yield PurePosixPath(path.relative_to(copy)), path


def _within(files: Iterable[tuple[PurePosixPath, Path]], room: int) -> tuple[tuple[tuple[str, bytes], ...], list[str]]:
    """Contents by path, smallest first as long as there is room, and the paths of the rest; both in the order of paths."""
    taken: dict[str, bytes] = {}
    left_out: list[str] = []
    for size, path, file in sorted((file.stat().st_size, str(path), file) for path, file in files):
        if size > room or len(taken) == MOST_FILES:
            left_out.append(path)
            continue
        taken[path] = file.read_bytes()
        room -= size
    left_out.sort()
    more = [f"{len(left_out) - MOST_NAMES} more"] if len(left_out) > MOST_NAMES else []
    return tuple(sorted(taken.items())), [*left_out[:MOST_NAMES], *more]
