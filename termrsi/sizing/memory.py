"""Bytes of each role on one device, part by part: what `model.masters`, `policy`, `critic` and the engine really keep (ours).

Under bf16 compute a trained weight costs 2 bytes beside its float32 master, moments and gradient (4, 8 and 4). N learner processes
share all of that (FSDP2), and gather it block by block to compute. With adapters (`model.lora`) that is what theirs cost, and a
weight of the frozen model 2 bytes (4 under fp32). Activations are each process's own: those of its longest
micro-batch, which holds `micro_tokens`, or one sample if that is longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from termrsi.sizing.shapes import ModelShape

GIB = 2**30
CONTEXT = GIB // 2  # assumed: a CUDA context and the allocator's slack, of each process
GRAPHS = GIB  # assumed: an engine's captured graphs
BUCKET_BYTES = 256 * 2**20  # of masters that are back for a step at once, as model.masters has it
CHUNK_BYTES = 64 * 2**20  # of float32 logits, as model.logprob.CHUNK_LOGITS has it
BATCHED_TOKENS = 8192  # vLLM's max_num_batched_tokens on a GPU, unless model.engine says otherwise


@dataclass(frozen=True, slots=True)
class Need:
    """What one process of a role takes on its device. `parts`: name and bytes, largest concern first."""

    role: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    def arithmetic(self) -> str:
        """41.2 GiB (weights 15.3 + masters ...): parts below a tenth of a GiB together."""
        shown = [(name, size) for name, size in self.parts if size >= GIB / 10]
        rest = self.total - sum(size for _, size in shown)
        terms = [f"{name} {size / GIB:.1f}" for name, size in shown] + ([f"other {rest / GIB:.1f}"] if rest >= GIB / 20 else [])
        return f"{self.total / GIB:.1f} GiB ({' + '.join(terms) or 'next to nothing'})"


@dataclass(frozen=True, slots=True)
class Learning:
    """Settings of the model hosts that memory depends on. `longest`: tokens of the longest sample. `lora_*`: of the policy."""

    compute: str
    micro_tokens: int
    longest: int
    checkpointing: bool
    share_prefix: bool
    processes: int
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    offload_activations: bool = False
    offload_optimizer: bool = False

    @property
    def tokens(self) -> int:
        """Of the largest micro-batch (`algo.batch`)."""
        return max(self.micro_tokens, self.longest)


def policy(shape: ModelShape, how: Learning) -> Need:
    if not how.lora_rank:
        return _trained("policy", shape, how, shape.parameters, 0, head=True)
    trained = shape.adapters(how.lora_rank, how.lora_targets)
    parts = [
        *_frozen(shape, how, trained),
        ("moments", 8 * trained // how.processes),
        ("gradients", 4 * trained // how.processes),
        ("gathered", _gathered(shape, how, 0, head=True, gradient=False)),
        ("activations", activations(shape, how)),
        ("prefix mask", _mask(how)),
        ("head", 4 * shape.embedding + 3 * CHUNK_BYTES),
        ("context", CONTEXT),
    ]
    return Need("policy", tuple(parts))


def _frozen(shape: ModelShape, how: Learning, trained: int) -> list[tuple[str, int]]:
    """A model with `trained` parameters of adapters: their masters alone are float32 beside what computes."""
    computing = 2 * (shape.parameters + trained) if how.compute == "bf16" else 4 * shape.parameters
    return [("weights", computing // how.processes), ("masters", 4 * trained // how.processes)]


def critic(shape: ModelShape, how: Learning, layers: int = 0) -> Need:
    """`layers`: the blocks it keeps, 0: all."""
    return _trained("critic", shape, how, shape.body(layers) + shape.hidden + 1, layers, head=False)


def reference(shape: ModelShape, how: Learning) -> Need:
    """A policy host that is never updated: it has masters, and no moments or gradients."""
    half = how.compute == "bf16"
    trained = shape.adapters(how.lora_rank, how.lora_targets) if how.lora_rank else 0
    whole = [("weights", 2 * shape.parameters // how.processes if half else 0), ("masters", 4 * shape.parameters // how.processes)]
    parts = [
        *(_frozen(shape, how, trained) if how.lora_rank else whole),
        ("gathered", _gathered(shape, how, 0, head=True)),
        ("activations", max(block.kept_bytes for block in shape.blocks) * how.tokens * (1 if half else 2)),
        ("prefix mask", _mask(how)),
        ("head", 4 * shape.embedding + 3 * CHUNK_BYTES),
        ("context", CONTEXT),
    ]
    return Need("reference", tuple(parts))


def _trained(role: str, shape: ModelShape, how: Learning, parameters: int, layers: int, *, head: bool) -> Need:
    half = how.compute == "bf16"
    masters, moments = 4 * parameters // how.processes, 8 * parameters // how.processes
    if how.offload_optimizer:
        moments = min(moments, 2 * BUCKET_BYTES)
        masters = (
            min(masters, BUCKET_BYTES) if half and how.processes == 1 else masters
        )  # of several processes they are the weights
    parts = [
        ("weights", 2 * parameters // how.processes if half else 0),
        ("masters", masters),
        ("moments", moments),
        ("gradients", 4 * parameters // how.processes),
        ("gathered", _gathered(shape, how, layers, head=head)),
        ("activations", activations(shape, how, layers)),
        ("prefix mask", _mask(how)),
        ("head", _head(shape) if head else 0),
        ("context", CONTEXT),
    ]
    return Need(role, tuple(parts))


def activations(shape: ModelShape, how: Learning, layers: int = 0) -> int:
    """What the backward pass of the largest micro-batch keeps. With checkpointing: inputs of blocks, and one block anew.

    Offloaded: one block of the pass, and the input of the next.
    """
    blocks = shape.kept(layers)
    width = 1 if how.compute == "bf16" else 2
    largest = max(block.kept_bytes for block in blocks)
    if how.offload_activations:
        return width * how.tokens * (2 * shape.hidden + largest)
    if how.checkpointing:
        return width * how.tokens * (2 * shape.hidden * len(blocks) + largest)
    return width * how.tokens * sum(block.kept_bytes for block in blocks)


def away(shape: ModelShape, how: Learning, layers: int = 0, *, trained: int) -> int:
    """What a process that trains so many parameters keeps in its node's own memory instead of on its device."""
    total = 0
    if how.offload_optimizer:
        own = trained // how.processes
        total += max(0, 8 * own - 2 * BUCKET_BYTES)
        if how.compute == "bf16" and how.processes == 1:  # of several processes the masters are the weights
            total += max(0, 4 * own - BUCKET_BYTES)
    if how.offload_activations:
        total += max(0, activations(shape, replace(how, offload_activations=False), layers) - activations(shape, how, layers))
    return total


