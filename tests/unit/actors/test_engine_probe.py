"""The probe sees what layers compute with, on layers that keep a packed copy of their weight as vLLM's do on a CPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from termrsi import weights
from termrsi.actors.engine_probe import WeightProbe

HIDDEN = 40


class Packed(nn.Module):
    """A linear layer whose packed copy computes; `keep`: and which has its parameter still."""

    def __init__(self, weight: nn.Parameter, sizes: tuple[int, ...] = (), *, keep: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.input_size, self.output_sizes, self._keep = HIDDEN, list(sizes), keep
        self.quant_method = SimpleNamespace(process_weights_after_loading=Packed.pack)
        self.cpu_linear: Callable[..., torch.Tensor]
        self.pack()

    def pack(self) -> None:
        copy = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: x @ copy.T
        if not self._keep:
            self.weight = nn.Parameter(torch.empty(0, dtype=copy.dtype))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = Packed(_random(6, HIDDEN), (3, 2, 1))
        self.norm = nn.LayerNorm(HIDDEN, bias=False, dtype=torch.bfloat16)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(_random(7, HIDDEN), freeze=True)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = Packed(cast("nn.Parameter", self.embed.weight), keep=True)


def _random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape).bfloat16(), requires_grad=False)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def probe(model: Model) -> WeightProbe:
    made = WeightProbe()
    made.model_runner = SimpleNamespace(get_model=lambda: model)
    return made


def expected(model: Model, version: int, columns: int = weights.SAMPLE_COLUMNS) -> dict[str, str]:
    """As the learner has them, by Hugging Face's names."""
    state = {"embed.weight": model.embed.weight.detach()}
    eye = torch.eye(HIDDEN, dtype=torch.bfloat16)
    for n, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        q, k, v = layer.qkv_proj.cpu_linear(eye, None, None).T.split([3, 2, 1])
        state |= {f"layers.{n}.{name}.weight": part for name, part in (("q_proj", q), ("k_proj", k), ("v_proj", v))}
        state[f"layers.{n}.norm.weight"] = layer.norm.weight.detach()
    return {name: weights.sample_digest(tensor, version, columns) for name, tensor in state.items()}


@pytest.mark.parametrize("columns", [0, weights.SAMPLE_COLUMNS])
def test_what_is_there_is_proved_under_the_learners_names(model: Model, columns: int) -> None:
    assert probe(model).prove(expected(model, 3, columns), 3, columns) == ("", [])
    assert probe(model).weight_digests() == expected(model, 0, 0)


def test_a_layer_that_computes_with_an_old_copy_is_named(model: Model) -> None:
    told = expected(model, 3)
    other = Model()
    assert probe(other).prove({"layers.1.k_proj.weight": told["layers.1.k_proj.weight"]}, 3, weights.SAMPLE_COLUMNS)[0] == (
        "tensor layers.1.k_proj.weight differs between learner and engine after a pull"
    )


def test_a_tied_head_is_proved_by_what_it_computes_and_packed_anew(model: Model) -> None:
    """The embedding has come, the head's own copy is still the old one."""
    model.embed.weight.data.mul_(2)
    told = {"embed.weight": weights.sample_digest(model.embed.weight, 5)}
    made = probe(model)
    assert "tensor embed.weight differs" in made.prove(told, 5, weights.SAMPLE_COLUMNS)[0]
    made.repack_tied()
    assert made.prove(told, 5, weights.SAMPLE_COLUMNS) == ("", [])


def test_what_cannot_be_compared_is_told(model: Model) -> None:
    """A shard is told as not proved, not as wrong."""
    told = expected(model, 3)
    model.layers[0].norm.tp_size = 2  # type: ignore[union-attr]  # as a layer of vLLM's has it
    assert probe(model).prove(told, 3, weights.SAMPLE_COLUMNS) == ("", ["layers.0.norm.weight"])
    assert probe(model).prove({"layers.0.experts.w1": "x"}, 3, weights.SAMPLE_COLUMNS) == ("", ["layers.0.experts.w1"])
