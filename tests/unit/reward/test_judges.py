"""Two judges of a task: blind to each other, the worse reading counts, and an answer must be one."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from termrsi.answers import Invalid
from termrsi.errors import EngineError, RequestRefused
from termrsi.records import EnvironmentSpec, Message, Outcome, SamplingParams, TaskSpec, Writing
from termrsi.reward import judges
from termrsi.reward.audit_log import AuditLog
from termrsi.reward.dossier import dossier

INSTRUCTION = "Write 17 to /app/a."


@pytest.fixture
def task(tmp_path: Path) -> TaskSpec:
    files = {
        "task.toml": "",
        "environment/Dockerfile": "FROM debian\n",
        "tests/test.sh": "grep -q 17 /app/a\n",
        "solution/solve.sh": "echo 17 > /app/a\n",
    }
    for name, text in files.items():
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_text(text)
    return TaskSpec("t", "f", INSTRUCTION, str(tmp_path / "t"), EnvironmentSpec())


def answer(**facets: tuple[str, str]) -> str:
    """Everything accepted, but what is named: (verdict, quotation)."""
    said = {facet: {"verdict": "accept", "reason": "fine", "evidence": []} for facet in judges.FACETS}
    for facet, (verdict, quote) in facets.items():
        said[facet] = {"verdict": verdict, "reason": "because", "evidence": [quote]}
    return json.dumps(said)


@dataclass
class Scripted:
    """`ports.Writer`: for each judge, who is told by the key, answers in order; "": a refusal; none left: nobody is there."""

    answers: dict[int, list[str]]
    asked: list[tuple[int, list[Message]]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    async def write(self, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        judge = int(key.rpartition("/")[2])
        assert sampling.seed is not None
        self.asked.append((judge, list(messages)))
        self.seeds.append(sampling.seed)
        if not self.answers[judge]:
            raise EngineError("the server does not answer")
        if not (text := self.answers[judge].pop(0)):
            raise RequestRefused("400 content filter")
        return Writing(text, 100, 10, 0.25)


Judge = Callable[[dict[int, list[str]]], "tuple"]


async def outcomes(task: TaskSpec, answers: dict[int, list[str]], log: Path) -> dict[str, Outcome]:
    with AuditLog(log) as opened:
        findings, _ = await judges.judged(task, Scripted(answers), "m", "key", opened)
    return {finding.gate: finding.outcome for finding in findings}


async def test_all_accepted(task: TaskSpec, tmp_path: Path) -> None:
    found = await outcomes(task, {1: [answer()], 2: [f"Here it is:\n```json\n{answer()}\n```"]}, tmp_path / "log")
    assert found == dict.fromkeys(judges.FACETS, Outcome.passed)


async def test_the_worse_reading_counts_and_four_facets_are_hard(task: TaskSpec, tmp_path: Path) -> None:
    first = answer(leakage=("flag", "17"), clarity=("reject", INSTRUCTION), weak_verifier=("reject", "grep -q 17"))
    second = answer(leakage=("reject", "FROM debian"), value=("flag", "Write 17"))
    found = await outcomes(task, {1: [first], 2: [second]}, tmp_path / "log")
    assert {facet: said for facet, said in found.items() if said is not Outcome.passed} == {
        "leakage": Outcome.reject,
        "weak_verifier": Outcome.reject,
        "clarity": Outcome.flag,
        "value": Outcome.flag,
    }


async def test_the_judges_are_blind_and_read_in_orders_of_their_own(task: TaskSpec, tmp_path: Path) -> None:
    writer = Scripted({1: [answer(value=("flag", "Write 17"))], 2: [answer()]})
    with AuditLog(tmp_path / "log") as log:
        findings, used = await judges.judged(task, writer, "m", "key", log)
    (_, one), (_, two) = writer.asked
    assert [len(one), len(two)] == [2, 2], "no answer of the other is in what a judge is asked"
    assert one[1].content != two[1].content
    assert sorted(one[1].content) == sorted(two[1].content), "the same letters in another order"
    assert all(part in one[1].content for part in (INSTRUCTION, "grep -q 17", "echo 17 >", "FROM debian"))
    assert findings[-1].evidence == ("judge 1, flag: because 'Write 17'",)
    assert (used.prompt_tokens, used.completion_tokens, used.cost) == (200, 20, 0.5)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("I accept it.", "no_object"),
        ('{"alignment": 1}', "bad_form in alignment"),
        (answer(value=("maybe", "17")), "bad_form in value.verdict"),
        (answer(value=("flag", "")), "no_evidence in value"),
        (answer(value=("flag", "Write 18")), "quote_not_found in value"),
        (answer(value=("accept", "write 17")), "quote_not_found in value"),
        (json.dumps(json.loads(answer()) | {"more": 1}), "bad_form in more"),
        (answer() + answer(), "several_objects"),
        (answer()[:-1] + ', "value": {"verdict": "accept", "reason": "", "evidence": []}}', "key_twice"),
    ],
)
async def test_an_answer_that_is_none_is_asked_for_again_with_its_fault(
    task: TaskSpec, tmp_path: Path, text: str, fault: str
) -> None:
    writer = Scripted({1: [text, text, answer()], 2: [answer()]})
    with AuditLog(tmp_path / "log") as log:
        findings, _ = await judges.judged(task, writer, "m", "key", log)
    assert all(finding.outcome is Outcome.passed for finding in findings)
    again = writer.asked[1][1]
    assert [message.role for message in again] == ["system", "user", "assistant", "user"]
    assert again[2].content == text
    assert f"({fault})" in again[3].content
    assert len(set(writer.seeds)) == 4, "no judge draws as the other did"


def test_a_brace_in_a_thought_is_no_answer() -> None:
    read = judges.parsed(f"<think>A set {{17}}, or {{}}?</think>{answer()}", INSTRUCTION)
    assert read.value.verdict == "accept"
    with pytest.raises(Invalid, match="several_objects"):
        judges.parsed(f"{answer()}, or rather {answer()}", INSTRUCTION)


async def test_without_a_valid_answer_a_facet_is_unjudged_if_the_other_does_not_reject_it(task: TaskSpec, tmp_path: Path) -> None:
    answers = {1: ["no"] * 3, 2: [answer(leakage=("reject", "17"), value=("flag", "17"))]}
    found = await outcomes(task, answers, tmp_path / "log")
    assert found == dict.fromkeys(judges.FACETS, Outcome.unmeasured) | {"leakage": Outcome.reject}
    assert not answers[1], "it was asked three times"


async def test_a_model_that_cannot_be_had_is_no_fault_of_the_task_and_is_asked_the_next_time(
    task: TaskSpec, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with pytest.raises(EngineError, match="does not answer"):
        await outcomes(task, {1: [answer()], 2: []}, log)
    answers: dict[int, list[str]] = {1: [], 2: [answer()]}
    assert set((await outcomes(task, answers, log)).values()) == {Outcome.passed}, "the first judge's answer was kept"


async def test_a_request_that_is_refused_or_too_long_leaves_the_task_unjudged_and_says_why(task: TaskSpec, tmp_path: Path) -> None:
    with AuditLog(tmp_path / "log") as log:
        writer = Scripted({1: [""], 2: [answer(leakage=("reject", "17"))]})
        findings, _ = await judges.judged(task, writer, "m", "key", log)
        found = {finding.gate: finding for finding in findings}
        assert (found["value"].outcome, found["value"].evidence) == (Outcome.unmeasured, ("unjudged", "judge 1: refused"))
        assert found["leakage"].outcome is Outcome.reject
        assert [judge for judge, _ in writer.asked] == [1, 2], "what is refused is not asked again at once"
        silent = Scripted({})
        findings, used = await judges.judged(task, silent, "other", "key", log, fits=lambda messages: False)
        assert {finding.outcome for finding in findings} == {Outcome.unmeasured}
        assert findings[0].evidence == ("unjudged", "judge 1: too_long", "judge 2: too_long")
        assert (silent.asked, used.prompt_tokens) == ([], 0)


async def test_room_is_asked_for_all_that_a_judge_is_shown(task: TaskSpec, tmp_path: Path) -> None:
    shown: list[int] = []

    def fits(messages: Sequence[Message]) -> bool:
        shown.append(sum(len(message.content) for message in messages))
        return True

    writer = Scripted({1: [answer()], 2: [answer()]})
    with AuditLog(tmp_path / "log") as log:
        await judges.judged(task, writer, "m", "key", log, max_tokens=77, fits=fits)
    assert shown == [sum(len(message.content) for message in messages) for _, messages in writer.asked]


def test_what_is_too_long_is_cut_and_says_so(task: TaskSpec) -> None:
    (Path(task.path) / "tests" / "big.txt").write_text("x" * 20_000)
    (Path(task.path) / "tests" / "binary").write_bytes(b"\0" * 100)
    documents = {document.part: document.text for document in dossier(task)}
    assert list(documents) == ["instruction", "environment", "verifier", "solution"]
    assert "--- tests/big.txt (its first 12000 of 20000 characters)\nxxx" in documents["verifier"]
    assert "--- tests/binary\n" in documents["verifier"]
    assert len(documents["verifier"]) < 13_000


def test_the_secret_files_of_both_formats_and_of_steps_are_shown(tmp_path: Path) -> None:
    files = ("task.yaml", "Dockerfile", "run-tests.sh", "tests/test_a.py", "solution.yaml", "truth.md", "steps/one/tests/test.sh")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\n")
    older = TaskSpec("t", "f", "Do it.", str(tmp_path), EnvironmentSpec())
    shown = {document.part: re.findall("text of (.*)", document.text) for document in dossier(older)}
    assert shown == {
        "instruction": [],
        "environment": ["Dockerfile"],
        "verifier": ["tests/test_a.py", "run-tests.sh", "steps/one/tests/test.sh"],
        "solution": ["solution.yaml", "truth.md"],
    }
