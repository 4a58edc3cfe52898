"""Shipped fakes for every port: a world with two files in it, and a model of two numbers that really learns. No clock, no disk.

The task of this world is to make `/app/half` and `/app/all`. The model chooses `solve` (makes both), `half` (makes the first) or
`false`, by the softmax of its logits; then it says that it is done. Worked examples, a runbook, or word of a failure in the prompt
raise the logit of `solve`. So rewriting and recovery find what the bare policy does not, and SFT and policy gradients raise its
success. The stages, the harness and the queues around these fakes are the real ones.
"""

import asyncio
import hashlib
import json
import math
import posixpath
import random
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from termrsi.config.choices import TO_SAMPLER
from termrsi.errors import CheckpointError, ConfigError, EngineError, SandboxError, SandboxSpoiled, VerifierError, WeightsError
from termrsi.harness import parse, variants
from termrsi.harness.chat_generator import ChatGenerator
from termrsi.harness.render import ChatFormat
from termrsi.harness.runner import Runner
from termrsi.ports import Sandbox, Writer
from termrsi.queues.recovery import RecoveryQueue
from termrsi.queues.store import GroupStore
from termrsi.records import (
    CommandResult,
    Completion,
    EnvironmentSpec,
    Finding,
    Outcome,
    RecoveryPoint,
    Sample,
    SamplingParams,
    Snapshot,
    TaskAudit,
    TaskSpec,
    UpdateMetrics,
    Verdict,
    WeightsVersion,
)
from termrsi.reward.checks import TaskChecks

BASE = "fake:base"  # in place of a model directory: the weights every run begins with
FILES = {"half_done": "/app/half", "all_done": "/app/all"}  # check -> the file it looks for
ACTIONS = ("solve", "half", "false")

# Steps per unit of learning rate, so that the rates meant for a language model move these two logits within a few steps.
UPDATE_SCALE = 2e6
FIT_SCALE = 5e4
CRITIC_SCALE = 2e4
HELP = 2.0  # what `_helped` adds to the logit of `solve`
LOSS_KEYS = frozenset({"kind", "clip_low", "clip_high", "delta", "max_tokens", "tis_cap", "correction", "correction_low"})
LOSS_KEYS |= {"anchor", "divergence", "dppo_form", "sat", "kl", "kl_kind"}
UNSEEN = "*"  # the critic's value of a situation that it has not learned


# --- text ---------------------------------------------------------------------------------------------------------

_SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
_SPECIAL_TEXT = {number: text for text, number in _SPECIAL.items()}
_PIECE = re.compile(r"<\|endoftext\|>|<\|im_start\|>|<\|im_end\|>|```| ?[A-Za-z0-9_]{1,6}|.", re.DOTALL)


class FakeTokenizer:
    """Pieces of words. An id is the piece's own bytes read as a number: no vocabulary, and the same in every process."""

    eos_token_id: int | None = 2

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """`add_special_tokens` adds none: this chat format has no token of its own at the start."""
        return [_number(piece) for piece in _PIECE.findall(text)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self._text(i) for i in ids if not (skip_special_tokens and i in _SPECIAL_TEXT))

    def convert_ids_to_tokens(self, token: int) -> str:
        """Marked as a word piece, so that nobody takes it for an alphabet of bytes."""
        return self._text(token) if token in _SPECIAL_TEXT else f"\u2581{self._text(token)}"

    def get_added_vocab(self) -> dict[str, int]:
        return dict(_SPECIAL)

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + "<|im_start|>assistant\n" * add_generation_prompt

    def _text(self, token: int) -> str:
        return _SPECIAL_TEXT.get(token) or token.to_bytes(8, "big").lstrip(b"\0")[1:].decode()


def _number(piece: str) -> int:
    """At most 7 bytes behind a 1, so 57 bits."""
    return _SPECIAL[piece] if piece in _SPECIAL else int.from_bytes(b"\1" + piece.encode(errors="replace"), "big")


# --- the world ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Machine:
    """What a snapshot holds."""

    files: dict[str, bytes] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    cwd: str = "/app"

    def copy(self) -> "_Machine":
        return _Machine(dict(self.files), dict(self.variables), self.cwd)

    def digest(self) -> str:
        return _digest({path: data.hex() for path, data in self.files.items()})


