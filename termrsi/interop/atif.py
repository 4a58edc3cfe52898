"""Rollouts as ATIF trajectories (Harbor's agent trajectory format, version 1.7), token ids and log-probabilities included.

One step for the system's message, one for the user's, one for each call of the sampler with what it caused. `prompt_token_ids` is
the whole prompt of that call, as it was sent; `completion_token_ids` and `logprobs` are the sampler's. A restart point's history is
part of the first prompt, and not a step.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from termrsi import __version__, durable
from termrsi.furnish import workdir_of
from termrsi.harness import variants
from termrsi.harness.actions import Command
from termrsi.harness.variants import WORKDIR, Machine, Variant
from termrsi.records import Chunk, EpisodeSpec, Rollout, Turn

SCHEMA = "ATIF-v1.7"
Json = dict[str, Any]  # Any: JSON


def trajectory(spec: EpisodeSpec, rollout: Rollout, *, model: str = "") -> Json:
    """The document. Fields without a value are left out, as the format wants it. Raises ValueError if turns and tokens disagree."""
    calls = list(tokens(rollout.chunks))
    if len(calls) != len(rollout.turns):
        raise ValueError(f"{rollout.id}: {len(rollout.turns)} turns but {len(calls)} calls in its tokens")
    variant = variants.get(spec.harness)
    told = spec.recovery_prompt if spec.recovery else spec.task.instruction
    messages = variant.messages(
        told, "" if spec.recovery else spec.guidance, show_tools=True, workdir=workdir_of(spec.task.environment) or WORKDIR
    )
    steps: list[Json] = [{"source": message.role, "message": message.content} for message in messages if message.role == "system"][
        :1
    ]
    steps.append({"source": "user", "message": messages[-1].content})
    for number, (turn, call) in enumerate(zip(rollout.turns, calls, strict=True), 1):
        steps.append(_step(number, turn, call, model, variant))
    agent: Json = {"name": f"termrsi-{spec.harness}", "version": __version__}
    if variant.tools:
        agent["tool_definitions"] = [tool.schema() for tool in variant.tools]
    document: Json = {
        "schema_version": SCHEMA,
        "session_id": rollout.id,
        "trajectory_id": rollout.id,
        "agent": agent | ({"model_name": model} if model else {}),
        "steps": [{"step_id": at, **step} for at, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": rollout.prompt_tokens,
            "total_completion_tokens": rollout.completion_tokens,
            "total_cached_tokens": rollout.cached_tokens,
            "total_steps": len(steps),
        },
        "extra": {"stop": rollout.stop.value, "attempt": rollout.attempt, "group": rollout.group_id},
    }
    if rollout.recovery_id:
        document["extra"]["recovery"] = rollout.recovery_id
    return document


def dump(path: Path, document: object) -> None:
    durable.write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n", errors="replace")


def tokens(chunks: Sequence[Chunk]) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """(prompt ids, completion ids, log-probabilities; [] where they are not known) of each call of the sampler, in order."""
    for chunk in chunks:
        logprobs = iter(chunk.logprobs)
        at = 0
        while at < len(chunk.ids):
            if not chunk.mask[at]:
                at += 1
                continue
            end = at
            while end < len(chunk.ids) and chunk.mask[end] and chunk.turn_ids[end] == chunk.turn_ids[at]:
                end += 1
            yield list(chunk.ids[:at]), list(chunk.ids[at:end]), [*islice(logprobs, end - at)]
            at = end


def _calls(turn: Turn, variant: Variant) -> list[Json]:
    """Each command of a turn as a call of a tool: under that tool's name or, where keys are typed, as Terminus-2 tells it."""
    if turn.command is None:
        return []
    name = variant.tools[0].name if variant.tools else "bash_command"
    action = variant.parse(turn.text)
    # Where a template opened the reasoning, the reply alone may read otherwise: then what was executed is one text.
    commands = action.commands if action.command == turn.command else (Command(turn.command),)
    if variant.machine is Machine.terminal:
        given = [{"keystrokes": one.text, "duration": 1.0 if one.wait_s is None else one.wait_s} for one in commands]
    else:
        given = [{"command": one.text} | ({} if one.wait_s is None else {"timeout": one.wait_s}) for one in commands]
    return [{"function_name": name, "arguments": arguments} for arguments in given]


def _step(number: int, turn: Turn, call: tuple[list[int], list[int], list[float]], model: str, variant: Variant) -> Json:
    prompt_ids, completion_ids, logprobs = call
    metrics: Json = {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(completion_ids),
        "prompt_token_ids": prompt_ids,
        "completion_token_ids": completion_ids,
    }
    step: Json = {
        "source": "agent",
        "message": turn.text,
        "metrics": metrics | ({"logprobs": logprobs} if logprobs else {}),
        "llm_call_count": 1,
        "extra": {"generate_s": turn.generate_s, "command_s": turn.command_s},
    }
    if model:
        step["model_name"] = model
    result: Json = {"content": turn.observation}
    if made := _calls(turn, variant):
        step["tool_calls"] = [{"tool_call_id": f"call_{number}_{at}", **one} for at, one in enumerate(made, 1)]
        result["source_call_id"] = step["tool_calls"][-1]["tool_call_id"]  # all of them have one observation
    if turn.observation or turn.command is not None:
        step["observation"] = {"results": [result]}
    if turn.format_error:
        step["extra"]["format_error"] = turn.format_error
    if turn.exit_code is not None:
        step["extra"]["exit_code"] = turn.exit_code
    return step
