# pyright: reportMissingImports=false
"""What verl's and TRL's own functions say, for tests and a benchmark that compare with them. Run by the interpreter of
.venv-peers: `python peer_side.py VERB PATH ...`; every PATH is an .npz of arrays, and the answer lies beside it as NAME.VERB.npz.

verl PATH ...       advantages, group advantages, losses with their gradients, value loss, KL estimators and TIS weights
trl PATH ...        losses with their gradients
time PATH REPEATS   verl's GAE on one batch: its returns, and in `seconds` how long each call took

Only the modules with the formulas are loaded. Stand-ins take the place of what these import and the formulas do not use:
loading all of either package would need ten more, some of them large.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, MutableSequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, Any]  # Tensor, or a float for a number


class StandIn(types.ModuleType):
    """Has every public name: a class without anything."""

    __path__: MutableSequence[str] = []  # noqa: RUF012 a module's own

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of the modules named, and of those below them."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


@functools.cache
def verl_algorithms() -> Any:  # Any: verl's module
    """`verl.trainer.ppo.core_algos`, without the `__init__` of the packages that would load the rest of verl."""
    sys.meta_path.insert(0, StandIns("tensordict", "verl.protocol", "verl.workers.config"))
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for name, place in {"verl": root, "verl.utils": root / "utils"}.items():
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(place)]
    from verl.utils import groupwise

    for name in ("as_torch_index", "group_mean_std"):
        setattr(sys.modules["verl.utils"], name, getattr(groupwise, name))
    from verl.trainer.ppo import core_algos

    return core_algos


def loss_and_gradient(loss: Callable[[Tensor], Tensor], at: Tensor, name: str) -> Arrays:
    point = at.clone().requires_grad_()
    value = loss(point)
    value.backward()
    return {name: value.detach(), f"{name} gradient": point.grad}


def verl(x: Arrays) -> Arrays:
    core = verl_algorithms()
    out: Arrays = {}
    out["advantages"], out["returns"] = core.compute_gae_advantage_return(
        x["rewards"], x["values"], x["mask"], x["gamma"], x["lam"]
    )
    outcomes = x["outcomes"][:, None]  # responses of one token
    for name, normalise in (("group", True), ("group centred", False)):
        found, _ = core.compute_grpo_outcome_advantage(
            outcomes, torch.ones_like(outcomes), x["groups"].numpy(), norm_adv_by_std_in_grpo=normalise
        )
        out[name] = found[:, 0]
    out |= _verl_losses(core, x)
    out["value"], _ = core.compute_value_loss(x["new_values"], x["targets"], x["values"], x["mask"], x["value_clip"])
    for kind in ("k1", "abs", "k2", "k3"):
        out[kind] = core.kl_penalty(x["sampler_logp"], x["logp"], kind)
    return out


def _verl_losses(core: Any, x: Arrays) -> Arrays:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    class Settings(core.ActorConfig):
        """What the loss functions read of an actor's configuration."""

        clip_ratio, clip_ratio_low, clip_ratio_high = x["clip_low"], x["clip_low"], x["clip_high"]
        clip_ratio_c = 1e9  # dual clip out of reach: that of the paper has none

        def __init__(self, **changed: object) -> None:
            self.global_batch_info: dict[str, object] = {}
            self.__dict__.update(changed)

        def get(self, name: str, default: object) -> object:
            return getattr(self, name, default)

    def loss(
        name: str, kind: str, mode: str, weights: Tensor | None = None, advantages: str = "advantages", **changed: Any
    ) -> Arrays:
        function, config = core.get_policy_loss_fn(kind), Settings(**changed)
        return loss_and_gradient(
            lambda logp: function(x["old_logp"], logp, x[advantages], x["mask"], mode, config, weights)[0], x["logp"], name
        )

    weights, _ = compute_rollout_correction_weights(
        x["old_logp"] - x["sampler_logp"], x["mask"], rollout_is="token", rollout_is_threshold=x["tis_cap"]
    )
    whole = {"batch_num_tokens": x["batch_tokens"], "global_batch_size": x["batch_rollouts"]}
    divergence = {"clip_ratio_low": x["delta"], "clip_ratio_high": x["delta"]}
    max_tokens = {"loss_scale_factor": x["max_tokens"]}
    return (
        {"tis": weights}
        | loss("ppo", "vanilla", "token-mean")
        | loss("ppo dual", "vanilla", "token-mean", clip_ratio_c=x["dual_clip"])
        | loss("ppo tis", "vanilla", "token-mean", weights)
        | loss("ppo of more", "vanilla", "token-mean", global_batch_info=whole)
        | loss("grpo", "vanilla", "seq-mean-token-mean")
        | loss("grpo of more", "vanilla", "seq-mean-token-mean", global_batch_info=whole)
        | loss("dr_grpo", "vanilla", "seq-mean-token-sum-norm", global_batch_info=max_tokens)
        | loss("gspo", "gspo", "seq-mean-token-mean", advantages="row_advantages")
        | loss("gspo by token", "gspo", "seq-mean-token-mean")
        | loss("dppo tv", "dppo_tv", "token-mean", **divergence)
        | loss("dppo kl", "dppo_kl", "token-mean", **divergence)
    )


