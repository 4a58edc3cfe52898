"""Adapters through a run: a learner on Ray that trains them, an engine that serves them merged, a stage that goes on from them."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from termrsi import datasets, weights
from termrsi.config.load import load
from termrsi.config.schema import ModelConfig
from termrsi.config.stages import SftConfig
from termrsi.datasets.schema import Kind, Lineage, Row
from termrsi.errors import ConfigError
from termrsi.harness.render import ChatFormat
from termrsi.model.checkpoint import checksum, tiny_model
from termrsi.pipeline import Pipeline
from termrsi.records import Message, Sample
from termrsi.stages import sft
from tests.stage_bench import Bench

ASKED = (
    "experiment=rsr",
    "scale=laptop",
    "pipeline=[rsr,sft,final_eval]",
    "~stages.base_eval",
    "~stages.sft_sources",
    "~stages.sources_eval",
    "stages.final_eval.baseline=''",
    "stages.final_eval.k=1",
    "stages.sft.epochs=2",
    "stages.sft.batch=2",
    "stages.sft.lr=0.01",
    "stages.sft.checkpoint_every=1",
    "tasks.families=[create]",
    "tasks.train=1",
    "tasks.validation=1",
    "tasks.heldout=1",
    "sampling.max_tokens=8",
    "limits.max_turns=1",
    "limits.max_context_tokens=4096",
    "model.max_model_len=4096",
    "model.kv_cache_gib=1",
    "model.max_num_seqs=4",
    "model.threads=1",
    "model.lora_rank=4",
    "sandbox.concurrency=2",
    "cluster.num_cpus=3",
    "cluster.object_store_mb=80",
    "min_free_gib=1",
)


def rows(model: Path) -> list[Row]:
    """Four conversations of one command each."""
    chat = ChatFormat(AutoTokenizer.from_pretrained(str(model)))
    made = []
    for i in range(4):
        prompt = chat.prompt([Message("user", f"Create the file f{i}.")])
        reply = list(f"touch f{i}".encode())
        mask = (0,) * len(prompt) + (1,) * len(reply)
        sample = Sample((*prompt, *reply), mask, (0,) * len(mask), rollout_id=f"r{i}", group_id=f"t{i}")
        made.append(Row(sample, "create", 1.0, True, Lineage(Kind.rsr)))
    return made


def small_rows() -> list[Row]:
    made = []
    for i in range(6):
        ids = tuple(40 + (7 * i + k) % 90 for k in range(16))
        sample = Sample(ids, (0,) * 6 + (1,) * 10, (0,) * 16, rollout_id=f"r{i}", group_id=f"t{i}")
        made.append(Row(sample, "create", 1.0, True, Lineage(Kind.rsr)))
    return made


@pytest.mark.ray
async def test_a_stage_trains_adapters_over_processes_on_ray(tmp_path: Path, own_ray: None) -> None:
    """SFT with a learner of two processes: what it publishes and saves is merged, and a learner of one goes on from it."""
    import ray

    from termrsi.actors.engine_weights import Fetcher
    from termrsi.actors.model_host import PolicyActor, RayPolicy, make_actors, meet

    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    model, config = tiny_model(tmp_path / "model"), ModelConfig(threads=1, compute="fp32", lora_rank=4)
    bench = Bench(tmp_path)
    made: Any = bench.made

    async def opened(processes: int) -> RayPolicy:
        actors = make_actors(PolicyActor, [{"num_cpus": 0.1}] * processes, str(model), config, 60.0)
        async with asyncio.timeout(300):
            await meet(actors)
        return RayPolicy(*actors)

    made.policy = await opened(2)
    datasets.write(tmp_path / "data.parquet", small_rows())
    start = await made.policy.checksum()
    ctx = bench.ctx("sft", data=tmp_path / "data.parquet")
    result = await sft.run(ctx, SftConfig(data="rsr", epochs=4, batch=3, lr=1e-2, validate_k=0))
    losses = [result.summary[key] for key in ("first_loss", "last_loss")]
    assert losses[1] < losses[0]  # type: ignore[operator]  # both numbers
    published = await made.policy.publish()
    assert isinstance(published.handle, weights.Stored)
    state = weights.unpack(await Fetcher(published.handle)(list(published.handle.facts)))
    base, saved = load_file(model / "model.safetensors"), load_file(ctx.out / "policy" / "model.safetensors")
    assert published.checksum == checksum(saved) == checksum(state) != start == checksum(base)
    changed = {name for name in base if not bool((base[name] == state[name]).all())}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    made.policy.end()

    other = await opened(1)
    assert await other.checksum() == start
    assert await other.load(str(ctx.out / "policy")) == published.checksum
    await other.fit([row.sample for row in small_rows()], 1e-2)
    assert await other.save(str(tmp_path / "again")) != published.checksum
    assert len(load_file(tmp_path / "again" / "adapter" / "adapter_model.safetensors")) == 2 * 2 * 7
    other.end()


@pytest.mark.engine
@pytest.mark.ray
def test_a_run_trains_adapters_and_goes_on_from_them(tmp_path: Path, own_ray: None) -> None:
    """SFT on data that a stage before left, validated on the engine, then an evaluation of what it saved."""
    model, run = tiny_model(tmp_path / "model"), tmp_path / "run"
    asked = [*ASKED, f"model.path={model}", f"run_dir={run}"]
    pipeline = Pipeline(load(asked), asked)
    before = run / "stages" / "rsr"
    before.mkdir(parents=True)
    datasets.write(before / "data.parquet", rows(model))
    entry = {"stage": "rsr", "kind": "rsr", "summary": {}, "verdict": "", "counts": {}, "costs": {}}
    manifest = {"fingerprint": pipeline._fingerprint("rsr"), "finished": time.time()}
    manifest["entry"] = {**entry, "outputs": {"data": str(before / "data.parquet")}}
    (before / "manifest.json").write_text(json.dumps(manifest))
    asyncio.run(pipeline.run())

    _, sft, evaluated = json.loads((run / "ledger.json").read_text())
    assert sft["summary"]["last_loss"] < sft["summary"]["first_loss"]
    assert sft["summary"]["steps"] == 4
    assert evaluated["costs"]["episodes"] == 1, "the engine served what was pulled"
    policy = run / "stages" / "sft" / "policy"
    merged, base = load_file(policy / "model.safetensors"), load_file(model / "model.safetensors")
    assert checksum(merged) != checksum(base)
    changed = {name for name in base if not bool((base[name] == merged[name]).all())}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    AutoModelForCausalLM.from_pretrained(str(policy))
    assert len(load_file(policy / "adapter" / "adapter_model.safetensors")) == 2 * 2 * 7
    other = [*asked, "model.lora_rank=8"]
    with pytest.raises(ConfigError, match=r"'sft' .* was run with another configuration"):
        asyncio.run(Pipeline(load(other), other).run())
