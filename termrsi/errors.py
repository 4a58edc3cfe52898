"""The exception tree. An agent that fails is data (`records.StopReason`); everything here is a fault of ours or of a machine.

    TermrsiError
      ConfigError       what the user asked for cannot be run: one line, before any engine starts
      TaskError         one task directory cannot be used
      SandboxError      a sandbox could not start, or was lost
        SandboxSpoiled  by what ran in it: the one fault that is the agent's, and ends as a StopReason or a Verdict
        SnapshotGone    the state that was to be started from lay on a node that was lost: another start would find it no more
      PoolError         no node for sandboxes is left: the end of a run, for no other sandbox can be had
      VerifierError     a verifier could not run, or its result is invalid (never scored as 0)
      EngineError       the generator, or a model behind an endpoint, cannot be had
        RequestRefused  one request is not taken, because of what it holds: its item's outcome, never the end of a run
        CaptureError    one completion came without the routing that was asked for
      WeightsError      weights could not be published, pulled, or differ after a pull
      CheckpointError   a checkpoint is missing, incomplete or of another model
      StageError        a stage could not reach its result

Errors cross Ray by pickle: every argument goes to `super().__init__` as it came, and the text is made in `__str__`.
"""


class TermrsiError(Exception):
    """What happened, where, and what would be valid instead."""

    def __init__(self, what: str, where: str = "", valid: str = "") -> None:
        super().__init__(what, where, valid)
        self.what = what
        self.where = where
        self.valid = valid

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.valid}" if self.valid else text


class ConfigError(TermrsiError, ValueError):
    """What the user asked for cannot be run."""


class TaskError(TermrsiError, ValueError):
    """One task directory cannot be used."""


class SandboxError(TermrsiError, RuntimeError):
    """A sandbox could not start, or was lost."""


class SandboxSpoiled(SandboxError):
    """What ran in a sandbox left it unusable: its shell taken away, its disk or memory used up. The agent's doing: scored 0."""


class SnapshotGone(SandboxError):
    """The state that was to be started from lay on a node that was lost. Dropped and counted: no retry cures it."""


class PoolError(TermrsiError, RuntimeError):
    """No node for sandboxes is left. Not a SandboxError: whoever tries again on a fresh sandbox would have none."""


class VerifierError(TermrsiError, RuntimeError):
    """A verifier could not run, or its result is invalid. Never a reward of 0."""


class EngineError(TermrsiError, RuntimeError):
    """The generator, or a model behind an endpoint, cannot be had."""


class RequestRefused(EngineError):
    """One request is not taken, because of what it holds (too long, a content filter); the next one may be. No retry cures it."""


class CaptureError(EngineError):
    """One completion came without the routing that was asked for: its rollout cannot be replayed, and is lost."""


class WeightsError(TermrsiError, RuntimeError):
    """Weights could not be published or pulled, or differ after a pull."""


class CheckpointError(TermrsiError, ValueError):
    """A checkpoint is missing, incomplete, or of another model."""


class StageError(TermrsiError, RuntimeError):
    """A stage could not reach its result."""
