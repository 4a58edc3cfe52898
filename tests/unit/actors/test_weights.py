"""Packed weights keep every bit; a difference is named."""

import pytest
import torch

from termrsi import weights
from termrsi.actors.engine_probe import canonical
from termrsi.errors import WeightsError


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(3, 4).bfloat16(), "b": torch.randn(5)}


def test_pack_and_unpack_keep_dtype_shape_and_bits() -> None:
    back = weights.unpack(weights.pack(_state()))
    for name, tensor in _state().items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_the_checksum_sees_one_changed_value_and_no_order() -> None:
    state = _state()
    whole = weights.checksum(weights.pack(state))
    assert whole == weights.checksum(weights.pack(dict(reversed(state.items()))))
    state["b"][2] += 1.0
    assert whole != weights.checksum(weights.pack(state))


def test_compare_names_the_tensor() -> None:
    expected = {n: canonical(t) for n, t in _state().items()}
    weights.compare(expected, expected | {"extra": "x"})
    with pytest.raises(WeightsError, match="tensor b differs"):
        weights.compare(expected, expected | {"b": "other"})
    with pytest.raises(WeightsError, match="tensor a is not in the engine"):
        weights.compare(expected, {"b": expected["b"]})


def test_negative_zero_is_zero_to_the_probe() -> None:
    assert canonical(torch.tensor([-0.0, 1.0])) == canonical(torch.tensor([0.0, 1.0]))
