"""Roles on the nodes of `cluster`: what each asks for, on which device it computes, and whether all of it fits (ours).

A role is a group of bundles, one for each process; co-located, an engine and the learners that share its device are one bundle.
Nodes are of one kind, and a bundle stands on one of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from termrsi import processor
from termrsi.config.schema import Config
from termrsi.config.stages import WRITES, PolicyOptimConfig
from termrsi.errors import ConfigError
from termrsi.sizing import memory, shapes
from termrsi.sizing.memory import GIB, Engine, Learning, Need
from termrsi.sizing.shapes import ModelShape

LEARNERS = ("policy", "critic", "reference")
DEVICES = "devices"  # the group of bundles that engines and learners share
MOST = 64  # processes or devices that a remedy names


@dataclass(frozen=True, slots=True)
class Bundle:
    """What must be on one node. `resource`: how much of `cluster.sandbox_resource`."""

    cpus: float
    gpus: float = 0.0
    resource: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Bundles of one role. `spread`: over nodes, else on as few as there must be."""

    name: str
    bundles: tuple[Bundle, ...]
    spread: bool = False


def learners(config: Config) -> tuple[str, ...]:
    """The model hosts that the stages of a run open."""
    names = [config.only] if config.only else config.pipeline
    stages = [config.stages[name] for name in names]
    critic = any("critic" in WRITES[stage.kind] for stage in stages)
    optims = [getattr(stage, "optim", None) for stage in stages]
    reference = any(isinstance(optim, PolicyOptimConfig) and optim.kl > 0.0 for optim in optims)
    return ("policy", *(["critic"] if critic else []), *(["reference"] if reference else []))


def groups(config: Config) -> tuple[Group, ...]:
    """Learners first: theirs are the bundles that should stand together."""
    c, hosts = config.cluster, learners(config)
    others = (
        Group(
            "sandboxes",
            (Bundle(0.1, 0.0, config.sandbox.concurrency if c.sandbox_resource else 0.0),) * c.sandbox_nodes,
            spread=c.sandbox_nodes > 1,
        ),
        Group("rollouts", (Bundle(0.1),) * c.rollout_workers, spread=True),
    )
    if c.colocated:
        return (Group(DEVICES, tuple(_shared(config, k) for k in range(max(c.generators, c.learner_processes)))), *others)
    processes = (Bundle(1.0, c.gpus_learner),) * c.learner_processes
    engines = Group("generator", (Bundle(1.0, c.gpus_generator),) * c.generators)
    return (*(Group(name, processes) for name in hosts), engines, *others)


def _shared(config: Config, k: int) -> Bundle:
    c = config.cluster
    hosts = len(learners(config)) if k < c.learner_processes else 0
    engine = 1 if k < c.generators else 0
    return Bundle(engine + hosts, round(engine * c.gpus_generator + hosts * c.gpus_learner, 6))


def group_of(config: Config, role: str) -> str:
    return DEVICES if config.cluster.colocated and role in ("generator", *LEARNERS) else role


def shape_of(config: Config) -> ModelShape:
    """Raises ConfigError as `shapes.load`."""
    return shapes.of(shapes.EMBEDDED) if config.model.path == "embedded" else shapes.load(config.model.path)


def learning(config: Config) -> Learning:
    m = config.model
    longest = min(config.limits.max_context_tokens, m.max_model_len)
    return Learning(
        m.compute,
        m.micro_tokens,
        longest,
        m.gradient_checkpointing,
        m.share_prefix,
        config.cluster.learner_processes,
        m.lora_rank,
        tuple(m.lora_targets),
        m.offload_activations,
        m.offload_optimizer,
    )


def engine(config: Config) -> Engine:
    """As vLLM is started. Raises ConfigError if what it spreads over is not what `gpus_generator` gives."""
    m, c = config.model, config.cluster
    tensor = _whole(config, "tensor_parallel_size") * _whole(config, "pipeline_parallel_size")
    copies = _whole(config, "data_parallel_size")
    if c.gpus_generator >= 1 and tensor * copies != c.gpus_generator:
        raise ConfigError(
            f"gpus_generator={c.gpus_generator:g}, and the engine spreads over {tensor * copies}",
            "cluster.gpus_generator",
            "valid: the product of tensor_, pipeline_ and data_parallel_size in model.engine",
        )
    batched = int(m.engine.get("max_num_batched_tokens", memory.BATCHED_TOKENS))
    share = float(m.engine.get("gpu_memory_utilization", 0.9))
    return Engine(m.max_model_len, m.max_num_seqs, batched, tensor, share, _width(config))


