"""A temperature that follows the entropy of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from torch import Tensor

from ....core.entropy_guided import relative_entropy
from ....parts.ranges import Positive

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ..writing import Attempt, Writer


def by_entropy(
    writer: Writer, *, reach: Annotated[float, Field(ge=0, lt=1)] = 0.05, pivot: Positive = 0.5
) -> list[Attempt]:
    """Every token has a temperature of its own: higher where the policy is unsure (HAPO's adaptive temperature).

    The temperature is generation.temperature times 1 + reach (H - pivot) / (H + pivot), where H is the entropy of the
    next token at generation.temperature. The sampler's log-probs are of the drawn tokens, at the tokens' own
    temperatures. The training engine scores at generation.temperature.

    Options:
        reach: largest change of the temperature, as a share of it.
        pivot: entropy in nats at which the temperature is as it was.
    """
    from ....text.scoring import token_entropies

    plain = writer.temperature

    def temperature(logits: Tensor) -> Tensor:
        entropy = token_entropies(logits[:, None], plain)[:, 0]
        return plain * (1 + reach * relative_entropy(entropy, pivot))

    return writer.write(writer.starts(), temperature=temperature if plain else None)
