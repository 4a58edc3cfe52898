"""A vLLM worker extension that loads weights bucket by bucket, and proves which ones the engine really computes with.

A load proves every byte that comes (its digest, in the process that loads it), then what the layers compute with: all of it once in
an engine's life, later some columns of each matrix, others at each version. On CPU, linear weights are repacked for oneDNN and the
parameter is left empty, or is no longer what is computed with: a checksum over parameters proves nothing. Columns of the identity
matrix go through each repacked layer: one product and zeros are summed, which is exact, so the result is the weight bit
for bit (-0.0 becomes +0.0; `weights.canonical` does the same to the learner's side). Parts of a layer that several workers share
(tensor parallelism), and experts, cannot be set beside the learner's: of those it is proved that their bytes came.
"""

import mmap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from termrsi import weights
from termrsi.actors.buckets import Slot

_PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(slots=True)
class _Load:
    """A load under way: what is loaded into, and what must be found after it."""

    version: int
    columns: int
    targets: list[Any]  # Any: modules of vLLM
    groups: tuple[str, ...] | None  # what they are called; None: the whole model, under whatever names it has them
    expected: dict[str, str] = field(default_factory=dict)


class WeightProbe:
    """Methods are mixed into vLLM's worker (`worker_extension_cls`) and called by `collective_rpc`."""

    model_runner: Any  # vLLM's; its type depends on the platform
    vllm_config: Any
    _termrsi_load: _Load | None = None

    def begin_load(self, version: int, groups: Sequence[str], columns: int) -> None:
        """The modules `groups` (none: the whole model) will be loaded. `columns`: of each matrix, to prove; 0: all."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        modules = dict(model.named_modules())
        # A name of Hugging Face's that this model does not have: vLLM finds its places alone, among all of them.
        known = bool(groups) and all(group in modules for group in groups)
        targets = [modules[group] for group in groups] if known else [model]
        with set_current_vllm_config(self.vllm_config):
            for target in targets:
                initialize_layerwise_reload(target)
        self._termrsi_load = _Load(version, columns, targets, tuple(groups) if known else None)

    def take_bucket(self, path: str, slots: Sequence[Sequence[Any]]) -> str:
        """Load one bucket; what is wrong with it, or nothing. Its memory may be used again on return."""
        from vllm.config import set_current_vllm_config

        load = self._termrsi_load
        assert load is not None, "`begin_load` comes first"
        found = [Slot(*slot) for slot in slots]
        with Path(path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)  # ends with the last tensor over it
        for slot in found:
            if weights.digest_of(memoryview(mapped)[slot.start : slot.start + slot.size_bytes]) != slot.digest:
                return f"tensor {slot.name}: other bytes came than were published"
        tensors = dict(_mapped(mapped, found))
        load.expected |= {name: weights.sample_digest(one, load.version, load.columns) for name, one in tensors.items()}
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(iter(tensors.items()))
            _keep(load.targets, mapped)
        return ""

    def end_load(self) -> tuple[str, list[str]]:
        """What is wrong, or nothing; and the names of tensors that cannot be proved (shards, those fused in an unknown way)."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        load = self._termrsi_load
        assert load is not None, "`begin_load` comes first"
        model = self.model_runner.get_model()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            for target in load.targets:
                finalize_layerwise_reload(target, self.vllm_config.model_config)
            _repack_tied(model, load.groups)
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()
        self._termrsi_load = None
        return self._proved(load.expected, load.version, load.columns, load.groups)

    def repack_tied(self) -> None:
        """After a load by vLLM alone (see `_repack_tied`)."""
        with torch.no_grad():
            _repack_tied(self.model_runner.get_model())

    def prove(self, expected: dict[str, str], version: int, columns: int) -> tuple[str, list[str]]:
        """As `end_load`, of what is expected by name at this version."""
        return self._proved(expected, version, columns, None)

    def _proved(
        self, expected: dict[str, str], version: int, columns: int, groups: Collection[str] | None
    ) -> tuple[str, list[str]]:
        proved = set()
        with torch.inference_mode():
            for name, found in _held(self.model_runner.get_model(), version, columns, groups):
                if name in expected and found != expected[name]:
                    return f"tensor {name} differs between learner and engine after a pull", []
                proved.add(name)
        return "", [name for name in expected if name not in proved]

    def weight_digests(self) -> dict[str, str]:
        """Digest of each whole tensor under its Hugging Face name, fused projections taken apart again."""
        with torch.inference_mode():
            return dict(_held(self.model_runner.get_model(), 0, 0))


