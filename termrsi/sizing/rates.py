"""Seconds from hardware figures: a decoding step, a prompt, an update, weights on their way. None of it was measured on a GPU.

Where a figure comes from stands in `SOURCES`. The laws are ours, in their simplest form: a decoding step reads weights and cache
once or computes two operations for each active weight and token, whichever takes longer; learning is its operations over what a GPU
is assumed to reach. Peaks are of one GPU.
"""

from collections.abc import Callable, Sequence
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


def step_s(shape: ModelShape, rates: Rates, gpus: int) -> Callable[[int, float], float]:
    """Of an engine of `gpus`: the seconds of one token for each sequence of a batch that holds so many context tokens together.

    Of a mixture's weights a step reads the experts that some token is sent to, each as likely as another.
    """
    always = 2.0 * (shape.parameters - (0 if shape.tied else shape.embedding) - sum(block.experts for block in shape.blocks))
    mixtures = [(2.0 * block.experts, 1.0 - block.routed) for block in shape.blocks if block.experts]
    kv_bytes, state_bytes, active = shape.kv_bytes, shape.state_bytes, shape.active
    reads, computes = gpus * rates.bandwidth * rates.decode_share, gpus * rates.flops * rates.prefill_share

    def law(batch: int, context_tokens: float) -> float:
        read = always + context_tokens * kv_bytes + batch * state_bytes
        read += sum(experts * (1.0 - idle**batch) for experts, idle in mixtures)
        return max(read / reads, 2.0 * active * batch / computes)

    return law


def prefill_s(shape: ModelShape, rates: Rates, gpus: int) -> Callable[[int, int], float]:
    """Likewise: the seconds of the last so many tokens of a prompt, given its length, the others from the cache."""
    of_token, looking_back = 2.0 * (shape.active - shape.embedding), 4.0 * sum(block.attention for block in shape.blocks)
    computes = gpus * rates.flops * rates.prefill_share
    return lambda tokens, context: tokens * (of_token + looking_back * (context - tokens / 2)) / computes


def learn_s(
    shape: ModelShape, rates: Rates, gpus: float, lengths: Sequence[int], *, passes: float, layers: int = 0, head: bool = True
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