def _width(config: Config) -> int:
    """As `actors.generator` has it, where the engine is asked for no other type."""
    asked = str(config.model.engine.get("dtype", "auto"))
    return 4 if asked == "float32" or (asked == "auto" and not config.cluster.gpus_generator and not processor.has_bf16()) else 2


def _whole(config: Config, key: str) -> int:
    return int(config.model.engine.get(key, 1))


def needs(config: Config, shape: ModelShape) -> dict[str, Need]:
    """Of one process of each role that holds a model, on its device."""
    how, layers = learning(config), config.model.critic_layers
    made = {
        "policy": lambda: memory.policy(shape, how),
        "critic": lambda: memory.critic(shape, how, layers),
        "reference": lambda: memory.reference(shape, how),
    }
    return {"generator": memory.generator(shape, engine(config))} | {name: made[name]() for name in learners(config)}


def check(config: Config) -> None:
    """Raises ConfigError, with the arithmetic and what would fit, if the roles do not fit the nodes that `cluster` describes.

    Says nothing where no nodes are described; a model whose family is not counted is checked for devices alone.
    """
    c = config.cluster
    if not c.nodes:
        return
    if c.gpus_learner > 1:
        raise ConfigError(
            f"gpus_learner={c.gpus_learner:g}: a process computes on one GPU",
            "cluster.gpus_learner",
            f"valid: gpus_learner=1 learner_processes={c.learner_processes * int(c.gpus_learner)}",
        )
    engine(config)
    _check_devices(config)
    try:
        shape = shape_of(config)
    except ConfigError:
        return
    for role, need in needs(config, shape).items():
        _check_role(config, shape, role, need)
    _check_hosts(config, shape)


def _check_devices(config: Config) -> None:
    """Bundles into nodes, largest first into the first node that has room: with nodes of one kind that misses little."""
    c = config.cluster
    bundles = sorted((b for group in groups(config) for b in group.bundles if not b.resource), key=lambda b: (-b.gpus, -b.cpus))
    free = [(float(c.gpus_per_node), c.cpus)] * c.nodes
    for bundle in bundles:
        if bundle.gpus > 1 and bundle.gpus != int(bundle.gpus):
            raise ConfigError(
                f"an engine and {', '.join(learners(config))} share a device, and ask for {bundle.gpus:g} of it",
                "cluster.colocated",
                "valid: fractions that add up to 1 at most",
            )
        for k, (gpus, cpus) in enumerate(free):
            if bundle.gpus <= gpus + 1e-6 and bundle.cpus <= cpus + 1e-6:
                free[k] = (gpus - bundle.gpus, cpus - bundle.cpus)
                break
        else:
            raise ConfigError(
                f"{asked(config)}; {c.nodes} x {c.gpus_per_node} GPUs and {c.nodes} x {c.cpus:g} CPUs do not hold that",
                "cluster.nodes",
                "valid: fewer generators or learner_processes, or more nodes",
            )


def gpus(config: Config) -> float:
    """Of all roles together."""
    return round(sum(bundle.gpus for group in groups(config) for bundle in group.bundles), 6)


def asked(config: Config) -> str:
    """What the roles ask for, with the arithmetic."""
    terms, gpus, cpus = [], 0.0, 0.0
    for group in groups(config):
        first, number = group.bundles[0], len(group.bundles)
        terms += [f"{group.name} {number} x {first.gpus:g}"] if first.gpus else []
        gpus += sum(bundle.gpus for bundle in group.bundles)
        cpus += sum(bundle.cpus for bundle in group.bundles if not bundle.resource)
    return f"the roles ask for {gpus:g} GPUs ({' + '.join(terms) or 'none'}) and {cpus:g} CPUs"


