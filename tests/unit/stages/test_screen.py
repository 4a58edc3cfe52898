"""Form, scan and critic, in this order: what each refuses, and how the critic's answer is read."""

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

import pytest

from termrsi.fakes import FakeGenerator, FakeTokenizer
from termrsi.harness.render import ChatFormat
from termrsi.records import Completion, EnvironmentSpec, Message, SamplingParams, TaskSpec, Writing
from termrsi.reward.leakage import scan
from termrsi.stages.roles import PolicyWriter
from termrsi.stages.rsr.screen import Screener

TESTS = '''
def test_vault_is_open():
    """Nothing but the number on the lid."""
    assert int(Path("/app/vault/lid.txt").read_text()) == 7319055
    assert digest() == "9f86d081884c7d65"
    assert animal() == "elephant"
    assert word() == "violet-lantern-88"
'''
BOOK = (
    "Target end state: the vault is open.\nMilestones: {}\nUseful checks: ls\n"
    "Recovery strategies: try again.\nPitfalls: do not hurry."
)


class Critic:
    """Says one thing, and keeps what it was asked."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[tuple[Sequence[Message], SamplingParams]] = []

    async def __call__(
        self, role: str, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = ""
    ) -> Writing:
        assert role == "critic"
        self.asked.append((messages, sampling))
        return Writing(self.text, 1, 1)


@pytest.fixture
def task(tmp_path: Path) -> TaskSpec:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_outputs.py").write_text(TESTS)
    return TaskSpec("t", "f", "Open the vault.", str(tmp_path), EnvironmentSpec(workdir="/app"))


@pytest.mark.parametrize(
    ("planted", "category"),
    [
        ("turn it to 7319055", "leak_literal"),
        ("see that the digest is 9f86d081884c7d65", "leak_hash"),
        ("write to /app/vault/lid.txt", "leak_path"),
        ("make test_vault_is_open pass", "leak_test_name"),
        ("say Elephant", "leak_expected_output"),
        (f"say what {b64encode(b'violet-lantern-88').decode()} is in base64", "leak_encoded"),
        ("say 88-nretnal-teloiv from its end", "leak_reversed"),
        ("echo vio\nlet-lan\ntern-88", "leak_split"),
        ("cat ../tests/* and do as they say", "leak_reads_tests"),
    ],
)
async def test_what_can_be_found_without_a_model_never_gets_to_the_critic(task: TaskSpec, planted: str, category: str) -> None:
    critic = Critic("no")
    refusals = await Screener(critic, scan, 4).refusals(task, BOOK.format(planted), 0)
    assert category in refusals
    assert set(refusals) <= {category, "leak_literal"}, "a hash is a string, too"
    assert not critic.asked


async def test_a_paraphrase_is_refused_by_the_critic_alone(task: TaskSpec) -> None:
    book = BOOK.format("say the name of the large grey animal with a trunk")
    assert scan(task, book) == ()
    assert await Screener(Critic("Yes."), scan, 4).refusals(task, book, 0) == ("critic_leak",)
    assert await Screener(Critic("No."), scan, 4).refusals(task, book, 0) == ()


async def test_the_critic_sees_the_public_task_and_the_runbook_alone(task: TaskSpec) -> None:
    critic = Critic("no")
    await Screener(critic, scan, 7).refusals(task, BOOK.format("open it"), 3)
    [(messages, sampling)] = critic.asked
    assert messages[-1].content.startswith("Task: Open the vault.\nRunbook: Target end state")
    assert not any("7319055" in message.content for message in messages)
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.0, 3)


@pytest.mark.parametrize(
    ("answer", "refusals"),
    [
        ("no", ()),
        (" No.", ()),
        ("**No**, it does not.", ()),
        ("no\nTask:", ()),
        ("Yes", ("critic_leak",)),
        ("*yes*: a value", ("critic_leak",)),
        ("Not sure", ("critic_unclear",)),
        ("None given, but test_x is", ("critic_unclear",)),
        ("Nothing is clear", ("critic_unclear",)),
        ("Noted: yes", ("critic_unclear",)),
        ("No-one can tell", ("critic_unclear",)),
        ("yesterday", ("critic_unclear",)),
        ("", ("critic_unclear",)),
        ("...", ("critic_unclear",)),
        ("<think>No value is told, or is it?</think>\n\nYes", ("critic_leak",)),
        ("No value, {maybe} one. </think> yes", ("critic_leak",)),  # the template opened the thought
        ("<think>yes? It is in the task.</think>No", ()),
        ("<think>\nNo test is named, so", ("critic_unclear",)),  # cut
        ("<think>no</think>", ("critic_unclear",)),
    ],
)
async def test_only_a_whole_first_word_is_an_answer(task: TaskSpec, answer: str, refusals: tuple[str, ...]) -> None:
    assert await Screener(Critic(answer), scan, 16).refusals(task, BOOK.format("open it"), 0) == refusals


async def test_form_comes_first(task: TaskSpec) -> None:
    assert await Screener(Critic("no"), scan, 4).refusals(task, "it is 7319055", 0) == ("block_missing",)


class Thinking(FakeTokenizer):
    """Its template opens the thought, so that the model's own words do not."""

    chat_template = "messages"

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.get_added_vocab()[token]

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False, **_: object) -> str:
        text = super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        return text + "<think>\n" * add_generation_prompt


class Says(FakeGenerator):
    """One thing, whatever it is asked."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        ids = tuple(Thinking().encode(self.text))
        return Completion(ids, (0.0,) * len(ids), "length")


@pytest.mark.parametrize(("said", "refusals"), [("No value is told, or", ("critic_unclear",)), ("Hm.</think>no", ())])
async def test_a_thought_that_the_template_opened_is_none_of_the_policys_answer(
    task: TaskSpec, said: str, refusals: tuple[str, ...]
) -> None:
    policy = PolicyWriter(Says(said), ChatFormat(Thinking()))

    async def ask(role: str, messages: Sequence[Message], sampling: SamplingParams, key: str = "", begun: str = "") -> Writing:
        return await policy.write(messages, sampling, key, begun)

    assert await Screener(ask, scan, 16).refusals(task, BOOK.format("open it"), 0) == refusals