@dataclass(slots=True)
class FakeWorld:
    """Owns what sandboxes leave behind, and counts. `lost_at`: number of a lease (from 1) -> its command that is never answered.

    `spoiled`: numbers of leases that are lost by their agent's doing.
    """

    lost_at: dict[int, int] = field(default_factory=dict)
    spoiled: frozenset[int] = frozenset()
    leases: int = 0
    releases: int = 0
    made: int = 0
    open: set[str] = field(default_factory=set)  # ids of sandboxes that are started and not closed, forks included
    taken: int = 0
    snapshots: dict[str, _Machine] = field(default_factory=dict)  # those not discarded

    def restore(self, snapshot: Snapshot) -> _Machine:
        """Raises SandboxError if it was discarded, or is not what was taken."""
        if snapshot.handle not in self.snapshots:
            raise SandboxError("there is no such snapshot", snapshot.id)
        machine = self.snapshots[snapshot.handle]
        if machine.digest() != snapshot.digest:
            raise SandboxError("the digest of the snapshot's files differs", snapshot.id)
        return machine.copy()


class FakeSandbox:
    """`ports.Sandbox` in memory. It knows solve, half, true, false, export, echo, cat, ls, rm, cd, pwd, sleep, and bash on a
    file of these; `;`, `&&`, `&`, `>`.

    `lost_at`: the command (from 1) at which it is lost, `spoiled`: by what ran in it. `sleep` takes no time, but a time-out sees
    the seconds it was given.
    """

    def __init__(self, world: FakeWorld, machine: _Machine | None = None, *, lost_at: int = 0, spoiled: bool = False) -> None:
        world.made += 1
        self._world = world
        self._machine = machine or _Machine()
        self._id = f"fake-{world.made}"
        self._lost_at = lost_at
        self._fault = SandboxSpoiled if spoiled else SandboxError
        self._commands = 0
        self._gone = "it was never started"
        self._processes: list[str] = []
        self._status = 0

    @property
    def id(self) -> str:
        return self._id

    async def start(self) -> None:
        self._gone = ""
        self._world.open.add(self._id)

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        self._check()
        self._commands += 1
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._gone = "lost: a command was cancelled"
            raise
        if self._commands == self._lost_at:
            self._gone = "lost"
        self._check()
        output: list[str] = []
        for line in re.split(r"[;\n]", command):
            for part in line.split("&&"):
                if part.strip():
                    self._status = self._one(part, output, math.inf if timeout_s is None else timeout_s)
                if self._status != 0:
                    break
            if self._status == 124:
                return CommandResult(124, "".join(output), timed_out=True, duration_s=timeout_s or 0.0)
        return CommandResult(self._status, "".join(output))

    async def snapshot(self) -> Snapshot:
        self._check()
        lost, self._processes = tuple(self._processes), []
        self._world.taken += 1
        handle = f"fake-snapshot-{self._world.taken}"
        self._world.snapshots[handle] = self._machine.copy()
        size = sum(len(data) for data in self._machine.files.values())
        return Snapshot(handle, "fake", handle, self._machine.digest(), lost, size)

    async def fork(self, n: int) -> list[Sandbox]:
        self._check()
        copies: list[Sandbox] = [FakeSandbox(self._world, self._machine.copy()) for _ in range(n)]
        for copy in copies:
            await copy.start()
        return copies

    async def put(self, source: Path | str, target: str) -> None:
        self._check()
        source = Path(source)
        if source.is_dir():
            inside = {f"{target}/{p.relative_to(source)}": p for p in source.rglob("*") if p.is_file()}
        elif source.is_file():
            inside = {target + source.name if target.endswith("/") else target: source}
        else:
            raise SandboxError("no such file on the host", str(source))
        self._machine.files |= {self._path(name): path.read_bytes() for name, path in inside.items()}

    async def get(self, source: str, target: Path | str) -> None:
        self._check()
        name, target = self._path(source), Path(target)
        below = {path: data for path, data in self._machine.files.items() if path.startswith(f"{name}/")}
        if name not in self._machine.files and not below:
            raise SandboxError("no such file in the sandbox", source)
        wanted = {target / path[len(name) + 1 :]: data for path, data in below.items()} or {target: self._machine.files[name]}
        for path, data in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    async def kill_processes(self) -> int:
        self._check()
        ended, self._processes = len(self._processes), []
        self._machine.variables, self._status = {}, 0
        return ended

    async def replaced(self) -> list[str]:
        self._check()
        return []

    async def close(self) -> None:
        self._gone = "closed"
        self._world.open.discard(self._id)

    def _check(self) -> None:
        if self._gone:
            raise self._fault(self._gone, self._id)

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._machine.cwd, path))

    def _one(self, text: str, output: list[str], timeout_s: float) -> int:
        """Exit code of one simple command."""
        words = re.sub(r"\$(\w+|\?)", lambda m: self._value(m.group(1)), text).replace('"', "").replace("'", "").split()
        if words[-1] == "&":
            self._processes.append(" ".join(words[:-1]))
            return 0
        files, said = self._machine.files, ""
        target = words[words.index(">") + 1] if ">" in words[:-1] else ""
        words = words[: words.index(">")] if target else words
        if words[-2:] == ["<", "/dev/null"]:
            words = words[:-2]
        match words:
            case ["bash", path] | ["env", "bash", path] if self._path(path) in files:
                lines = files[self._path(path)].decode(errors="replace").splitlines()
                return [self._one(line, output, timeout_s) for line in lines if line and not line.startswith(("#", "set "))][-1]
            case ["solve"]:
                files |= dict.fromkeys(FILES.values(), b"done\n")
            case ["half"]:
                files[FILES["half_done"]] = b"done\n"
            case ["true"]:
                pass
            case ["false"]:
                return 1
            case ["export", setting] | [setting] if "=" in setting:
                name, _, self._machine.variables[name] = setting.partition("=")
            case ["echo", *said_words]:
                said = " ".join(said_words) + "\n"
            case ["cat", path]:
                if self._path(path) not in files:
                    output.append(f"cat: {path}: No such file or directory\n")
                    return 1
                said = files[self._path(path)].decode(errors="replace")
            case ["ls", *where]:
                folder = self._path(where[0] if where else ".").rstrip("/") + "/"
                said = "".join(f"{n}\n" for n in sorted({p[len(folder) :].split("/")[0] for p in files if p.startswith(folder)}))
            case ["rm", path]:
                return 0 if files.pop(self._path(path), None) is not None else 1
            case ["cd", path]:
                self._machine.cwd = self._path(path)
            case ["pwd"]:
                said = f"{self._machine.cwd}\n"
            case ["sleep", seconds]:
                return 124 if float(seconds) > timeout_s else 0
            case _:
                output.append(f"bash: {words[0]}: command not found\n")
                return 127
        if target:
            files[self._path(target)] = said.encode()
        else:
            output.append(said)
        return 0

    def _value(self, name: str) -> str:
        return str(self._status) if name == "?" else self._machine.variables.get(name, "")


