"""Every file of conf/ composes or is refused in one line; what cannot run is named before anything starts."""

import enum
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from termrsi.config import choices, schema, stages
from termrsi.config import load as configuration
from termrsi.config.load import load
from termrsi.errors import ConfigError

EXPERIMENTS = configuration.choices("experiment")
SCALES = configuration.choices("scale")
VARIANTS = ("rpr_spr", "dppo", "t1", "sft_reterm")  # stages of one system, of a kind that another file has
BASE = ("experiment=terminal_rsi", "scale=laptop")


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    assert "\n" not in str(caught.value)
    return caught.value


def test_all_experiments_and_scales_are_there() -> None:
    assert EXPERIMENTS == ["comparisons", "reterm", "river", "rsr", "t1", "terminal_rsi", "tmax"]
    assert SCALES == ["dry", "full", "laptop", "node"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_at_every_scale(experiment: str, scale: str) -> None:
    config = load((f"experiment={experiment}", f"scale={scale}"))
    assert (config.experiment, config.scale, config.dry) == (experiment, scale, scale == "dry")
    assert list(config.stages) == config.pipeline
    assert all(type(stage) is stages.STAGES[stage.kind] for stage in config.stages.values())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", sorted(stages.STAGES))
def test_every_stage_file_exists_for_every_scale(kind: str, scale: str) -> None:
    assert kind in configuration.choices(f"stage/{scale}")
    assert set(configuration.choices(f"stage/{scale}")) == {*stages.STAGES, *VARIANTS}


@pytest.mark.parametrize("word", ["--scale", "seed", "dry"])
def test_a_word_that_sets_nothing_is_refused_with_the_way_to_write_it(word: str) -> None:
    assert (
        str(refusal("experiment=rsr", word))
        == f"command line: {word!r} is no KEY=VALUE; as in scale=dry, seed=1, stages.NAME.KEY=VALUE"
    )


@pytest.mark.parametrize("name", ["local", "docker", "gvisor"])
def test_each_backend_is_a_choice(name: str) -> None:
    assert load(["experiment=rsr", f"sandbox={name}"]).sandbox.backend == name


@pytest.mark.parametrize("group", ["cluster", "logger", "sandbox"])
def test_every_file_of_the_small_groups_composes(group: str) -> None:
    for name in configuration.choices(group):
        load((*BASE, f"{group}={name}"))


def test_model_and_tasks_files_take_a_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load((*BASE, "model=qwen3_8b", f"model.path={tmp_path}", "tasks=directory", f"tasks.path={tmp_path}"))
    assert (config.model.path, config.tasks.path) == (str(tmp_path), str(tmp_path))
    assert (config.model.max_model_len, config.tasks.train) == (65536, 0)


def test_what_the_files_say_arrives() -> None:
    config = load(BASE)
    rpr_1, rpr_2 = config.stages["rpr_1"], config.stages["rpr_2"]
    assert isinstance(rpr_1, stages.RprConfig)
    assert isinstance(rpr_2, stages.RprConfig)
    assert (rpr_1.critic, rpr_1.policy, rpr_2.critic, rpr_2.policy) == ("warmup", "sft_1", "rpr_1", "sft_2")
    assert (rpr_1.reward.kind, rpr_2.reward.kind) == (schema.Reward.fdr, schema.Reward.spr)
    said = yaml.safe_load((configuration.conf_dir() / "stage" / "laptop" / "rpr.yaml").read_text())
    assert (rpr_1.steps, rpr_1.tasks_per_step) == (said["steps"], said["tasks_per_step"])
    assert rpr_1.optim.lr == said["optim"]["lr"], "and what stands in a group of its own"
    assert [name for name, _ in configuration.stages_of(config)] == config.pipeline


def test_a_command_line_value_wins_over_the_files() -> None:
    config = load((*BASE, "stages.rpr_1.steps=9", "stages.rpr_1.credit.credit=skip", "seed=4", "limits.max_turns=3"))
    stage = config.stages["rpr_1"]
    assert isinstance(stage, stages.RprConfig)
    assert (stage.steps, stage.credit.credit, config.seed, config.limits.max_turns) == (9, schema.Credit.skip, 4, 3)


@pytest.mark.parametrize("choice", [choice for choice in vars(choices).values() if isinstance(choice, enum.EnumType)])
def test_choices_are_written_as_they_are_called(choice: type[enum.StrEnum]) -> None:
    """Configuration takes names, files and records hold values."""
    assert [member.name for member in choice] == [member.value for member in choice]


def test_a_stage_alone() -> None:
    assert load((*BASE, "stage=sft_1")).only == "sft_1"
    assert load(BASE).only == ""
    error = refusal(*BASE, "stage=sft_3")
    assert "sft_3" in str(error)
    assert "sft_1" in error.valid


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("stages.rpr_1.clip_hihg=0.3", "clip_hihg", ""),
        ("stages.rpr_1.optim.clip_hihg=0.3", "stages.rpr_1.optim.clip_hihg", "stages.rpr_1.optim.clip_high"),
        ("stages.rpr_1.stepz=3", "stages.rpr_1.stepz", "stages.rpr_1.steps"),
        ("limits.max_turn=3", "limits.max_turn", "limits.max_turns"),
        ("sede=3", "sede", "seed"),
        ("sandbox.memory=3", "sandbox.memory", "sandbox.memory_mb"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(override: str, key: str, nearest: str) -> None:
    error = refusal(*BASE, override)
    assert key in error.what
    if nearest:
        assert error.valid == f"nearest valid key: {nearest}"


@pytest.mark.parametrize("override", ["+stages.rpr_1.stepz=3", "+limits.typo=1", "+typo=1"])
def test_a_plus_does_not_slip_a_key_in(override: str) -> None:
    name = override.partition("=")[0].rpartition(".")[2].lstrip("+")
    assert name in str(refusal(*BASE, override))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("seed=abc", "seed"),
        ("stages.rpr_1.steps=many", "steps"),
        ("limits.max_turns=2.5", "max_turns"),
        ("stages.rpr_1.credit.credit=turn", "tb"),  # the valid names
        ("stages.rpr_1.loss=pppo", "ppo"),
        ("dry=perhaps", "dry"),
        ("pipeline=rpr_1", "pipeline"),
        ("stages.sft_1=3", "sft_1"),
    ],
)
def test_a_wrong_type_is_refused_by_name(override: str, part: str) -> None:
    assert part in str(refusal(*BASE, override))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("limits.max_turns=0", "max_turns=0"),
        ("sandbox.concurrency=0", "concurrency=0"),
        ("sampling.max_tokens=0", "max_tokens=0"),
        ("stages.base_eval.temperature=-1", "temperature=-1"),
        ("stages.sft_1.epochs=0", "epochs=0"),
        ("stages.base_eval.k=0", "k=0"),
        ("logger.wandb=sometimes", "sometimes"),
        ("cluster.sandbox_nodes=2", "2 nodes for sandboxes, and nothing keeps two actors from standing on one"),
    ],
)
def test_a_value_out_of_range_is_refused(override: str, part: str) -> None:
    error = refusal(*BASE, override)
    assert part in str(error)
    assert "valid" in error.valid


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("stages.rpr_1.steps=0", "stages.rpr_1.steps=0 is too small; valid: 1 or more"),
        ("stages.rpr_2.optim.minibatches=0", "stages.rpr_2.optim.minibatches=0 is too small; valid: 1 or more"),
        ("stages.rpr_1.credit.lam=1.5", "stages.rpr_1.credit.lam=1.5; valid: 0 to 1"),
        ("stages.rsr_2.harnesses=[]", "stages.rsr_2.harnesses: no harness to discover with; name at least one"),
        ("stages.final_eval.split=all", "stages.final_eval.split: 'all' is unknown; valid: train, validation, heldout"),
        ("stages.rpr_2.reward.delta=0.7", "stages.rpr_2.reward: beta + delta = 1.1; at most 1, so that a reward is at most 1"),
        ("limits.max_turns=0", "limits.max_turns=0 is too small; valid: 1 or more"),
        ("cluster.gpus_learner=1.5", "cluster.gpus_learner=1.5; valid: a fraction of one GPU, or a whole number"),
        ("roles.critic.url=http://h/v1 roles.critic.model=m roles.critic.retries=-1", "roles.critic.retries=-1 is too small"),
        ("roles.critic.url=http://h/v1 roles.critic.model=m roles.critic.key_env=a-b", "roles.critic.key_env: that is no name"),
    ],
)
def test_a_refused_value_is_named_by_the_key_that_sets_it(overrides: str, message: str) -> None:
    assert str(refusal(*BASE, *overrides.split())).startswith(message)


