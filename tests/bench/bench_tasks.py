"""How long a large collection takes to load: `python -m tests.bench.bench_tasks [TASKS]`. Against reading the same files alone."""

import sys
import tempfile
import time
from pathlib import Path

from termrsi import tasks

CONFIG = """version = "1.0"
[metadata]
difficulty = "easy"
category = "files"
[verifier]
timeout_sec = 240.0
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
cpus = 1
memory = "2G"
storage = "10G"
"""
FILES = {
    "task.toml": CONFIG,
    "instruction.md": "Make a file.\n" * 20,
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY data /app/data\n",
    "environment/data": "x\n",
    "tests/test.sh": "#!/bin/bash\n" + "true\n" * 30,
    "tests/test_outputs.py": "def test_a():\n    pass\n" * 10,
    "solution/solve.sh": "#!/bin/bash\ntrue\n",
}


def make(root: Path, count: int) -> None:
    for number in range(count):
        for name, text in FILES.items():
            path = root / f"task-{number:05d}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def measure(count: int) -> dict[str, float]:
    """Seconds to load `count` tasks, and to read their files alone; how many came out."""
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), count)
        start = time.perf_counter()
        for path in Path(name).rglob("*"):
            if path.is_file():
                path.read_bytes()
        read_s = time.perf_counter() - start
        start = time.perf_counter()
        found = tasks.load_dir(name)
        return {"load_s": time.perf_counter() - start, "read_s": read_s, "tasks": len(found.tasks), "refused": len(found.skipped)}


if __name__ == "__main__":
    figures = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    said = "  ".join(f"{name} {value:.2f}" for name, value in figures.items())
    sys.stdout.write(f"{said}  ratio {figures['load_s'] / figures['read_s']:.1f}\n")
