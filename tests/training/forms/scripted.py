"""A writer whose completions are given, so that what a form does with them can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.data import PromptRow
from flowgrpo.training.text.text_policy import Completions
from flowgrpo.training.text.writing import Attempt, Writer

END = 0


def ids_of(text: str) -> list[int]:
    """A token for each character; `$` is the end token."""
    return [END if one == "$" else ord(one) for one in text]


def text_of(ids: Sequence[int]) -> str:
    """The characters of tokens."""
    return "".join("$" if one == END else chr(one) for one in ids)


class Scripted(Writer):
    """Appends given texts, in the order of the openings that go on.

    Args:
        texts: stage -> what is appended in each stage, over and over. A capital has log-prob -1, others -0.01.
        group: completions of a prompt.
        max_tokens: of generation.
        prompts: how many there are.
    """

    def __init__(
        self, texts: Mapping[int, Sequence[str]], *, group: int = 1, max_tokens: int = 8, prompts: int = 1
    ) -> None:  # fmt: skip
        self.texts, self.group, self.max_tokens = texts, group, max_tokens
        self.rows = [PromptRow(p, "?", {"answer": "ab"}) for p in range(prompts)]
        self.policy: Any = SimpleNamespace(language=SimpleNamespace(positions=None), cut=lambda found: found)
        self.keys, self.temperatures = [31 + p for p in range(prompts)], list[float | None]()

    def context(self, prompt: int, template: str | None = None) -> list[int]:
        """One token."""
        return [1 + prompt]

    def ids(self, text: str) -> list[int]:
        """A token for each character."""
        return ids_of(text)

    def text(self, attempt: Attempt) -> str:
        """The characters."""
        return text_of(attempt.ids)

    def write(self, openings: Any, *, stage: int = 0, limit: Any = None, temperature: Any = None) -> list[Attempt]:
        """Append the next text to each attempt that goes on."""
        self.temperatures.append(temperature)
        limits = limit if isinstance(limit, list) else [limit or self.max_tokens] * len(openings)
        found, number = [], 0
        for one, most in zip(openings, limits, strict=True):
            if one.ended or len(one.ids) >= most:
                found.append(one)
                continue
            new = ids_of(self.texts[stage][number % len(self.texts[stage])])[: most - len(one.ids)]
            number += 1
            log_probs = [-1.0 if text_of([k]).isupper() else -0.01 for k in new]
            found.append(
                replace(
                    one, ids=one.ids + new, log_probs=one.log_probs + log_probs, own=one.own + [True] * len(new),
                    ended=END in new,
                )
            )  # fmt: skip
        return found

    def log_probs(self, attempts: Sequence[Attempt]) -> list[torch.Tensor]:
        """-0.5 for each token."""
        return [torch.full((len(one.ids),), -0.5) for one in attempts]


def marked(attempt: Attempt) -> str:
    """The text of an attempt, with what is not trained in lower case and what is trained in capitals."""
    return "".join(
        one.upper() if own else one.lower() for one, own in zip(text_of(attempt.ids), attempt.own, strict=True)
    )


def judged_by(attempts: Sequence[Attempt], writer: Writer, rewards: Sequence[float]) -> tuple[Completions, RewardBatch]:
    """The rollout of attempts, and their scores by one reward."""
    return writer.completions(attempts), RewardBatch(
        torch.tensor(rewards)[:, None], ("right",), torch.ones(1), {}, {}, {}
    )
