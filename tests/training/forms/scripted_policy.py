"""A writer whose policy says what a test wants, so that what a form does can be written down by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from flowgrpo.configs.text_recipe import GenerationConfig
from flowgrpo.text.model import LanguageModel
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.data import PromptRow
from flowgrpo.training.text.text_policy import Completions
from flowgrpo.training.text.writing import Writer

Says = Callable[[str, int], str]
"""`says(text before, number of the call's completion with this text) -> what comes next`; the end follows."""


def right(rows: Sequence[PromptRow], found: Completions) -> torch.Tensor:
    """1 for a completion that ends with the answer, NaN for a prompt without an answer."""
    answers = [rows[p].columns.get("answer") for p in found.prompt_of_sample]
    pairs = zip(found.samples, answers)
    return torch.tensor([float("nan") if answer is None else float(text.endswith(answer)) for text, answer in pairs])


def scripted(
    language: LanguageModel,
    rows: Sequence[dict[str, Any]],
    says: Says,
    *,
    group: int = 2,
    max_tokens: int = 40,
    chance: Callable[[str], Sequence[float]] | None = None,
    iteration: int | None = 0,
) -> Writer:
    """A writer over a tokenizer of characters.

    Args:
        language: has the tokenizer.
        rows: the prompts with their columns.
        says: the policy.
        group: completions of a prompt.
        max_tokens: of a completion.
        chance: log-probs of the tokens of a text and of its end; -1 each if left out.
        iteration: None in an evaluation.
    """
    ids = language.tokenizer.encode

    def sampler(_: object, prompts: Any, owner: Any, keys: Any, *, max_tokens: int, **settings: Any) -> Sampled:
        texts, count = list[str](), dict[str, int]()
        for one in owner:
            before = language.tokenizer.decode(prompts[one])
            count[before] = count.get(before, -1) + 1
            texts.append(says(before, count[before]))
        own = [[*ids(text), language.ends[0]] for text in texts]
        chances = [list(chance(text)) if chance else [-1.0] * len(row) for text, row in zip(texts, own)]
        return Sampled(
            [row[:max_tokens] for row in own], [row[:max_tokens] for row in chances],
            [len(row) <= max_tokens for row in own],
        )  # fmt: skip

    policy: Any = SimpleNamespace(
        language=language, sampler=sampler, cut=lambda found: found,
        recipe=SimpleNamespace(generation=GenerationConfig(max_tokens=max_tokens)),
    )  # fmt: skip
    prompts = [
        PromptRow(k, row["prompt"], {name: value for name, value in row.items() if name != "prompt"}, place=f"line {k}")
        for k, row in enumerate(rows)
    ]
    return Writer(
        policy, prompts, [10 + k for k in range(len(rows))], group, iteration=iteration, temperature=1.0, batch=64,
        score=None if iteration is None else right,
    )  # fmt: skip


def in_other_contexts(rows: Sequence[PromptRow], found: Completions) -> torch.Tensor:
    """1 for a completion of something else than its prompt alone, 0 for the others."""
    owners = enumerate(found.prompt_of_sample)
    return torch.tensor([float(found.context(row) != found.prompts[p]) for row, p in owners])


def texts(writer: Writer, attempts: Sequence[Any]) -> list[tuple[int, str, str]]:
    """Prompt, context and completion of each attempt, in the order in which a run has them."""
    decode = writer.policy.language.decode
    return [(one.prompt, decode(one.context), writer.text(one)) for one in sorted(attempts, key=lambda one: one.prompt)]
