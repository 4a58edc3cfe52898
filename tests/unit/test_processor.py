"""Which processors compute in bf16, by what Linux says of them, and what a run takes where its settings leave it open."""

import pytest

from termrsi import processor
from termrsi.actors.generator import EngineOptions, engine_arguments
from termrsi.config.load import load

ZEN3 = "flags\t\t: fpu sse2 avx fma avx2 sha_ni\n"
SKYLAKE_SP = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512dq avx512cd avx512bw avx512vl\n"
KNIGHTS = "flags\t\t: fpu avx2 avx512f avx512cd avx512er avx512pf\n"
GRAVITON3 = "Features\t: fp asimd sve bf16 i8mm\n"
GRAVITON2 = "Features\t: fp asimd crc32 asimddp\n"


@pytest.mark.parametrize(
    ("cpuinfo", "machine", "has"),
    [
        (ZEN3, "x86_64", False),
        (SKYLAKE_SP, "x86_64", True),
        (KNIGHTS, "x86_64", False),
        (GRAVITON3, "aarch64", True),
        (GRAVITON2, "aarch64", False),
        ("", "x86_64", False),
    ],
)
def test_it_is_told_by_the_flags(cpuinfo: str, machine: str, has: bool) -> None:
    assert processor.computes_bf16(cpuinfo, machine) is has


def test_this_one_is_told_as_torch_tells_it() -> None:
    import torch

    if torch.backends.mkldnn.is_available():
        assert processor.has_bf16() is torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize(("has", "compute", "dtype"), [(True, "bf16", "bfloat16"), (False, "fp32", "float32")])
def test_a_processor_without_it_computes_in_float32_unless_it_is_asked_to(
    has: bool, compute: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "has_bf16", lambda: has)
    assert load(["experiment=rsr"]).model.compute == compute
    assert load(["experiment=rsr", "model.compute=bf16"]).model.compute == "bf16"
    assert load(["experiment=rsr", "model.compute=fp32"]).model.compute == "fp32"
    assert engine_arguments("m", EngineOptions(), on_cpu=True)["dtype"] == dtype
    assert engine_arguments("m", EngineOptions(extra={"dtype": "bfloat16"}), on_cpu=True)["dtype"] == "bfloat16"
    assert load(["experiment=rsr", "cluster=node"]).model.compute == "bf16", "on GPUs whatever the processor"
    assert engine_arguments("m", EngineOptions(), on_cpu=False)["dtype"] == "bfloat16"
