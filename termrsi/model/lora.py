"""Low-rank adapters (LoRA, arXiv 2106.09685) through PEFT, trained in place of a policy's weights: W + alpha / rank x B A.

What leaves the learner is merged: one tensor at a time, in float32 from the adapters' masters, cast to bf16 once, under the names
that the model has without adapters. So publishing, checksums, saved directories and engines know nothing of them.
The adapters lie in `adapter/` of a saved policy, as PEFT reads them. They are of the model that the learner began with, its base,
however many stages have trained them: that directory loaded again is the same base with these adapters, and nothing was rounded.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from termrsi.errors import ConfigError
from termrsi.model.masters import Compute
from termrsi.model.ranks import whole

FOLDER, CONFIG, WEIGHTS = "adapter", "adapter_config.json", "adapter_model.safetensors"
_BASE = ".base_layer"  # where PEFT puts the layer that has an adapter
_NAME = ".default"  # PEFT's name for the only adapter; not in its files
_PREFIX = "base_model.model."  # of names in PEFT's files


@dataclass(frozen=True, slots=True)
class Lora:
    """`targets`: last names of the linear layers that get adapters; empty: all but the head, as arXiv 2305.14314 has it.

    `alpha`: as Schulman et al., LoRA Without Regret (2025), where 32 lets one learning rate do for all ranks.
    There is no dropout: it would make every ratio noisy (see `policy`). `seed`: of A; B begins at 0.
    """

    rank: int
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Base:
    """What the adapters are of. `checksum`: of its bf16 weights; `targets`: the names that get adapters."""

    directory: Path
    checksum: str
    targets: tuple[str, ...]


def inject(module: PreTrainedModel, lora: Lora, *, compute: Compute) -> tuple[str, ...]:
    """Adapters in place, float32 and alone trained; the rest frozen, rounded to bf16, and kept so unless `compute` is "fp32".

    The same in every process. Returns the last names of the layers that have one. Raises ConfigError on a name that is no linear
    layer, and on experts (their weights are no linear layers) unless `targets` names what else gets adapters.
    """
    targets = _targets(module, lora)
    _cast(module, torch.bfloat16)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets))  # pyright: ignore[reportArgumentType]: int
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        inject_adapter_in_model(config, module)
    if compute == "fp32":
        _cast(module, torch.float32)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    module.eval()
    return targets


def merged(state: Mapping[str, Tensor], adapters: Mapping[str, Tensor], lora: Lora) -> Iterator[tuple[str, Tensor]]:
    """The bf16 weights of a module with adapters, under its names without them, one at a time.

    `adapters`: their float32 masters, whole. Where the module is cut every process goes through all of it, and those without
    `adapters` get the base's.
    """
    for name, tensor in state.items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        half = tensor.detach().to(torch.bfloat16)
        layer = name.removesuffix(f"{_BASE}.weight")
        if layer == name or not adapters:
            yield name.replace(f"{_BASE}.", "."), half
            continue
        a, b = (adapters[f"{layer}.lora_{part}{_NAME}.weight"].to(half.device) for part in "AB")
        yield f"{layer}.weight", add(whole(half).float(), a, b, lora).to(torch.bfloat16)


def add(weight: Tensor, a: Tensor, b: Tensor, lora: Lora) -> Tensor:
    """`weight` `[out, in]`, float32, with alpha / rank x `b` `[out, r]` `a` `[r, in]` added in place."""
    return weight.addmm_(b, a, alpha=lora.alpha / lora.rank)


def write(policy: Path, adapters: Mapping[str, Tensor], lora: Lora, base: Base) -> None:
    """The adapters beside merged weights, in `adapter/`: what PEFT's `from_pretrained` puts on the base."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]: PEFT's own annotation is int
        target_modules=list(base.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base.directory),
        inference_mode=True,
    )
    config.save_pretrained(str(policy / FOLDER))
    tensors = {_PREFIX + name.replace(f"{_NAME}.", "."): tensor.cpu().contiguous() for name, tensor in adapters.items()}
    save_file(tensors, policy / FOLDER / WEIGHTS, metadata={"format": "pt", "base": base.checksum})


def read(policy: Path, lora: Lora, base: Base) -> dict[str, Tensor] | None:
    """What `write` left there, by the names of the learner's masters; None where it is not of this base and these settings."""
    folder = policy / FOLDER
    if not (folder / WEIGHTS).is_file():
        return None
    asked = (lora.rank, lora.alpha, sorted(base.targets))
    with safe_open(folder / WEIGHTS, "pt") as file:
        if (file.metadata() or {}).get("base") != base.checksum:
            return None
        found = json.loads((folder / CONFIG).read_text())
        if (found["r"], found["lora_alpha"], sorted(found["target_modules"])) != asked:
            return None
        return {_own(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def _own(name: str) -> str:
    return name.removeprefix(_PREFIX).removesuffix(".weight") + f"{_NAME}.weight"


def _targets(module: PreTrainedModel, lora: Lora) -> tuple[str, ...]:
    head = module.get_output_embeddings()
    linear = {name.rpartition(".")[2] for name, part in module.named_modules() if isinstance(part, nn.Linear) and part is not head}
    experts = any("experts" in name.split(".") for name, _ in module.named_parameters())
    if experts and not lora.targets:
        raise ConfigError("experts get no adapters", "model.lora_targets", f"name what does, of {', '.join(sorted(linear))}")
    if odd := [name for name in lora.targets if name not in linear]:
        raise ConfigError(f"no linear layer is called {odd[0]!r}", "model.lora_targets", f"of {', '.join(sorted(linear))}")
    return tuple(sorted(set(lora.targets or linear)))


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: frequencies of positions are buffers, and in bf16 they would be others."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
