"""Liger's kernels on a GPU beside transformers' own layers. Never run: `tests/contract/test_liger.py` has them interpreted."""

from pathlib import Path

import pytest
import torch

from termrsi.model.policy import PolicyModel
from termrsi.records import Sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize(("compute", "near"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_the_fused_learner_is_the_plain_one(embedded: Path, compute: str, near: float) -> None:
    ids = tuple(range(40, 104))
    samples = [Sample(ids, (0,) * 16 + (1,) * 48, (0,) * 64, rollout_id="r", group_id="g")]
    found = []
    for liger in (False, True):  # the plain one first: Liger changes the family's classes
        policy = PolicyModel(str(embedded), compute=compute, device="cuda", liger=liger)  # pyright: ignore[reportArgumentType]: of two
        step = policy.fit(samples, 1e-5)
        found.append((step.loss, step.grad_norm, policy.logp(samples)[0]))
    (loss, norm, logp), (fused_loss, fused_norm, fused_logp) = found
    assert fused_loss == pytest.approx(loss, rel=near)
    assert fused_norm == pytest.approx(norm, rel=10 * near)
    assert fused_logp == pytest.approx(logp, abs=20 * near)
