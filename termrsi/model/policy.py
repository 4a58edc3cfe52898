"""The learner's policy: a Hugging Face causal LM, plain torch. Samples in; log-probabilities, updates and weights out.

It owns its parameters and its optimizer and knows nothing of actors. `termrsi.ports.Policy` is this with `async` and `publish`.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from termrsi.algo import batch as batching
from termrsi.algo import loss as losses
from termrsi.algo import metrics
from termrsi.algo import whole as of_batch
from termrsi.errors import CheckpointError, ConfigError
from termrsi.model import checkpoint, lora
from termrsi.model.learning import (
    enable_checkpointing,
    learn,
    load_module,
    place,
    return_freed_memory,
    save_training,
    split,
    untied_state,
)
from termrsi.model.liger import fuse
from termrsi.model.logprob import hidden_of, token_logprobs
from termrsi.model.lora import Base, Lora
from termrsi.model.masters import Compute, Masters
from termrsi.model.ranks import ALONE, Ranks, rest, whole
from termrsi.model.routing import RoutingReplay, lay_out
from termrsi.records import Sample, UpdateMetrics

LOSS_KEYS = (
    "kind",
    "clip_low",
    "clip_high",
    "delta",
    "max_tokens",
    "tis_cap",
    "correction",
    "correction_low",
    "anchor",
    "divergence",
    "dppo_form",
    "sat",
    "kl",
    "kl_kind",
)
ANCHORS = ("old", "sampler", "current")
# Logits are changed between head and softmax in these models, and `token_logprobs` would not know.
LOGIT_OPTIONS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class PolicyModel:
    """A causal LM with float32 masters, AdamW (see `masters`) and micro-batches of at most `micro_tokens` padded tokens.

    `compute`: "bf16" computes on bf16 copies of the weights, "fp32" on the masters; head and log-softmax are float32 in both.
    `share_prefix`: what a group's samples begin with is computed once (`algo.prefix`); takes SDPA attention.
    `offload_activations`, `offload_optimizer`: what waits in CPU memory (`model.offload`); no number changes.
    `liger`: fused kernels (`model.liger`).
    `routing_replay`: log-probabilities and updates use the experts of the samples' records (`routing`); `fit` does not, as what it
    learns from is shown under another prompt than it was sampled with.
    `adapters`: train these and not the weights (`model.lora`); what is handed out and saved is merged.
    `ranks`: the processes that hold the model together (`model.ranks`). Each is given the same calls, with the whole batch; what is
    returned is of the whole batch too, weights and metrics on the first process only.
    The module stays in evaluation mode: dropout would make every ratio noisy. Raises CheckpointError if `directory` holds no
    model that can be used, ConfigError on an unknown `compute`.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        compute: Compute = "bf16",
        device: str | torch.device = "cpu",
        micro_tokens: int = 4096,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float = 1.0,
        gradient_checkpointing: bool = False,
        share_prefix: bool = False,
        offload_activations: bool = False,
        offload_optimizer: bool = False,
        liger: bool = False,
        routing_replay: bool = False,
        adapters: Lora | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if routing_replay and share_prefix:
            raise ConfigError("a record is laid out for whole rows", "model.routing_replay", "model.share_prefix=false")
        if compute not in ("bf16", "fp32"):
            raise ConfigError(f"unknown compute {compute!r}", "model.policy", "bf16 or fp32")
        self._compute: Compute = compute
        self._device, self._ranks = torch.device(device), ranks
        self._micro_tokens = micro_tokens
        self._betas, self._max_grad_norm = betas, max_grad_norm
        self._gradient_checkpointing, self._share_prefix = gradient_checkpointing, share_prefix
        self._offload_activations, self._offload_optimizer = offload_activations, offload_optimizer
        self._liger = liger
        self._routing_replay = routing_replay
        self._lora, self._base = adapters, Base(Path(directory), "", ())
        self.load(directory)

    # Reading and writing

    def load(self, directory: Path | str) -> str:
        """Weights from a Hugging Face directory, fresh optimizer; returns the checksum. Raises CheckpointError.

        With adapters it is the new base, unless it was saved with adapters of the present one: those are gone on with.
        """
        checkpoint.verify(directory)
        if self._lora is not None and (found := lora.read(Path(directory), self._lora, self._base)) is not None:
            self._masters.load_weights(found)
            return self.checksum()
        module = load_module(AutoModelForCausalLM, directory, self._ranks)
        head = module.get_output_embeddings()
        odd = [name for name in LOGIT_OPTIONS if getattr(module.config, name, None) not in (None, 1.0)]
        if not isinstance(head, nn.Linear) or odd:
            raise CheckpointError(f"unsupported output head ({', '.join(odd) or type(head).__name__})", str(directory))
        if self._liger:
            fuse(module)
        self._replay = RoutingReplay(module) if self._routing_replay else None
        targets = lora.inject(module, self._lora, compute=self._compute) if self._lora is not None else ()
        if self._gradient_checkpointing:
            enable_checkpointing(module, self._replay)
        self._source, self._module = Path(directory), module
        self._scorer = _Scorer(module, head)
        half = place(self._scorer, module, compute=self._compute, device=self._device, ranks=self._ranks)
        self._masters = Masters(
            module,
            half=half,
            betas=self._betas,
            max_grad_norm=self._max_grad_norm,
            offload=self._offload_optimizer,
            ranks=self._ranks,
        )
        checksum = self.checksum()
        if self._lora is not None:
            self._base = Base(Path(directory).absolute(), self._ranks.gather_all(checksum)[0], targets)
        return checksum

    def save(self, directory: Path | str) -> str:
        """A complete Hugging Face directory in bf16, tokenizer included; returns the checksum of the weights in it.

        Adapters are merged into them, and lie in a folder of their own beside.
        """
        state = self.state()
        adapters = self._masters.weights() if self._lora is not None else {}
        if not self._ranks.first:
            return ""
        with checkpoint.atomic_directory(directory) as temporary:
            self._module.save_pretrained(temporary, state_dict=state)
            checkpoint.set_config_dtype(temporary)
            checkpoint.copy_tokenizer(self._source, temporary)
            if self._lora is not None:
                lora.write(temporary, adapters, self._lora, self._base)
        return checkpoint.checksum(state)

    def state(self) -> dict[str, Tensor]:
        """The weights to publish: bf16, under the module's own (Hugging Face) names, a tied weight once.

        Under bf16 compute these are the live parameters, not copies: they change with the next update. Over several processes they
        are copies on the first one's CPU, put together one tensor at a time, and nothing elsewhere; so they are with adapters.
        """
        if self._lora is not None:
            return self._ranks.keep(lora.merged(untied_state(self._module), self._masters.weights(), self._lora))
        half = ((name, tensor.to(torch.bfloat16)) for name, tensor in untied_state(self._module).items())
        return dict(half) if self._ranks.size == 1 else self._ranks.keep(half)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """`state` one tensor after the other, on this process's device. Over several processes all must come to its end together;
        the first is given the tensors, the others nothing."""
        own = untied_state(self._module)
        made = own.items() if self._lora is None else lora.merged(own, self._masters.weights(), self._lora)
        for name, tensor in made:
            full = whole(tensor.detach().to(torch.bfloat16))
            if self._ranks.first:
                yield name, full

    def checksum(self) -> str:
        """Of `state`; over several processes meaningless but on the first."""
        return checkpoint.checksum(self.state())

    def save_training(self, directory: Path | str) -> str:
        """Masters and optimizer, about 12 bytes per weight: with it a resumed run goes on bit for bit, in as many processes.

        Whole or not at all; returns the checksum of the weights. Raises OSError, also where safetensors has one of its own.
        """
        return save_training(directory, self._masters, self.checksum(), self._ranks)

    def load_training(self, directory: Path | str) -> str:
        """Go on from `save_training`, by however many processes; returns the checksum. Raises CheckpointError."""
        checkpoint.verify(directory)
        self._masters.load_training(Path(directory))
        return self.checksum()

    # Learning

    def logp(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Log-probabilities of the action tokens under the present weights.

        One list per sample, as long as its ids, 0 off the mask.
        """
        with torch.no_grad():
            batches = self._split(samples, ())
            rows = batching.restore(samples, [(batch, self._forward(batch, samples)[0]) for batch in batches])
        rest(self._scorer)
        return_freed_memory()
        return self._ranks.fill(rows, [i for batch in batches for i in batch.rows])

    def update(self, samples: Sequence[Sample], loss: Mapping[str, object], lr: float) -> UpdateMetrics:
        """One optimizer step on the whole batch; `loss` holds arguments of `algo.loss.policy_loss`.

        `anchor`: "old" takes each sample's `old_logp`, "sampler" (always so in `dppo`, `tvpo`, `dis`) its `sampler_logp`,
        "current" the present weights themselves (first update on a batch: saves the forward pass of `logp`, and the ratio is 1).
        Samples whose advantages are all 0 count in the denominator and cost nothing, unless the loss has a `kl`: their gradient is
        0 in every kind. Without any other there is no step, and `tokens` is 0. `tvpo` and `sat` take one forward pass of the whole
        batch before: what they compare with (`algo.whole`) is of all its samples, so give them the rollouts of a prompt together.
        Raises ConfigError on an unknown key, ValueError if a sample lacks a list that the loss needs.
        """
        options = _loss_options(loss)
        kind = str(options["kind"])
        anchor = "sampler" if kind in losses.SAMPLER_KINDS else str(options.pop("anchor", "old"))
        options["anchor"] = "sampler" if anchor == "sampler" else "old"
        sampled = any(sample.sampler_logp for sample in samples)
        needs_sampler = sampled or anchor == "sampler" or options.get("tis_cap", 0.0) != 0.0
        fields: list[batching.Field] = ["advantages"]
        if anchor == "old":
            fields.append("old_logp")
        if needs_sampler:
            fields.append("sampler_logp")
        near = options.get("kl", 0.0) != 0.0
        if near:
            fields.append("ref_logp")
        by_rollout = kind in losses.ROLLOUT_KINDS
        count = of_batch.count_rollouts(samples) if by_rollout else sum(sum(sample.mask) for sample in samples)
        of_rollout = of_batch.rollout_tokens(samples) if by_rollout else []
        told = [i for i, one in enumerate(samples) if near or any(one.advantages) or len(one.advantages) != len(one.ids)]
        if not told:
            return UpdateMetrics(0.0, 0.0, 0, 0.0)
        of_prompt = [0.0] * len(samples)
        if kind == "tvpo":
            of_prompt = of_batch.prompt_tv(samples, self.logp(samples))
        sat = float(str(options.get("sat", 0.0)))
        if sat > 0.0:
            options["sat_bound"] = of_batch.log_ratio_bound(samples, self.logp(samples), sat, of_sequences=kind == "gspo")
        of_prompt = [of_prompt[i] for i in told]
        of_rollout, samples = [of_rollout[i] for i in told] if by_rollout else [], [samples[i] for i in told]
        seen = _Seen()

        def one(micro: batching.MicroBatch) -> Tensor:
            logp, entropy = self._forward(micro, samples)
            columns = micro.columns
            old = {"old": columns.get("old_logp"), "sampler": columns.get("sampler_logp"), "current": logp.detach()}[anchor]
            assert old is not None, "micro_batches checks that the anchor is there"
            rows = torch.tensor(_of_rows(of_rollout, micro), device=self._device) if by_rollout else None
            tv = _of_rows(of_prompt, micro)
            prompts = torch.tensor(tv, dtype=torch.float64, device=self._device) if kind == "tvpo" else None
            seen.add(micro, logp, entropy, old, prompts)
            return losses.policy_loss(
                logp=logp,
                old_logp=old,
                advantages=columns["advantages"],
                mask=micro.mask,
                denominator=float(count),
                sampler_logp=columns.get("sampler_logp"),
                ref_logp=columns.get("ref_logp"),
                rollout_tokens=rows,
                prompt_tv=prompts,
                **options,  # pyright: ignore[reportArgumentType]: keys are checked above, values by policy_loss
            )

        result = self._learn(self._split(samples, fields), one, lr)
        result.extra.update(_Seen.of(self._ranks.gather(seen)).report(options))
        return result

    def fit(self, samples: Sequence[Sample], lr: float) -> UpdateMetrics:
        """One optimizer step of cross-entropy on the action tokens; denominator: all action tokens of `samples`."""
        count = float(sum(sum(sample.mask) for sample in samples))

        def one(micro: batching.MicroBatch) -> Tensor:
            return losses.sft_loss(self._forward(micro)[0], micro.mask, denominator=count)

        return self._learn(self._split(samples, ()), one, lr)

    def _split(self, samples: Sequence[Sample], fields: Sequence[batching.Field]) -> list[batching.MicroBatch]:
        return split(samples, fields, self._micro_tokens, self._device, self._ranks, share_prefix=self._share_prefix)

    def _forward(self, micro: batching.MicroBatch, sampled: Sequence[Sample] = ()) -> tuple[Tensor, Tensor]:
        """Log-probabilities `[B, T]`, 0 off the mask, and entropies `[K]`, at each row's temperature.

        `sampled`: the samples that the micro-batch was made of, where their routing is to be replayed.
        """
        known = self._replay is not None and sampled and micro.rows
        replaying = self._replay.using(lay_out(sampled, micro)) if self._replay is not None and known else nullcontext()
        with replaying:
            logp, entropy = self._scorer(micro)
        return torch.zeros(micro.mask.shape, device=self._device).masked_scatter(micro.mask, logp), entropy

    def _learn(
        self, batches: Sequence[batching.MicroBatch], loss_of: Callable[[batching.MicroBatch], Tensor], lr: float
    ) -> UpdateMetrics:
        return learn(self._masters, batches, loss_of, lr, self._ranks, offload=self._offload_activations)


class _Scorer(nn.Module):
    """A causal LM from micro-batch to log-probabilities and entropies `[K]`: the body, then the head in chunks, in float32.

    One module, so that the head's weight is used where it is put together for the pass.
    """

    def __init__(self, model: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, micro: batching.MicroBatch) -> tuple[Tensor, Tensor]:
        hidden = hidden_of(self.model.base_model, micro)
        temperature = None
        if bool((micro.temperatures != 1.0).any()):
            temperature = micro.temperatures.unsqueeze(1).expand(micro.mask.shape)[micro.mask]
        return token_logprobs(hidden, self.head.weight, micro.ids[micro.mask], self.head.bias, temperature)


def _of_rows(values: Sequence[float], micro: batching.MicroBatch) -> list[float]:
    """Of a micro-batch's samples; 0 for the row of a blank one."""
    return [values[i] for i in micro.rows] if micro.rows else [0] * len(micro.mask)


def _loss_options(loss: Mapping[str, object]) -> dict[str, object]:
    for key in loss:
        if key not in LOSS_KEYS:
            near = difflib.get_close_matches(key, LOSS_KEYS, n=1)
            raise ConfigError(f"unknown loss argument {key!r}", "policy.update", f"did you mean {near[0]}?" if near else "")
    if "kind" not in loss:
        raise ConfigError("no loss kind", "policy.update", "loss needs the key kind")
    if loss.get("anchor", "old") not in ANCHORS:
        raise ConfigError(f"unknown anchor {loss['anchor']!r}", "policy.update", f"one of {', '.join(ANCHORS)}")
    return dict(loss)


@dataclass
class _Seen:
    """Action tokens of the micro-batches of one update, for its metrics; all from before the step."""

    parts: list[dict[str, np.ndarray]] = field(default_factory=list)
    rows: int = 0  # sequences seen

    def add(self, micro: batching.MicroBatch, logp: Tensor, entropy: Tensor, old: Tensor, prompt_tv: Tensor | None = None) -> None:
        columns = {"logp": logp.detach(), "old": old, **micro.columns}
        if prompt_tv is not None:
            columns["prompt_tv"] = prompt_tv.unsqueeze(1).expand_as(logp)
        part = {name: column[micro.mask].double().cpu().numpy() for name, column in columns.items()}
        row = self.rows + micro.mask.nonzero()[:, 0].cpu().numpy()  # of each token
        self.rows += len(micro.mask)
        self.parts.append(part | {"entropy": entropy.double().cpu().numpy(), "row": row})

    @classmethod
    def of(cls, seen: Sequence["_Seen"]) -> "_Seen":
        """What several processes saw, sequences numbered on."""
        together = cls()
        for one in seen:
            together.parts += [part | {"row": part["row"] + together.rows} for part in one.parts]
            together.rows += one.rows
        return together

    def report(self, options: Mapping[str, object]) -> dict[str, float]:
        """Ratio and clip are those of the objective: of sequences in `gspo`, else of tokens; `dppo`, `tvpo`, `dis` mask instead."""
        if not self.parts:
            return {}
        values = {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}
        logp, old, advantages = (values[name] for name in ("logp", "old", "advantages"))
        if options["kind"] == "gspo":
            logp, old, advantages = (metrics.sequence_means(x, values["row"]) for x in (logp, old, advantages))
        ratio = metrics.ratios(logp, old)
        report = {
            "ratio_mean": float(ratio.mean()),
            "ratio_max": float(ratio.max()),
            "entropy": float(values["entropy"].mean()),
            "advantage_std": float(values["advantages"].std()),
        }
        if options["kind"] in losses.SAMPLER_KINDS:
            report["mask_fraction"] = float(_masked(values, options).mean())
        else:
            low, high = _radii(np.asarray(logp - old), options)
            report["clip_fraction"] = metrics.clip_fraction(ratio, advantages, clip_low=low, clip_high=high)
        if "prompt_tv" in values:
            report["prompt_tv_max"] = float(values["prompt_tv"].max())
        if "sampler_logp" in values:
            gap = metrics.logp_gap(values["logp"], values["sampler_logp"])
            report |= {"sampler_gap_mean": gap.mean, "sampler_gap_max": gap.max, "sampler_k3": gap.k3}
            if float(str(options.get("tis_cap", 0.0))) > 0.0:
                report |= _corrected(values, options)
        if "ref_logp" in values:
            apart = losses.kl_terms(torch.from_numpy(values["logp"]), torch.from_numpy(values["ref_logp"]), "k3")
            report["reference_k3"] = float(apart.mean())
        return report


def _radii(log_ratio: np.ndarray, options: Mapping[str, object]) -> tuple[np.ndarray, np.ndarray]:
    """The clip's two radii, for each token or sequence `[K]`."""
    low, high = (float(str(options.get(key, 0.2))) for key in ("clip_low", "clip_high"))
    below, above = losses.contraction(torch.from_numpy(log_ratio), float(str(options.get("sat_bound", 0.0))))
    return low * below.numpy(), high * above.numpy()


def _masked(values: Mapping[str, np.ndarray], options: Mapping[str, object]) -> np.ndarray:
    """Which tokens `[K]` carry no gradient, whatever their advantage."""
    logp, old, advantages = (torch.from_numpy(values[name]) for name in ("logp", "old", "advantages"))
    if options["kind"] == "dis":
        ratio, low, high = (logp - old).exp(), *(float(str(options.get(key, 0.2))) for key in ("clip_low", "clip_high"))
        return ((ratio <= 1 - low) | (ratio >= 1 + high)).numpy()
    delta = float(str(options.get("delta", 0.1)))
    if options["kind"] == "tvpo":
        tv = torch.from_numpy(values["prompt_tv"])
        now, before, wanted = (x.unsqueeze(1) for x in (logp, old, advantages))
        return ~losses.tvpo_mask(now, before, wanted, tv, delta=delta).squeeze(1).numpy()
    divergence = options.get("divergence", "tv")
    keep = losses.dppo_mask(logp, old, advantages, delta=delta, divergence=divergence)  # pyright: ignore[reportArgumentType]: as in update
    return (keep == 0).numpy()


def _corrected(values: Mapping[str, np.ndarray], options: Mapping[str, object]) -> dict[str, float]:
    """The share of tokens whose weight was cut at the cap, or that say nothing because they or their sequence are too far off."""
    low, high = (float(str(options.get(key, default))) for key, default in (("correction_low", 0.5), ("tis_cap", 0.0)))
    old, sampler = values["old"], values["sampler_logp"]
    kind = options.get("correction", "tis")
    if kind == "tis":
        return {"tis_truncated": float((metrics.ratios(old, sampler) > high).mean())}
    if kind == "sequence":
        of_sequence = metrics.ratios(*(metrics.sequence_means(x, values["row"]) for x in (old, sampler)))
        _, row = np.unique(values["row"], return_inverse=True)
        ratio = of_sequence[row]
    else:
        ratio = metrics.ratios(old, sampler)
    return {"correction_dropped": float(((ratio < low) | (ratio > high)).mean())}
