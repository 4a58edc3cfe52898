"""A vLLM worker extension that says which weights the engine really computes with.

On CPU, linear weights are repacked for oneDNN and the parameter is left empty, so a checksum over parameters proves nothing.
The probe pushes the identity matrix through each repacked layer: one product and zeros are summed, which is exact in bfloat16,
so the result is the weight bit for bit (-0.0 becomes +0.0; `canonical` does the same to the learner's side).
"""

import hashlib
from typing import Any

import torch

_PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def canonical(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes with negative zeros made positive."""
    flat = (tensor.detach().cpu().contiguous() + 0.0).view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(flat.data, digest_size=16).hexdigest()


class WeightProbe:
    """Methods are mixed into vLLM's worker (`worker_extension_cls`) and called by `collective_rpc`."""

    model_runner: Any  # vLLM's; its type depends on the platform

    def weight_digests(self) -> dict[str, str]:
        """Digest per tensor under its Hugging Face name, fused projections taken apart again."""
        found: dict[str, str] = {}
        model = self.model_runner.get_model()
        with torch.inference_mode():
            for name, module in model.named_modules():
                if hasattr(module, "weight") and isinstance(module.weight, torch.Tensor):
                    found |= _of_module(name, module)
        return found


def _of_module(name: str, module: Any) -> dict[str, str]:  # Any: vLLM layers share no public base with these fields
    weight = module.weight
    if weight.numel() == 0:
        width = getattr(module, "input_size_per_partition", module.input_size)
        eye = torch.eye(width, dtype=weight.dtype, device=weight.device)
        weight = module.cpu_linear(eye, module.weight, None).T
    parent, _, leaf = name.rpartition(".")
    if leaf not in _PACKED:
        return {f"{name}.weight": canonical(weight)}
    parts = weight.split(list(module.output_sizes), dim=0)
    return {f"{parent}.{part}.weight": canonical(w) for part, w in zip(_PACKED[leaf], parts, strict=True)}
