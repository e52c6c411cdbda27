"""The number format of a build."""

import pytest
import torch

from flowgrpo.worlds.number_format import fast_precision


@pytest.mark.parametrize(
    ("flags", "expected"), [((False, False), False), ((True, False), True), ((False, True), True), ((), True)]
)
def test_the_build_is_in_float32_on_a_processor_without_bfloat16(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[bool, ...], expected: bool
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    for name, flag in zip(("_is_avx512_bf16_supported", "_is_amx_tile_supported"), flags):
        monkeypatch.setattr(torch.cpu, name, lambda flag=flag: flag, raising=False)
    with fast_precision():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if expected else torch.float32)
