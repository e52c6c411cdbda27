"""People's choices as a reward: a preference model fitted to the votes of `flowgrpo gallery RUN --vote`.

The features of a picture come from a frozen model of images and texts. A linear head on these features is fitted when
the reward is made. The preference model is in `bradley_terry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..scores import Scores
from .bradley_terry import Array, HeldOut, Pairs, choose_penalty, fit, shorten, validate
from .learned_taste import LearnedTaste, check_learning
from .picture_features import SCENES, known_embeddings
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
        check_learning(self.name, agreement, allow_chance, least, regularisation)
        names = [votes] if isinstance(votes, (str, Path)) else votes
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, (str, Path)) for n in names):
            raise ValueError(f"choices: votes is {votes!r}; give a file of votes, a folder with one, or a list")
        try:
            voted = read_voted(names, least)
        except ValueError as error:
            raise ValueError(f"choices: {error}") from None
        learn = partial(self._fit, voted, agreement, regularisation)
        super().__init__(learn, features, allow_chance, device, dtype, batch_size, frames)

    @torch.no_grad()
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
        picture, agreement = self.terms(images, prompts)
        picture = picture - self._means[0]
        if agreement is None:
            return Scores(picture, notes=[self.report] * len(images))
        agreement = agreement - self._means[1]
        subs = {"picture": picture.tolist(), "agreement": agreement.tolist()}
        return Scores(picture + agreement, subs, [self.report] * len(images))

    @torch.no_grad()
    def _fit(self, voted: Voted, agreement: bool, penalty: float | None) -> None:
        """Fit the head, and measure how well it predicts choices on which it was not fitted."""
        images, texts = self._sides(voted)
        kinds = [images, (images * texts).sum(-1, keepdims=True)] if agreement else [images]
        scales = [_spread(kind) for kind in kinds]
        differences = [(kind[:, 0] - kind[:, 1]) / scale for kind, scale in zip(kinds, scales)]
        tallies = [(count.first, count.second, count.tie) for count in voted.pairs.values()]
        firsts, seconds, ties = np.array(tallies, dtype=np.float64).T
        pairs, directions = shorten(Pairs(np.concatenate(differences, axis=1), firsts, seconds, ties, voted.units))
        self.regularisation = choose_penalty(pairs) if penalty is None else float(penalty)
        self.held_out = validate(pairs, penalty)
        self.report = f"{_words(self.held_out)}, on {voted.shared} left out"
        heads = self.take(directions @ fit(pairs, self.regularisation), images.shape[-1], scales)
        self._means = [float((kind @ head).mean()) for kind, head in zip(kinds, heads)]

    def _sides(self, voted: Voted) -> tuple[Array, Array]:
        """Return the embeddings of the two samples of each pair [N, 2, D], and of each pair's prompt [N, 1, D]."""
        contents = sorted(voted.files)
        places = {content: place for place, content in enumerate(contents)}
        prompts = {prompt: place for place, prompt in enumerate(sorted({pair.prompt for pair in voted.pairs}))}
        texts = [
            self.lease.value.embed_texts(list(prompts)[start : start + self.batch_size])
            for start in range(0, len(prompts), self.batch_size)
        ]
        samples = [(voted.files[content], voted.frames.get(content, 1)) for content in contents]
        known = known_embeddings(self.lease.value, samples, self.batch_size, self.frames)
        words = torch.cat(texts).cpu().double().numpy()
        return (
            known[[[places[pair.first], places[pair.second]] for pair in voted.pairs]],
            words[[[prompts[pair.prompt]] for pair in voted.pairs]],
        )


def _spread(sides: Array) -> float:
    """Return the root mean square, over the pairs, of the distance between the two sides [N, 2, D]; 1 if it is 0."""
    distance = float(np.sqrt(np.square(sides[:, 0] - sides[:, 1]).sum(-1).mean()))
    return distance or 1.0


def _words(held_out: HeldOut) -> str:
    low, high = held_out.interval
    share = held_out.right / held_out.count
    return f"{share:.0%} of {held_out.count} held-out pairs predicted (95 %: {low:.0%} to {high:.0%})"
