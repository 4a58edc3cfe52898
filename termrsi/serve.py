"""`termrsi serve CHECKPOINT`: vLLM's own OpenAI-compatible server on a policy that a run left, with a run's engine settings."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from termrsi.errors import ConfigError
from termrsi.options import FLAG, NUMBER, Option, Verb

VERB = Verb(
    "serve",
    "CHECKPOINT",
    "an OpenAI-compatible server on a policy",
    (
        Option("host", "ADDRESS", "127.0.0.1 if not given"),
        Option("port", NUMBER, "8000 if not given"),
        Option("name", "NAME", "as clients call the model; its directory's if not given"),
        Option("max_model_len", NUMBER, "tokens of a conversation"),
        Option("max_num_seqs", NUMBER, "conversations at once"),
        Option("threads", NUMBER, "of the engine on processors"),
        Option("kv_cache_gib", NUMBER, "of the cache on processors"),
        Option("eager", FLAG, "true: starts sooner, answers later"),
    ),
)
ENGINE = ("max_model_len", "max_num_seqs", "threads", "kv_cache_gib")


def run(arguments: list[str]) -> int:
    """Does not return: the server takes this process over. Raises ConfigError."""
    argv, environment = command(arguments)
    os.execve(argv[0], argv, environment)


def command(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The server's command line and environment. Raises ConfigError."""
    if not arguments or "=" in arguments[0]:
        raise ConfigError("needs the directory of a checkpoint", "termrsi serve", "as in termrsi serve RUN_DIR/stages/sft/policy")
    checkpoint, words = Path(arguments[0]), arguments[1:]
    if not (checkpoint / "config.json").is_file():
        nested = checkpoint / "policy"
        near = f"did you mean {nested}?" if (nested / "config.json").is_file() else "valid: a Hugging Face model directory"
        raise ConfigError(f"no config.json in {str(checkpoint)!r}", "termrsi serve", near)
    given: dict[str, Any] = {"host": "127.0.0.1", "port": 8000, "name": checkpoint.absolute().name, "eager": False}
    given |= VERB.read(words)
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vllm is not installed", "termrsi serve", "pip install 'termrsi[cpu]' or 'termrsi[gpu]'")
    from vllm.platforms import current_platform

    from termrsi.actors.generator import EngineOptions, engine_arguments, engine_environment

    numbers = {key: given[key] for key in ENGINE if key in given}
    options = EngineOptions(**numbers, enforce_eager=given["eager"])
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", given["host"], "--port", str(given["port"])]
    argv += ["--served-model-name", given["name"], "--enable-prompt-tokens-details"]  # the latter: tokens served from the cache
    for key, value in engine_arguments(str(checkpoint), options, on_cpu=current_platform.is_cpu()).items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv += [f"--{flag}", str(value)]
    environment = engine_environment(options)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # the server keeps its engine in a process of its own
    return argv, {**os.environ, **environment}
