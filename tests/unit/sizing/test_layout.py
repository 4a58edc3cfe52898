"""Roles on nodes: what fits, what is refused and with which arithmetic, and that what a refusal names as valid is valid."""

import json
from pathlib import Path

import pytest

from termrsi import processor
from termrsi.config import load as configuration
from termrsi.config.load import load
from termrsi.errors import ConfigError
from termrsi.sizing import layout, shapes
from termrsi.sizing.layout import Bundle

QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture
def eight(tmp_path: Path) -> str:
    """Qwen3-8B, as far as its config goes."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        layout.check(load(overrides))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", configuration.choices("cluster"))
@pytest.mark.parametrize("experiment", configuration.choices("experiment"))
def test_every_preset_holds_the_embedded_model(experiment: str, name: str) -> None:
    layout.check(load((f"experiment={experiment}", f"cluster={name}")))


@pytest.mark.parametrize("experiment", ["terminal_rsi", "reterm"])
def test_sixteen_gpus_hold_a_model_of_eight_billions(experiment: str, eight: str) -> None:
    words = (f"experiment={experiment}", "scale=full", "cluster=a100x16", "model=qwen3_8b", f"model.path={eight}")
    layout.check(load((*words, "tasks=directory", f"tasks.path={eight}")))


def test_nothing_is_said_of_a_laptop() -> None:
    config = load(("experiment=terminal_rsi",))
    assert config.cluster.nodes == 0
    layout.check(config)


@pytest.mark.parametrize(
    ("overrides", "hosts"),
    [
        (("experiment=reterm",), ("policy",)),
        (("experiment=terminal_rsi",), ("policy", "critic")),
        (("experiment=terminal_rsi", "stage=sft_1"), ("policy",)),
        (("experiment=reterm", "stages.reterm.optim.kl=0.1"), ("policy", "reference")),
    ],
)
def test_hosts_are_those_that_the_stages_open(overrides: tuple[str, ...], hosts: tuple[str, ...]) -> None:
    assert layout.learners(load(overrides)) == hosts


def test_roles_have_devices_of_their_own() -> None:
    config = load(("experiment=terminal_rsi", "scale=full", "cluster=a100x16"))
    found = {group.name: group for group in layout.groups(config)}
    assert list(found) == ["policy", "critic", "generator", "sandboxes", "rollouts"]
    assert found["policy"].bundles == found["critic"].bundles == (Bundle(1.0, 1.0),) * 4
    assert found["generator"].bundles == (Bundle(1.0, 1.0),) * 8
    assert found["sandboxes"].bundles == (Bundle(0.1, 0.0, 256),)
    assert sum(b.gpus for group in found.values() for b in group.bundles) == 16


def test_colocated_roles_share_a_device() -> None:
    config = load(("experiment=terminal_rsi", "cluster=colocated", "cluster.learner_processes=2"))
    (devices, *_) = layout.groups(config)
    assert devices.name == "devices"
    assert devices.bundles == (*(Bundle(3.0, 1.0),) * 2, *(Bundle(1.0, 0.5),) * 6)
    assert {layout.group_of(config, role) for role in ("generator", "policy", "critic")} == {"devices"}
    assert layout.group_of(config, "sandboxes") == "sandboxes"


def test_a_reference_shares_the_device_too() -> None:
    words = ("experiment=terminal_rsi", "cluster=colocated")
    error = refusal(*words, "stages.rpr_1.optim.kl=0.1")
    assert error.what == "an engine and policy, critic, reference share a device, and ask for 1.25 of it"
    layout.check(load((*words, "stages.rpr_1.optim.kl=0.1", "cluster.gpus_learner=0.125")))


def test_a_policy_too_large_for_its_device_is_told_with_its_arithmetic(eight: str) -> None:
    base = ("experiment=reterm", "cluster=node", f"model.path={eight}", "cluster.learner_processes=1")
    error = refusal(*base)
    parameters = shapes.load(eight).parameters
    assert error.where == "cluster.gpus_learner"
    assert f"weights {2 * parameters / 2**30:.1f} + masters {4 * parameters / 2**30:.1f}" in error.what
    assert "gpus_learner=1 gives 80.0 GiB" in error.what
    assert error.valid == "valid: cluster.learner_processes=4"
    layout.check(load((*base[:-1], "cluster.learner_processes=4")))


def test_long_samples_are_told_to_be_computed_anew(eight: str) -> None:
    base = ("experiment=reterm", "scale=node", "cluster=node", f"model.path={eight}", "cluster.learner_processes=4")
    error = refusal(*base, "model.gradient_checkpointing=false")
    assert "activations" in error.what
    assert error.valid.endswith("model.gradient_checkpointing=true")
    layout.check(load((*base[:-1], *error.valid.removeprefix("valid: ").split())))


def test_an_engine_too_large_for_its_device_is_spread(eight: str) -> None:
    base = ("experiment=reterm", "cluster=node", f"model.path={eight}", "cluster.learner_processes=4")
    small = ("cluster.gpu_memory_gib=40", "model.max_model_len=131072", "model.max_num_seqs=256")
    error = refusal(*base, "model.gradient_checkpointing=true", *small)
    assert error.what.startswith("generator needs ")
    assert "gpu_memory_utilization=0.9" in error.what
    assert error.valid == "valid: cluster.gpus_generator=2 +model.engine.tensor_parallel_size=2"
    fits = (
        *base[:-1],
        "cluster.learner_processes=8",
        "cluster.generators=1",
        "cluster.nodes=2",
        "model.gradient_checkpointing=true",
    )
    layout.check(load((*fits, *small, *error.valid.removeprefix("valid: ").split())))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("cluster.generators=8",), "ask for 12 GPUs (policy 2 x 1 + critic 2 x 1 + generator 8 x 1) and 12.5 CPUs; 1 x 8 GPUs"),
        (("cluster.cpus=4",), "and 1 x 4 CPUs do not hold that"),
        (("cluster.gpus_learner=2",), "valid: gpus_learner=1 learner_processes=4"),
        (("cluster.gpus_generator=2",), "gpus_generator=2, and the engine spreads over 1"),
        (("cluster.gpus_generator=0.5",), "would take 0.9 of a GPU of which it is given 0.5"),
        (("cluster.memory_gib=1",), "a node needs 1.3 GiB (a whole copy 0.5 + object store 0.5 + weights beside an engine 0.3"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], part: str) -> None:
    assert part in str(refusal("experiment=terminal_rsi", "cluster=node", *overrides))


def test_what_is_put_off_the_gpus_is_counted_where_it_lies(eight: str) -> None:
    """4 processes on one node: 8 bytes of moments a parameter, cut over them, but for the two buckets that each has there."""
    words = ("experiment=reterm", "scale=full", "cluster=node", "model=qwen3_8b", f"model.path={eight}")
    words = (*words, "cluster.learner_processes=4", "tasks=directory", f"tasks.path={eight}")
    kept = load(words)
    put = load((*words, "model.offload_optimizer=true"))
    shape = layout.shape_of(kept)
    before, after = dict(layout.host_need(kept, shape).parts), dict(layout.host_need(put, shape).parts)
    assert "away from GPUs" not in before
    moments = 8 * shape.parameters - 4 * 2 * 256 * 2**20
    assert after["away from GPUs"] == pytest.approx(moments, rel=1e-6)
    more = dict(layout.host_need(load((*words, "model.offload_activations=true")), shape).parts)
    assert more["away from GPUs"] > 4 * 2**30, "of the longest sample, of each process"


@pytest.mark.parametrize(("words", "has", "width"), [((), True, 2), ((), False, 4), (("+model.engine.dtype=float32",), True, 4)])
def test_an_engine_on_a_processor_without_bf16_takes_twice_as_much(
    words: tuple[str, ...], has: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "has_bf16", lambda: has)
    config = load(("experiment=reterm", *words))
    shape = layout.shape_of(config)
    assert dict(layout.needs(config, shape)["generator"].parts)["weights"] == width * shape.parameters
    assert layout.engine(load(("experiment=reterm", "cluster=node"))).width == 2, "on a GPU whatever the processor"


def test_a_bundle_stands_on_one_node() -> None:
    """Six engines of three GPUs are eighteen of twenty-four, and three nodes of eight hold two each."""
    words = ("experiment=reterm", "cluster=node", "cluster.gpus_generator=3", "+model.engine.tensor_parallel_size=3")
    words = (*words, "cluster.nodes=3", "cluster.learner_processes=6")
    layout.check(load((*words, "cluster.generators=6")))
    assert "ask for 27 GPUs" in str(refusal(*words, "cluster.generators=7"))
    assert "ask for 24 GPUs" in str(refusal(*words, "cluster.generators=7", "cluster.learner_processes=3"))


def test_processors_alone_have_a_memory_too() -> None:
    words = ("experiment=terminal_rsi", "cluster.nodes=1", "cluster.cpus=8")
    layout.check(load((*words, "cluster.memory_gib=24")))
    error = refusal(*words, "cluster.memory_gib=8")
    assert "kv cache 2.0" in error.what
    assert "policy " in error.what


def test_a_model_that_is_not_counted_is_checked_for_devices_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "new"}')
    words = ("experiment=reterm", "cluster=node", f"model.path={tmp_path}")
    layout.check(load(words))
    assert "ask for" in str(refusal(*words, "cluster.generators=9"))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("cluster.gpus_learner=1.5",), "a fraction of one GPU, or a whole number"),
        (("cluster.colocated=true",), "share no device"),
        (("cluster.colocated=true", "cluster.gpus_learner=0.5", "cluster.gpus_generator=0.5"), "on which nodes"),
        (("cluster.gpus_per_node=8",), "no effect with nodes=0"),
        (("cluster.nodes=1",), "half a shape"),
        (("cluster.nodes=1", "cluster.cpus=8", "cluster.gpus_per_node=8"), "half a shape"),
        (("cluster.generators=0",), "generators=0"),
    ],
)
def test_half_a_description_is_refused(overrides: tuple[str, ...], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(("experiment=reterm", *overrides))
    assert part in str(caught.value)