def test_a_dry_run_brings_its_tasks() -> None:
    assert str(refusal("experiment=rsr", "scale=dry", "tasks=directory")) == (
        "tasks: scale=dry brings tasks of its own; take tasks=... and tasks.*=... away, or another scale"
    )


def test_adapters_and_what_has_no_effect_without_them() -> None:
    model = load((*BASE, "model.lora_rank=16", "model.lora_alpha=16", "model.lora_targets=[q_proj,v_proj]")).model
    assert (model.lora_rank, model.lora_alpha, model.lora_targets) == (16, 16.0, ["q_proj", "v_proj"])
    for key, value in (("lora_alpha", "16"), ("lora_targets", "[q_proj]")):
        error = refusal(*BASE, f"model.{key}={value}")
        assert (error.what, error.where) == (f"{key} without adapters", f"model.{key}")
        assert "model.lora_rank" in error.valid
    assert "lora_rank=-1" in str(refusal(*BASE, "model.lora_rank=-1"))
    assert "lora_alpha=0" in str(refusal(*BASE, "model.lora_rank=4", "model.lora_alpha=0"))


@pytest.mark.parametrize("name", ["offload_activations", "offload_optimizer"])
def test_offloading_from_the_cpu_to_the_cpu_is_refused(name: str) -> None:
    assert refusal(*BASE, f"model.{name}=true").where == f"model.{name}"
    assert getattr(load((*BASE, f"model.{name}=true", "cluster.gpus_learner=1")).model, name)


