"""What rewards share that learn from people when they are made: a linear head on the features of a frozen model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backbones.towers import TowerReward
from ..options import check_count, check_flag, check_positive
from .bradley_terry import Array, HeldOut
from .picture_features import feature_towers


class LearnedTaste(TowerReward):
    """A reward with a linear head on features of pictures and, if wanted, on their agreement with the prompt.

    Args:
        learn: fits the head, and sets `held_out` and `report`. It is called when the features can be computed.
        features: see `feature_towers`.
        allow_chance: if true, give a warning instead of an error if the head is no better than chance.
        device: where to score.
        dtype: data type of the weights of the model that gives the features.
        batch_size: largest number of images in one call.
        frames: largest number of frames of a video that count, evenly spaced; None takes all.

    Attributes:
        held_out: how well the head predicts what people said, where it was not fitted.
        report: `held_out` in words.
        more: what to do for a better head; for the message of the error.

    Raises:
        ValueError: the head is no better than chance, or as in `learn`.
    """

    more = "learn from more"
    held_out: HeldOut
    report: str

    def __init__(
        self,
        learn: Callable[[], None],
        features: str,
        allow_chance: bool,
        device: str,
        dtype: str,
        batch_size: int,
        frames: int | None,
    ) -> None:
        super().__init__(feature_towers(self.name, features, device, dtype), batch_size=batch_size, frames=frames)
        try:
            learn()
            self._judge(allow_chance)
        except BaseException:
            self.close()
            raise

    def take(self, weights: Array, width: int, scales: Sequence[float]) -> list[Array]:
        """Take the head, and return its parts for unscaled features: on pictures [D] and, if there is one, on cosines.

        Args:
            weights: on scaled features of pictures, then on scaled cosines, if the prompt counts.
            width: D, the number of features of a picture.
            scales: by which the features of a kind were divided, for each kind.
        """
        heads = [np.asarray(own / scale) for own, scale in zip(np.split(weights, [width]), scales)]
        self._on_picture = torch.as_tensor(heads[0], dtype=torch.float32, device=self.device)
        self._on_agreement = float(heads[1].item()) if len(heads) > 1 else None
        return heads

    def terms(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """The sums [B] over the features of a picture, and over its cosines; None if the prompt does not count."""
        embeddings = self.embeddings(images)
        picture = (embeddings * self._on_picture).sum(-1).mean(1)
        if self._on_agreement is None:
            return picture, None
        texts = self.lease.value.embed_texts(prompts).unsqueeze(1)
        return picture, (embeddings * texts).sum(-1).mean(1) * self._on_agreement

    def _judge(self, allow_chance: bool) -> None:
        """Refuse a head that is not better than chance."""
        if self.held_out.beats_chance:
            logging.getLogger(type(self).__module__).info("%s: %s", self.name, self.report)
            return
        self.report = f"no better than chance: {self.report}"
        if not allow_chance:
            raise ValueError(
                f"{self.name}: {self.report}; {self.more}, name other `features`, or set `allow_chance: true` to go "
                "on with a warning"
            )
        warnings.warn(f"{self.name}: {self.report}; the preferences of this reward may be noise", stacklevel=4)


def check_learning(reward: str, agreement: Any, allow_chance: Any, least: Any, regularisation: Any) -> None:
    """Refuse options that such a reward cannot have.

    Raises:
        ValueError: an option is out of its range.
    """
    check_flag(reward, "agreement", agreement)
    check_flag(reward, "allow_chance", allow_chance)
    check_count(reward, "least", least, 2)
    if regularisation is not None:
        check_positive(reward, "regularisation", regularisation)
