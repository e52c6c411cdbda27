"""What a reward is tried on: samples with their prompts, columns and groups, from a model, a file or a drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.addressing import address
from ..training.data import PromptRow, columns_of, read_prompts

SEED = 20_260_301


@dataclass(frozen=True)
class Material:
    """B samples to score.

    Attributes:
        samples: images [B, 3, H, W] or videos [B, F, 3, H, W], float in [0, 1]; or B completions.
        prompts: B strings.
        columns: name -> B values.
        groups: B group ids.
        labels: B names of the samples, such as file names.
        source: a description of the samples, for messages.
    """

    samples: Tensor | list[str]
    prompts: list[str]
    columns: dict[str, list[Any]]
    groups: list[int]
    labels: list[str]
    source: str

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def images(self) -> Tensor:
        """The samples, which must be images or videos."""
        assert isinstance(self.samples, Tensor)
        return self.samples

    @property
    def moving(self) -> bool:
        """Whether the samples are videos."""
        return isinstance(self.samples, Tensor) and self.samples.ndim == 5

    @property
    def texts(self) -> list[str]:
        """The samples, which must be completions."""
        assert isinstance(self.samples, list)
        return self.samples

    def take(self, rows: Sequence[int]) -> Material:
        """Some of the samples, in the order given."""
        chosen = list(rows)
        samples = self.samples[chosen] if isinstance(self.samples, Tensor) else [self.samples[i] for i in chosen]
        return Material(
            samples,
            [self.prompts[i] for i in chosen],
            {name: [column[i] for i in chosen] for name, column in self.columns.items()},
            [self.groups[i] for i in chosen],
            [self.labels[i] for i in chosen],
            self.source,
        )

    def few(self, most: int = 12, of_each: int = 4) -> Material:
        """At most `most` samples, and at most `of_each` of a group if there are several groups."""
        return self.take(self.few_rows(most, of_each))

    def few_rows(self, most: int = 12, of_each: int = 4) -> list[int]:
        """The rows of the samples that `few` takes."""
        if len(set(self.groups)) == 1:
            return list(range(min(len(self), most)))
        counted: Counter[int] = Counter()
        rows = []
        for row, group in enumerate(self.groups):
            counted[group] += 1
            if counted[group] <= of_each:
                rows.append(row)
        return rows[:most]

    def changed(self, samples: Tensor | list[str]) -> Material:
        """This material with other samples."""
        return replace(self, samples=samples)

    def asked(self, prompts: Sequence[str]) -> Material:
        """This material with other prompts and the same columns."""
        return replace(self, prompts=list(prompts))


def groups_of(prompts: Sequence[Hashable]) -> tuple[list[int], str]:
    """Group ids, and how the groups were made: equal prompts are a group; if all prompts differ, all are one group."""
    numbers = {prompt: k for k, prompt in enumerate(dict.fromkeys(prompts))}
    if len(numbers) == len(prompts):
        return [0] * len(prompts), "as one group, since no prompt comes twice"
    return [numbers[prompt] for prompt in prompts], f"{len(numbers)} prompts"


def scene_samples(data: str, prompts: int, seeds: int, *, steps: int = 10) -> Material:
    """Pictures of the embedded scenes model: `seeds` pictures for each of the first `prompts` prompts of a file.

    Raises:
        ValueError: the prompt file cannot be read or the model is not installed.
    """
    from ..inference.image_samples import model_images

    rows, labels = _repeated(data, prompts, seeds)
    keys = [address(SEED, row.id, k % seeds) for k, row in enumerate(rows)]
    how = [f"evaluate.steps={steps}", "rollout.batch=32", "rollout.decode_batch=32"]
    images = model_images("scenes", [row.text for row in rows], keys, how)
    return _of_rows(images, rows, labels, f"{len(rows)} samples of the embedded scenes model")


def arithmetic_samples(data: str, prompts: int, seeds: int) -> Material:
    """Completions of the embedded language model: `seeds` of them for each of the first `prompts` prompts of a file.

    Raises:
        ValueError: the prompt file cannot be read, the model is not installed, or a prompt cannot be encoded.
    """
    from ..configs.load import load_recipe
    from ..configs.schema import TextRecipe
    from ..inference.text_inference import open_language_model
    from ..training.text.text_policy import complete

    recipe = load_recipe("text")
    assert isinstance(recipe, TextRecipe)
    rows, labels = _repeated(data, prompts, seeds)
    once = rows[::seeds]
    done = complete(
        open_language_model("arithmetic", recipe), once, [address(SEED, row.id) for row in once], seeds,
        recipe.generation, temperature=1.0, batch=256,
    )  # fmt: skip
    return _of_rows(done.samples, rows, labels, f"{len(rows)} completions of the embedded language model")


def written_completions(data: str) -> Material | None:
    """The completions that a prompt file itself holds, in a column `completion`; None if it has no such column.

    Raises:
        ValueError: the file cannot be read, or some rows lack a completion.
    """
    rows = read_prompts(data)
    given = [row.columns.get("completion") for row in rows]
    if all(text is None for text in given):
        return None
    for row, text in zip(rows, given):
        if not isinstance(text, str):
            raise ValueError(f"{data}: prompt {row.id + 1} has the completion {text!r}; write a text in every row")
    columns = {name: column for name, column in columns_of(rows).items() if name != "completion"}
    groups, how = groups_of([row.text for row in rows])
    labels = [f"row {row.id + 1}" for row in rows]
    texts = [str(text) for text in given]
    return Material(texts, [row.text for row in rows], columns, groups, labels, f"{len(rows)} of {data}, {how}")


def _repeated(data: str, prompts: int, seeds: int) -> tuple[list[PromptRow], list[str]]:
    rows = [row for row in read_prompts(data)[:prompts] for _ in range(seeds)]
    return rows, [f"prompt {row.id + 1}, seed {k % seeds}" for k, row in enumerate(rows)]


def _of_rows(samples: Tensor | list[str], rows: list[PromptRow], labels: list[str], source: str) -> Material:
    return Material(samples, [row.text for row in rows], columns_of(rows), [row.id for row in rows], labels, source)


def replaced(images: Tensor, row: int, picture: Tensor) -> Tensor:
    """A copy of the images or videos with `picture`, of the shape of one of them, at position `row`."""
    copy = images.clone()
    copy[row] = picture.to(torch.float32)
    return copy