def test_fused_kernels_are_of_gpus() -> None:
    assert refusal(*BASE, "model.liger=true").where == "model.liger"
    assert load((*BASE, "model.liger=true", "cluster.gpus_learner=1")).model.liger
    error = refusal(*BASE, "model.liger=true", "cluster.gpus_learner=1", "model.routing_replay=true")
    assert error.where == "model.routing_replay"


def test_replay_of_routing_and_shared_prefixes_are_refused_together() -> None:
    assert load((*BASE, "model.routing_replay=true", "model.share_prefix=false")).model.routing_replay
    error = refusal(*BASE, "model.routing_replay=true", "model.share_prefix=true")
    assert error.where == "model.routing_replay"
    assert "model.share_prefix=false" in str(error)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("stages.base_eval.split=nowhere", "valid: train, validation, heldout"),
        ("stages.rpr_1.steps=0", "steps=0"),
        ("stages.rpr_1.retention.every=0", "every=0"),
        ("stages.rpr_1.optim.minibatches=0", "minibatches=0"),
        ("stages.rpr_1.optim.lr=0", "valid: above 0"),
        ("stages.rpr_1.optim.clip_high=0.3 stages.rpr_1.optim.minibatches=1", "a clip has no effect"),
        ("stages.rpr_1.only_contrast=true stages.rpr_1.samples_per_task=1", "no contrast"),
        ("stages.rpr_1.oversample=1 stages.rpr_1.max_staleness=0", "oversample=1: max_staleness=0 allows 0"),
        (
            "stages.rpr_1.oversample=33 stages.rpr_1.max_staleness=1 stages.rpr_1.tasks_per_step=32",
            "fewer, or a larger max_staleness",
        ),
        ("stages.rpr_1.oversample=-1", "oversample=-1"),
        ("stages.rpr_1.admission=first", "a larger max_staleness"),
        ("stages.rpr_1.admission=first stages.rpr_1.max_staleness=1 stages.rpr_1.tasks_per_step=8", "above 0 and below 8"),
        ("stages.rpr_2.reward.delta=0.7", "at most 1"),
        ("stages.rpr_1.credit.lam=1.5", "valid: 0 to 1"),
        ("stages.rsr_1.harnesses=[]", "name at least one"),
        ("stages.rsr_1.critic_tokens=0", "critic_tokens=0 is too small"),
        ("stages.sft_1.tasks_from=rsr_1", "unknown key 'stages.sft_1.tasks_from'"),
        ("stages.rsr_1.tasks_from=base_eval", "writes no tasks"),
        ("stages.sft_1.data=", "reads data=''"),
        ("stages.rpr_1.critic=", "reads critic=''"),
        ("model.compute=fp8", "valid: auto, bf16, fp32"),
        ("sandbox.network=all", "valid: none, host"),
        ("cluster.rollout_workers=0", "rollout_workers=0"),
        ("cluster.learner_processes=0", "learner_processes=0"),
        ("cluster.learner_processes=7", "8 slots for 7 learner processes and a generator; at least 9"),
        (
            "cluster=join cluster.learner_processes=2 cluster.gpus_learner=2",
            "2 GPUs for each of 2 processes; each drives one",
        ),
        ("cluster.weight_channel=ipc", "valid: object_store, nccl"),
        ("cluster.weight_channel=nccl", "NCCL takes a GPU for each: gpus_generator=0 gpus_learner=0; object_store"),
        ("cluster=colocated cluster.weight_channel=nccl", "gpus_generator=0.5 gpus_learner=0.25 colocated; object_store"),
        ("cluster.weight_bucket_mb=0", "weight_bucket_mb=0 is too small"),
        ("cluster.weight_update=abort", "valid: drain, pause"),
        (
            "cluster.weight_update=pause model.routing_replay=true model.share_prefix=false",
            "valid: drain, or model.routing_replay=false",
        ),
        ("cluster=join cluster.num_cpus=4", "of a Ray that the run starts itself"),
        ("scale=dry tasks.train=3", "brings tasks of its own"),
    ],
)
def test_what_would_fail_later_is_refused_at_once(override: str, part: str) -> None:
    assert part in str(refusal(*BASE, *override.split()))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("stages.synthesise.legacy=0", "no items"),
        ("stages.synthesise.rounds=1", "rounds has no effect: the author is no model"),
        ("stages.synthesise.author=policy", "families are of the procedural author"),
        ("stages.synthesise.author=policy stages.synthesise.families=[]", "may need a context of 22016"),
        ("stages.synthesise.axes.domain.security=-1", "security=-1"),
        ("+stages.synthesise.axes.domain.cooking=1", "unknown domain 'cooking'"),
        ("stages.synthesise.benchmarks=[/nowhere]", "no benchmark at '/nowhere'"),
        ("stages.synthesise.tasks_from=base_eval", "unknown key"),
        ("stages.dppo.tasks_from=base_eval", "writes no tasks"),
        ("pipeline=[base_eval,dppo,synthesise,final_eval]", "which no earlier stage writes"),
    ],
)
def test_settings_of_synthesis_that_cannot_be(override: str, part: str) -> None:
    assert part in str(refusal("experiment=tmax", "scale=laptop", *override.split()))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("experiment=terminal_rsy",), "terminal_rsi"),
        (("experiment=rsr", "scale=desktop"), "laptop"),
        (("experiment=rsr", "cluster=b200"), "a100x16"),
        (("experiment=rsr", "model=big"), "embedded"),
    ],
)
def test_an_unknown_choice_lists_the_valid_ones(overrides: tuple[str, ...], part: str) -> None:
    assert part in refusal(*overrides).valid


