"""Weights from the learner to whoever computes with them, against copying the same bytes once, in one run.

`python -m tests.bench.bench_weights`: a state as large as the embedded model's, hashed and put by one actor, pulled and proved to
the last byte by another; then through buckets in shared memory into a process that maps and hashes them, as an engine's does.
`--engine`: the embedded model in vLLM, which lays every layer out anew for the CPU. `--shares`: how many bf16 weights of the
embedded model an update leaves as they were. Ways and copies take turns; figures are medians of rounds.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from termrsi import weights
from termrsi.actors.engine_weights import Fetcher, Loader
from termrsi.actors.model_host import BUCKET_BYTES, RayPolicy
from termrsi.records import Sample, SamplingParams, WeightsVersion

SHARES = (1.0, 0.1, 0.0)


def actors() -> tuple[Any, ...]:
    """Learner, mapper and puller as classes for Ray, and the learner's first state. Made in a function: they travel by value."""

    def state(megabytes: float) -> dict[str, torch.Tensor]:
        """bf16 matrices, five in each of 30 layers."""
        rows = max(1, round(megabytes * 1e6 / (30 * 5 * 576 * 2)))
        return {f"model.layers.{n}.{i}.weight": torch.randn(rows, 576).bfloat16() for n in range(30) for i in range(5)}

    class Learner:
        """As PolicyActor, without a model: between two versions a share of the tensors changes."""

        def __init__(self, megabytes: float) -> None:
            from termrsi.actors.model_host import _Member

            self._state = state(megabytes)
            self._member = _Member.__new__(_Member)
            self._member._version, self._member._handed = 0, (0, {})

        def update(self, share: float) -> None:
            names = list(self._state)
            for name in names[: round(share * len(names))]:
                self._state[name].neg_()

        @ray.method(num_returns="streaming")
        def export(self, base: int, bucket_bytes: int) -> Iterator[Any]:
            yield from self._member._hand_out(self._state.items(), base, bucket_bytes)

    class Mapper:
        """In the place of vLLM's process."""

        def take_bucket(self, path: str, slots: Sequence[Any]) -> str:
            import mmap

            with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped, memoryview(mapped) as view:
                for slot in slots:
                    with view[slot.start : slot.start + slot.size_bytes] as part:
                        if weights.digest_of(part) != slot.digest:
                            return slot.name
            return ""

    class Puller:
        def __init__(self, mapper: Any) -> None:
            async def call(method: str, *arguments: Any) -> list[Any]:
                return [await mapper.take_bucket.remote(*arguments)] if method == "take_bucket" else [("", [])]

            self._loader = Loader(call, BUCKET_BYTES)

        async def prove(self, version: WeightsVersion) -> str:
            stored: Any = version.handle
            return weights.checksum(weights.facts_of(await Fetcher(stored)(list(stored.facts))))

        async def into(self, version: WeightsVersion) -> float:
            stored: Any = version.handle
            packed = await Fetcher(stored)(self._loader.missing(stored.facts))
            return (await self._loader.load(stored.facts, packed, version.version))["bytes"]

        def close(self) -> None:
            self._loader.close()

    return Learner, Mapper, Puller, state


@contextlib.contextmanager
def timed(into: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    into.append(time.perf_counter() - start)


async def measure(megabytes: float = 269.0, rounds: int = 7, share: float = 1.0) -> dict[str, float]:
    """Median seconds of each part, and ratios to the copy, if this share of the tensors changes each time. Ray runs.

    Before the rounds that count, two put the pages of all processes in place; what the very first took is told apart.
    """
    make_learner, make_mapper, make_puller, state = actors()
    learner: Any = ray.remote(num_cpus=0.1)(make_learner).remote(megabytes)  # Any: Ray's actor handles are untyped
    mapper: Any = ray.remote(num_cpus=0.1)(make_mapper).remote()
    puller: Any = ray.remote(num_cpus=0.1)(make_puller).remote(mapper)
    policy = RayPolicy(learner)
    source, moved = state(megabytes), 0.0
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    found: dict[str, list[float]] = {name: [] for name in ("copy", "publish", "pull", "into")}
    for _ in range(2 + rounds):
        await learner.update.remote(share)
        with timed(found["copy"]):
            for name, tensor in source.items():
                target[name].copy_(tensor)
        with timed(found["publish"]):
            version = await policy.publish()
        with timed(found["pull"]):
            proved = await puller.prove.remote(version)
        assert proved == version.checksum, "every byte arrived"
        with timed(found["into"]):
            moved = await puller.into.remote(version)
    await puller.close.remote()
    for actor in (learner, mapper, puller):
        ray.kill(actor)
    middle = {name: statistics.median(values[2:]) for name, values in found.items()}
    return {
        **middle,
        "first": found["publish"][0] + found["into"][0],
        "moved": moved,
        "bytes": float(sum(tensor.nbytes for tensor in source.values())),
        "ratio": (middle["publish"] + middle["pull"]) / middle["copy"],
        "ratio_into": (middle["publish"] + middle["into"]) / middle["copy"],
    }


def table(found: dict[float, dict[str, float]]) -> str:
    """A row for each share of changed tensors."""
    head = ("changed", "copy, ms", "publish", "pull, proved", "÷ copy", "into a process, proved", "with publish ÷ copy", "first")
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for share, one in found.items():
        ms = {name: f"{1000 * one[name]:.0f}" for name in ("copy", "publish", "pull", "into", "first")}
        ratios = f"{one['ratio']:.1f}", f"{one['ratio_into']:.1f}"
        row = (f"{share:.0%}", ms["copy"], ms["publish"], ms["pull"], ratios[0], ms["into"], ratios[1], ms["first"])
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


async def engine(model: Path, rounds: int = 5) -> dict[str, list[dict[str, float]]]:
    """What a pull takes in vLLM, by part, where every weight or one layer changed."""
    from termrsi.actors.generator import Engine, EngineOptions
    from termrsi.model.policy import PolicyModel

    host = Engine(str(model), EngineOptions(max_model_len=256, max_num_seqs=4, kv_cache_gib=1, enforce_eager=True))
    policy = PolicyModel(model, compute="bf16")
    packed = weights.pack({name: tensor.clone() for name, tensor in policy.state().items()})
    del policy

    async def fetch(names: Sequence[str]) -> weights.PackedState:
        return {name: packed[name] for name in names}

    found: dict[str, list[dict[str, float]]] = {"first": [], "all": [], "one layer": []}
    version = 0
    for what, times in (("first", 1), ("all", rounds), ("one layer", rounds)):
        for _ in range(times):
            for name, tensor in weights.unpack(packed).items():
                if what != "one layer" or name.startswith("model.layers.7."):
                    tensor.neg_()
            version += 1
            found[what].append(await host.load(weights.facts_of(packed), fetch, version))
            await host.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=1))
    host.close()
    return found