class FakePool:
    """`ports.SandboxPool`: at most `size` leases at a time; a further one waits for a release."""

    def __init__(self, world: FakeWorld | None = None, size: int = 16) -> None:
        self.world = world or FakeWorld()
        self._places = asyncio.Semaphore(size)
        self._leased: set[str] = set()

    async def lease(self, task: TaskSpec, snapshot: Snapshot | None = None) -> Sandbox:
        await self._places.acquire()
        try:
            environment = task.environment
            fresh = _Machine(variables=dict(environment.env), cwd=environment.workdir or "/app")
            machine = self.world.restore(snapshot) if snapshot else fresh
        except SandboxError:
            self._places.release()
            raise
        self.world.leases += 1
        number = self.world.leases
        sandbox = FakeSandbox(self.world, machine, lost_at=self.world.lost_at.get(number, 0), spoiled=number in self.world.spoiled)
        await sandbox.start()
        self._leased.add(sandbox.id)
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """A second release does nothing."""
        await sandbox.close()
        if sandbox.id in self._leased:
            self._leased.remove(sandbox.id)
            self.world.releases += 1
            self._places.release()

    async def discard(self, snapshot: Snapshot) -> None:
        self.world.snapshots.pop(snapshot.handle, None)

    async def kept(self, snapshot: Snapshot) -> bool:
        return snapshot.handle in self.world.snapshots


