"""The verifier of whichever format a task is in."""

from collections.abc import Collection, Mapping
from pathlib import Path

from termrsi.ports import Sandbox
from termrsi.records import TaskSpec, Verdict
from termrsi.reward.apart import Beside
from termrsi.reward.kit import opened
from termrsi.reward.procedure import Suite, judge
from termrsi.reward.terminal_bench import TerminalBenchVerifier
from termrsi.reward.verifier import HarborVerifier


class TaskVerifier:
    """Implements `ports.Verifier`: by the file that the task directory is told by."""

    def __init__(
        self,
        *,
        timeout_multiplier: float = 1.0,
        text_first: bool = False,
        kit: Path | str | None = None,
        beside: Beside | None = None,
        keep_bytes: int = 0,
    ) -> None:
        """`kit`: the directory of one. `beside`: makes the containers of verifiers that want one of their own. `keep_bytes`: bound
        of the log files, and of the artifacts, that go with each verdict.

        Raises ConfigError if there is no kit.
        """
        found = opened(kit) if kit else None
        self._beside = beside
        self._keep_bytes = keep_bytes
        self._harbor = HarborVerifier(timeout_multiplier=timeout_multiplier, text_first=text_first, kit=found, beside=beside)
        self._terminal_bench = TerminalBenchVerifier(timeout_multiplier=timeout_multiplier, kit=found)

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        """See `procedure.judge`. Raises TaskError, too, if the task has no verifier."""
        return await judge(sandbox, task, self.suite(task), self._beside, keep_bytes=self._keep_bytes)

    def expect(self, checks: Mapping[str, Collection[str]]) -> None:
        """What the tasks' own solutions passed, by task id: a report that shrinks is no success."""
        self._harbor.expect(checks)
        self._terminal_bench.expect(checks)

    def suite(self, task: TaskSpec) -> Suite:
        """Raises TaskError, VerifierError."""
        root = Path(task.path)
        legacy = (root / "task.yaml").is_file() and not (root / "task.toml").is_file()
        return (self._terminal_bench if legacy else self._harbor).suite(task)
