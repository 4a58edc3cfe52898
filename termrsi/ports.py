"""The protocols of the boxes. Stages and episodes see these; actors, local parts and `fakes` implement them.

Every method that can meet a machine fault raises an error of `errors`; an agent's failure is always a value.
"""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

from termrsi.records import (
    CommandResult,
    Completion,
    DroppedRollout,
    EpisodeSpec,
    FinishedBatch,
    Flow,
    Message,
    RecoveryPoint,
    Sample,
    SamplingParams,
    ScoredRollout,
    Snapshot,
    TaskAudit,
    TaskSpec,
    UpdateMetrics,
    Verdict,
    WeightsVersion,
    Writing,
)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rendering needs."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str: ...


class Sandbox(Protocol):
    """One machine for one agent, with one persistent shell. Raises SandboxError once it is lost."""

    @property
    def id(self) -> str: ...

    async def start(self) -> None:
        """Ready for `run` on return."""
        ...

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        """Run in the persistent shell. On time-out the command's whole process tree is dead on return, the shell lives."""
        ...

    async def snapshot(self) -> Snapshot:
        """File tree and shell state, taken while no process of the agent runs."""
        ...

    async def fork(self, n: int) -> list["Sandbox"]:
        """n started, isolated copies of the present state."""
        ...

    async def put(self, source: Path | str, target: str) -> None:
        """Copy a host file, or the contents of a host directory, to `target` inside; owner root."""
        ...

    async def get(self, source: str, target: Path | str) -> None:
        """Copy a file, or the contents of a directory, from inside to the host. Symlinks stay symlinks."""
        ...

    async def kill_processes(self) -> int:
        """End every process but the sandbox's own; returns how many there were. The shell is fresh afterwards."""
        ...

    async def replaced(self) -> list[str]:
        """Watched paths (`termrsi.watched`) that are not as the image had them, by means that nothing inside can deceive."""
        ...

    async def close(self) -> None:
        """Everything it held is gone on return. May be called twice."""
        ...


class SandboxPool(Protocol):
    """Sandboxes to lease; a used one is closed on release, never lent again."""

    async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox: ...

    async def release(self, sandbox: Sandbox) -> None: ...

    async def discard(self, snapshot: Snapshot) -> None:
        """Free what a snapshot holds."""
        ...

    async def kept(self, snapshot: Snapshot) -> bool:
        """Whether it is still there: an earlier process may have taken it, and left it behind or not."""
        ...


class Verifier(Protocol):
    """Scores what an agent left behind. Raises VerifierError if no valid result can be had."""

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict: ...


