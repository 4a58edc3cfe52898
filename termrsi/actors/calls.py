"""Calls to actors: what ends the run is told in one line instead of a traceback, and no call is waited for without end.

What ends it: a process's death, one that hangs, an object store without room for what a call takes or gives.
"""

import asyncio
import logging
import math
import re
from collections.abc import Awaitable
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayTaskError

from termrsi.errors import EngineError

LATE_S = 600.0  # told then, and each time so much later
PATIENCE_S = 7200.0  # a step of a large model takes minutes: what is not done by then never will be
NO_ROOM = (ObjectStoreFullError, OutOfDiskError)
NO_END = math.inf  # for a call that waits for others, whose own waits end, of an actor that is looked at meanwhile
LOOK_S, ANSWER_S = 30.0, 600.0  # between two looks at such an actor, and in which it says that it is there
_LOG = logging.getLogger(__name__)


async def ask(name: str, actor: Any, method: str, *arguments: object, patience_s: float | None = None) -> Any:
    """The actor's answer; errors of ours arrive as what they are.

    Raises EngineError if its process has died, or has hung, or if the object store is full. (Any: actor handles and results are
    untyped, here and below.)
    """
    try:
        call = getattr(actor, method).remote(*arguments)  # large arguments are put into the store here
    except NO_ROOM as error:
        raise no_room(name, method, error) from error
    return await alive(name, call, method, patience_s=patience_s)


async def ask_while_it_answers(name: str, actor: Any, method: str, *arguments: object) -> Any:
    """As `ask`, of a call that waits for others and may take as long as they do: its actor is asked if it is `ready` meanwhile.

    Raises EngineError, too, if it does not say so in ANSWER_S.
    """
    answer = asyncio.ensure_future(ask(name, actor, method, *arguments, patience_s=NO_END))
    try:
        while not (await asyncio.wait({answer}, timeout=LOOK_S))[0]:
            await ask(name, actor, "ready", patience_s=ANSWER_S)
        return answer.result()
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def alive(name: str, reference: Awaitable[Any], what: str = "call", *, patience_s: float | None = None) -> Any:
    """One call's answer. Raises EngineError, see `ask`."""
    patience_s = PATIENCE_S if patience_s is None else patience_s
    try:
        return await bounded(name, reference, what, patience_s=patience_s)
    except TimeoutError as error:
        raise EngineError(
            f"{what} was not done after {patience_s:.0f} s", name, "`ray stack` shows where its process waits"
        ) from error
    except NO_ROOM as error:
        raise no_room(name, what, error) from error
    except RayActorError as error:
        cure = "the kernel's log says if memory ran out; the same command goes on from what is finished"
        raise EngineError(f"its process died: {first_line(error)}", name, cure) from error
    except RayTaskError as error:
        if type(error.cause).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        cure = "a smaller model.micro_tokens, model.gradient_checkpointing=true, or model.offload_activations=true"
        raise EngineError(f"its device has no room for {what}: {first_line(error)}", name, cure) from error


def no_room(name: str, what: str, error: BaseException) -> EngineError:
    """Of an object store, and the disk that it spills to, without room for what was put into it."""
    limit = f"{ray.cluster_resources().get('object_store_memory', 0.0) / 2**20:.0f} MiB" if ray.is_initialized() else "unknown"
    size = next((f"{int(word) / 2**20:.1f} MiB, " for word in re.findall(r"[Oo]bject size is (\d+)", str(error))), "")
    return EngineError(
        f"the object store is full, and so is the disk that it spills to: no room for what {what} moves ({size}limit {limit})",
        name,
        "valid: a larger cluster.object_store_mb (where Ray was started before, its --object-store-memory), or a free disk for Ray",
    )


async def bounded(name: str, reference: Awaitable[Any], what: str, *, patience_s: float | None = None) -> Any:
    """One call's answer, or what it raises. What is late is named every LATE_S.

    Raises TimeoutError after `patience_s`; None: PATIENCE_S.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    call = asyncio.ensure_future(reference)
    waited_s = 0.0
    try:
        while True:
            step_s = min(LATE_S, patience_s - waited_s)
            done, _ = await asyncio.wait({call}, timeout=step_s)
            if done:
                return call.result()
            waited_s += step_s
            if waited_s >= patience_s:
                raise TimeoutError
            _LOG.warning("%s: %s has not been done for %.0f s", name, what, waited_s)
    finally:
        call.cancel()


def first_line(error: BaseException) -> str:
    """One line: an error of ours that crossed Ray has a traceback for its text, and itself for its cause."""
    error = getattr(error, "cause", None) or error
    return (str(error).splitlines() or [type(error).__name__])[0]