def _mapped(mapped: mmap.mmap, slots: Sequence[Slot]) -> Iterator[tuple[str, torch.Tensor]]:
    for slot in slots:
        data = np.frombuffer(mapped, np.uint8, slot.size_bytes, slot.start)
        yield slot.name, weights.as_tensor(data, slot.dtype, slot.shape)


def _keep(targets: Sequence[Any], mapped: mmap.mmap) -> None:
    """Own copies of what vLLM puts off to the end of the load, such as a vocabulary that it fills up: the bucket is used again."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    first = np.frombuffer(mapped, np.uint8).ctypes.data
    for module in {module for target in targets for module in target.modules()}:
        for _, bound in get_layerwise_info(module).loaded_weights:
            for key, value in bound.arguments.items():
                if isinstance(value, torch.Tensor) and first <= value.data_ptr() < first + len(mapped):
                    bound.arguments[key] = value.clone()


def _held(model: torch.nn.Module, version: int, columns: int, groups: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
    """Names and digests of what the modules of `groups` (None: all) compute with, whole tensors only; one that is tied
    to another is told under the other's name."""
    first: dict[int, str] = {}  # a weight, and the module that had it first
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or getattr(module, "tp_size", 1) > 1:
            continue
        name = first.setdefault(id(weight), name)
        if groups is not None and weights.group_of(f"{name}.weight") not in groups:
            continue
        yield from _split(f"{name}.weight", module, _columns(module, weight, version, columns))
        if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
            yield from _split(f"{name}.bias", module, bias.to(weight.dtype))


def _columns(module: Any, weight: torch.Tensor, version: int, columns: int) -> torch.Tensor:  # Any: vLLM layers, here and below
    """Those that are proved at this version, of what the module computes with."""
    if hasattr(module, "cpu_linear"):
        width = weight.shape[1] if weight.numel() else module.input_size
        start, count = weights.sample_of(width, version, columns)
        unit = torch.zeros(count, width, dtype=weight.dtype, device=weight.device)
        unit[range(count), range(start, start + count)] = 1.0
        cut = module.cpu_linear(unit, weight, None).T
    elif weight.dim() > 1:
        start, count = weights.sample_of(weight.shape[-1], version, columns)
        cut = weight[..., start : start + count]
    else:
        return weight
    rows = getattr(module, "org_vocab_size", None)  # vLLM fills a vocabulary up
    return cut if rows is None else cut[:rows]


def _split(full: str, module: Any, tensor: torch.Tensor) -> Iterator[tuple[str, str]]:
    name, _, kind = full.rpartition(".")
    parent, _, leaf = name.rpartition(".")
    if leaf not in _PACKED:
        yield full, weights.canonical(_as_published(tensor))
        return
    for part, own in zip(_PACKED[leaf], tensor.split(list(module.output_sizes), dim=0), strict=True):
        yield f"{parent}.{part}.{kind}", weights.canonical(_as_published(own))


def _as_published(tensor: torch.Tensor) -> torch.Tensor:
    """Of an engine that computes in float32: in bf16, as weights are published, if it is that to the bit; else as it is."""
    half = tensor.to(torch.bfloat16)
    return half if tensor.dtype == torch.float32 and torch.equal(half.float(), tensor) else tensor


def _repack_tied(model: torch.nn.Module, groups: Collection[str] | None = None) -> None:
    """Of modules tied to one of `groups` (None: any). A head that is tied to the embedding computes, on CPU, with a packed copy of
    its own, which no load of vLLM's renews."""
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.numel():
            continue
        owner = first.setdefault(id(weight), name)
        if owner != name and hasattr(module, "cpu_linear") and (groups is None or weights.group_of(f"{owner}.weight") in groups):
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator]  # a layer of vLLM's has one
