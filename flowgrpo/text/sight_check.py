"""A check that a model sees the pictures of prompts in a batch as it sees them alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .model import LanguageModel
from .pictured import PicturedIds
from .scoring import completion_log_probs

WITHIN = 1e-3
WITHIN_HALF = 0.2
"""Largest difference of a log-prob in float32, and in a type of 16 bits."""
SIGNS = ("_token_id", "_token_index")
"""Endings of the keys of a configuration that name tokens."""


@torch.no_grad()
def check_sight(language: LanguageModel, prompt: PicturedIds) -> None:
    """Compare the log-probs of likely tokens after a prompt with the model's own call for this prompt alone.

    Models have different rules for positions and pictures. A model whose rules are not known here is refused, because
    its ratios would belong to another policy. So is a model that takes a token of a completion for a sign of a
    picture.

    Args:
        language: the model.
        prompt: a prompt that shows pictures.

    Raises:
        ValueError: the log-probs differ, or the model takes no batches.
    """
    try:
        gap = _gap(language, prompt)
    except Exception as error:
        # Any model's own code runs here, and may fail in any way.
        raise ValueError(
            f"{type(language.model).__name__} cannot be trained with model.pictures: a batch of prompts with pictures "
            f"fails ({type(error).__name__}: {error!s:.200})"
        ) from error
    most = WITHIN if language.model.dtype == torch.float32 else WITHIN_HALF
    if not gap <= most:
        raise ValueError(
            f"{type(language.model).__name__} gives other log-probs to a prompt with pictures in a batch than alone: "
            f"they differ by {gap:.2g}, and at most {most:g} is rounding. Its rules for positions or pictures are not "
            "known here; train another model with model.pictures"
        )


def _gap(language: LanguageModel, prompt: PicturedIds) -> float:
    """The largest difference between log-probs that should be equal."""
    # Some models look for a picture after each sign of its beginning, and the likely tokens are words.
    config = vars(language.model.config)
    signs = {value for name, value in config.items() if name.endswith(SIGNS) and isinstance(value, int)}
    for name, value in config.items():
        signs |= set(value) if name.endswith("_token_ids") and isinstance(value, list) else set()
    tail, alone = list[int](), list[float]()
    for _ in range(2):
        log_probs = language.said(_own_logits(language, prompt, tail)).float().log_softmax(0)
        token = next(token for token in log_probs.argsort(descending=True).tolist() if token not in signs)
        tail.append(token)
        alone.append(float(log_probs[token]))
    # The other prompt is longer, so the prompt gets padding.
    longer = [language.ends[0]] * (len(prompt) + 3)
    odd = [token for token in sorted(signs) if token not in language.unsaid and 0 <= token < len(log_probs)]
    found, gaps = list[Tensor](), list[float]()
    for shared in (True, False):
        scored, _ = completion_log_probs(
            language, [prompt, longer], [tail, [*odd, *tail], tail], [0, 0, 1], shared_prefix=shared
        )
        gaps.append(float((scored[0, :2].cpu() - torch.tensor(alone)).abs().max()))
        found.append(scored[1].cpu())
    return max(*gaps, float((found[0] - found[1]).abs().max()))


def _own_logits(language: LanguageModel, prompt: PicturedIds, tail: Sequence[int]) -> Tensor:
    """[V] logits of the token after a prompt and `tail`, as the model computes them for its processor's output."""
    device = next(language.model.parameters()).device
    ids = torch.tensor([[*prompt, *tail]], device=device)
    floats = {name: value.to(device) for name, value in prompt.inputs.items()}
    inputs = {k: v.to(language.model.dtype) if v.is_floating_point() else v for k, v in floats.items()}
    kinds = {
        name: torch.cat([value, value.new_zeros(len(tail))])[None].to(device) for name, value in prompt.kinds.items()
    }
    out = language.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs, **kinds)
    return out.logits[0, -1]  # type: ignore[no-any-return]
