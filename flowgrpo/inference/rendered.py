"""A reward of completions that are prompts for images: a pipeline makes the images, and another reward scores them.

With this reward, a language model learns to write prompts for a frozen image pipeline: Promptist (2212.09611),
RePrompt (2505.17540), PromptEnhancer (2509.04545).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..configs.schema import Recipe
from ..core.addressing import address
from ..rewards.backbones.sharing import borrow
from ..rewards.base import FROM_RUN, NOISE_KEY, RESERVED, Reward, RewardSpec, Scores
from ..rewards.inputs import Inputs
from ..rewards.text.extraction import final_answer
from ..rewards.within import check_inner, inner_reward, inner_servers, score_within, signature_of
from ..training.images.evaluator import Evaluator
from .model_recipes import image_recipe, is_run
from .opening import check_call, open_images, pipeline_of

FIXED = ("model.release_text_encoders=false",)
"""Every call brings new prompts, so text encoders stay."""
MAY_CHANGE = (
    "evaluate.steps", "evaluate.call", "model.call", "model.dtype", "model.quantize", "model.offload", "model.compile",
    "rollout.batch", "rollout.decode_batch",
)  # fmt: skip
"""Keys that `set` may change. None of them names code, so a foreign recipe with this reward runs none."""
PROMPTS_KEPT = 1024
"""How many encoded prompts are kept while they need more memory than `SPARE_EMBEDDINGS`."""
THOUGHT = "</think>"
SHARED_NOISE = 20_260_102

Asked = tuple[str, int]
"""A prompt, and the seed of the initial noise of its image."""


class Rendered:
    """How good the images are that a pipeline makes of a completion, by a reward of images.

    The completion is a prompt for a frozen pipeline, which makes `count` images of it from different noises, and

        rendered = mean over the images of r(image, what was asked for)

    where r is the other reward. So a language model learns to write prompts for this pipeline (Promptist 2212.09611,
    RePrompt 2505.17540). r judges by the prompt that the language model was given, not by the prompt that it wrote. All
    completions of a prompt begin with the same noises, so they differ by their words alone. The noises are new in each
    iteration, and the same in all evaluations.

    Of a completion that thinks first, the text after the last `</think>` is the prompt; of this text, the content of
    the last `\\boxed{...}` or `<answer>` tag if it has one. What is opened and never closed leaves an empty prompt.
    Calls of tools and their answers are text as any other, so a writer with tools puts its prompt into `<answer>`. Of a
    conversation, the last message is the prompt that the language model was given; name a `column` with the whole wish
    if the last message is only a part of it.

    Several rewards of one run with the same `model` and `set` share the pipeline. If `count`, `column` and `plain` are
    the same too, they also share the images.

    A reward that compares whole groups compares the images that begin with the same noise: image k of each completion
    with image k of the others. Other words may have the same image, as upper and lower case do for some text encoders.
    Two images of this kind can differ in the last bits, by the company in which they were made. So give `win_rate` a
    `margin` that is larger than rounding.

    The images are handed out beside the scores, so a gallery shows them.

    Args:
        reward: name of the reward of images, `path/to/file.py:name` or `package.module:name`, as for any reward.
        reward_options: options of the reward.
        model: the pipeline, as `flowgrpo sample --model` takes it: a run, a pipeline folder, a hub id or `scenes`.
        count: number of images of each completion, at least 1.
        set: how the pipeline makes images, as a list of KEY=VALUE for keys of a recipe, such as [evaluate.steps=10,
            model.call.guidance_scale=1.0, rollout.batch=16, model.dtype=bfloat16]. A run is called as in its own
            evaluations, and any other pipeline as by `flowgrpo sample`.
        column: the column with the words by which r judges; the prompt of the language model if left out.
        plain: also make images of these words themselves, from the same noises. Sub-score `plain` is their score, and
            `gain` what the completion has above it. Not with a reward that compares whole groups.

    Raises:
        ValueError: the reward cannot be made, the model makes no images, or an option is wrong.
        MissingDependency: the reward needs a package that is not installed.
    """

    name = "rendered"
    remote: bool
    whole_group: bool

    def __init__(
        self,
        reward: str,
        reward_options: Mapping[str, Any] | None = None,
        *,
        model: str,
        count: int = 1,
        set: Sequence[str] = (),
        column: str | None = None,
        plain: bool = False,
    ) -> None:
        _check(self.name, model, count, set, column, plain)
        self.reward = inner_reward(self.name, "reward", reward, reward_options)
        _check_reward(self.name, self.reward, plain)
        vars(self).update(_attributes(self.reward, column))
        self.count, self.column, self.plain = count, column, plain
        self._painter = borrow(("rendered", model, tuple(set)), lambda: _Painter(model, set))

    @staticmethod
    def outlined(options: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes that an instance has from the other reward, without making it."""
        reward = check_inner(Rendered.name, "reward", options["reward"], options.get("reward_options"))
        return _attributes(reward, options.get("column"))

    @staticmethod
    def hub_ids(options: Mapping[str, Any]) -> list[str]:
        """The pipeline, if it is not a folder here."""
        found = pipeline_of(options["model"], _recipe(options["model"], options.get("set", ())))
        return [] if Path(found).is_dir() else [found]

    @staticmethod
    def check_options(name: str, options: Mapping[str, Any]) -> None:
        """Refuse a reward that cannot be made and a model that makes no images, without loading either.

        Raises:
            ValueError: the reward's name or one of its options is wrong, or another option is.
        """
        reward = check_inner(name, "reward", options["reward"], options.get("reward_options"))
        _check(
            name, options["model"], options.get("count", 1), options.get("set", ()), options.get("column"),
            options.get("plain", False),
        )  # fmt: skip
        _check_reward(name, reward, options.get("plain", False))

    @staticmethod
    def served_at(options: Mapping[str, Any]) -> list[str]:
        """The servers that the other reward asks, in words."""
        return inner_servers(options["reward"], options.get("reward_options"))

    def __call__(
        self,
        completions: Sequence[str],
        prompts: Sequence[str],
        noise_key: Sequence[int] | None = None,
        groups: Sequence[int] | None = None,
        **columns: Any,
    ) -> Scores:
        """Score B completions.

        Args:
            completions: B strings.
            prompts: B strings, what the language model was given.
            noise_key: B seeds, equal for the completions of a prompt; by the text of the prompt if left out.
            groups: B group ids, for a reward of whole groups.
            columns: name -> B values, for the other reward.

        Returns:
            Scores with B values, NaN where the reward applies to none of the images; and the images.

        Raises:
            ValueError: a value of `column` is no text.
            InvalidScores, RuntimeError: from the other reward.
        """
        wanted = list(prompts) if self.column is None else _texts(columns[self.column], self.column)
        keys = [_key_of(prompt) for prompt in prompts] if noise_key is None else list(noise_key)
        asked = [self._asked(texts, keys) for texts in ([written(one) for one in completions], wanted)]
        asked = asked if self.plain else asked[:1]
        keep = self._painter.shared or self.remote
        images = self._painter.value.images([one for part in asked for one in part], keep)
        columns[NOISE_KEY] = keys
        parts = images.chunk(len(asked))
        scored = [self._scored(part, wanted, columns, groups) for part in parts]
        made = {name: [list(own) for own in part.split(self.count)] for name, part in zip(("", "plain"), parts)}
        if not self.plain:
            return Scores(scored[0], rendered=made)
        return Scores(scored[0], {"plain": scored[1], "gain": scored[0] - scored[1]}, rendered=made)

    def close(self) -> None:
        """Close the other reward, and free the pipeline if no other reward shares it."""
        self.reward.close()
        self._painter.close()

    def _asked(self, texts: Sequence[str], keys: Sequence[int]) -> list[Asked]:
        """The images of B prompts, prompt by prompt."""
        return [(text, address(SHARED_NOISE, key, k)) for text, key in zip(texts, keys) for k in range(self.count)]

    def _scored(
        self, images: Tensor, wanted: Sequence[str], columns: Mapping[str, Any], groups: Sequence[int] | None
    ) -> Tensor:
        """[B] means of the reward over the images of each of B prompts."""
        rows = range(len(wanted))
        owners = [row for row in rows for _ in range(self.count)]
        inputs = Inputs(
            images,
            [wanted[row] for row in owners],
            {name: [column[row] for row in owners] for name, column in columns.items()},
            # Images that begin with different noises differ by more than the words.
            None if groups is None else [groups[row] * self.count + k for row in rows for k in range(self.count)],
        )
        values = torch.as_tensor(score_within(self.reward, inputs, "reward").values)
        return values.view(len(wanted), self.count).nanmean(1)


