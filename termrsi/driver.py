"""The entry point: `termrsi`, `python -m termrsi`. Subcommands before Hydra; heavy imports only once the configuration is sound.

termrsi experiment=NAME [scale=…] [key=value …]     run a pipeline, or go on with one
termrsi VERB …                                      what `termrsi.commands.VERBS` lists
"""

import asyncio
import signal
import sys
from collections.abc import Sequence

from termrsi import commands
from termrsi.commands import HELP, USAGE
from termrsi.errors import ConfigError, TermrsiError


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: `commands.EXIT_CODES`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except TermrsiError as error:
        cause = getattr(error, "cause", error)  # Ray wraps what an actor raised, with a traceback as its text
        print(f"termrsi: {type(cause).__name__}: {cause}", file=sys.stderr)  # noqa: T201 the one line a user gets
        return 2 if isinstance(cause, ConfigError) else 1


def _dispatch(arguments: list[str]) -> int:
    is_run = bool(arguments) and "=" in arguments[0]
    if not arguments or arguments[0] in {*HELP, "help"} or (is_run and HELP & set(arguments)):
        from termrsi.config.load import choices

        print(USAGE.format(experiments=", ".join(choices("experiment"))))  # noqa: T201 the answer of a command
        return 0
    if not is_run and not arguments[0].startswith("-"):
        return commands.run(arguments)
    return _run(arguments)


def _run(overrides: list[str]) -> int:
    from termrsi.config.load import load
    from termrsi.pipeline import Pipeline
    from termrsi.report import logs

    config = load(overrides)
    logs.setup(config.logger.lines)
    pipeline = Pipeline(config, overrides)
    return asyncio.run(_with_signals(pipeline))


async def _with_signals(pipeline: "object") -> int:
    from termrsi.pipeline import Pipeline

    assert isinstance(pipeline, Pipeline)
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(pipeline.run())
    stopped: list[int] = []

    def stop(number: int) -> None:
        if not stopped and not pipeline.closing:
            stopped.append(number)
            work.cancel()

    def listen() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)

    pipeline.on_connected = listen  # Ray installs handlers of its own when it starts; ours stand again afterwards
    listen()
    try:
        await work
    except asyncio.CancelledError:
        if not stopped:
            raise
        name = signal.Signals(stopped[0]).name
        print(f"termrsi: stopped by {name}; the same command goes on from what is finished", file=sys.stderr)  # noqa: T201
        return 128 + stopped[0]
    return 0