class FakeVerifier:
    """`ports.Verifier`: strict if both files are there. It leaves a file behind, as real ones do; its first `faults` calls fail."""

    def __init__(self, faults: int = 0) -> None:
        self.faults = faults

    async def verify(self, sandbox: Sandbox, task: TaskSpec) -> Verdict:
        if self.faults > 0:
            self.faults -= 1
            raise VerifierError("told to fail", task.id)
        try:
            return await self._look(sandbox)
        except SandboxSpoiled:
            return Verdict(False, 0.0, source="spoiled")

    async def _look(self, sandbox: Sandbox) -> Verdict:
        await sandbox.kill_processes()
        await sandbox.run("echo was here > /logs/verifier")
        there = {check: (await sandbox.run(f"cat {path}")).exit_code == 0 for check, path in FILES.items()}
        strict = all(there.values())
        passed, failed = (tuple(check for check, found in there.items() if found is wanted) for wanted in (True, False))
        return Verdict(strict, float(strict), passed, failed, source="fake")


def fake_scan(task: TaskSpec, text: str) -> tuple[str, ...]:
    """`ports.Scan`: the names of the checks are the verifier's secret."""
    return ("test_name",) if any(check in text for check in FILES) else ()


# --- the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FakeSkill:
    """The weights: logits of `solve` and `half` in a bare prompt; that of `false` is 0."""

    solve: float = -1.0
    half: float = 0.5

    def probs(self, *, helped: bool, temperature: float = 1.0) -> tuple[float, ...]:
        """Of ACTIONS. Temperature 0 puts everything on the likeliest."""
        logits = (self.solve + HELP * helped, self.half, 0.0)
        if temperature == 0.0:
            return tuple(float(i == logits.index(max(logits))) for i in range(len(logits)))
        weights = [math.exp((x - max(logits)) / temperature) for x in logits]
        return tuple(w / sum(weights) for w in weights)

    def to_dict(self) -> dict[str, float]:
        return {"solve": self.solve, "half": self.half}


_WORKED_EXAMPLE = variants.get("fewshot").examples[0][0]
_TOKENIZER = FakeTokenizer()


def _helped(prompt: str) -> bool:
    """Worked examples, a runbook before the task, or a failure to recover from."""
    return any(mark in prompt for mark in (_WORKED_EXAMPLE, "\n\nTask: ", "Your earlier attempt at this task failed."))


def _last_user(prompt: str) -> str:
    return prompt.rpartition("<|im_start|>user\n")[2].split("<|im_end|>")[0]


def _acts(prompt: str) -> bool:
    """Whether an agent that has read this now chooses a command; after a command's result it says that it is done."""
    return not re.match(r"\[(exit \d+|timed out)\]", _last_user(prompt))


def _turns(sample: Sample) -> Iterator[tuple[int, int]]:
    """First and last + 1 position of each run of sampled tokens of one call."""
    at = 0
    while at < len(sample.ids):
        end = at
        while end < len(sample.ids) and sample.mask[end] and sample.turn_ids[end] == sample.turn_ids[at]:
            end += 1
        if end > at:
            yield at, end
        at = max(end, at + 1)


def _choices(sample: Sample) -> Iterator[tuple[int, int, bool]]:
    """Position of the first token, number of the action, and whether the prompt helped, of each choice in the sample."""
    for start, end in _turns(sample):
        prompt = _TOKENIZER.decode(sample.ids[:start])
        command = parse.parse(_TOKENIZER.decode(sample.ids[start:end], skip_special_tokens=True)).command
        if _acts(prompt) and command in ACTIONS:
            yield start, ACTIONS.index(command), _helped(prompt)


