"""The number formats of a processor."""

import pytest
import torch

from flowgrpo.training.number_format import fast_precision, notes_on_format

FLAGS = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")
CPU = torch.device("cpu")


def processor(monkeypatch: pytest.MonkeyPatch, *flags: bool) -> None:
    """A processor whose first flags are these; torch has no function for the others."""
    for name in FLAGS:
        monkeypatch.delattr(torch.cpu, name, raising=False)
    for name, flag in zip(FLAGS, flags):
        monkeypatch.setattr(torch.cpu, name, lambda flag=flag: flag, raising=False)


@pytest.mark.parametrize(
    ("flags", "expected"), [((False, False), False), ((True, False), True), ((False, True), True), ((), True)]
)
def test_the_build_is_in_float32_on_a_processor_without_bfloat16(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[bool, ...], expected: bool
) -> None:
    processor(monkeypatch, *flags)
    with fast_precision():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if expected else torch.float32)


def test_a_slow_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    processor(monkeypatch, False, False, False)
    assert "no instructions for bfloat16" in notes_on_format("bfloat16", CPU)[0]
    assert "model.dtype float16" in notes_on_format("float16", CPU)[0]
    assert notes_on_format("float32", CPU) == []
    assert notes_on_format("bfloat16", torch.device("cuda")) == notes_on_format("float16", torch.device("cuda")) == []
    for flags in ((True, False, True), ()):
        processor(monkeypatch, *flags)
        assert notes_on_format("bfloat16", CPU) == notes_on_format("float16", CPU) == []
