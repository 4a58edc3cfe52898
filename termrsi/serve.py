"""`termrsi serve CHECKPOINT`: vLLM's own OpenAI-compatible server on a policy that a run left, with a run's engine settings."""

import importlib.util
import os
import sys
from pathlib import Path

from termrsi.errors import ConfigError

VALID = (
    "termrsi serve CHECKPOINT [host=127.0.0.1] [port=8000] [name=NAME] [max_model_len=N] [max_num_seqs=N] [threads=N] "
    "[kv_cache_gib=N] [eager=true]"
)
NUMBERS = ("port", "max_model_len", "threads", "kv_cache_gib", "max_num_seqs")


def run(arguments: list[str]) -> int:
    """Does not return: the server takes this process over. Raises ConfigError."""
    argv, environment = command(arguments)
    os.execve(argv[0], argv, environment)


def command(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The server's command line and environment. Raises ConfigError."""
    if not arguments or "=" in arguments[0]:
        raise ConfigError("needs the directory of a checkpoint", "termrsi serve", VALID)
    checkpoint, words = Path(arguments[0]), arguments[1:]
    if not (checkpoint / "config.json").is_file():
        nested = checkpoint / "policy"
        near = f"did you mean {nested}?" if (nested / "config.json").is_file() else "valid: a Hugging Face model directory"
        raise ConfigError(f"no config.json in {str(checkpoint)!r}", "termrsi serve", near)
    given = {"host": "127.0.0.1", "port": "8000", "name": checkpoint.absolute().name, "eager": "false"}
    known = (*given, *NUMBERS)
    for word in words:
        key, found, value = word.partition("=")
        if not found or key not in known:
            raise ConfigError(f"unknown option {word!r}", "termrsi serve", VALID)
        if key in NUMBERS and not (value.isdigit() and int(value) > 0):
            raise ConfigError(f"{key} is {value!r}", "termrsi serve", "valid: a whole number from 1 on")
        if key == "eager" and value not in ("true", "false"):
            raise ConfigError(f"eager is {value!r}", "termrsi serve", "valid: true (starts sooner, answers later) or false")
        given[key] = value
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vllm is not installed", "termrsi serve", "pip install 'termrsi[cpu]' or 'termrsi[gpu]'")
    from vllm.platforms import current_platform

    from termrsi.actors.generator import EngineOptions, engine_arguments, engine_environment

    numbers = {key: int(given[key]) for key in NUMBERS if key in given and key != "port"}
    options = EngineOptions(**numbers, enforce_eager=given["eager"] == "true")  # pyright: ignore[reportArgumentType]  # names and types are those of NUMBERS
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", given["host"], "--port", given["port"]]
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
