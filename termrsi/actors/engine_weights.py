"""How an engine comes to new weights: what differs from those it holds, bucket by bucket through one file in shared memory.

The host's process writes a bucket, the engine's own maps it, checks its digests and loads it (`engine_probe`). The file is used
again, by later buckets and versions: its pages are there already, and no more than one bucket is in memory beside the store.
Whatever an engine holds after versions that it missed, the difference is taken from that. The Loader owns what is known of it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from termrsi import weights
from termrsi.actors.buckets import ALIGNMENT, BucketFile
from termrsi.errors import WeightsError

_LOG = logging.getLogger(__name__)

Fetch = Callable[[Sequence[str]], Awaitable[weights.PackedState]]  # tensors by name, all of those asked for
Call = Callable[..., Awaitable[list[Any]]]  # of vLLM's collective_rpc: what each worker answers


class Fetcher:
    """Tensors by name out of the object store, without a copy where they lie on this node already."""

    def __init__(self, stored: weights.Stored) -> None:
        self._part = {name: i for i, part in enumerate(stored.parts) for name in part.names}
        self._references = [part.reference for part in stored.parts]

    async def __call__(self, names: Sequence[str]) -> weights.PackedState:
        wanted = sorted({self._part[name] for name in names})
        states = dict(zip(wanted, await asyncio.gather(*(self._references[i] for i in wanted)), strict=True))
        return {name: states[self._part[name]][name] for name in names}


class Loader:
    """`call`: a method of `engine_probe` on each worker."""

    def __init__(self, call: Call, bucket_bytes: int) -> None:
        self._call, self._bucket_bytes = call, bucket_bytes
        self._held: dict[str, str] = {}  # digests of what the engine has; empty: not known
        self._file: BucketFile | None = None
        self._proved_whole = self._told = False

    def missing(self, facts: weights.Facts) -> list[str]:
        """What must be loaded for this state, in order."""
        return weights.to_load(facts, self._held)

    def forget(self) -> None:
        """The engine has been given weights by other ways."""
        self._held = {}

    async def load(self, facts: weights.Facts, packed: weights.PackedState, version: int) -> dict[str, float]:
        """Have the engine compute with this state; how long it took. `packed`: at least what is missing.

        Raises WeightsError: the engine must serve nothing then.
        """
        names = self.missing(facts)
        parts = weights.buckets(facts, names, self._bucket_bytes)
        took: dict[str, float] = {"write_s": 0.0, "load_s": 0.0, "prove_s": 0.0}
        took["bytes"] = float(sum(facts[name].size_bytes for name in names))
        if names:
            whole = len(names) == len(facts)
            self._held = {}
            columns = weights.SAMPLE_COLUMNS if self._proved_whole else 0
            groups = () if whole else tuple(dict.fromkeys(map(weights.group_of, names)))
            await self._call("begin_load", version, groups, columns)
            for bucket in parts:
                await self._pass_on(bucket, facts, packed, took)
            start_s = time.monotonic()
            self._judge(await self._call("end_load"), version)
            took["prove_s"] = time.monotonic() - start_s
            self._proved_whole |= whole
        self._held = weights.digests(facts)
        return took

    async def _pass_on(
        self, bucket: tuple[str, ...], facts: weights.Facts, packed: weights.PackedState, took: dict[str, float]
    ) -> None:
        start_s = time.monotonic()
        slots = self._bucket_file(sum(facts[name].size_bytes + ALIGNMENT for name in bucket)).fill(packed, facts, bucket)
        written_s = time.monotonic()
        assert self._file is not None, "it is written"
        for wrong in await self._call("take_bucket", str(self._file.path), slots):
            if wrong:
                raise WeightsError(wrong, "generator")
        took["write_s"] += written_s - start_s
        took["load_s"] += time.monotonic() - written_s

    async def prove(self, expected: dict[str, str], version: int) -> None:
        """The engine's samples against these. Raises WeightsError."""
        self._judge(await self._call("prove", expected, version, weights.SAMPLE_COLUMNS), version)

    def _judge(self, answers: Iterable[tuple[str, list[str]]], version: int) -> None:
        for wrong, unproved in answers:
            if wrong:
                raise WeightsError(f"version {version}: {wrong}", "generator")
            if unproved and not self._told:
                self._told = True
                told = "weights: %d tensors came whole, but what the engine computes with them cannot be compared, of %s to %s"
                _LOG.warning(told, len(unproved), unproved[0], unproved[-1])

    def _bucket_file(self, size_bytes: int) -> BucketFile:
        if self._file is None or self._file.size_bytes < size_bytes:
            self.close()
            self._file = BucketFile(max(size_bytes, 1))
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