def test_nothing_to_run_lists_the_experiments() -> None:
    error = refusal()
    assert all(name in error.valid for name in EXPERIMENTS)


@pytest.mark.parametrize(
    ("overrides", "key", "valid"),
    [
        (("stages.sft_1.data=rsr_2",), "stages.sft_1.data", "rsr_1"),  # written later
        (("stages.sft_1.data=rsr_9",), "stages.sft_1.data", "rsr_1"),  # written never
        (("stages.rpr_1.policy=rpr_2",), "stages.rpr_1.policy", "base, sft_1"),
        (("stages.rpr_1.critic=sft_1",), "stages.rpr_1.critic", "warmup"),  # earlier, and no critic
        (("stages.final_eval.baseline=rpr_1",), "stages.final_eval.baseline", "base_eval"),
        (("pipeline=[base_eval,sft_1,rsr_1,warmup,rpr_1,rsr_2,sft_2,rpr_2,final_eval]",), "stages.sft_1.data", "none"),
    ],
)
def test_a_stage_reads_what_an_earlier_one_wrote(overrides: tuple[str, ...], key: str, valid: str) -> None:
    error = refusal(*BASE, *overrides)
    assert (error.where, error.valid) == (key, f"valid: {valid}")


def test_tasks_come_from_an_audit_or_from_the_whole_train_split() -> None:
    river = ("experiment=river", "scale=laptop")
    assert refusal(*river, "stages.grpo.tasks_from=base_eval").valid == "valid: audit"
    error = refusal(*river, "stages.grpo.tasks_from=adit")
    assert (error.where, error.valid) == ("stages.grpo.tasks_from", "valid: audit")
    assert getattr(load((*river, "stages.grpo.tasks_from=")).stages["grpo"], "tasks_from", None) == ""
    assert "tasks_from" in str(refusal(*river, "stages.final_eval.tasks_from=audit")), "which no evaluation has"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("judge=perhaps", "judge"),
        ("mutants=0", "mutants=0"),
        ("judge_tokens=-1", "judge_tokens=-1"),
        ("judge_tokens=512", "judge_tokens without a judge"),
        ("judge_prompt_tokens=512", "judge_prompt_tokens without a judge"),
    ],
)
def test_half_an_audit_is_refused(override: str, part: str) -> None:
    assert part in str(refusal("experiment=river", f"stages.audit.{override}"))


