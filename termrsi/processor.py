"""Whether this machine's processor computes in bf16, as torch's and vLLM's libraries do on a CPU (oneDNN). Brings no torch.

Where it does not, products in bf16 fall back to loops, and float32 is several times faster (tests/bench/README.md).
"""

import platform
import re
from collections.abc import Set
from functools import cache
from pathlib import Path

_X86 = frozenset({"avx512bw", "avx512vl", "avx512dq"})  # as oneDNN asks: with less it has no bf16 kernels
_ARM = frozenset({"bf16"})


@cache
def has_bf16() -> bool:
    """Of the machine that asks. False where the system does not say."""
    try:
        return computes_bf16(Path("/proc/cpuinfo").read_text(), platform.machine())
    except OSError:
        return False


def compute(asked: str, *, gpu: bool) -> str:
    """ "bf16" or "fp32": what `model.compute` asks for, "auto" being bf16 where a GPU or this machine's processor has it."""
    if asked != "auto":
        return asked
    return "bf16" if gpu or has_bf16() else "fp32"


def computes_bf16(cpuinfo: str, machine: str) -> bool:
    """By the text of Linux's /proc/cpuinfo."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags: Set[str] = frozenset(found[1].split()) if found else frozenset()
    return (_ARM if machine in ("aarch64", "arm64") else _X86) <= flags