def _check_role(config: Config, shape: ModelShape, role: str, need: Need) -> None:
    c = config.cluster
    gpus = c.gpus_generator if role == "generator" else c.gpus_learner
    if not gpus:
        return
    key = "gpus_generator" if role == "generator" else "gpus_learner"
    share = min(1.0, gpus)
    if role == "generator":
        used = engine(config).share
        if gpus < 1 and used > gpus + 1e-6:
            raise ConfigError(
                f"the engine would take {used:g} of a GPU of which it is given {gpus:g}",
                "model.engine.gpu_memory_utilization",
                f"valid: at most {gpus:g}",
            )
        share = used
    given = share * c.gpu_memory_gib * GIB
    if need.total > given:
        what = f"{key}={gpus:g} gives {given / GIB:.1f}" + (f" (gpu_memory_utilization={share:g})" if role == "generator" else "")
        raise ConfigError(f"{role} needs {need.arithmetic()} a GPU, and {what} GiB", f"cluster.{key}", _remedy(config, shape, role))


def _remedy(config: Config, shape: ModelShape, role: str) -> str:
    """The smallest change that would make one role fit its devices."""
    given = config.cluster.gpu_memory_gib * GIB
    if role == "generator":
        now = engine(config)
        for tensor in _doubled(2 * now.tensor):
            if memory.generator(shape, replace(now, tensor=tensor)).total <= now.share * given:
                return f"valid: cluster.gpus_generator={tensor} +model.engine.tensor_parallel_size={tensor}"
        return "valid: a shorter model.max_model_len, or a smaller model"
    given *= min(1.0, config.cluster.gpus_learner)
    how = learning(config)
    for checkpointing in [False, True] if not how.checkpointing else [True]:
        for processes in _doubled(how.processes):
            tried = replace(how, checkpointing=checkpointing, processes=processes)
            if _host(shape, role, tried, config.model.critic_layers).total <= given:
                more = " model.gradient_checkpointing=true" if checkpointing and not how.checkpointing else ""
                return f"valid: cluster.learner_processes={processes}{more}"
    return "valid: model.gradient_checkpointing=true with a shorter limits.max_context_tokens, or a smaller model"


def _host(shape: ModelShape, role: str, how: Learning, layers: int) -> Need:
    if role == "critic":
        return memory.critic(shape, how, layers)
    return memory.policy(shape, how) if role == "policy" else memory.reference(shape, how)


def _doubled(first: int) -> Iterator[int]:
    while first <= MOST:
        yield first
        first *= 2


def host_need(config: Config, shape: ModelShape) -> Need:
    """Of a node's own memory: roles without a GPU, what learners have put off theirs, and weights on their way.

    On their way: a copy in float32 (one process loads it, the first of several puts it together to save it; as they load, several
    map the files, which is less), two versions in the object store, at most one beside an engine, in bf16.
    """
    c, made = config.cluster, needs(config, shape)
    gpus = {role: c.gpus_generator if role == "generator" else c.gpus_learner for role in made}
    on_cpu = [need for role, need in made.items() if not gpus[role]]
    parts = memory.on_cpu(on_cpu, config.model.kv_cache_gib if not c.gpus_generator else 0.0).parts
    moved = (
        ("a whole copy", 4 * shape.parameters),
        ("object store", 2 * 2 * shape.parameters),
        ("weights beside an engine", 2 * shape.parameters),
    )
    return Need("node", (*parts, *_away(config, shape), *moved))


def _away(config: Config, shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """What the learners of one node keep in its own memory for their GPUs."""
    c, how = config.cluster, learning(config)
    if not c.gpus_learner:
        return ()
    together = min(c.learner_processes, int(c.gpus_per_node / c.gpus_learner)) if c.gpus_per_node else c.learner_processes
    trained = {"policy": shape.adapters(how.lora_rank, how.lora_targets) if how.lora_rank else shape.parameters}
    trained["critic"] = shape.body(config.model.critic_layers) + shape.hidden + 1
    total = 0
    for role in (role for role in learners(config) if role in trained):  # a reference is not trained
        layers = config.model.critic_layers if role == "critic" else 0
        total += together * memory.away(shape, how, layers, trained=trained[role])
    return (("away from GPUs", total),) if total else ()


def _check_hosts(config: Config, shape: ModelShape) -> None:
    given, need = config.cluster.memory_gib, host_need(config, shape)
    if given and need.total > given * GIB:
        raise ConfigError(
            f"a node needs {need.arithmetic()} of its own memory, and memory_gib={given:g}", "cluster.memory_gib", "a smaller model"
        )
