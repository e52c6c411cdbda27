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
from torch import Tensor

from ...votes.marks import Reaction, read_reactions
from ..options import check_count
from ..scores import Scores
from .bradley_terry import HeldOut, Pairs, predictions
from .learned_taste import LearnedTaste, scaled
from .picture_features import SCENES

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
        check_count(self.name, "least", least, 2)
        folders = [runs] if isinstance(runs, (str, Path)) else list(runs)
        seen = read_reactions(Path(marks).expanduser(), [Path(folder).expanduser() for folder in folders])
        samples = [(file_of(one), one.sample.frames) for one in seen]
        check_enough(seen, least)
        learn = partial(self._fit, seen, samples)
        super().__init__(learn, features, agreement, regularisation, allow_chance, device, dtype, batch_size, frames)

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Probability of each picture. Arguments as for `LearnedTaste`.

        Returns:
            B probabilities, in (0, 1). The notes are the report.
        """
        scores = super().__call__(images, prompts)
        return Scores(torch.sigmoid(scores.values + self._constant), notes=scores.notes)

    @torch.no_grad()
    def _fit(self, seen: Sequence[Reaction], samples: Sequence[tuple[Path, int]]) -> None:
        prompts = [one.sample.prompt for one in seen]
        kinds = self.kinds_of_features(samples, prompts)
        known, scales = scaled([kind - kind.mean(0) for kind in kinds])
        known = np.column_stack([known, np.full(len(seen), CONSTANT)])
        loved = np.array([float(one.loved) for one in seen])
        units = np.unique([repr(one.sample.asked_anywhere) for one in seen], return_inverse=True)[1]
        rows = Pairs(known, loved, 1 - loved, np.zeros(len(seen)), units)
        self._constant = CONSTANT * float(self.fit_head(rows, kinds, scales, ranked_right).item())
        self.report = self.held_out.words("favourites and others of their prompts in the right order")


def file_of(reaction: Reaction) -> Path:
    """Return the file of the picture that a reaction is about.

    Raises:
        ValueError: the sample is a completion.
    """
    if reaction.sample.image is None:
        raise ValueError(
            f"reactions: seed {reaction.sample.seed} of {reaction.sample.prompt!r:.80} in {reaction.run} is a "
            "completion, and this reward learns from pictures only"
        )
    return reaction.run / "samples" / reaction.sample.image


def check_enough(seen: Sequence[Reaction], least: int) -> None:
    """Refuse reactions from which nothing can be learned.

    Raises:
        ValueError: there are too few favourites, too few other pictures, or too few prompts that have both.
    """
    loved = sum(one.loved for one in seen)
    liked, others = ({one.sample.asked_anywhere for one in seen if one.loved == kind} for kind in (True, False))
    both = liked & others
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
    return HeldOut.of_units(rows.units, right.sum(1), pairs.sum(1))