class FakeGenerator:
    """`ports.Generator` that plays every role. The first token of a choice carries its whole log-probability.

    `sloppy`: share of first drafts of a runbook with an empty block, of a judge's first answers without a category, and of tasks
    without an end. `dies_at`: the call (from 1) from which on it is dead. `top_p` is not looked at.
    """

    def __init__(self, seed: int = 0, *, sloppy: float = 0.25, dies_at: int = 0) -> None:
        self._random = random.Random(f"generator/{seed}")
        self._sloppy = sloppy
        self._dies_at = dies_at
        self._served = (0, FakeSkill())
        self.calls = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, prefix_key: str = "") -> Completion:
        self.calls += 1
        if self._dies_at and self.calls >= self._dies_at:
            raise EngineError("told to die", "fake generator")
        version, skill = self._served
        draw = self._random if params.seed is None else random.Random(f"draw/{params.seed}")
        reply, logp = self._reply(_TOKENIZER.decode(prompt_ids), skill, params.temperature, draw)
        await asyncio.sleep(0)
        ids = (*_TOKENIZER.encode(reply), _SPECIAL["<|im_end|>"])
        finish = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        return Completion(ids, (logp, *[0.0] * (len(ids) - 1)), finish, version, self._served[0])

    async def pull(self, weights: WeightsVersion) -> None:
        skill = FakeSkill(**_handle(weights))
        self._served = (weights.version, skill)

    def _reply(self, prompt: str, skill: FakeSkill, temperature: float, draw: random.Random) -> tuple[str, float]:
        system = prompt.partition("<|im_start|>system\n")[2].split("<|im_end|>")[0]
        if "hidden test" in system:
            return "no", 0.0
        if "five headings" in system:
            return self._block(system, prompt, draw), 0.0
        if "five categories of errors" in system:
            return self._errors(prompt, draw), 0.0
        if "continued another agent's failed attempt" in system:
            return self._judgement(prompt), 0.0
        if "write tasks for an agent" in system:
            return self._part_of_a_task(_last_user(prompt), draw), 0.0
        if not _acts(prompt):
            return parse.DONE_WORD, 0.0
        probs = skill.probs(helped=_helped(prompt), temperature=temperature)
        (action,) = draw.choices(range(len(ACTIONS)), probs)
        return f"```bash\n{ACTIONS[action]}\n```", math.log(probs[action])

    def _block(self, system: str, prompt: str, draw: random.Random) -> str:
        """What follows the heading that the prompt ends with; with the commands that it shows. A rewrite is always whole."""
        headings = system.rpartition(": ")[2].rstrip(".").split(", ")
        commands = prompt.rpartition("Commands that worked: ")[2].split("<|im_end|>")[0]
        hints = ("Both files are there.", f"Run {commands}.", "Look with ls.", "Run it once more.", "Do not stop half way.")
        heading = prompt.rpartition("\n")[2].rstrip(":")
        sloppy = heading == headings[-1] and "was refused" not in _last_user(prompt) and draw.random() < self._sloppy
        return "" if sloppy else dict(zip(headings, hints, strict=True))[heading]

    def _errors(self, prompt: str, draw: random.Random) -> str:
        """The first turn that failed is a wrong command, one that left a file out is unfinished work; the next two may mend it."""
        ends = [int(code) for code in re.findall(r"^Turn \d+ \(exit (\d+)\)$", prompt, re.MULTILINE)]
        commands = re.findall(r"^  \$ (.*)$", prompt, re.MULTILINE)
        wrong = {
            "tool_use": next((n for n, code in enumerate(ends, 1) if code), 0),
            "implementation": next((n for n, command in enumerate(commands, 1) if command == "half"), 0),
        }
        success = "Official result: success" in prompt
        found: dict[str, dict[str, object]] = {}
        for category in ("planning", "tool_use", "implementation", "verification", "resource_management"):
            turn = wrong.get(category, 0)
            mended = bool(turn) and ends[turn : turn + 2] == [0, 0]
            state = ("recovered" if mended else "uncertain" if success else "unresolved") if turn else "no_error"
            later = ([turn + 1], [turn + 2]) if mended else ([], [])
            mistake = {"error": [turn], "correction": later[0], "confirmation": later[1], "contributes": state == "unresolved"}
            found[category] = {"state": state, "errors": [mistake] if turn else [], "reason": "seen", "confidence": 0.5}
        if "was refused" not in _last_user(prompt) and draw.random() < self._sloppy:
            del found["planning"]
        return json.dumps(found)

    def _judgement(self, prompt: str) -> str:
        """No to each question that is asked."""
        questions = re.findall(r"^- (repeated_failure|constraint_violation):", prompt, re.MULTILINE)
        return json.dumps({question: {"answer": "no", "evidence": []} for question in questions})

    def _part_of_a_task(self, request: str, draw: random.Random) -> str:
        """The part whose form the request shows. The tests are for the look of it: `FakeVerifier` does not read them."""
        heading = re.findall(r"^=== ([a-z_]+)", request, re.MULTILINE)[0]
        body = {
            "instruction": f"Make both files of case {draw.randrange(10**6)}.\n=== truth ===\n{' '.join(FILES.values())}",
            "initial_test": "true",
            "check": f"cat {FILES['all_done']}",
            "file": "solve",
        }[heading]
        title = {"check": "check all_done", "file": "solution"}.get(heading, heading)
        sloppy = heading == "instruction" and "was refused" not in request and draw.random() < self._sloppy
        return f"=== {title} ===\n{body}\n" + "=== end ===" * (not sloppy)


