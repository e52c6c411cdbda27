"""Models of blocks have the logits and the texts of the released code, and TraceRL has the passes of its release."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowgrpo.core.completion_blocks import seen_in_blocks
from flowgrpo.core.likelihoods import trace
from flowgrpo.samplers.plans import Plan, StepPlan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.unmasking import MaskMoves, confidence, mask_levels
from flowgrpo.text.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from flowgrpo.text.sdar import SDARConfig, SDARForCausalLM
from tests.releases.asked_blocks import BLOCK, IDS, LLADA2, LLADA2_TEXTS, NOISED, PROMPT, SETTINGS, TEXTS
from tests.releases.asked_models import LLADA, masked_logits, sizes, with_drawn_weights
from tests.releases.comparing import numbers, with_released_names


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits(attention: str) -> None:
    model, released = with_drawn_weights(SDARForCausalLM(SDARConfig(**SETTINGS))), numbers("sdar_logits")
    model.config._attn_implementation = attention
    assert sizes(model) == released["weights"]
    number = torch.arange(len(PROMPT) + len(IDS))[None] // BLOCK
    found = model(torch.tensor([PROMPT + IDS]), seen_in_blocks(number)).logits
    torch.testing.assert_close(found, torch.tensor(released["finished"]), rtol=5e-6, atol=5e-6)
    own, places = number[:, len(PROMPT) :], torch.arange(len(PROMPT) + len(IDS))[None]
    joined = torch.cat([number, own], dim=1)
    noised = torch.arange(joined.shape[1])[None] >= number.shape[1]
    found = model(
        torch.tensor([PROMPT + IDS + NOISED]), seen_in_blocks(joined, noised),
        torch.cat([places, places[:, len(PROMPT) :]], dim=1),
    ).logits  # fmt: skip
    torch.testing.assert_close(found, torch.tensor(released["noised"]), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_of_experts_in_groups(attention: str, tmp_path: Path) -> None:
    """Weights under the released names, in a file, give the released logits; and they are saved under these names."""
    released = numbers("llada2_logits")
    model = with_released_names(LLaDA2MoeModelLM, LLaDA2MoeConfig(**LLADA2), released["weights"], tmp_path, attention)
    number = torch.arange(len(PROMPT) + len(IDS))[None] // BLOCK
    found = model(torch.tensor([PROMPT + IDS]), seen_in_blocks(number)).logits
    torch.testing.assert_close(found, torch.tensor(released["logits"]), rtol=5e-6, atol=5e-6)


def written(case: tuple[int, int, int, float | None, int | None]) -> tuple[list[int], int]:
    """What steps without noise write, block after block, and how many states are evaluated for it."""
    tokens, block, steps, threshold, end = case
    steps *= tokens // block
    order = partial(confidence, threshold=threshold)
    moves = MaskMoves(tokens, LLADA["mask_token_id"], order, block=block, ends=() if end is None else (end,))

    def logits(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        places = moves.places(x)
        assert places is not None
        whole = torch.cat([torch.tensor(PROMPT * 2).expand(len(x), -1), x[:, : int(places.max()) + 1]], dim=1)
        return masked_logits(whole)[:, -block:]

    plan = Plan(mask_levels(tokens, steps, block=block), (StepPlan(),) * steps)
    rollout = RolloutRunner(logits, plan, moves=moves).run([1])
    assert rollout.states is not None
    return rollout.x[0].tolist(), int(moves.going(rollout.states[:-1]).sum())


def test_texts_of_llada2() -> None:
    """Steps without noise write what LLaDA 2's own sampler writes up to the end of a text."""
    shorter = 0
    for row, case in zip(numbers("llada2_texts")["texts"], LLADA2_TEXTS, strict=True):
        (found, calls), released = written(case), row["text"]
        assert found[: len(released)] == released
        if len(released) == len(found):
            assert calls == row["calls"]
        else:
            # The released sampler looks for a whole text only when it has just written an end.
            assert released[-1] == case[-1]
            assert calls <= row["calls"]
            shorter += 1
    assert shorter == 2


def test_texts() -> None:
    """Steps without noise, block after block, write what SDAR's own sampler writes, with as many calls of the model."""
    fewer = 0
    for row, case in zip(numbers("sdar_texts")["texts"], TEXTS, strict=True):
        tokens, block, steps, threshold, end = case
        steps *= tokens // block
        (found, calls), released = written(case), row["text"]
        if end is None:
            assert (found, calls) == (released, row["calls"])
        else:
            # The released sampler looks for the end after each block. Here a text ends with its last token.
            length = released.index(end) + 1
            assert found[:length] == released[:length]
            assert row["calls"] - steps * block // tokens < calls <= row["calls"] < steps
        fewer += threshold is not None and calls < steps
    assert fewer == 4


def test_passes() -> None:
    for row in numbers("trace_rl_passes")["passes"]:
        steps = torch.tensor(row["steps"])
        found = trace(24, torch.Generator(), steps=steps, block=row["block"], shrink=row["shrink"])
        assert found.masked.tolist() == [[bool(one) for one in masks] for masks in row["masked"]]
        assert found.weight.tolist() == row["scored"]
