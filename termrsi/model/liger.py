"""Liger's fused Triton kernels (arXiv 2410.10989) in place of a model's norms, rotary embedding and gated layers: learners on GPUs.

Head and loss stay ours (`model.logprob`): Liger's are of next-token losses. Sums within a kernel run in another order, so that
numbers agree to rounding. Liger changes the classes of a family for the whole process, which is a learner's own.
"""

import importlib.util

from transformers import PreTrainedModel

from termrsi.errors import ConfigError

KEY = "model.liger"


def installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def fuse(module: PreTrainedModel) -> None:
    """In place, before adapters are injected. Raises ConfigError if the package is missing, or knows no kernels for the family."""
    if not installed():
        raise ConfigError("liger-kernel is not installed", KEY, "pip install 'termrsi[gpu]', or false")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family = module.config.model_type
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"Liger has no kernels for {family}", KEY, "false")
    _apply_liger_kernel_to_instance(model=module, cross_entropy=False, fused_linear_cross_entropy=False)