def test_the_pipeline_and_the_stages_must_agree() -> None:
    assert "unknown stage 'rpr_3'" in str(refusal(*BASE, "pipeline=[base_eval,rpr_3]"))
    assert "twice" in str(refusal(*BASE, "pipeline=[base_eval,base_eval]"))
    assert "never run" in str(refusal(*BASE, "pipeline=[base_eval]"))


def test_what_has_no_default_must_be_given() -> None:
    assert "tasks.path" in str(refusal(*BASE, "tasks=directory"))
    assert "stages.sft_1.data" in str(refusal(*BASE, "stages.sft_1.data=???"))


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert refusal(*BASE, f"model.path={missing}").where == "model.path"
    assert refusal(*BASE, f"model.path={tmp_path}").where == "model.path", "a directory without config.json is no model"
    error = refusal(*BASE, f"tasks.path={missing}")
    assert (error.where, str(missing) in error.what) == ("tasks.path", True)


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("limits.max_context_tokens=4096", "limits.max_context_tokens"),
        ("sampling.max_tokens=1024", "sampling.max_tokens"),
        ("sandbox.backend=podman", "sandbox.backend"),
    ],
)
def test_sizes_that_do_not_fit_each_other(override: str, where: str) -> None:
    assert refusal(*BASE, override).where == where


@pytest.mark.parametrize(
    ("experiment", "overrides", "where"),
    [
        ("river", ("stages.audit.judge=true", "stages.audit.judge_tokens=992"), "stages.audit.judge_tokens"),
        ("reterm", ("stages.recovery.judge=true", "stages.recovery.judge_tokens=992"), "stages.recovery.judge_tokens"),
        ("rsr", ("stages.rsr.plan_tokens=1984",), "stages.rsr.plan_tokens"),
    ],
)
def test_a_question_needs_room_beside_its_answers(experiment: str, overrides: tuple[str, ...], where: str) -> None:
    base = (f"experiment={experiment}", "scale=laptop")  # a context of 2048
    error = refusal(*base, *overrides)
    assert (error.where, "no room in a context of 2048" in error.what) == (where, True)
    *others, last = overrides
    key, _, tokens = last.partition("=")
    load((*base, *others, f"{key}={int(tokens) - 1}"))
    other = where.replace("_tokens", "_prompt_tokens")
    load((*base, *overrides, f"{other}=500"))  # a model with a context of its own


