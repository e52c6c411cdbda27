"""What rewards share that learn from people when they are made: a linear head on the features of a frozen model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backbones.towers import TowerReward
from ..options import check_flag, check_positive
from ..scores import Scores
from .bradley_terry import Array, HeldOut, Pairs, choose_penalty, fit, shorten, validate
from .picture_features import feature_towers, known_embeddings, known_texts


class LearnedTaste(TowerReward):
    """A reward with a linear head on features of pictures and, if wanted, on their agreement with the prompt.

    Args:
        learn: calls `fit_head`, and sets `report`. It is called when the features can be computed.
        features: see `feature_towers`.
        agreement: whether the prompt counts.
        regularisation: factor λ of the penalty λ/2 · |w|²; None takes the value that predicts what is held out best.
        allow_chance: if true, give a warning instead of an error if the head is no better than chance.
        device: where to score.
        dtype: data type of the weights of the model that gives the features.
        batch_size: largest number of images in one call.
        frames: largest number of frames of a video that count, evenly spaced; None takes all.

    Attributes:
        agreement: as given.
        regularisation: factor of the penalty under which the head was fitted.
        held_out: how well the head predicts what people said, where it was not fitted.
        report: `held_out` in words.
        more: what to do for a better head; for the message of the error.

    Raises:
        ValueError: an option is out of its range, the head is no better than chance, or as in `learn`.
    """

    more = "learn from more"
    held_out: HeldOut
    report: str

    def __init__(
        self,
        learn: Callable[[], None],
        features: str,
        agreement: bool,
        regularisation: float | None,
        allow_chance: bool,
        device: str,
        dtype: str,
        batch_size: int,
        frames: int | None,
    ) -> None:
        check_flag(self.name, "agreement", agreement)
        check_flag(self.name, "allow_chance", allow_chance)
        if regularisation is not None:
            check_positive(self.name, "regularisation", regularisation)
        self.agreement, self._penalty = agreement, regularisation
        super().__init__(feature_towers(self.name, features, device, dtype), batch_size=batch_size, frames=frames)
        try:
            learn()
            self._judge(allow_chance)
        except BaseException:
            self.close()
            raise

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Score of each picture.

        Args:
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            prompts: B strings; they have no effect with `agreement: false`.
            columns: ignored.

        Returns:
            B scores. Each score is the sum of two sub-scores: `picture`, which depends on the picture alone, and
            `agreement` with the prompt. The notes are the report.
        """
        if not len(images):
            return Scores(images.new_zeros(0))
        notes, embeddings = [self.report] * len(images), self.embeddings(images)
        picture = (embeddings * self._on_picture).sum(-1).mean(1) - self._means[0]
        if self._on_agreement is None:
            return Scores(picture, notes=notes)
        texts = self.lease.value.embed_texts(prompts).unsqueeze(1)
        agreement = (embeddings * texts).sum(-1).mean(1) * self._on_agreement - self._means[1]
        return Scores(picture + agreement, {"picture": picture.tolist(), "agreement": agreement.tolist()}, notes)

    def kinds_of_features(self, samples: Sequence[tuple[Path, int]], prompts: Sequence[str]) -> list[Array]:
        """Return the kinds of features of N samples: embeddings [N, D] and, with `agreement`, cosines [N, 1].

        Args:
            samples: file of each sample, and the number of frames that stand side by side in it. Samples may repeat.
            prompts: the prompt of each sample.
        """
        places = {sample: place for place, sample in enumerate(sorted(set(samples)))}
        known = known_embeddings(self.lease.value, list(places), self.batch_size, self.frames)
        pictures = known[[places[sample] for sample in samples]]
        if not self.agreement:
            return [pictures]
        texts = known_texts(self.lease.value, prompts, self.batch_size)
        return [pictures, (pictures * texts).sum(-1, keepdims=True)]

    def fit_head(
        self,
        pairs: Pairs,
        kinds: Sequence[Array],
        scales: Sequence[float],
        measure: Callable[[Pairs, float | None], HeldOut] = validate,
    ) -> Array:
        """Fit the head, and measure how well it does where it was not fitted. The mean score of samples becomes 0.

        Args:
            pairs: what is fitted, on scaled features of pictures, then scaled cosines if the prompt counts, then
                features of the caller's own.
            kinds: unscaled features of the samples; see `kinds_of_features`.
            scales: by which the features of each kind were divided in `pairs`.
            measure: measures the predictions on held-out pairs; called as `validate` is.

        Returns:
            The weights of the caller's own features.
        """
        pairs, directions = shorten(pairs)
        self.regularisation = choose_penalty(pairs) if self._penalty is None else float(self._penalty)
        self.held_out = measure(pairs, self._penalty)
        ends = np.cumsum([kind.shape[1] for kind in kinds])
        *parts, own = np.split(directions @ fit(pairs, self.regularisation), ends)
        heads = [np.asarray(part / scale) for part, scale in zip(parts, scales)]
        self._means = [float((kind @ head).mean()) for kind, head in zip(kinds, heads)]
        self._on_picture = torch.as_tensor(heads[0], dtype=torch.float32, device=self.device)
        self._on_agreement = float(heads[1].item()) if len(heads) > 1 else None
        return own

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


def scaled(kinds: Sequence[Array]) -> tuple[Array, list[float]]:
    """Scale kinds of features, because the penalty is the same for all kinds.

    Args:
        kinds: [N, D] for each kind.

    Returns:
        [N, ΣD], in which the rows of every kind have a root mean square length of 1, and by what each kind was divided;
        1 for a kind that is 0 everywhere.
    """
    scales = [float(np.sqrt(np.square(kind).sum(-1).mean())) or 1.0 for kind in kinds]
    return np.concatenate([kind / scale for kind, scale in zip(kinds, scales)], axis=1), scales