def shares(model: Path, lr: float, steps: int, width: int = 4, tokens: int = 32) -> list[float]:
    """Of each update, the share of published bf16 values that it leaves as they were.

    Real updates: GRPO's advantages over `width` samples of the model itself for each of four requests; the reward is made up.
    """
    from transformers import AutoTokenizer

    from termrsi.model.policy import PolicyModel

    policy, tokenizer = PolicyModel(model, micro_tokens=512), AutoTokenizer.from_pretrained(str(model))
    requests = ("List the files in /app.", "Make the directory /data.", "Count the lines of notes.txt.", "Rename a.txt to b.txt.")
    prompts = [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n") for text in requests]
    unchanged = []
    before = {name: tensor.clone() for name, tensor in policy.state().items()}
    torch.manual_seed(0)
    for _ in range(steps):
        samples = [one for group, ids in enumerate(prompts) for one in _group(policy._module, ids, group, width, tokens)]
        policy.update(samples, {"kind": "grpo", "anchor": "current"}, lr)
        now = policy.state()
        same = sum(int((now[name] == before[name]).sum()) for name in now)
        unchanged.append(same / sum(tensor.numel() for tensor in now.values()))
        for name, tensor in now.items():
            before[name].copy_(tensor)
    return unchanged


def _group(module: Any, ids: list[int], group: int, width: int, tokens: int) -> list[Sample]:  # Any: transformers' model
    with torch.no_grad():
        rows = module.generate(torch.tensor([ids] * width), do_sample=True, max_new_tokens=tokens, pad_token_id=0)
    rewards = torch.tensor([float((row[len(ids) :] % 7 == 0).sum()) for row in rows])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    samples = []
    for number, (row, advantage) in enumerate(zip(rows.tolist(), advantages.tolist(), strict=True)):
        mask = (0,) * len(ids) + (1,) * (len(row) - len(ids))
        column = tuple(advantage * one for one in mask)
        samples.append(Sample(tuple(row), mask, mask, rollout_id=f"{group}-{number}", group_id=str(group), advantages=column))
    return samples


def sparse(changed: float, megabytes: float = 269.0, rounds: int = 5) -> dict[str, float]:
    """Values that changed in place of all: seconds to find them, to put them into a copy of the old, and to copy everything; the
    bytes of a 4-byte place and a 2-byte value each, as a share of all."""
    old = np.random.default_rng(0).integers(0, 2**16, int(megabytes * 1e6) // 2, dtype=np.uint16)
    new, held, target = old.copy(), old.copy(), np.zeros_like(old)
    new[np.random.default_rng(1).random(old.size) < changed] ^= 1
    found: dict[str, list[float]] = {"copy": [], "find": [], "apply": []}
    places = np.empty(0, np.uint32)
    for _ in range(rounds):
        with timed(found["copy"]):
            np.copyto(target, new)
        with timed(found["find"]):
            places = np.flatnonzero(new != old).astype(np.uint32)
            values = new[places]
        with timed(found["apply"]):
            held[places] = values
    assert np.array_equal(held, new)
    middle = {name: statistics.median(values) for name, values in found.items()}
    return middle | {"bytes": 6 * len(places) / new.nbytes, "ratio": (middle["find"] + middle["apply"]) / middle["copy"]}


def _embedded() -> Path:
    from termrsi.model.checkpoint import embedded_model
    from termrsi.places import cache_dir

    return embedded_model(cache_dir() / "models")


async def _moved(megabytes: float, rounds: int) -> dict[float, dict[str, float]]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1000 * 2**20)
    try:
        return {share: await measure(megabytes, rounds, share) for share in SHARES}
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=269.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--shares", action="store_true")
    given = parser.parse_args()
    write = sys.stdout.write
    if given.engine:
        for what, rounds in asyncio.run(engine(_embedded())).items():
            parts = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            write(f"{what}: {' '.join(f'{key}={value:.3f}' for key, value in parts.items())}\n")
    elif given.shares:
        for lr in (3e-5, 1e-6):
            unchanged = shares(_embedded(), lr, 4)
            found = sparse(1.0 - unchanged[-1])
            write(f"lr {lr:g}: {' '.join(f'{share:.1%}' for share in unchanged)} unchanged; as places and values of the last ")
            write(f"{found['bytes']:.1%} of the bytes, in {found['ratio']:.1f} times a copy of all ({found})\n")
    else:
        write(table(asyncio.run(_moved(given.megabytes, given.rounds))) + "\n")


if __name__ == "__main__":
    main()
