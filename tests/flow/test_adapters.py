"""Adapters through a run: a learner on Ray that trains them, an engine that serves them merged, a stage that goes on from them."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from termrsi import datasets
from termrsi.config.load import load
from termrsi.datasets.schema import Kind, Lineage, Row
from termrsi.errors import ConfigError
from termrsi.harness.render import ChatFormat
from termrsi.model.checkpoint import checksum, tiny_model
from termrsi.pipeline import Pipeline
from termrsi.records import Message, Sample

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
