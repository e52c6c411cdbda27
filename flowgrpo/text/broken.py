"""Logits that are no numbers."""

from __future__ import annotations

from torch import Tensor


def refuse_nan(logits: Tensor) -> None:
    """Raise if any of the logits that tokens are drawn from is NaN: every draw from them would be the same token.

    Raises:
        FloatingPointError: a logit is NaN.
    """
    # The largest is NaN if any is, and it needs no tensor of the logits' size.
    if bool(logits.detach().amax().isnan()):
        raise FloatingPointError(
            "the model's logits are no numbers (NaN), so no token can be drawn; its weights may be damaged, or numbers "
            "may be too large for model.dtype float16: get the model again, or use bfloat16 or float32; during a run, "
            "lower optimizer.learning_rate"
        )
