"""Packed weights keep every bit; digests say what two states have in common; a difference is named."""

from collections.abc import Sequence

import pytest
import torch

from termrsi import weights
from termrsi.errors import WeightsError
from termrsi.weights import canonical


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(3, 4).bfloat16(), "b": torch.randn(5)}


def _layers(changed: Sequence[int] = ()) -> weights.Facts:
    """Of a model of three layers, each of two tensors of 8 bytes, between an embedding and a norm."""
    names = ["model.embed.weight"]
    names += [f"model.layers.{n}.{part}.weight" for n in range(3) for part in ("mlp.experts.7.up", "attn.q")]
    names += ["model.norm.weight"]
    state = {name: torch.tensor([1.0, float(i in changed)]) for i, name in enumerate(names)}
    return weights.facts_of(weights.pack(state))


def test_pack_and_unpack_keep_dtype_shape_and_bits() -> None:
    back = weights.unpack(weights.pack(_state()))
    for name, tensor in _state().items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_nothing_is_copied_on_the_way() -> None:
    """Neither into bytes nor out of them, and bytes that may not be written to are no reason to."""
    state = _state()
    packed = weights.pack(state)
    for _, _, data in packed.values():
        data.flags.writeable = False
    assert {n: t.data_ptr() for n, t in weights.unpack(packed).items()} == {n: t.data_ptr() for n, t in state.items()}


def test_the_checksum_sees_one_changed_value_and_no_order() -> None:
    state = _state()
    whole = weights.checksum_of(state)
    assert whole == weights.checksum_of(dict(reversed(state.items())))
    assert whole == weights.checksum(weights.facts_of(weights.pack(state)))
    state["b"][2] += 1.0
    assert whole != weights.checksum_of(state)


def test_only_what_changed_is_put_and_its_whole_layer_is_loaded() -> None:
    """Of a fused projection, or of the experts of a layer, no part can be loaded alone."""
    before, after = _layers(), _layers(changed=[3, 7])
    held = weights.digests(before)
    assert weights.changed(after, held) == ["model.layers.1.mlp.experts.7.up.weight", "model.norm.weight"]
    assert weights.to_load(after, held) == [
        "model.layers.1.mlp.experts.7.up.weight",
        "model.layers.1.attn.q.weight",
        "model.norm.weight",
    ]
    assert weights.to_load(after, weights.digests(after)) == []
    assert weights.to_load(after, {}) == list(after)


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1, 2, 2, 2, 1]), (16, [1, 2, 2, 2, 1]), (24, [3, 2, 3]), (1000, [8])])
def test_a_bucket_is_bounded_and_holds_whole_layers(limit: int, sizes: list[int]) -> None:
    facts = _layers()
    found = weights.buckets(facts, facts, limit)
    assert [len(bucket) for bucket in found] == sizes
    assert [name for bucket in found for name in bucket] == list(facts)


@pytest.mark.parametrize(("limit", "sizes"), [(1, [1, 1]), (24, [1, 1]), (25, [2]), (1000, [2])])
def test_portions_are_full_once_they_have_their_bytes(limit: int, sizes: list[int]) -> None:
    assert [len(one) for one in weights.portions(_state().items(), limit)] == sizes


def test_a_version_takes_from_earlier_objects_what_did_not_change() -> None:
    first, second = _layers(), _layers(changed=[3])
    names = list(first)
    one = weights.merge(first, [("A", names[:4]), ("B", names[4:])], None)
    two = weights.merge(second, [("C", [names[3]])], one)
    assert [(part.reference, len(part.names), part.size_bytes) for part in two.parts] == [("C", 1, 8), ("A", 3, 32), ("B", 4, 32)]
    assert (two.size_bytes, two.put_bytes) == (64, 72)
    with pytest.raises(WeightsError, match="tensor a was not put"):
        weights.merge(weights.facts_of(weights.pack(_state())), [("D", ["b"])], two)


def test_compare_names_the_tensor() -> None:
    expected = {n: canonical(t) for n, t in _state().items()}
    weights.compare(expected, expected | {"extra": "x"})
    with pytest.raises(WeightsError, match="tensor b differs"):
        weights.compare(expected, expected | {"b": "other"})
    with pytest.raises(WeightsError, match="tensor a is not in the engine"):
        weights.compare(expected, {"b": expected["b"]})


def test_negative_zero_is_zero_to_the_probe() -> None:
    assert canonical(torch.tensor([-0.0, 1.0])) == canonical(torch.tensor([0.0, 1.0]))


def test_samples_come_to_every_column_and_see_their_own_alone() -> None:
    seen = {c for version in range(200) for first, n in [weights.sample_of(40, version, 16)] for c in range(first, first + n)}
    assert seen == set(range(40))
    assert weights.sample_of(40, 3, 0) == (0, 40)
    matrix = torch.zeros(2, 40)
    first, count = weights.sample_of(40, 3, 16)
    base = weights.sample_digest(matrix, 3)
    matrix[1, (first + count) % 40] = 1.0
    assert weights.sample_digest(matrix, 3) == base
    matrix[1, first] = 1.0
    assert weights.sample_digest(matrix, 3) != base
    assert weights.sample_digest(matrix, 3, 0) == canonical(matrix)
