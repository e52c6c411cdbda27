"""Questions about losses of language models: their values, and their gradients by the log-probs of tokens."""

from __future__ import annotations

from typing import Any

import torch

from tests.releases.asking import Names, Question, drawn
from tests.releases.sources import FLOW_DPPO


def tokens(rows: int = 6, length: int = 9) -> dict[str, Any]:
    """Log-probs of answers before and after a move, some of them large, and advantages of both signs."""
    old = -2.0 * drawn(1, rows, length).abs()
    return {
        "old": old, "logp": torch.minimum(old + 0.7 * drawn(2, rows, length), torch.tensor(-1e-3)),
        "advantage": 2.0 * drawn(3, rows), "lengths": [9, 7, 4, 1, 8, 2],
    }  # fmt: skip


def drpo_loss(names: Names) -> dict[str, Any]:
    """The losses of DRPO and of SPO in UniRL, at the published threshold and at one that tokens cross."""
    given = tokens()
    found: dict[str, Any] = {**given, "forms": []}
    for by_probability in (True, False):
        for epsilon in (12.5, 0.1):
            logp = given["logp"].clone().requires_grad_(True)
            loss, _ = names["_drpo_loss"](
                new_logp=logp, old_logp=given["old"], epsilon=epsilon, mu_weighted=by_probability,
                advantages=given["advantage"][:, None].expand_as(logp),
            )  # fmt: skip
            loss.sum().backward()
            found["forms"].append(
                {"by_probability": by_probability, "epsilon": epsilon, "loss": loss, "gradient": logp.grad}
            )
    return found


TOKENS: dict[str, Question] = {
    "drpo_loss": Question(*FLOW_DPPO, "unirl/algorithms/drpo.py", ("_drpo_loss",), drpo_loss),
}
