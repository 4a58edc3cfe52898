"""The gates of an audit that need no model: what was measured of a task in, one finding each out. Nothing here runs anything.

After River's filter and T1's prechecks (arXiv 2608.22631; the exact rules are ours). In this order, and a task leaves at the first
that rejects it or cannot be measured:

loads     both formats' loaders, and the verifier's own side
builds    a sandbox of its image starts
network   runs that fail are not for want of a network that the task does not ask for
oracle    its solution passes each time, in fresh sandboxes
empty     an empty submission never does
replay    the solution passes in a clean sandbox when its own directory is gone before the verifier comes: nothing that only the
          solution's author has may matter; and a second verification of the same state says the same (ours)
mutation  broken solutions that leave another state behind are noticed
flaky     two runs of one submission, and two verifications of one state, have the same checks with the same results
time      solution and verifier need no more than a share of their own limits
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from termrsi.records import Finding, Outcome, Verdict

GATES = ("loads", "builds", "network", "oracle", "empty", "replay", "mutation", "flaky", "time")

# Shares of mutants that a verifier must notice (ours): below the first it is too weak, below the second it is told.
REJECT_BELOW, FLAG_BELOW = 0.5, 0.8
TIME_SHARE = 0.5  # of its own limit: beyond it a machine half as fast would be too slow (ours)
SHOWN = 8  # pieces of evidence of one kind

# What programs say that look for a host and find no network.
_WANTED = re.compile(
    r"Could ?n[o']t resolve|Temporary failure in name resolution|Temporary failure resolving|Name or service not known"
    r"|Network is unreachable|No address associated with hostname|nodename nor servname|getaddrinfo|ENOTFOUND|EAI_AGAIN"
    r"|Unable to locate package|[Nn]o network\b|unable to resolve host|bad address '|Could not find a version that satisfies"
)


@dataclass(frozen=True, slots=True)
class Timed:
    """How long something took, in seconds, and what it may take."""

    what: str
    seconds: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One submission in a fresh sandbox. Without a verdict there is a reason: the task's own doing, or the machine's."""

    verdict: Verdict | None = None
    again: Verdict | None = None  # of the same state, where it was asked for
    refused: str = ""  # by the task: it runs out of time, spoils its sandbox, has no solution
    fault: str = ""  # of the machine, after every retry; beside a verdict: of the second verification
    said: str = ""  # the ends of what its solution and its verifier printed
    times: tuple[Timed, ...] = ()  # of what has a limit of its own
    solve_s: float = 0.0

    @property
    def strict(self) -> bool:
        return self.verdict is not None and self.verdict.strict


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of one mutant: `equal`, its state was the whole solution's; `noticed`, None where no result could be had."""

    what: str
    equal: bool = False
    noticed: bool | None = None


def leaves(finding: Finding) -> bool:
    """Whether a task goes no further after it."""
    return finding.outcome in (Outcome.reject, Outcome.unmeasured)


def wanted(text: str) -> tuple[str, ...]:
    """Lines that tell of a host that was looked for in vain."""
    lines = (" ".join(line.split())[:200] for line in text.splitlines() if _WANTED.search(line))
    return tuple(dict.fromkeys(lines))[:SHOWN]


def network(runs: Sequence[Run], online: Run | None, *, declared: bool) -> Finding:
    """`runs`: of the solution, without a network. `online`: with one, where there was any. `declared`: the task may have it."""
    asked = wanted("\n".join(run.said for run in runs))
    if all(run.strict for run in runs):
        return _of("network", Outcome.flag, "does without, but asks for hosts", *asked) if asked else _of("network")
    if online is not None and online.strict:
        if declared:
            return _of("network", Outcome.flag, "passes with a network only, as its task.toml lets it", *asked)
        return _of("network", Outcome.reject, "fails without a network and passes with one, which it does not ask for", *asked)
    if online is None and asked:
        if declared:
            cure = "it may have a network, and there is none here: audit it with network=host"
            return _of("network", Outcome.unmeasured, cure, *asked)
        return _of("network", Outcome.reject, "its solution does not pass, and looks for hosts, which it does not ask for", *asked)
    return _of("network")


def oracle(runs: Sequence[Run]) -> Finding:
    if lost := _lost(runs, "its solution"):
        return Finding("oracle", *lost)
    passed = sum(run.strict for run in runs)
    if passed == len(runs):
        return _of("oracle")
    bad = [run.verdict for run in runs if run.verdict is not None and not run.strict]
    failed = dict.fromkeys(check for verdict in bad for check in verdict.failed)
    said = next((run.said.strip()[-300:] for run in runs if not run.strict and run.said.strip()), "")
    return _of(
        "oracle",
        Outcome.reject,
        f"its solution passes {passed} of {len(runs)} times, with rewards {', '.join(f'{verdict.reward:g}' for verdict in bad)}",
        *(f"fails: {check}" for check in list(failed)[:SHOWN]),
        *([f"said: {said}"] if said else []),
    )


