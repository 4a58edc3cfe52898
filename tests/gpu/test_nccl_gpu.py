"""Weights by NCCL from a learner on one GPU to an engine on another. It has never been run: nothing here had two GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from termrsi.actors.engines import Engines
from termrsi.actors.generator import EngineOptions, GeneratorActor
from termrsi.actors.model_host import PolicyActor, RayPolicy
from termrsi.actors.nccl_channel import NcclChannel
from termrsi.config.schema import ModelConfig
from termrsi.errors import WeightsError
from termrsi.queues.prefix_router import PrefixRouter
from termrsi.records import Sample, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ray,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a GPU for the learner and one for the engine"),
]
BUCKET = 64 * 2**20


async def test_a_trained_policy_reaches_the_engine_by_nccl(embedded: Path, own_ray: None) -> None:
    import ray

    ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
    options = EngineOptions(max_model_len=256, max_num_seqs=4, weight_channel="nccl", bucket_bytes=BUCKET)
    settings = {"num_cpus": 1, "num_gpus": 1}
    engine: Any = GeneratorActor.options(**settings, max_concurrency=100).remote(str(embedded), options)  # Any: untyped handles
    policy = RayPolicy(PolicyActor.options(**settings).remote(str(embedded), ModelConfig()), bucket_bytes=BUCKET)
    policy.announces = True
    engines = Engines([engine], PrefixRouter(1, slack=4), 0, lambda all_: NcclChannel(policy, all_, BUCKET, 120.0))
    await engines.open()
    first = await policy.publish()
    await engines.pull(first)
    ids = tuple(range(40, 60))
    mask = (0,) * 10 + (1,) * 10
    await policy.fit([Sample(ids, mask, mask)], lr=1e-4)
    with pytest.raises(WeightsError, match="past version 1"):
        await engines.pull(first)
    await engines.pull(await policy.publish())
    completion = await engines.generate(list(ids[:10]), SamplingParams(temperature=1.0, max_tokens=8, seed=1))
    assert completion.version_low == 2
    whole = (*ids[:10], *completion.ids)
    (logp,) = await policy.logp([Sample(whole, (0,) * 10 + (1,) * len(completion.ids), (0,) * len(whole))])
    gaps = [abs(a - b) for a, b in zip(logp[10:], completion.logprobs, strict=True)]
    assert sum(gaps) / len(gaps) < 0.08
    await engines.close()
