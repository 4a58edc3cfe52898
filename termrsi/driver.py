"""The entry point: `termrsi`, `python -m termrsi`. Subcommands before Hydra; heavy imports only once the configuration is sound.

termrsi experiment=NAME [scale=…] [key=value …]     run a pipeline, or go on with one
termrsi doctor | tasks list|show|check|kit|audit PATH | data show|stats|export|import | report RUN_DIR | serve CHECKPOINT | plan
"""

import asyncio
import signal
import sys
from collections.abc import Sequence

from termrsi.errors import ConfigError, TermrsiError

USAGE = """usage: termrsi experiment=NAME [scale=dry|laptop|node|full] [key=value ...]
       termrsi experiment=NAME stage=NAME          one stage of the pipeline, on what the run directory holds
       termrsi doctor                              what this machine can run, and what is missing
       termrsi doctor --clean                      removes what killed runs left on this machine
       termrsi tasks list PATH                     tasks of a directory, and what was refused and why
       termrsi tasks show PATH                     all that is known of each, its verifier's contract too
       termrsi tasks check PATH                    run each task's solution and an empty submission
                 [strict=true] [backend=docker] [attempts=N] [jobs=N] [run=false] [kit=DIR]
       termrsi tasks audit PATH|bundled            which tasks are fit to be trained on: gates in sandboxes, and judges
                 [jobs=N] [mutants=N] [network=host] [kit=DIR] [out=DIR] [judge=URL judge_model=NAME judge_key_env=VAR]
       termrsi tasks kit PATH [out=DIR]            fetch once what their verifiers install, to verify without a network
       termrsi data show FILE|RUN_DIR [rows=N]     rows of the data sets that stages write: lineage, counts
                 [text=true tokenizer=DIR]         and their text, with what is trained on marked
       termrsi data stats FILE|RUN_DIR             rows, tasks, families, tokens, turns, rewards, rows per lineage
       termrsi data export FILE OUT.jsonl tokenizer=DIR          to chat messages, as other programs read them
       termrsi data import IN.jsonl OUT.parquet tokenizer=DIR    from chat messages, of any program
       termrsi report RUN_DIR                      the ledger of a run
       termrsi report errors RUN_DIR stage=NAME    what a stage of kind analyse found, [against=NAME] beside another's
       termrsi serve CHECKPOINT [port=8000]        an OpenAI-compatible server on a policy
       termrsi plan experiment=NAME [key=value ...]                memory of each role, and what its time and cost would be:
                 [price=N] [json=true] [turns=N] [reply=N] [flops=N] ...       estimated, every assumption told

experiments: {experiments}
Any key of termrsi/config/schema.py and stages.py can be set: seed=1 stages.rpr_1.steps=8 run_dir=/data/run logger=wandb_offline.
A run that was stopped goes on at its first unfinished stage when the same command is given again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 it cannot be run as asked, 1 a fault on the way, 130 and 143 stopped by a signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except TermrsiError as error:
        cause = getattr(error, "cause", error)  # Ray wraps what an actor raised, with a traceback as its text
        print(f"termrsi: {type(cause).__name__}: {cause}", file=sys.stderr)  # noqa: T201 the one line a user gets
        return 2 if isinstance(cause, ConfigError) else 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        from termrsi.config.load import choices

        print(USAGE.format(experiments=", ".join(choices("experiment"))))  # noqa: T201 the answer of a command
        return 0
    if "=" not in arguments[0] and not arguments[0].startswith("-"):
        from termrsi import commands

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
