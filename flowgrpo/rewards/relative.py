"""A reward in two styles: how much better an image suits a prompt in a liked style than in a disliked one.

SRPO (arXiv 2509.06942): a reward model that reads prompts also knows words for styles. Asked twice about one image,
with two of these words, its general biases cancel, and what is left is the difference between the two styles.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import OF_RECOVERED, Scores
from .inputs import Inputs
from .within import check_inner, inner_reward, inner_servers, score_within, signature_of


class Relative:
    """How much better a sample suits its prompt in a liked style than in a disliked one, by another reward.

    With a word of each list in front of the prompt, such as "Detailed. a cat", and r the other reward:

        (1 + k) r(x, liked) - r(x, disliked)

    as in SRPO (2509.06942). k is small, so what the reward says of any image counts little beside the difference of the
    styles. Each prompt always gets the same two words, chosen by its text, so the samples of a prompt are compared in
    the same styles. The released code takes the next word of each list in every iteration, for all prompts.

    If the other reward has a gradient with respect to the images, so has this one. Objective `direct_align` with
    `inversion` lowers the reward at images that a step towards noise has changed. There it is
    r(x, liked) - (1 + k') r(x, disliked).

    Args:
        reward: name of the reward, `path/to/file.py:name` or `package.module:name`, as for any reward. It must read
            prompts.
        reward_options: options of the reward.
        liked: words or phrases for styles that are wanted. The reward must know them.
        disliked: words or phrases for styles that are not wanted.
        favour: k, a number of at least 0, or two for the lowest and the highest noise level of objective
            `direct_align`, and linear between. Elsewhere, the mean of the two is used.
        favour_inverted: k', in the same way. The defaults of both are the values of the released code.

    Raises:
        ValueError: the reward cannot be made or does not read prompts, or an option is wrong.
        MissingDependency: the reward needs a package that is not installed.
    """

    name = "relative"

    def __init__(
        self,
        reward: str,
        reward_options: Mapping[str, Any] | None = None,
        *,
        liked: Sequence[str],
        disliked: Sequence[str],
        favour: float | Sequence[float] = (0.1, 0.25),
        favour_inverted: float | Sequence[float] = (0.3, 0.01),
    ) -> None:
        self.reward = inner_reward(self.name, "reward", reward, reward_options)
        if not self.reward.takes("prompts"):
            raise ValueError(
                f"relative: the reward {reward!r} does not read `prompts`, so it cannot tell styles apart; choose a "
                "reward that compares an image with its prompt, such as hpsv2"
            )
        self.liked, self.disliked = _words(self.name, "liked", liked), _words(self.name, "disliked", disliked)
        _apart(self.name, self.liked, self.disliked)
        self.favour = _ends(self.name, "favour", favour)
        self.favour_inverted = _ends(self.name, "favour_inverted", favour_inverted)
        self.device, self.remote, self.batch_size = self.reward.device, self.reward.remote, self.reward.batch_size
        self.whole_group = self.reward.whole_group
        needed = signature_of("prompts", *(["groups"] if self.whole_group else []), *self.reward.needed)
        *named, others = needed.parameters.values()
        told = [inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, default=None) for one in OF_RECOVERED]
        self.__signature__ = needed.replace(parameters=[*named, *told, others])

    @staticmethod
    def check_options(name: str, options: Mapping[str, Any]) -> None:
        """Refuse a reward that cannot be made, without making it.

        Raises:
            ValueError: the reward's name or one of its options is wrong, or another option is.
        """
        _apart(name, *(_words(name, key, options[key]) for key in ("liked", "disliked")))
        for key in ("favour", "favour_inverted"):
            _ends(name, key, options.get(key, 0.0))
        check_inner(name, "reward", options["reward"], options.get("reward_options"))

    @staticmethod
    def served_at(options: Mapping[str, Any]) -> list[str]:
        """The servers that the reward asks, in words."""
        return inner_servers(options["reward"], options.get("reward_options"))

    def __call__(
        self,
        prompts: Sequence[str],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        groups: Sequence[int] | None = None,
        inverted: Sequence[bool] | None = None,
        noisiness: Sequence[float] | None = None,
        **columns: Any,
    ) -> Scores:
        """Score B samples.

        Args:
            prompts: B strings.
            images: [B, 3, H, W] in [0, 1], or videos [B, F, 3, H, W].
            completions: B strings, instead of images.
            groups: B group ids, for a reward of whole groups.
            inverted: for each image whether a step towards noise has changed it; for none if left out.
            noisiness: B numbers in [0, 1], see `favour`.
            columns: name -> B values, for the reward.

        Returns:
            Scores with B values, NaN where the reward does not apply; they have a graph if the images have one.
            Sub-scores `liked` and `disliked` are the two scores of the reward.

        Raises:
            InvalidScores, NoGradient, RuntimeError: from the reward.
        """
        samples = list(completions or ()) if images is None else images
        chosen = [self.words_of(prompt) for prompt in prompts]
        liked, disliked = (
            self._scored(
                Inputs(
                    samples,
                    [f"{words[k]}. {prompt}" for words, prompt in zip(chosen, prompts)],
                    columns,
                    None if groups is None else list(groups),
                )
            )
            for k in range(2)
        )
        backwards = torch.tensor(inverted or [False] * len(prompts), device=liked.device)
        k = self._favours(noisiness, backwards)
        values = torch.where(backwards, liked - (1.0 + k) * disliked, (1.0 + k) * liked - disliked)
        return Scores(values, {"liked": liked.detach(), "disliked": disliked.detach()})

    def words_of(self, prompt: str) -> tuple[str, str]:
        """The liked and the disliked word of a prompt, which depend on its text alone."""
        number = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")
        return self.liked[number % len(self.liked)], self.disliked[number // len(self.liked) % len(self.disliked)]

    def close(self) -> None:
        """Close the reward."""
        self.reward.close()

    def _scored(self, inputs: Inputs) -> Tensor:
        """[B] scores of the inner reward, with a graph if the images have one."""
        samples = inputs.samples
        if not (isinstance(samples, Tensor) and samples.requires_grad):
            return torch.as_tensor(score_within(self.reward, inputs, "reward").values)
        values, slopes = self.reward.gradient(samples, inputs.prompts, inputs.columns)
        # The graph of the inner reward is gone, so that only one of the two is in memory. This has the same gradient.
        moved = (samples - samples.detach()).to(slopes.device)
        return values.to(slopes.device) + (slopes * moved).flatten(1).sum(1)

    def _favours(self, noisiness: Sequence[float] | None, inverted: Tensor) -> Tensor:
        """[B] k of each sample."""
        place = torch.tensor(noisiness or [0.5] * len(inverted), dtype=torch.float32, device=inverted.device)
        first, last = (
            torch.where(inverted, there, here) for here, there in zip(self.favour, self.favour_inverted)
        )  # fmt: skip
        return first + place * (last - first)


def _words(reward: str, option: str, words: Any) -> tuple[str, ...]:
    if isinstance(words, str) or not isinstance(words, Sequence) or not words:
        raise ValueError(f"{reward}: {option} is {words!r}; give a list of words, such as [Detailed]")
    if wrong := [word for word in words if not isinstance(word, str) or not word.strip()]:
        raise ValueError(f"{reward}: {option} has {wrong[0]!r}; give words that are not empty")
    return tuple(words)


def _apart(reward: str, liked: Sequence[str], disliked: Sequence[str]) -> None:
    if both := [word for word in liked if word in disliked]:
        raise ValueError(
            f"{reward}: {both[0]!r} is in liked and in disliked, so nothing would be compared; leave it out of one of "
            "them"
        )


def _ends(reward: str, option: str, favour: Any) -> tuple[float, float]:
    ends = list(favour) if isinstance(favour, Sequence) and not isinstance(favour, str) else [favour] * 2
    numbers = [one for one in ends if isinstance(one, (int, float)) and not isinstance(one, bool)]
    if len(ends) != 2 or len(numbers) != 2 or not all(0.0 <= one < math.inf for one in numbers):
        raise ValueError(
            f"{reward}: {option} is {favour!r}; give a number of at least 0, or two such numbers in a list"
        )
    return float(ends[0]), float(ends[1])
