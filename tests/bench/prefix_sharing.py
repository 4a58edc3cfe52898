"""An update on groups of rollouts, with and without their common beginnings computed once.

`python tests/bench/prefix_sharing.py [MODEL]`; without MODEL the embedded one. Sizes are those of a step at laptop scale:
8 tasks x 4 rollouts, a prompt of 115 tokens, then 32 to 92. The two kinds alternate in one process; the figure is the ratio of
their medians.
"""

import random
import statistics
import sys
from pathlib import Path

from termrsi.model.policy import PolicyModel
from termrsi.places import cache_dir
from termrsi.records import Sample

PROMPT, TASKS, ROLLOUTS = 115, 8, 4


def samples(seed: int = 0, vocabulary: int = 40_000) -> list[Sample]:
    draw = random.Random(seed)
    made = []
    for task in range(TASKS):
        prompt = [draw.randrange(100, vocabulary) for _ in range(PROMPT)]
        for rollout in range(ROLLOUTS):
            mask = [0] * PROMPT + [1] * 18 + [0] * 10 + [1] * 4
            if draw.random() < 0.15:
                mask += [0] * 30 + [1] * 30
            ids = prompt + [draw.randrange(100, vocabulary) for _ in mask[PROMPT:]]
            advantages = tuple(draw.choice((-1.0, 1.0)) * m for m in mask)
            made.append(
                Sample(tuple(ids), tuple(mask), (0,) * len(ids), f"{task}/{rollout}", group_id=str(task), advantages=advantages)
            )
    return made


def measure(model: Path | str, *, repeats: int = 3, micro_tokens: int = 1024, vocabulary: int = 40_000) -> dict[str, float]:
    """Median seconds of one update and tokens computed, apart and shared, and the ratios."""
    batch = samples(vocabulary=vocabulary)
    models = {share: PolicyModel(model, micro_tokens=micro_tokens, share_prefix=share) for share in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    tokens: dict[bool, float] = {}
    for _ in range(repeats + 1):  # the first of each warms up
        for share, policy in models.items():
            metrics = policy.update(batch, {"kind": "ppo", "anchor": "current"}, lr=0.0)
            seconds[share].append(metrics.seconds)
            tokens[share] = metrics.extra["padded_tokens"]
    apart, shared = (statistics.median(seconds[share][1:]) for share in (False, True))
    return {
        "apart_s": apart,
        "shared_s": shared,
        "ratio": apart / shared,
        "tokens_apart": tokens[False],
        "tokens_shared": tokens[True],
        "tokens_ratio": tokens[False] / tokens[True],
    }


if __name__ == "__main__":
    import torch

    from termrsi.model.checkpoint import embedded_model

    torch.set_num_threads(2)
    where = sys.argv[1] if len(sys.argv) > 1 else embedded_model(cache_dir() / "models")
    for name, value in measure(where).items():
        print(f"{name:14} {value:10.2f}")  # noqa: T201 what a benchmark is for
