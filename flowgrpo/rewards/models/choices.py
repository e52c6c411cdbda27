"""What people chose, as a reward: a preference model fitted to the votes of `flowgrpo gallery RUN --vote`.

The features of a picture come from a frozen model of images and texts. A linear head on them is fitted when the reward
is made; `bradley_terry` has the model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backbones.model_loading import check_dtype, load_processor, source_name
from ..backbones.open_clip_model import open_clip_towers
from ..backbones.sharing import Lease, borrow
from ..backbones.towers import TowerReward, Towers, transformers_towers
from ..options import check_count, check_flag, check_positive
from ..pixels import load_picture, preprocess_images
from ..registry import resolve
from ..scores import Scores
from .bradley_terry import Array, HeldOut, Pairs, choose_penalty, fit, shorten, validate
from .voted import Voted, read_voted

SCENES = "scenes"
_log = logging.getLogger(__name__)


class Choices(TowerReward):
    """Human preference learned from your own votes: a Bradley-Terry model on the features of a frozen CLIP.

    The score is the log-odds that people prefer the picture to another one whose score is 0; the pictures that were
    voted on have mean 0. Of videos there is no score.

    Args:
        votes: a file of votes, or a folder of a run with one (`votes.jsonl`), or a list of these.
        features: "scenes" for the scorer of the embedded world; else the folder of a CLIP or SigLIP model, in the
            format of transformers or open_clip, or a model id.
        agreement: let the prompt count: the cosine of picture and prompt is one more feature.
        regularisation: factor λ of the penalty λ/2 · |w|², in units in which the two pictures of a pair are 1 apart in
            the root mean square, in either kind of features. By default what predicts held-out choices best.
        least: fewest pairs of which one picture was preferred.
        allow_chance: warn, in place of the error, if the model predicts held-out choices no better than chance.
        device: where to score.
        dtype: of the weights of the features' model.
        batch_size: most images in one call.

    Attributes:
        held_out: how well choices were predicted that the model was not fitted on.
        report: the same in words; it is the note of every score.

    Raises:
        ValueError: the votes cannot be used (see `read_voted`) or are not predicted better than by chance, an option is
            out of its range, or the features' model cannot be loaded.
    """

    name = "choices"

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
    ) -> None:
        check_flag(self.name, "agreement", agreement)
        check_flag(self.name, "allow_chance", allow_chance)
        check_count(self.name, "least", least, 2)
        if regularisation is not None:
            check_positive(self.name, "regularisation", regularisation)
        names = [votes] if isinstance(votes, (str, Path)) else votes
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, (str, Path)) for n in names):
            raise ValueError(f"choices: votes is {votes!r}; give a file of votes, a folder with one, or a list")
        try:
            voted = read_voted(names, least)
        except ValueError as error:
            raise ValueError(f"choices: {error}") from None
        super().__init__(_towers(features, device, dtype), batch_size=batch_size, frames=None)
        try:
            self._fit(voted, agreement, regularisation)
            self._judge(allow_chance)
        except BaseException:
            self.close()
            raise

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Score of each picture.

        Args:
            images: [B, 3, H, W] in [0, 1].
            prompts: B strings; they do not matter with `agreement: false`.
            columns: ignored.

        Returns:
            B scores, which are the sum of the sub-scores `picture`, what it has by itself, and `agreement` with the
            prompt; and the report as notes.

        Raises:
            ValueError: the images are videos.
        """
        if images.ndim != 4:
            raise ValueError(f"choices: images have shape {list(images.shape)}; give single images [B, 3, H, W]")
        if not len(images):
            return Scores(images.new_zeros(0))
        embeddings = self.embeddings(images)[:, 0]
        picture = (embeddings * self._on_picture).sum(-1) - self._means[0]
        if self._on_agreement is None:
            return Scores(picture, notes=[self.report] * len(images))
        cosines = (embeddings * self.lease.value.embed_texts(prompts)).sum(-1)
        agreement = cosines * self._on_agreement - self._means[1]
        subs = {"picture": picture.tolist(), "agreement": agreement.tolist()}
        return Scores(picture + agreement, subs, [self.report] * len(images))

    @torch.no_grad()
    def _fit(self, voted: Voted, agreement: bool, penalty: float | None) -> None:
        """Fit the head, and see how well it predicts what it was not fitted on."""
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
        weights = np.split(directions @ fit(pairs, self.regularisation), [images.shape[-1]])
        heads = [head / scale for head, scale in zip(weights, scales)]
        self._means = [float((kind @ head).mean()) for kind, head in zip(kinds, heads)]
        self._on_picture = torch.as_tensor(heads[0], dtype=torch.float32, device=self.device)
        self._on_agreement = float(heads[1].item()) if agreement else None

    def _sides(self, voted: Voted) -> tuple[Array, Array]:
        """Embeddings of the two pictures of each pair [N, 2, D], and of its prompt [N, 1, D]."""
        towers, contents = self.lease.value, sorted(voted.files)
        places = {content: place for place, content in enumerate(contents)}
        prompts = {prompt: place for place, prompt in enumerate(sorted({pair.prompt for pair in voted.pairs}))}
        images, texts = [], []
        for start in range(0, len(contents), self.batch_size):
            some = contents[start : start + self.batch_size]
            # Pictures of several sizes may stand in one file of votes; the encoder's input has one.
            pixels = [towers.prepare(load_picture(voted.files[content]).unsqueeze(0)) for content in some]
            images.append(towers.embed_pixels(torch.cat(pixels)))
        for start in range(0, len(prompts), self.batch_size):
            texts.append(towers.embed_texts(list(prompts)[start : start + self.batch_size]))
        known, words = (torch.cat(parts).double().cpu().numpy() for parts in (images, texts))
        return (
            known[[[places[pair.first], places[pair.second]] for pair in voted.pairs]],
            words[[[prompts[pair.prompt]] for pair in voted.pairs]],
        )

    def _judge(self, allow_chance: bool) -> None:
        """Refuse a model that is not better than chance."""
        if self.held_out.beats_chance:
            _log.info("choices: %s", self.report)
            return
        self.report = f"no better than chance: {self.report}"
        if not allow_chance:
            raise ValueError(
                f"choices: {self.report}; vote on more pairs, name other `features`, or set `allow_chance: true` to go "
                "on with a warning"
            )
        warnings.warn(f"choices: {self.report}; what it prefers may be noise", stacklevel=3)


