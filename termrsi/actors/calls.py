"""Calls to actors whose death ends the run, told in one line instead of a traceback."""

from typing import Any

from ray.exceptions import RayActorError

from termrsi.errors import EngineError


async def ask(name: str, actor: Any, method: str, *arguments: object) -> Any:  # Any: actor handles and results are untyped
    """The actor's answer; errors of ours arrive as what they are. Raises EngineError if its process has died."""
    return await alive(name, getattr(actor, method).remote(*arguments))


async def alive(name: str, reference: Any) -> Any:  # Any: see ask
    try:
        return await reference
    except RayActorError as error:
        cure = "the kernel's log says if memory ran out; the same command goes on from what is finished"
        raise EngineError(f"its process died: {str(error).splitlines()[0]}", name, cure) from error
