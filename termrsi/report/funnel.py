"""How many tasks entered each gate of an audit, how many left there, and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from termrsi.records import Outcome, TaskAudit

VERDICTS = ("clean", "flagged", "not measured", "rejected")


@dataclass(slots=True)
class Row:
    """One gate, or all facets of the judges together."""

    gate: str
    entered: int = 0
    rejected: int = 0
    unmeasured: int = 0
    flagged: int = 0
    why: Counter[str] = field(default_factory=Counter)  # facets that were not accepted

    @property
    def left(self) -> int:
        return self.rejected + self.unmeasured


def rows(audits: Sequence[TaskAudit], gates: Sequence[str]) -> list[Row]:
    """One for each of `gates`, in their order; what findings are of none of them are the judges', in one row at the end."""
    found = {gate: Row(gate) for gate in gates}
    judges = Row("judges")
    for audit in audits:
        for finding in audit.findings:
            if finding.gate in found:
                _count(found[finding.gate], finding.outcome)
        facets = {finding.gate: finding.outcome for finding in audit.findings if finding.gate not in found}
        if facets:
            order = (Outcome.reject, Outcome.unmeasured, Outcome.flag, Outcome.passed)
            _count(judges, min(facets.values(), key=order.index))
            judges.why.update(facet for facet, outcome in facets.items() if outcome is not Outcome.passed)
    return [*found.values(), *([judges] if judges.entered else [])]


def verdicts(audits: Sequence[TaskAudit]) -> dict[str, int]:
    """How many have each verdict."""
    counts = Counter(audit.verdict for audit in audits)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def _count(row: Row, outcome: Outcome) -> None:
    row.entered += 1
    row.rejected += outcome is Outcome.reject
    row.unmeasured += outcome is Outcome.unmeasured
    row.flagged += outcome is Outcome.flag