class FakePolicy:
    """`ports.Policy` of two logits. Gradients are exact, means over the samples; `loss` is checked and otherwise not looked at."""

    def __init__(self, skill: FakeSkill | None = None) -> None:
        self.skill = skill or FakeSkill()
        self._version = 0

    async def logp(self, samples: Sequence[Sample]) -> list[list[float]]:
        return [self._logp(sample) for sample in samples]

    async def update(self, samples: Sequence[Sample], loss: dict[str, object], lr: float) -> UpdateMetrics:
        """Ascends the mean of sum(advantage x grad log pi): the policy gradient at ratio 1."""
        if "kind" not in loss or not loss.keys() <= LOSS_KEYS:
            raise ConfigError(f"unknown or missing arguments of the loss: {sorted(loss)}", "fake policy")
        anchor = "sampler" if loss["kind"] in TO_SAMPLER else str(loss.get("anchor", "old"))
        needed = ["advantages", *{"old": ["old_logp"], "sampler": ["sampler_logp"]}.get(anchor, [])]
        needed += ["ref_logp"] if "kl" in loss else []
        for sample in samples:
            if missing := [name for name in needed if len(getattr(sample, name)) != len(sample.ids)]:
                raise ValueError(f"{sample.rollout_id}: {' and '.join(missing)} needed for every token")
        return self._step(samples, [sample.advantages for sample in samples], lr * UPDATE_SCALE)

    async def fit(self, samples: Sequence[Sample], lr: float) -> UpdateMetrics:
        return self._step(samples, [(1.0,) * len(sample.ids) for sample in samples], lr * FIT_SCALE)

    async def publish(self) -> WeightsVersion:
        self._version += 1
        return WeightsVersion("policy", self._version, await self.checksum(), self.skill.to_dict())

    async def save(self, directory: str) -> str:
        _write(directory, "skill.json", self.skill.to_dict())
        return await self.checksum()

    async def load(self, directory: str) -> str:
        """A directory that `save` left, or BASE. Raises CheckpointError."""
        self.skill = FakeSkill() if directory == BASE else FakeSkill(**_read(directory, "skill.json"))
        return await self.checksum()

    async def save_training(self, directory: str) -> str:
        _write(directory, "skill.json", self.skill.to_dict())
        return await self.checksum()

    async def load_training(self, directory: str, version: int) -> str:
        self.skill, self._version = FakeSkill(**_read(directory, "skill.json")), version
        return await self.checksum()

    async def checksum(self) -> str:
        return _digest(self.skill.to_dict())

    def _logp(self, sample: Sample) -> list[float]:
        logp = [0.0] * len(sample.ids)
        for start, action, helped in _choices(sample):
            logp[start] = math.log(self.skill.probs(helped=helped)[action])
        return logp

    def _step(self, samples: Sequence[Sample], weights: Sequence[Sequence[float]], rate: float) -> UpdateMetrics:
        gradient, objective, tokens = [0.0, 0.0], 0.0, 0
        for sample, weight in zip(samples, weights, strict=True):
            tokens += sum(sample.mask)
            for start, action, helped in _choices(sample):
                probs = self.skill.probs(helped=helped)
                objective += weight[start] * math.log(probs[action]) / len(samples)
                for i in range(len(gradient)):
                    gradient[i] += weight[start] * ((action == i) - probs[i]) / len(samples)
        self.skill = replace(self.skill, solve=self.skill.solve + rate * gradient[0], half=self.skill.half + rate * gradient[1])
        return UpdateMetrics(-objective, math.hypot(*gradient), tokens, 0.0)