def _attributes(reward: Reward, column: str | None) -> dict[str, Any]:
    """The attributes that an instance of `Rendered` has from the other reward."""
    needed = [name for name in reward.needed if name not in ("images", "prompts", NOISE_KEY)]
    groups = ["groups"] if reward.whole_group else []
    signature = signature_of("completions", "prompts", *groups, *needed, *([] if column is None else [column]))
    *named, others = signature.parameters.values()
    # A run gives these columns only to a reward that names them.
    optional = dict.fromkeys([NOISE_KEY, *(name for name in reward.optional if name in FROM_RUN)])
    told = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in optional]
    return {
        "remote": reward.remote,
        "whole_group": reward.whole_group,
        "__signature__": signature.replace(parameters=[*named, *told, others]),
    }


def _recipe(model: str, changes: Sequence[str]) -> Recipe:
    """The recipe with which the pipeline makes images."""
    return image_recipe(model, [*changes, *FIXED])


def painters_of(entries: Sequence[RewardSpec]) -> list[Recipe]:
    """The recipes of the pipelines that entries of this reward load, each once; their paths are of the pipelines.

    Args:
        entries: checked entries of any rewards.
    """
    asked = {
        (one.options["model"], tuple(one.options.get("set", ()))): None for one in entries if one.name == Rendered.name
    }
    found = []
    for model, changes in asked:
        recipe = _recipe(model, changes)
        settings = recipe.model.model_copy(update={"path": pipeline_of(model, recipe)})
        found.append(recipe.model_copy(update={"model": settings}))
    return found


