"""The classes of diffusion language models give the logits of the released code, under its names of the weights."""

from typing import Any

import pytest
import torch

from flowgrpo.text.dream import DreamConfig, DreamModel
from flowgrpo.text.llada import LLaDAConfig, LLaDAModelLM
from tests.releases.asked_models import CHOICES, DREAM, IDS, LLADA, sizes, with_drawn_weights
from tests.releases.comparing import numbers


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("llada_logits", lambda: LLaDAModelLM(LLaDAConfig(**LLADA, **CHOICES))),
        ("dream_logits", lambda: DreamModel(DreamConfig(**DREAM))),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits(name: str, made: Any, attention: str) -> None:
    model, released = with_drawn_weights(made()), numbers(name)
    model.config._attn_implementation = attention
    assert sizes(model) == released["weights"]
    # The logits are sums of products of several layers, up to 3.6.
    torch.testing.assert_close(model(torch.tensor(IDS)).logits, torch.tensor(released["logits"]), rtol=5e-6, atol=5e-6)