class FakeCritic:
    """`ports.Critic`: one value per situation (the command before the turn), moved towards the mean return seen in it."""

    def __init__(self) -> None:
        self.table: dict[str, float] = {}
        self.fresh_optimizer = True
        self.updates = 0
        self._version = 0

    async def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        return [self._values(sample) for sample in samples]

    async def update(self, samples: Sequence[Sample], lr: float, value_clip: float) -> UpdateMetrics:
        """`value_clip` holds what is aimed at within that distance of `old_values`; 0: no clip."""
        goals: dict[str, list[float]] = {}
        error, tokens = 0.0, 0
        for sample in samples:
            if len(sample.returns) != len(sample.ids) or (value_clip > 0.0 and len(sample.old_values) != len(sample.ids)):
                raise ValueError(f"{sample.rollout_id}: returns and old_values are needed for every token")
            for start, end in _turns(sample):
                situation = _situation(sample, start)
                for at in range(start, end):
                    goal, tokens = sample.returns[at], tokens + 1
                    error += (self._value(situation) - goal) ** 2 / 2
                    if value_clip > 0.0:
                        goal = min(max(goal, sample.old_values[at] - value_clip), sample.old_values[at] + value_clip)
                    goals.setdefault(situation, []).append(goal)
        for situation, values in goals.items():
            now = self._value(situation)
            self.table[situation] = now + min(1.0, lr * CRITIC_SCALE) * (sum(values) / len(values) - now)
        self.fresh_optimizer = False
        self.updates += 1
        return UpdateMetrics(error / max(1, tokens), 0.0, tokens, 0.0)

    async def refit(self, scale: float, shift: float) -> None:
        values = {UNSEEN: 0.0} | self.table
        self.table = {situation: scale * value + shift for situation, value in values.items()}
        self.fresh_optimizer = True

    async def publish(self) -> WeightsVersion:
        self._version += 1
        return WeightsVersion("critic", self._version, await self.checksum(), dict(self.table))

    async def pull(self, weights: WeightsVersion) -> None:
        self.table, self.fresh_optimizer = _handle(weights), True

    async def save(self, directory: str) -> str:
        _write(directory, "critic.json", self.table)
        return await self.checksum()

    async def load(self, directory: str) -> str:
        """What `save` left; a policy's directory, or BASE, gives a new head. Raises CheckpointError."""
        new = directory == BASE or (Path(directory) / "skill.json").is_file()
        self.table, self.fresh_optimizer = {} if new else _read(directory, "critic.json"), True
        return await self.checksum()

    async def save_training(self, directory: str) -> str:
        _write(directory, "critic.json", self.table)
        return await self.checksum()

    async def load_training(self, directory: str, version: int) -> str:
        self.table, self.fresh_optimizer, self._version = _read(directory, "critic.json"), False, version
        return await self.checksum()

    async def checksum(self) -> str:
        return _digest(self.table)

    def _values(self, sample: Sample) -> list[float]:
        values = [0.0] * len(sample.ids)
        for start, end in _turns(sample):
            values[start:end] = [self._value(_situation(sample, start))] * (end - start)
        return values

    def _value(self, situation: str) -> float:
        return self.table.get(situation, self.table.get(UNSEEN, 0.0))


def _situation(sample: Sample, start: int) -> str:
    """The last action before this position, and "" before the first."""
    return (re.findall(rf"```bash\n({'|'.join(ACTIONS)})\n```", _TOKENIZER.decode(sample.ids[:start])) or [""])[-1]


def _digest(state: dict[str, str] | dict[str, float]) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


def _handle(weights: WeightsVersion) -> dict[str, float]:
    """The published numbers. Raises WeightsError if they are not those that were announced."""
    if not isinstance(weights.handle, dict) or _digest(weights.handle) != weights.checksum:
        raise WeightsError("the weights differ after the pull", weights.name)
    return dict(weights.handle)


