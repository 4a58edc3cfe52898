"""An update of the learner against TRL's SFTTrainer: `python -m tests.bench.bench_learner [--layers N] [--checkpointing] ...`.

Same model (the embedded one, or its first `--layers` blocks), same samples, as many optimizer steps, float32 masters, the same
compute in both (`--compute`; unless said, what a run would take here), on the CPU. `--other`: ours in the other type as well.
Each arm in a process of its own, in turns; TRL's in .venv-peers, left out where that is missing. For each: tokens per second (all
tokens of the samples, over the median step but for the first), bytes after importing and after loading, and the peak. Memory is
compared by what a process takes beyond its imports.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
MIB = 2**20
OTHER = "other"  # the arm that computes in the other type

Row = tuple[list[int], list[int]]  # ids and mask


@dataclass(frozen=True, slots=True)
class Settings:
    """`steps` optimizer steps, the first of which warms up; `micro_tokens` of one forward and backward pass, padding included."""

    model: str
    samples: list[Row]
    micro_tokens: int = 1024
    steps: int = 3
    checkpointing: bool = False
    threads: int = 2
    compute: str = "bf16"
    lr: float = 1e-6
    scratch: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one process: seconds and loss of each step; bytes in memory after importing, after loading, and at most from there on."""

    seconds: list[float]
    losses: list[float]
    imported: int
    loaded: int
    peak: int


def samples(num: int, longest: int, vocabulary: int = 40_000, seed: int = 0) -> list[Row]:
    """Episodes from a quarter of `longest` to all of it: a prompt, then turns of which 40 % is action."""
    draw, made = random.Random(seed), []
    for i in range(num):
        length = longest - (3 * longest // 4) * i // max(1, num - 1)
        mask = [0] * (length // 4)
        while len(mask) < length:
            mask += [1] * 20 + [0] * 30
        mask[length - 1 :] = [1]
        made.append(([draw.randrange(100, vocabulary) for _ in mask], mask))
    draw.shuffle(made)
    return made


def truncated(model: Path, layers: int, target: Path) -> Path:
    """`model` with its first `layers` blocks."""
    import torch
    from transformers import AutoModelForCausalLM

    from termrsi.model.checkpoint import copy_tokenizer
    from termrsi.model.critic import keep_layers

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, local_files_only=True)
    body: Any = module.base_model  # Any: typed as a module of any kind
    keep_layers(body, layers, str(model))
    module.save_pretrained(target)
    copy_tokenizer(model, target)
    return target


def play(arm: str, settings: Settings) -> Measured:
    """One arm in its own process. Raises CalledProcessError with what it wrote."""
    python = str(PEERS) if arm == "trl" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "settings.json", Path(folder) / "found.json"
        compute = settings.compute if arm != OTHER else "fp32" if settings.compute == "bf16" else "bf16"
        given.write_text(json.dumps(asdict(settings) | {"scratch": folder, "compute": compute}))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CI": "1"}
        side = "trl" if arm == "trl" else "ours"
        command = [python, str(ROOT / "tests" / "bench" / "learner_side.py"), side, str(given), str(found)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{arm} failed: {done.stderr[-2000:]}")
        return Measured(**json.loads(found.read_text()))


def measure(settings: Settings, repeats: int, *, other: bool = False) -> dict[str, list[Measured]]:
    """`other`: ours in the other type as well."""
    arms = ["ours", *(["trl"] if PEERS.is_file() else []), *([OTHER] if other else [])]
    found: dict[str, list[Measured]] = {arm: [] for arm in arms}
    for _ in range(repeats):
        for arm in arms:
            found[arm].append(play(arm, settings))
    return found


def summary(settings: Settings, found: dict[str, list[Measured]]) -> dict[str, dict[str, float]]:
    """Medians over repeats: tokens/s, MiB after imports, MiB beyond them after loading and at the peak, loss of the first step."""
    tokens = sum(len(ids) for ids, _ in settings.samples)
    return {
        arm: {
            "tokens_s": tokens / statistics.median(second for one in runs for second in one.seconds[1:]),
            "imported_mib": statistics.median(one.imported for one in runs) / MIB,
            "loaded_mib": statistics.median(one.loaded - one.imported for one in runs) / MIB,
            "peak_mib": statistics.median(one.peak - one.imported for one in runs) / MIB,
            "loss": runs[0].losses[0],
        }
        for arm, runs in found.items()
    }


def table(figures: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(figures.values())))
    lines = [f"{'':8}" + "".join(f"{name:>14}" for name in names)]
    lines += [f"{arm:8}" + "".join(f"{of[name]:14.2f}" for name in names) for arm, of in figures.items()]
    if "trl" in figures:
        speed, memory = (figures["ours"][name] / figures["trl"][name] for name in ("tokens_s", "peak_mib"))
        lines.append(f"ours / TRL: tokens/s {speed:.2f}, peak beyond imports {memory:.2f}")
    if OTHER in figures:
        lines.append(f"ours / ours in the other type: tokens/s {figures['ours']['tokens_s'] / figures[OTHER]['tokens_s']:.2f}")
    return "\n".join(lines)


def main() -> None:
    from termrsi import processor
    from termrsi.model.checkpoint import embedded_model
    from termrsi.places import cache_dir

    parser = argparse.ArgumentParser()
    for name, value in (("layers", 0), ("repeats", 3), ("num", 12), ("longest", 512), ("micro-tokens", 1024), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("checkpointing", "other"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--compute", choices=("bf16", "fp32"), default="bf16" if processor.has_bf16() else "fp32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = embedded_model(cache_dir() / "models")
        model = truncated(model, args.layers, Path(folder) / "model") if args.layers else model
        rows = samples(args.num, args.longest)
        settings = Settings(str(model), rows, args.micro_tokens, args.steps, args.checkpointing, compute=args.compute)
        sys.stdout.write(f"{args.compute}\n{table(summary(settings, measure(settings, args.repeats, other=args.other)))}\n")
    if not PEERS.is_file():
        sys.stdout.write("TRL is left out: launch/test.sh makes .venv-peers where it can\n")


if __name__ == "__main__":
    main()