def empty(runs: Sequence[Run]) -> Finding:
    if lost := _lost(runs, "an empty submission"):
        return Finding("empty", *lost)
    passed = sum(run.strict for run in runs)
    return _of("empty", Outcome.reject, f"an empty submission passes {passed} of {len(runs)} times") if passed else _of("empty")


def replay(run: Run) -> Finding:
    if lost := _lost([run], "its solution, without its directory"):
        return Finding("replay", *lost)
    assert run.verdict is not None
    if not run.strict:
        why = "passes only while /solution is there, which no agent has"
        return _of("replay", Outcome.reject, why, *(f"fails: {check}" for check in run.verdict.failed[:SHOWN]))
    if run.again is None:
        return _of("replay", Outcome.flag, f"a second verification of the same state has no result: {run.fault}")
    if run.again.reward != run.verdict.reward:
        what = f"a second verification of the same state gives {run.again.reward:g}, the first {run.verdict.reward:g}"
        checks = differing([run.verdict, run.again])
        return _of("replay", Outcome.flag, what, *(f"differs: {check}" for check in checks[:SHOWN]))
    return _of("replay")


def mutation(tried: Sequence[Tried]) -> Finding:
    """By the share of mutants noticed, of those that left another state than the whole solution and got a result."""
    counted = [one for one in tried if not one.equal and one.noticed is not None]
    equal, lost = sum(one.equal for one in tried), sum(not one.equal and one.noticed is None for one in tried)
    beside = f"{equal} changed nothing, {lost} had no result"
    if not counted:
        return _of("mutation", Outcome.flag, f"no broken solution to try it with: of {len(tried)} mutants {beside}")
    missed = [one for one in counted if not one.noticed]
    share = 1 - len(missed) / len(counted)
    said = f"{len(counted) - len(missed)} of {len(counted)} broken solutions noticed ({share:.0%}); {beside}"
    outcome = Outcome.reject if share < REJECT_BELOW else Outcome.flag if share < FLAG_BELOW else Outcome.passed
    return _of("mutation", outcome, said, *(f"not noticed: {one.what}" for one in missed[:SHOWN]))


def flaky(solved: Sequence[Run], nothing: Sequence[Run], replayed: Run) -> Finding:
    """By runs of one submission, and by the two verifications of one state."""
    pairs = {
        "two runs of the solution": [run.verdict for run in solved],
        "two runs of an empty submission": [run.verdict for run in nothing],
        "two verifications of one state": [replayed.verdict, replayed.again],
    }
    found = [
        f"{check} differs between {what}"
        for what, verdicts in pairs.items()
        for check in differing([verdict for verdict in verdicts if verdict is not None])
    ]
    return _of("flaky", Outcome.flag, *found[:SHOWN]) if found else _of("flaky")


def differing(verdicts: Sequence[Verdict]) -> list[str]:
    """Checks that do not have one result in all of them, or are not in all."""
    results: dict[str, set[str]] = {}
    for verdict in verdicts:
        kinds = (("passed", verdict.passed), ("failed", verdict.failed), ("skipped", verdict.skipped))
        for kind, checks in kinds:
            for check in checks:
                results.setdefault(check, set()).add(kind)
    everywhere = [set(verdict.passed) | set(verdict.failed) | set(verdict.skipped) for verdict in verdicts]
    return [check for check, kinds in results.items() if len(kinds) > 1 or any(check not in ids for ids in everywhere)]


def in_time(runs: Sequence[Run]) -> Finding:
    """By the slowest of all runs."""
    slowest: dict[str, Timed] = {}
    for one in (one for run in runs for one in run.times):
        if one.what not in slowest or one.seconds > slowest[one.what].seconds:
            slowest[one.what] = one
    late = [one for one in slowest.values() if one.seconds > TIME_SHARE * one.limit_s]
    told = [f"{one.what} takes {one.seconds:.1f} s of {one.limit_s:g} s" for one in late]
    return _of("time", Outcome.flag, *told) if late else _of("time")


def _lost(runs: Sequence[Run], what: str) -> tuple[Outcome, tuple[str, ...]] | None:
    if refused := next((run.refused for run in runs if run.refused), ""):
        return Outcome.reject, (refused,)
    if fault := next((run.fault for run in runs if run.verdict is None), ""):
        return Outcome.unmeasured, (f"{what} could not be judged: {fault}",)
    return None


def _of(gate: str, outcome: Outcome = Outcome.passed, *evidence: str) -> Finding:
    return Finding(gate, outcome, evidence)