def _write(directory: str, name: str, state: dict[str, float]) -> None:
    """Files are replaced, not written over: another directory may hold links to them."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    for file, content in {"config.json": {"model_type": "fake"}, name: state}.items():
        draft = Path(directory) / f"{file}.part"
        draft.write_text(json.dumps(content))
        draft.rename(Path(directory) / file)


def _read(directory: str, name: str) -> dict[str, float]:
    try:
        return json.loads((Path(directory) / name).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"no readable {name}", directory, f"a directory that was saved, or {BASE}") from error


# --- the rest -----------------------------------------------------------------------------------------------------


class FakeRecoveryStore:
    """`ports.RecoveryStore` over the real queue."""

    def __init__(self, capacity: int = 16) -> None:
        self._queue = RecoveryQueue(capacity)

    async def push(self, points: Sequence[RecoveryPoint]) -> list[RecoveryPoint]:
        for point in points:
            self._queue.push(point)
        return self._queue.clear_evicted()

    async def take(self, n: int) -> list[RecoveryPoint]:
        return self._queue.take(n)

    async def peek(self, n: int) -> list[RecoveryPoint]:
        return self._queue.peek(n)

    async def size(self) -> int:
        return len(self._queue)

    async def reset(self, capacity: int) -> list[RecoveryPoint]:
        left = self._queue.take(len(self._queue))
        self._queue = RecoveryQueue(capacity)
        return left


@dataclass(frozen=True, slots=True)
class FakeAuditor:
    """`ports.Auditor`: every task is clean but those named."""

    rejected: frozenset[str] = frozenset()

    async def run(self, tasks: Sequence[TaskSpec]) -> AsyncGenerator[TaskAudit, None]:
        for task in tasks:
            bad = task.id in self.rejected
            finding = Finding("empty", Outcome.reject, ("told to reject",)) if bad else Finding("empty", Outcome.passed)
            yield TaskAudit(task.id, task.path, (finding,))


class FakeTasks(NamedTuple):
    """The arguments of `stages.base.Splits`."""

    train: list[TaskSpec]
    validation: list[TaskSpec]
    heldout: list[TaskSpec]


def dry_tasks(train: int = 8, validation: int = 4, heldout: int = 6) -> FakeTasks:
    """Two families, two levels. All are alike to the model; their directories do not exist."""

    def make(split: str, n: int) -> list[TaskSpec]:
        return [
            TaskSpec(
                id=f"{split}-{i}",
                family=("files", "data")[i % 2],
                instruction=f"Make both files of case {split} {i}.",
                path=f"fake/{split}-{i}",
                environment=EnvironmentSpec(),
                level=1 + i // 2 % 2,
                split=split,
            )
            for i in range(n)
        ]

    return FakeTasks(make("train", train), make("validation", validation), make("heldout", heldout))


def dry_checks(tasks: FakeTasks) -> dict[str, TaskChecks]:
    """Neither check is passed by an empty submission."""
    every = [*tasks.train, *tasks.validation, *tasks.heldout]
    return {task.id: TaskChecks(task.id, task.family, tuple(FILES), weights=dict.fromkeys(FILES, 1.0)) for task in every}


@dataclass(slots=True)
class FakeParts:
    """Every port of a run."""

    pool: FakePool
    verifier: FakeVerifier
    generator: FakeGenerator
    rollouts: Runner
    policy: FakePolicy
    critic: FakeCritic
    queue: FakeRecoveryStore
    groups: GroupStore
    chat: ChatFormat
    tasks: FakeTasks
    checks: dict[str, TaskChecks]
    model: str = BASE

    @staticmethod
    def scan(task: TaskSpec, text: str) -> tuple[str, ...]:
        return fake_scan(task, text)


def dry_parts(seed: int = 0, writers: Mapping[str, Writer] | None = None) -> FakeParts:
    """All of them, joined: the runner is the real one. `writers`: models of roles that may play episodes."""
    pool, verifier, generator, chat = FakePool(), FakeVerifier(), FakeGenerator(seed), ChatFormat(FakeTokenizer())
    tasks = dry_tasks()
    players = {role: ChatGenerator(writer, chat) for role, writer in (writers or {}).items()}
    return FakeParts(
        pool=pool,
        verifier=verifier,
        generator=generator,
        rollouts=Runner(pool, verifier, generator, chat, players=players),
        policy=FakePolicy(),
        critic=FakeCritic(),
        queue=FakeRecoveryStore(),
        groups=GroupStore(),
        chat=chat,
        tasks=tasks,
        checks=dry_checks(tasks),
    )