class Generator(Protocol):
    """Token ids in, token ids and log-probabilities out; those of models that speak text are not known (`Completion`)."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        """Raises EngineError once it is dead, RequestRefused for a prompt that it does not take."""
        ...

    async def pull(self, weights: WeightsVersion) -> None:
        """Serve these weights from now on. Raises WeightsError if they differ after the pull."""
        ...


class Writer(Protocol):
    """A language model in a role that reads and writes text: the policy itself, or a model behind an endpoint."""

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        """The next assistant turn. `key`: requests that begin alike. `begun`: how its text begins, which is not given back.

        Raises EngineError once the model cannot be had, after the retries of whoever implements this; RequestRefused if it does not
        take this request, for what it holds.
        """
        ...


class Auditor(Protocol):
    """Looks whether tasks are fit to be trained on."""

    def run(self, tasks: Sequence[TaskSpec]) -> AsyncGenerator[TaskAudit, None]:
        """Results in the order they finish; each task comes out exactly once. What was found before is not looked for again."""
        ...


class Rollouts(Protocol):
    """Runs and verifies episodes."""

    def run(self, specs: Sequence[EpisodeSpec]) -> AsyncGenerator[ScoredRollout | DroppedRollout, None]:
        """Results in the order they finish; each spec comes out exactly once."""
        ...

    async def discard(self, snapshots: Sequence[Snapshot]) -> None: ...

    async def kept(self, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        """Those that are still there."""
        ...


class Policy(Protocol):
    """The learner's actor model with its optimizer."""

    async def logp(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probabilities of the action tokens under the present weights, one list per sample, 0 off the mask."""
        ...

    async def update(self, samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        """One optimizer step on the whole batch. `loss` holds the arguments of `algo.loss.policy_loss`."""
        ...

    async def fit(self, samples: Sequence[Sample], lr: float) -> UpdateMetrics:
        """One optimizer step of cross-entropy on the action tokens."""
        ...

    async def publish(self) -> WeightsVersion: ...

    async def save(self, directory: str) -> str:
        """A Hugging Face directory; returns the checksum of the weights."""
        ...

    async def load(self, directory: str) -> str:
        """Weights from a Hugging Face directory, fresh optimizer; returns the checksum."""
        ...

    async def save_training(self, directory: str) -> str:
        """All that `load_training` goes on from bit for bit, its optimizer included; returns the checksum of the weights."""
        ...

    async def load_training(self, directory: str, version: int) -> str:
        """Goes on from what `save_training` left of the same model; `version`: of the weights published last before the next.

        Returns the checksum. Raises CheckpointError if the directory is not whole, and then nothing has changed.
        """
        ...

    async def checksum(self) -> str: ...


class Critic(Protocol):
    """A value model with its optimizer."""

    async def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Value of the prefix before each action token, one list per sample, 0 off the mask."""
        ...

    async def update(self, samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        """One optimizer step towards `returns`, clipped around `old_values`."""
        ...

    async def refit(self, scale: float, shift: float) -> None:
        """From now on each value V is scale x V + shift, by the value head alone; fresh optimizer."""
        ...

    async def publish(self) -> WeightsVersion: ...

    async def pull(self, weights: WeightsVersion) -> None:
        """Weights only, fresh optimizer."""
        ...

    async def save(self, directory: str) -> str: ...

    async def load(self, directory: str) -> str: ...

    async def save_training(self, directory: str) -> str:
        """As of a policy."""
        ...

    async def load_training(self, directory: str, version: int) -> str:
        """As of a policy."""
        ...

    async def checksum(self) -> str: ...


class Scan(Protocol):
    """Categories of what a text gives away of a task's verifier or oracle; never the text itself."""

    def __call__(self, task: TaskSpec, text: str) -> tuple[str, ...]: ...


class RecoveryStore(Protocol):
    """The recovery queue with its one owner: newest first, bounded, what is pushed out is handed back."""

    async def push(self, points: Sequence[RecoveryPoint]) -> list[RecoveryPoint]:
        """Insert at the front, in order; returns what was evicted, oldest first."""
        ...

    async def take(self, n: int) -> list[RecoveryPoint]:
        """Up to n, newest first, removed."""
        ...

    async def peek(self, n: int) -> list[RecoveryPoint]:
        """Up to n, newest first, which stay in the queue."""
        ...

    async def size(self) -> int: ...

    async def reset(self, capacity: int) -> list[RecoveryPoint]:
        """Empty, with a new capacity; returns what was in it."""
        ...


class Meter(Protocol):
    """Who passes on to a monitor what happens. The names and their labels: `report.meters.INSTRUMENTS`."""

    def __call__(self, name: str, value: float = 1.0, **labels: str) -> None: ...


class GroupStore(Protocol):
    """Groups of rollouts between sampler and learner with their one owner, bounded by slots (`queues.buffer` says how many)."""

    async def reset(self, flow: Flow, version: int = 0, held: Sequence[tuple[str, int, bool]] = ()) -> None:
        """For a new phase: empty, or, for one that goes on at `version`, with the groups that were not trained, oldest first.

        `held`: their ids, the version at which each was admitted, and whether it was refused. Whoever still waits gets a
        StageError. Raises ValueError if they do not fit, or would be too old.
        """
        ...

    async def admit(self, group_id: str) -> None:
        """A slot for a new group; waits until `trained`, `refuse` or `drop` frees one. Raises ValueError if the id came before."""
        ...

    async def put(self, group_id: str, rollouts: Sequence[ScoredRollout]) -> None:
        """The group is finished."""
        ...

    async def refuse(self, group_id: str) -> None:
        """The group is finished, and the learner has no use for it: the next takes its place, as far as `flow.replace` goes."""
        ...

    async def drop(self, group_id: str) -> None:
        """The group will not come: its slot is free."""
        ...

    async def take(self) -> FinishedBatch:
        """The next batch; waits until its groups are finished. They keep their slots until `trained`."""
        ...

    async def trained(self) -> None:
        """The last batch is trained: its slots are free, and the version is one higher."""
        ...
