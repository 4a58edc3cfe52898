"""Seconds from hardware figures: a decoding step, a prompt, an update, weights on their way. None of it was measured on a GPU.

Where a figure comes from stands in `SOURCES`. The laws are ours, in their simplest form: a decoding step reads weights and cache
once or computes two operations for each active weight and token, whichever takes longer; learning is its operations over what a GPU is
assumed to reach. Peaks are of one GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from termrsi.sizing.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peaks in operations and bytes per second; shares of them that are reached; seconds of a sandbox."""

    flops: float = 312e12
    bandwidth: float = 2.039e12
    decode_share: float = 0.6
    prefill_share: float = 0.4
    learn_share: float = 0.35
    network: float = 1e10
    start_s: float = 0.0141
    turn_s: float = 0.00037


SOURCES = {
    "flops": "NVIDIA's data sheet of the A100: bf16 without sparsity",
    "bandwidth": "NVIDIA's data sheet of the A100 80GB SXM",
    "decode_share": "assumed",
    "prefill_share": "assumed",
    "learn_share": "assumed",
    "network": "assumed: bytes per second from a learner to an engine",
    "start_s": "measured on two cores: a local sandbox's start to its first answer, p50",
    "turn_s": "measured on two cores: a trivial command in a local sandbox, p50",
}


def read_bytes(shape: ModelShape, batch: int) -> float:
    """Of weights in bf16 that one decoding step of `batch` sequences reads: experts as far as some token is sent to them."""
    idle = sum(block.experts * (1.0 - block.routed) ** batch for block in shape.blocks if block.experts)
    return 2.0 * (shape.parameters - (0 if shape.tied else shape.embedding) - idle)


def step_s(shape: ModelShape, rates: Rates, gpus: int, batch: int, context_tokens: float) -> float:
    """One token for each of `batch` sequences, which hold `context_tokens` together, on an engine of `gpus`."""
    read = read_bytes(shape, batch) + context_tokens * shape.kv_bytes + batch * shape.state_bytes
    memory_s = read / (gpus * rates.bandwidth * rates.decode_share)
    compute_s = 2.0 * shape.active * batch / (gpus * rates.flops * rates.prefill_share)
    return max(memory_s, compute_s)


def prefill_s(shape: ModelShape, rates: Rates, gpus: int, tokens: int, context: int) -> float:
    """The last `tokens` of a prompt of `context` tokens, the others from the cache."""
    looked_at = sum(block.attention for block in shape.blocks) * 4.0 * tokens * (context - tokens / 2)
    operations = 2.0 * (shape.active - shape.embedding) * tokens + looked_at
    return operations / (gpus * rates.flops * rates.prefill_share)


def learn_s(
    shape: ModelShape, rates: Rates, gpus: int, lengths: Sequence[int], *, passes: float, layers: int = 0, head: bool = True
) -> float:
    """Samples of so many tokens, spread evenly over `gpus`. `passes`: in forward passes, of which a backward pass is two."""
    blocks = shape.kept(layers)
    of_token = 2.0 * (sum(block.active for block in blocks) + (shape.embedding if head else 0))
    looking_back = 2.0 * sum(block.attention for block in blocks)  # of T tokens, each sees half of T
    operations = sum(of_token * n + looking_back * float(n) ** 2 for n in lengths)
    return passes * operations / (gpus * rates.flops * rates.learn_share)


def move_s(shape: ModelShape, rates: Rates) -> float:
    """A version from the learner to every engine: packed and put, fetched and loaded (two ways, engines at once)."""
    return 2 * 2.0 * shape.parameters / rates.network
