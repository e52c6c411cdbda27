"""People's choices as a reward: a preference model fitted to the votes of `flowgrpo gallery RUN --vote`.

The features of a picture come from a frozen model of images and texts. A linear head on these features is fitted when
the reward is made. The preference model is in `bradley_terry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..options import check_count
from .bradley_terry import Pairs
from .learned_taste import LearnedTaste, scaled
from .picture_features import SCENES
from .voted import Voted, read_voted


class Choices(LearnedTaste):
    """Human preference learned from your own votes: a Bradley-Terry model on the features of a frozen CLIP.

    The score is the log-odds that people prefer the picture to a picture whose score is 0. The mean score of the
    pictures that were voted on is 0. The score of a video is the mean over its frames, so motion does not matter.

    Args:
        votes: a file of votes, the folder of a run that has such a file (`votes.jsonl`), or a list of files and
            folders.
        features: "scenes" for the scorer of the embedded world; otherwise the folder of a CLIP or SigLIP model, in the
            format of transformers or open_clip, or a model id.
        agreement: if true, the prompt counts: the cosine between picture and prompt is an additional feature.
        regularisation: factor λ of the penalty λ/2 · |w|². Both kinds of features are scaled so that the root mean
            square of the distance between the two pictures of a pair is 1. By default, λ is the value that predicts
            held-out choices best.
        least: smallest number of pairs in which one picture was preferred.
        allow_chance: if true, give a warning instead of an error if the model predicts held-out choices no better than
            chance.
        device: where to score.
        dtype: data type of the weights of the model that gives the features.
        batch_size: largest number of images in one call.
        frames: largest number of frames of a video that count, evenly spaced; None takes all.

    Attributes:
        held_out: how well the model predicts choices on which it was not fitted.
        report: `held_out` in words; it is the note of every score.

    Raises:
        ValueError: the votes cannot be used (see `read_voted`), the model predicts them no better than chance, an
            option is out of its range, or the model of the features cannot be loaded.
    """

    name = "choices"
    more = "vote on more pairs"

    def __init__(
        self,
        votes: str | Path | Sequence[str | Path],
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
        names = [votes] if isinstance(votes, (str, Path)) else votes
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, (str, Path)) for n in names):
            raise ValueError(f"choices: votes is {votes!r}; give a file of votes, a folder with one, or a list")
        try:
            voted = read_voted(names, least)
        except ValueError as error:
            raise ValueError(f"choices: {error}") from None
        learn = partial(self._fit, voted)
        super().__init__(learn, features, agreement, regularisation, allow_chance, device, dtype, batch_size, frames)

    @torch.no_grad()
    def _fit(self, voted: Voted) -> None:
        contents = [content for pair in voted.pairs for content in (pair.first, pair.second)]
        samples = [(voted.files[content], voted.frames.get(content, 1)) for content in contents]
        prompts = [pair.prompt for pair in voted.pairs for _ in range(2)]
        kinds = self.kinds_of_features(samples, prompts)
        differences, scales = scaled([kind[::2] - kind[1::2] for kind in kinds])
        tallies = [(count.first, count.second, count.tie) for count in voted.pairs.values()]
        firsts, seconds, ties = np.array(tallies, dtype=np.float64).T
        self.fit_head(Pairs(differences, firsts, seconds, ties, voted.units), kinds, scales)
        self.report = f"{self.held_out.words('pairs predicted')}, on {voted.shared} left out"
