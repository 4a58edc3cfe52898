"""Log-probabilities of action tokens, without a [T, V] tensor: body, gather, then the head in chunks, in float32.

Where hidden states and head are bf16, so are the factors of the head's products (in the backward pass the gradient of the logits
is rounded to that), but their sums, the logits and the softmax are float32: forward nothing is lost, and the units that processors
have for bf16 are used.

Letters: B rows, T tokens, K action tokens of the batch in row-major order, H hidden size, V vocabulary.
The token at position t is predicted by the hidden state at t - 1, so the body never sees the last column.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from termrsi.algo.batch import MicroBatch

CHUNK_LOGITS = 1 << 24  # float32 logits in one chunk: 64 MiB, and the backward pass holds two of them


def hidden_before(body: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Hidden states `[K, H]` that predict the action tokens: `ids`, `mask` are `[B, T]`, rows padded on the right.

    No attention mask: in a causal model nothing before a row's end can see its padding. Raises ValueError if the first
    column is masked in.
    """
    if bool(mask[:, 0].any()):
        raise ValueError("the first token of a row is an action, but nothing precedes it")
    states = body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state  # [B, T-1, H]
    return states[mask[:, 1:]]


def hidden_of(body: nn.Module, micro: MicroBatch) -> Tensor:
    """`hidden_before` of a micro-batch, common beginnings computed once where it is laid out for that (attention: SDPA)."""
    shared = micro.shared
    if shared is None:
        return hidden_before(body, micro.ids, micro.mask)
    states = body(
        input_ids=shared.ids, position_ids=shared.positions, attention_mask=shared.attention, use_cache=False
    ).last_hidden_state  # [R, L, H]
    return states.flatten(0, 1)[shared.before]


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, temperature: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[K]` of `targets` `[K]` and entropies `[K]` (detached), float32.

    `hidden` `[K, H]`, head `weight` `[V, H]` and `bias` `[V]` of any float type; logits are float32. `temperature` `[K]` divides
    them. Peak: two chunks of logits forward, one backward, which computes each anew from the kept normalisers.
    """
    return _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature)  # pyright: ignore[reportReturnType]: apply is untyped


class _ChunkedLogprobs(torch.autograd.Function):
    """d logp / d logits = onehot - softmax, so only the normaliser of each token needs to be kept."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: torch declares *args
        ctx: Any,  # torch's context has no public type for saved attributes
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logp), torch.empty_like(logp)
        head = weight.float()
        with _products_of(hidden, weight):
            for part in _chunks(len(targets), weight.shape[0]):
                logits = _logits(hidden[part], head, bias, temperature, part)
                normaliser[part] = torch.logsumexp(logits, 1)
                logp[part] = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1) - normaliser[part]
                probabilities = (logits - normaliser[part].unsqueeze(1)).exp_()
                entropy[part] = normaliser[part] - torch.linalg.vecdot(probabilities, logits)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, normaliser)
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, targets, temperature, normaliser = ctx.saved_tensors
        head = weight.float()
        grad_hidden = torch.empty_like(hidden)
        # Gradients of the head add up over chunks, so they stay in float32 until the end.
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        with _products_of(hidden, weight):
            for part in _chunks(len(targets), weight.shape[0]):
                logits = _logits(hidden[part], head, bias, temperature, part)
                logits.sub_(normaliser[part].unsqueeze(1)).exp_().mul_(-grad[part].unsqueeze(1))
                logits.scatter_add_(1, targets[part].unsqueeze(1), grad[part].unsqueeze(1))
                if temperature is not None:
                    logits.div_(temperature[part].unsqueeze(1))
                grad_hidden[part] = (logits @ head).to(hidden.dtype)
                if grad_head is not None:
                    grad_head.addmm_(logits.T, hidden[part].float())
                if grad_bias is not None:
                    grad_bias += logits.sum(0)
        return (
            grad_hidden,
            None if grad_head is None else grad_head.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


@contextmanager
def _products_of(*factors: Tensor) -> Iterator[None]:
    """Within, products may round what they multiply, if `factors` are bf16: to that on a CPU, to the finer TF32 on a GPU."""
    if any(factor.dtype != torch.bfloat16 for factor in factors):
        yield
        return
    on_cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at import
    backends = (on_cpu, "bf16"), (torch.backends.cuda.matmul, "tf32")
    before = [backend.fp32_precision for backend, _ in backends]
    for backend, precision in backends:
        backend.fp32_precision = precision
    try:
        yield
    finally:
        for (backend, _), precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: Tensor | None, part: slice) -> Tensor:
    """`hidden` is of the tokens of `part`, `temperature` of all."""
    logits = hidden.float() @ head.T
    if bias is not None:
        logits.add_(bias.float())
    return logits if temperature is None else logits.div_(temperature[part].unsqueeze(1))


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(i, min(i + size, num_tokens)) for i in range(0, num_tokens, size)]