def _towers(features: str, device: str, dtype: str) -> Lease[Towers]:
    if features == SCENES:
        key = ("scenes", dtype, str(torch.device(device)))
        return borrow(key, lambda: _scenes(device, check_dtype(Choices.name, dtype)))
    folder = Path(features).expanduser()
    if features.startswith(("hf-hub:", "local-dir:")) or (folder / "open_clip_config.json").is_file():
        return open_clip_towers(Choices.name, features, device=device, dtype=dtype)
    from transformers import AutoConfig

    kind = load_processor(Choices.name, AutoConfig, source_name(Choices.name, "features", features)).model_type
    # SigLIP 2 was trained on lower case.
    lowercase = kind.startswith("siglip")
    return transformers_towers(Choices.name, features, device=device, dtype=dtype, lowercase=lowercase)


def _scenes(device: str, dtype: torch.dtype) -> Towers:
    """The scorer of the embedded world as towers."""
    proxy = resolve("proxy")(device=device)
    model = proxy.model.to(dtype)
    return Towers(
        model,
        lambda images: preprocess_images(images, proxy.preprocess).to(dtype),
        model.encode_image,
        lambda texts: model.encode_text(proxy.tokenizer(texts).to(device)),
        scale=float(model.logit_scale.float().exp()),
        bias=0.0,
        device=device,
    )


def _spread(sides: Array) -> float:
    """Root mean square, over the pairs, of the distance between the two sides [N, 2, D]; 1 if there is none."""
    distance = float(np.sqrt(np.square(sides[:, 0] - sides[:, 1]).sum(-1).mean()))
    return distance or 1.0


def _words(held_out: HeldOut) -> str:
    low, high = held_out.interval
    share = held_out.right / held_out.count
    return f"{share:.0%} of {held_out.count} held-out pairs predicted (95 %: {low:.0%} to {high:.0%})"
