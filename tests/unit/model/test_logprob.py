"""Chunked log-probabilities against the full log-softmax, gradients included."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from termrsi.model import logprob


@pytest.mark.parametrize("chunk", [1, 7 * 11, 1 << 24])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_entropy_and_gradients(chunk: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "CHUNK_LOGITS", chunk)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, 5, generator=g).requires_grad_()
    weight = torch.randn(11, 5, generator=g).requires_grad_()
    bias = torch.randn(11, generator=g).requires_grad_() if with_bias else None
    targets = torch.randint(0, 11, (10,), generator=g)
    upstream = torch.randn(10, generator=g)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]

    full = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias), 1)
    want = full.gather(1, targets[:, None])[:, 0]
    want_grads = torch.autograd.grad(want @ upstream, leaves)
    got, entropy = logprob.token_logprobs(hidden, weight, targets, bias)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(1))
    assert not entropy.requires_grad
    for a, b in zip(torch.autograd.grad(got @ upstream, leaves), want_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_no_token_and_bf16() -> None:
    weight = torch.randn(11, 5).bfloat16().requires_grad_()
    none, _ = logprob.token_logprobs(torch.zeros(0, 5).bfloat16(), weight, torch.zeros(0, dtype=torch.int64))
    assert none.shape == (0,)
    got, _ = logprob.token_logprobs(torch.ones(2, 5).bfloat16(), weight, torch.tensor([1, 2]))
    assert got.dtype == torch.float32  # head and softmax are float32 whatever the weights are
    got.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("with_bias", [False, True])
def test_factors_in_bf16_lose_nothing_forward_and_little_backward(with_bias: bool) -> None:
    """Against float64 on the same bf16 values, at temperatures other than 1."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = ((torch.randn(n, 64, generator=g) / 4).bfloat16().requires_grad_() for n in (40, 300))
    bias = torch.randn(300, generator=g).bfloat16().requires_grad_() if with_bias else None
    targets, upstream = torch.randint(0, 300, (40,), generator=g), torch.randn(40, generator=g)
    temperature = torch.linspace(0.5, 2.0, 40)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    full = torch.log_softmax(torch.nn.functional.linear(*wide) / temperature.double()[:, None], 1)
    want = full.gather(1, targets[:, None])[:, 0]
    got, entropy = logprob.token_logprobs(hidden, weight, targets, bias, temperature)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(1), rtol=0, atol=2e-5)
    exact = torch.autograd.grad(want @ upstream.double(), wide)
    for found, wanted in zip(torch.autograd.grad(got @ upstream, leaves), exact, strict=True):
        assert float((found.double() - wanted).norm() / wanted.norm()) < 2**-8
    on_cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at import
    assert on_cpu.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "none"


def test_offset_and_padding_on_the_model(tiny: Path) -> None:
    """The token at t is predicted by the hidden state at t - 1, and a padded row equals the row alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (2, 9), generator=g)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, [3, 4, 8]] = True
    mask[1, [1, 5]] = True  # the row ends at 6: the rest is padding
    hidden = logprob.hidden_before(model.base_model, ids, mask)
    got, _ = logprob.token_logprobs(hidden, model.lm_head.weight, ids[mask])
    want = []
    for row, length in ((0, 9), (1, 6)):
        full = torch.log_softmax(model(ids[row : row + 1, :length]).logits[0], 1)
        want += [full[t - 1, ids[row, t]] for t in range(length) if mask[row, t]]
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-5, atol=1e-5)
    mask[0, 0] = True
    with pytest.raises(ValueError, match="nothing precedes it"):
        logprob.hidden_before(model.base_model, ids, mask)
