"""Liger's kernels on a CPU, in Triton's interpreter, beside transformers' own layers: run by `tests/contract/test_liger.py`.

The interpreter must be asked for before Triton is imported, so this is a program: it prints what both learners found as JSON.
"""

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from termrsi.model.critic import CriticModel
from termrsi.model.lora import Lora
from termrsi.model.policy import PolicyModel
from termrsi.records import Sample, UpdateMetrics


def teach_the_interpreter() -> None:
    """Two things that it lacks (Triton 3.9): numbers with a point as arguments, and `rsqrt` of CUDA's library."""
    import liger_kernel.ops.rms_norm as norms

    known = interpreter._implicit_cvt

    def converted(given: Any) -> Any:  # Any: Triton's own
        if isinstance(given, float):
            return tl.tensor(interpreter.TensorHandle(np.array([given], np.float32), tl.float32), tl.float32)
        return known(given)

    interpreter._implicit_cvt = converted
    norms.rsqrt = lambda x: 1.0 / tl.sqrt(x)


def samples() -> list[Sample]:
    g = torch.Generator().manual_seed(0)
    made = []
    for i in range(2):
        ids = tuple(torch.randint(0, 256, (8 + 3 * i,), generator=g).tolist())
        mask = tuple(int(k >= 4) for k in range(len(ids)))
        told = tuple((torch.randn(len(ids), generator=g) * torch.tensor(mask)).tolist())
        nothing = (0.0,) * len(ids)
        more = {"advantages": told, "returns": told, "old_values": nothing, "rollout_id": f"r{i}", "group_id": "g"}
        made.append(Sample(ids, mask, (0,) * len(ids), **more))
    return made


def main(model: str) -> None:
    """Plain first: Liger puts its classes into the modules of transformers."""
    teach_the_interpreter()
    found: dict[str, dict[str, Any]] = {}  # Any: JSON
    cases: dict[str, dict[str, Any]] = {"whole": {}, "recomputed": {"gradient_checkpointing": True}}  # Any: arguments of the model
    cases["adapters"] = {"adapters": Lora(4)}
    for kind, liger in (("plain", False), ("fused", True)):
        for name, more in cases.items():
            policy = PolicyModel(model, compute="fp32", liger=liger, **more)
            before, step = policy.logp(samples()), policy.fit(samples(), 1e-3)
            layer = policy._module.get_submodule("model.norm").forward.__qualname__
            found[f"{name} {kind}"] = told(before, step, policy.logp(samples()), layer)
        critic = CriticModel(model, compute="fp32", liger=liger)
        before, step = critic.values(samples()), critic.update(samples(), 1e-3, 0.2)
        found[f"critic {kind}"] = told(
            before, step, critic.values(samples()), critic._body.get_submodule("norm").forward.__qualname__
        )
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def told(before: list[list[float]], step: UpdateMetrics, after: list[list[float]], layer: str) -> dict[str, Any]:  # Any: JSON
    return {"before": before, "loss": step.loss, "norm": step.grad_norm, "after": after, "layer": layer}


if __name__ == "__main__":
    main(sys.argv[1])