class _Painter:
    """A pipeline that makes images of prompts.

    Args:
        model: as in `Rendered`.
        overrides: changed keys of the recipe.
    """

    def __init__(self, model: str, overrides: Sequence[str]) -> None:
        self._opened = open_images(model, _recipe(model, overrides))
        self._opened.most = PROMPTS_KEPT
        self._evaluator: Evaluator | None = None
        self._asked: list[Asked] = []
        self._kept = torch.empty(0)

    def images(self, asked: Sequence[Asked], keep: bool) -> Tensor:
        """[N, 3, H, W] in [0, 1], or videos [N, F, 3, H, W], of N prompts, each from the noise of its own seed.

        Equal pairs of a prompt and a seed are made once. With `keep`, the images are kept for a next call that asks for
        the same. Some of them alone are made again, because an image differs in the last bits in other company, and a
        resumed run has not kept the images of its last call.
        """
        if list(asked) != self._asked:
            self._asked, self._kept = [], torch.empty(0)
            distinct = {one: place for place, one in enumerate(dict.fromkeys(asked))}
            made = self._made(*zip(*distinct))[[distinct[one] for one in asked]]
            if not keep:
                return made
            self._asked, self._kept = list(asked), made
        return self._kept

    def _made(self, texts: Sequence[str], noises: Sequence[int]) -> Tensor:
        if self._evaluator is None:
            self._evaluator = self._opened.evaluator(texts)
        images = self._evaluator.images(texts, noises)
        assert isinstance(images, Tensor)
        return images


def written(completion: str) -> str:
    """The prompt in a completion, see `Rendered`."""
    return final_answer(completion.rpartition(THOUGHT)[2]) or ""


def _key_of(prompt: str) -> int:
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "little") >> 1


def _texts(values: Sequence[Any], column: str) -> list[str]:
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise ValueError(f"rendered: the column {column!r} has {wrong[0]!r:.80}; give the words of a prompt")
    return list(values)


def _check(name: str, model: Any, count: Any, changes: Any, column: Any, plain: Any) -> None:
    """Refuse wrong options, without loading the model.

    Raises:
        ValueError: an option is wrong, or the model makes no images.
    """
    if not isinstance(model, str):
        raise ValueError(f"{name}: model is {model!r}; give a run, a pipeline folder, a hub id or `scenes`")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name}: count is {count!r}; give the number of images of a completion, 1 or more")
    if isinstance(changes, str) or not isinstance(changes, Sequence) or not all(isinstance(c, str) for c in changes):
        raise ValueError(f"{name}: set is {changes!r}; give a list of KEY=VALUE, such as [evaluate.steps=10]")
    for change in changes:
        key = change.partition("=")[0]
        if not any(key == one or key.startswith(f"{one}.") for one in MAY_CHANGE):
            raise ValueError(f"{name}: set has {change!r}; it may change {', '.join(MAY_CHANGE)}")
    if not isinstance(column, str | None):
        raise ValueError(f"{name}: column is {column!r}; give the name of a column of the prompt file")
    if column in ("", *RESERVED, *FROM_RUN):
        raise ValueError(
            f"{name}: column is {column!r}, and no prompt file has such a column; name the column with the words of "
            "a prompt, or leave column out for the prompts themselves"
        )
    if not isinstance(plain, bool):
        raise ValueError(f"{name}: plain is {plain!r}; give true or false")
    try:
        recipe = _recipe(model, changes)
        if is_run(model) and not any((Path(model) / one).is_dir() for one in ("lora", "pipeline")):
            raise ValueError(f"{model} has no trained weights yet; finish it with `flowgrpo resume {model}`")
        check_call(model, recipe)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_reward(name: str, reward: Reward, plain: bool) -> None:
    """Refuse another reward that cannot score the images, as far as its signature shows.

    Raises:
        ValueError: it scores no images, or `plain` is set and it compares whole groups.
    """
    if "completions" in reward.needed or not reward.takes("images"):
        raise ValueError(f"{name}: the reward {reward.name!r} scores no images; choose a reward that takes `images`")
    if plain and reward.whole_group:
        raise ValueError(
            f"{name}: plain is true, but {reward.name!r} compares the images of a group, and the images of the words "
            "themselves are alike in a group; leave plain out, or choose a reward that scores each image by itself"
        )
