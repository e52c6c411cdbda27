"""The classes of diffusion language models give the logits of the released code, under its names of the weights."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.samplers.plans import Plan, StepPlan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.unmasking import MaskMoves, blocks, mask_levels
from flowgrpo.text.dream import DreamConfig, DreamModel
from flowgrpo.text.llada import LLaDAConfig, LLaDAModelLM, MMadaConfig, MMadaModelLM
from flowgrpo.text.llada_moe import LLaDAMoEConfig, LLaDAMoEModelLM
from tests.releases.asked_models import (
    BLOCKS,
    CHOICES,
    DREAM,
    IDS,
    LLADA,
    LLADA_MOE,
    PROMPT,
    masked_logits,
    sizes,
    with_drawn_weights,
)  # fmt: skip
from tests.releases.comparing import numbers, with_released_names


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("llada_logits", lambda: LLaDAModelLM(LLaDAConfig(**LLADA, **CHOICES))),
        ("mmada_logits", lambda: MMadaModelLM(MMadaConfig(**LLADA, **CHOICES))),
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_of_experts(attention: str, tmp_path: Path) -> None:
    """Weights under the released names, in a file, give the released logits; and they are saved under these names."""
    released = numbers("llada_moe_logits")
    model = with_released_names(LLaDAMoEModelLM, LLaDAMoEConfig(**LLADA_MOE), released["weights"], tmp_path, attention)
    torch.testing.assert_close(model(torch.tensor(IDS)).logits, torch.tensor(released["logits"]), rtol=5e-6, atol=5e-6)


def test_texts_in_blocks() -> None:
    """Steps without noise, in blocks from left to right, write what LLaDA's own sampler writes."""
    released = numbers("llada_texts")["texts"]
    assert [(row["tokens"], row["steps"], row["size"]) for row in released] == list(BLOCKS)

    def logits(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        whole = torch.cat([torch.tensor(PROMPT).expand(len(x), -1), x], dim=1)
        return masked_logits(whole)[:, len(PROMPT) :]

    for row in released:
        order = partial(blocks, size=row["size"])
        plan = Plan(mask_levels(row["tokens"], row["steps"]), (StepPlan(),) * row["steps"])
        moves = MaskMoves(row["tokens"], LLADA["mask_token_id"], order)
        assert RolloutRunner(logits, plan, moves=moves).run([1]).x[0].tolist() == row["text"]