class Trainer:
    """What `GRPOTrainer._compute_loss` reads of its trainer: one process that evaluates, so that nothing is accumulated."""

    aux_loss_enabled = _entropy_bonus_enabled = use_vllm = False
    top_entropy_quantile, off_policy_mask_threshold, beta = 1.0, None, 0.0
    args = types.SimpleNamespace(delta=None)
    model = types.SimpleNamespace(training=False)
    accelerator = types.SimpleNamespace(num_processes=1, gather=lambda found: found, reduce=lambda found, reduction: found)

    def __init__(self, x: Arrays, loss_type: str, level: str) -> None:
        self.loss_type, self.importance_sampling_level = loss_type, level
        self.epsilon_low, self.epsilon_high, self.max_completion_length = x["clip_low"], x["clip_high"], x["max_tokens"]
        self._metrics: dict[str, dict[str, list[float]]] = {"eval": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, model: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor, None]:
        return model, torch.zeros_like(model), None


def trl(x: Arrays) -> Arrays:
    from trl.trainer.grpo_trainer import GRPOTrainer

    ids = torch.zeros_like(x["mask"])
    inputs = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": ids[:, :0],
        "completion_ids": ids,
        "completion_mask": torch.ones_like(ids),
        "tool_mask": x["mask"],
        "old_per_token_logps": x["old_logp"],
        "num_items_in_batch": x["mask"].sum(),
    }
    out: Arrays = {}
    for name, loss_type, level, advantages in (
        ("grpo", "grpo", "token", "advantages"),
        ("ppo", "bnpo", "token", "advantages"),
        ("dapo", "dapo", "token", "advantages"),
        ("dr_grpo", "dr_grpo", "token", "advantages"),
        ("gspo", "grpo", "sequence", "row_advantages"),
    ):
        trainer, given = Trainer(x, loss_type, level), inputs | {"advantages": x[advantages]}
        out |= loss_and_gradient(lambda logp: GRPOTrainer._compute_loss(trainer, logp, given), x["logp"], name)  # noqa: B023 called at once
    return out


def timed(x: Arrays, repeats: int) -> Arrays:
    compute, seconds = verl_algorithms().compute_gae_advantage_return, []
    returns = x["values"]
    for _ in range(repeats):
        start = time.perf_counter()
        _, returns = compute(x["rewards"], x["values"], x["mask"], x["gamma"], x["lam"])
        seconds.append(time.perf_counter() - start)
    return {"returns": returns, "seconds": torch.tensor(seconds)}


def read(path: str) -> Arrays:
    with np.load(path) as stored:
        return {name: array.item() if array.ndim == 0 else torch.from_numpy(array) for name, array in stored.items()}


def write(path: str, verb: str, found: Arrays) -> None:
    arrays = {name: tensor.detach().numpy() for name, tensor in found.items()}
    np.savez(Path(path).with_suffix(f".{verb}.npz"), **arrays)


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    if verb == "time":
        write(paths[0], verb, timed(read(paths[0]), int(paths[1])))
        sys.exit()
    if verb == "trl":
        sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]: says that it is not installed; loading it takes longest
        sys.meta_path.append(StandIns("datasets", "pandas", "pyarrow"))
    for path in paths:
        write(path, verb, {"verl": verl, "trl": trl}[verb](read(path)))
