"""People's reactions as a reward: the probability that a picture becomes a favourite in the gallery.

Reinforcement Learning from User Feedback (arXiv 2505.14946) learns P[Love], the probability that a user reacts with a
heart, and trains for it beside other rewards. Here the reactions are the favourites of a file of marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...votes.marks import Reaction, read_reactions
from ..backbones.towers import TowerReward
from ..scores import Scores
from .bradley_terry import (
    Array,
    HeldOut,
    Pairs,
    choose_penalty,
    fit,
    predictions,
    shorten,
)
from .learned_taste import LearnedTaste, check_learning
from .picture_features import SCENES, known_embeddings

CONSTANT = 30.0
"""The feature that all pictures share. It is large, so that the penalty hardly holds the base rate back."""
LEAST_PROMPTS = 5


class Reactions(LearnedTaste):
    """Probability that people make a picture a favourite, learned from the marks of the gallery (RLUF, 2505.14946).

    The model is a logistic regression on the features of a frozen CLIP. Favourites are its ones, and the pictures that
    stand beside a mark without being favourites are its zeros; see `flowgrpo.votes.marks`. The features of a video are
    the mean over its frames.

    Args:
        marks: the file that the page of the gallery has saved.
        runs: folder of the run whose samples were marked, or a list of folders.
        features: "scenes" for the scorer of the embedded world; otherwise the folder of a CLIP or SigLIP model, or a
            model id.
        agreement: if true, the cosine between picture and prompt is an additional feature.
        regularisation: factor λ of the penalty λ/2 · |w|². By default, the value that predicts held-out reactions best.
        least: smallest number of favourites, and of other pictures.
        allow_chance: if true, give a warning instead of an error if the model tells held-out favourites from other
            pictures of their prompts no better than chance.
        device: where to score.
        dtype: data type of the weights of the model that gives the features.
        batch_size: largest number of images in one call.
        frames: largest number of frames of a video that count, evenly spaced; None takes all.

    Attributes:
        held_out: how often a favourite has a higher probability than another picture of its prompt, on prompts on which
            the model was not fitted.
        report: `held_out` in words; it is the note of every score.

    Raises:
        ValueError: the marks cannot be used, the model is no better than chance, or an option is wrong.
    """

    name = "reactions"
    more = "mark more pictures"

    def __init__(
        self,
        marks: str | Path,
        runs: str | Path | Sequence[str | Path],
        *,
        features: str = SCENES,
        agreement: bool = True,
        regularisation: float | None = None,
        least: int = 20,
        allow_chance: bool = False,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int | None = None,
    ) -> None:
        check_learning(self.name, agreement, allow_chance, least, regularisation)
        folders = [runs] if isinstance(runs, (str, Path)) else list(runs)
        seen = read_reactions(Path(marks).expanduser(), [Path(folder).expanduser() for folder in folders])
        check_enough(seen, least)
        learn = partial(self._fit, seen, agreement, regularisation)
        super().__init__(learn, features, allow_chance, device, dtype, batch_size, frames)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Probability of each picture.

        Args:
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            prompts: B strings; they have no effect with `agreement: false`.
            columns: ignored.

        Returns:
            B probabilities, in (0, 1). The notes are the report.
        """
        if not len(images):
            return Scores(images.new_zeros(0))
        picture, agreement = self.terms(images, prompts)
        logits = picture + self._constant if agreement is None else picture + agreement + self._constant
        return Scores(torch.sigmoid(logits), {}, [self.report] * len(images))

    @torch.no_grad()
    def _fit(self, seen: Sequence[Reaction], agreement: bool, penalty: float | None) -> None:
        """Fit the head, and measure how well it ranks pictures on which it was not fitted."""
        kinds, units = kinds_of_features(self, seen, agreement)
        means, scales = [kind.mean(0) for kind in kinds], [spread(kind) for kind in kinds]
        scaled = [(kind - mean) / scale for kind, mean, scale in zip(kinds, means, scales)]
        loved = np.array([float(one.loved) for one in seen])
        known = np.concatenate([*scaled, np.full((len(seen), 1), CONSTANT)], 1)
        rows, directions = shorten(Pairs(known, loved, 1 - loved, np.zeros(len(seen)), units))
        self.regularisation = choose_penalty(rows) if penalty is None else float(penalty)
        self.held_out = ranked_right(rows, penalty)
        self.report = _words(self.held_out)
        weights = directions @ fit(rows, self.regularisation)
        heads = self.take(weights[:-1], kinds[0].shape[1], scales)
        self._constant = float(CONSTANT * weights[-1] - sum(float(mean @ head) for mean, head in zip(means, heads)))


def kinds_of_features(
    reward: TowerReward, seen: Sequence[Reaction], agreement: bool
) -> tuple[list[Array], NDArray[np.int64]]:
    """Return the kinds of features of N pictures, and the number of the prompt of each [N].

    The kinds are embeddings [N, D] and, with `agreement`, the cosines with the prompts [N, 1].
    """
    towers, samples = reward.lease.value, [(one.file, one.frames) for one in seen]
    pictures = known_embeddings(towers, samples, reward.batch_size, reward.frames)
    prompts = {prompt: number for number, prompt in enumerate(sorted({one.prompt for one in seen}))}
    units = np.array([prompts[one.prompt] for one in seen])
    if not agreement:
        return [pictures], units
    texts = torch.cat([towers.embed_texts([prompt]) for prompt in prompts]).cpu().double().numpy()
    return [pictures, (pictures * texts[units]).sum(-1, keepdims=True)], units


def spread(features: Array) -> float:
    """Return the root mean square distance of features [N, D] from their mean; 1 if it is 0.

    Each kind of features is divided by it, because the penalty is the same for all kinds.
    """
    return float(np.sqrt(np.square(features - features.mean(0)).sum(-1).mean())) or 1.0


def check_enough(seen: Sequence[Reaction], least: int) -> None:
    """Refuse reactions from which nothing can be learned.

    Raises:
        ValueError: there are too few favourites, too few other pictures, or too few prompts that have both.
    """
    loved = sum(one.loved for one in seen)
    both = {one.prompt for one in seen if one.loved} & {one.prompt for one in seen if not one.loved}
    if min(loved, len(seen) - loved) < least or len(both) < LEAST_PROMPTS:
        raise ValueError(
            f"reactions: the marks have {loved} favourites and {len(seen) - loved} other pictures beside them, and "
            f"{len(both)} prompts with both; {least} of each and {LEAST_PROMPTS} prompts are needed. Mark more, or "
            "lower `least`"
        )


def ranked_right(rows: Pairs, penalty: float | None = None) -> HeldOut:
    """Measure how often a favourite is ranked above another picture of its prompt, where the fit knows neither.

    Args:
        rows: pictures with their features as `differences`, and 1 in `firsts` for a favourite; the units are prompts.
        penalty: None chooses a penalty for every fold, with the other prompts alone.
    """
    scores, loved = predictions(rows, penalty), rows.firsts > 0
    pairs = (rows.units[:, None] == rows.units) & loved[:, None] & ~loved
    right = pairs & (scores[:, None] > scores)
    return HeldOut(int(np.count_nonzero(right)), int(np.count_nonzero(pairs)))


def _words(held_out: HeldOut) -> str:
    low, high = held_out.interval
    return (
        f"{held_out.right / held_out.count:.0%} of {held_out.count} held-out favourites and others of their prompts in "
        f"the right order (95 %: {low:.0%} to {high:.0%})"
    )