def _gathered(shape: ModelShape, how: Learning, layers: int, *, head: bool, gradient: bool = True) -> int:
    """Of FSDP2, assumed: two blocks and the embedding (and an untied head) whole in bf16, one block's gradient in float32."""
    if how.processes == 1:
        return 0
    block = max(block.parameters for block in shape.kept(layers))
    ends = shape.embedding * (2 if head and not shape.tied else 1)
    return (2 * 2 + 4 * gradient) * block + 2 * ends


def _head(shape: ModelShape) -> int:
    """`model.logprob`: the head in float32, its gradient in float32 and bf16, and three chunks of logits."""
    return (4 + 4 + 2) * shape.embedding + 3 * CHUNK_BYTES


def _mask(how: Learning) -> int:
    """Of common prefixes: which token may look where, as bool and as the bias that attention makes of it."""
    return 3 * how.tokens**2 if how.share_prefix else 0


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine's memory depends on. `tensor`: devices that one copy of the model is spread over; `share`: of a device;
    `width`: bytes of a number."""

    max_model_len: int
    max_num_seqs: int
    batched_tokens: int = BATCHED_TOKENS
    tensor: int = 1
    share: float = 0.9
    width: int = 2


def generator(shape: ModelShape, engine: Engine) -> Need:
    """Of one device of an engine, with a cache for one sequence of `max_model_len`: with less vLLM does not start."""
    kept = max(block.kept_bytes for block in shape.blocks)
    parts = [
        ("weights", engine.width * shape.parameters // engine.tensor),
        ("activations", kept * engine.width // 2 * engine.batched_tokens // engine.tensor),
        ("logits", 2 * 4 * shape.vocab * engine.max_num_seqs),
        ("graphs", GRAPHS),
        ("context", CONTEXT),
        ("cache of one sequence", sequence_bytes(shape, engine.max_model_len, engine.tensor)),
    ]
    return Need("generator", tuple(parts))


def sequence_bytes(shape: ModelShape, tokens: int, tensor: int = 1) -> int:
    """Of one sequence on one device. Heads are spread over devices as far as there are any."""
    spread = min(tensor, shape.kv_heads)
    return (tokens * shape.kv_bytes + shape.state_bytes) // spread


def cache_tokens(shape: ModelShape, engine: Engine, device_bytes: int) -> int:
    """Tokens that an engine's cache holds beside everything else, states of `max_num_seqs` sequences included; 0: none."""
    if shape.kv_bytes == 0:
        return 0
    fixed = sum(size for name, size in generator(shape, engine).parts if name != "cache of one sequence")
    spread = min(engine.tensor, shape.kv_heads)
    room = (int(engine.share * device_bytes) - fixed) * spread - engine.max_num_seqs * shape.state_bytes
    return max(0, room // shape.kv_bytes)


def on_cpu(needs: Sequence[Need], kv_cache_gib: float) -> Need:
    """Of a node whose roles all compute on its processors: their sum without what a GPU takes, and the engine's cache as set."""
    parts = [(need.role, _without(need, "context", "graphs", "cache of one sequence")) for need in needs]
    return Need("node", (*parts, ("kv cache", int(kv_cache_gib * GIB))))


def _without(need: Need, *names: str) -> int:
    return sum(size for name, size in need.parts if name not in names)