@pytest.mark.parametrize(("scale", "tokens"), [("laptop", 512), ("node", 4096), ("full", 4096)])
def test_a_judge_has_room_to_think_where_the_context_has(scale: str, tokens: int) -> None:
    stage = load(("experiment=reterm", f"scale={scale}", "stages.recovery.judge=true")).stages["recovery"]
    assert isinstance(stage, stages.CollectRecoveryConfig)
    longest = {"laptop": 2048, "node": 32768, "full": 65536}[scale]
    assert (stage.answer_tokens(longest), stage.room(longest)) == (tokens, longest - 2 * tokens - 64)


def test_a_judge_that_is_not_asked_has_no_settings() -> None:
    base = ("experiment=reterm", "scale=node", "stages.recovery.judge=false")
    load((*base, "stages.recovery.judge_uncertain=keep"))  # which has an effect: all of what is flagged is uncertain then
    for key in ("judge_tokens", "judge_prompt_tokens"):
        error = refusal(*base, f"stages.recovery.{key}=512")
        assert (error.where, error.valid) == (f"stages.recovery.{key}", "take it away, or judge=true")


def test_what_every_stage_reads_is_written_by_some_kind() -> None:
    assert set(stages.WRITES) == set(stages.STAGES)
    assert set(stages.READS.values()) <= frozenset().union(*stages.WRITES.values())
    kinds = {f.name for node in stages.STAGES.values() for f in fields(node)}
    assert set(stages.READS) <= kinds


def test_the_record_of_a_run(tmp_path: Path) -> None:
    overrides = (*BASE, "seed=3")
    configuration.record(load(overrides), overrides, tmp_path / "run")
    plain = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (plain["seed"], plain["stages"]["rpr_1"]["reward"]["kind"]) == (3, "fdr")
    assert json.loads((tmp_path / "run" / "overrides.json").read_text()) == list(overrides)
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert {"python", "revision", "torch", "ray"} <= set(versions)


def test_the_revision_tells_a_changed_tree(tmp_path: Path) -> None:
    assert configuration.revision(tmp_path) == "unknown"

    def git(*words: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    clean = configuration.revision(tmp_path)
    assert len(clean) == 40
    (tmp_path / "a").write_text("2")
    assert configuration.revision(tmp_path) == f"{clean}+changes"


def test_a_directory_without_a_configuration() -> None:
    assert configuration.choices("experiment", Path("/nonexistent")) == []


def test_loading_a_configuration_brings_no_torch_no_vllm_and_no_ray() -> None:
    code = (
        "import sys\n"
        "import termrsi.config.load as c\n"
        "c.load(['experiment=terminal_rsi', 'scale=dry'])\n"
        "print(*sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'vllm', 'ray', 'transformers', 'numpy'}))"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == ""


def test_error_analysis_reads_evaluations_and_leaves_room_for_its_answers() -> None:
    base = (
        "experiment=reterm",
        "pipeline=[base_eval,recovery,sft,reterm,final_eval,errors]",
        "+stage@stages.errors=laptop/analyse",
    )
    stage = load((*base, "stages.errors.of=final_eval")).stages["errors"]
    assert isinstance(stage, stages.AnalyseConfig)
    assert (stage.of, stage.against, stage.room(2048)) == ("final_eval", "", 2048 - 2 * stage.max_tokens - 64)
    assert "stages.errors.of has no value" in str(refusal(*base))
    assert "valid: base_eval, final_eval" in str(refusal(*base, "stages.errors.of=sft"))
    assert "valid: base_eval, final_eval" in str(refusal(*base, "stages.errors.of=final_eval", "stages.errors.against=x"))
    assert "leave no room" in str(refusal(*base, "stages.errors.of=final_eval", "stages.errors.max_tokens=1000"))
    load((*base, "stages.errors.of=final_eval", "stages.errors.max_tokens=1000", "stages.errors.prompt_tokens=8000"))
