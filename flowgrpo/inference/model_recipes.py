"""The recipe with which a model is called or evaluated: the recipe of its run, a named one, or the defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..configs.load import load_recipe
from ..configs.schema import AnyRecipe, MaskedRecipe, Recipe
from ..configs.yaml_text import parse_yaml
from ..intake.links import check_links
from ..training.folder.run_folder import refuse_part_of_run

PLAIN = ("model={}", "evaluate={}", "sampler={}", "rollout={}", "rollout.batch=8", "rollout.decode_batch=8")
"""Settings for a model that is not a run: it is called with the arguments that its folder recommends, and in small
batches."""
HOW = ("model", "sampler", "rollout", "generation", "run")
"""Sections of a recipe that say how samples are made. In an evaluation, the other sections say what is sampled and
scored."""


def is_run(model: str) -> bool:
    """Whether a model is the folder of a run.

    Raises:
        ValueError: it is a part of a run, or its path is no text, which the libraries of models do not open.
    """
    if model != model.encode(errors="replace").decode():
        raise ValueError(f"{model!a} has a name that is not UTF-8; rename it")
    if not (Path(model) / "config.yaml").is_file():
        return False
    refuse_part_of_run(Path(model))
    return True


def check_not_run(out: Path, better: str) -> None:
    """Raise ValueError if a folder for samples is a run folder; `better` names a folder in it that would do."""
    if is_run(str(out)):
        raise ValueError(
            f"{out} has a config.yaml, so it is a run folder; name another folder with --out, such as {out / better}"
        )


def run_config(model: str) -> Path:
    """The recipe of a run.

    Raises:
        ValueError: the folder of the run has links that lead out of it.
    """
    check_links(Path(model))
    return Path(model) / "config.yaml"


def recipe_of_run(run: str, overrides: Sequence[str], rewards: bool = True) -> AnyRecipe:
    """The recipe of a run, with changes.

    Raises:
        ValueError: the schema refuses a change, or the changes say which weights the run trains. The run has trained
            its own.
    """
    config = run_config(run)
    recipe = load_recipe(config, overrides, rewards=rewards)
    if overrides and recipe.model.train != load_recipe(config, rewards=False).model.train:
        raise ValueError(f"model.train says which weights are trained, and {run} has trained its own; leave it out")
    return recipe


def refuse_other_path(run: str, recipe: AnyRecipe) -> None:
    """Refuse another base model for a run whose result is a whole model."""
    if recipe.model.path != load_recipe(run_config(run), rewards=False).model.path:
        raise ValueError(
            f"model.path is the model before training, and {run} has trained whole weights; leave model.path out, or "
            "add --base"
        )


def image_recipe(model: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe with which a model of images is called: a run's own recipe, else the schema's defaults.

    Raises:
        ValueError: the model is a run of text, the schema refuses an override, or an override says which weights a run
            trains.
    """
    if is_run(model):
        # Overrides for images have no place in a recipe of text, and the schema would refuse them first.
        if not isinstance(recipe_of_run(model, (), rewards=False), Recipe):
            raise ValueError(f"{model} is a run of text, and makes no images; name a run or a model of images")
        recipe = recipe_of_run(model, list(overrides), rewards=False)
    else:
        recipe = load_recipe("mixgrpo_guard", [*PLAIN, *overrides], rewards=False)
    assert isinstance(recipe, Recipe)
    return _as_evaluated(recipe, overrides)


def _as_evaluated(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """The recipe with the call of its evaluations; a change of `model.call` comes before `evaluate.call`."""
    changed: set[str] = set()
    for key, _, value in (word.partition("=") for word in overrides):
        if key.startswith("model.call."):
            changed.add(key.split(".")[2])
        elif key in ("model", "model.call"):
            given = parse_yaml(value, key)
            call = given.get("call") if key == "model" and isinstance(given, dict) else given
            changed |= set(call) if isinstance(call, dict) else set()
    kept = {name: value for name, value in recipe.evaluate.call.items() if name not in changed}
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"call": kept})}).as_evaluated


def evaluation_recipe(model: str, source: str | None, overrides: Sequence[str]) -> AnyRecipe:
    """The recipe by which a model is evaluated: the recipe that is named, else a run's own recipe.

    If a recipe is named for a run, the prompts, the rewards and the section `evaluate` come from this recipe. Samples
    are still made as in the evaluations of the run, except for the steps, the share of the trained weights and the
    arguments of the call that the section `evaluate` of this recipe names.

    Raises:
        ValueError: no recipe is named and the model is neither a run nor an embedded model, the recipe is of another
            task, or an override says which weights a run trains or names rewards that do not score the evaluation.
    """
    recipe = _evaluation_recipe(model, source, overrides)
    if isinstance(recipe, Recipe):
        recipe = _as_evaluated(recipe, overrides)
    changed = {word.partition("=")[0] for word in overrides}
    own = any(re.match(r"evaluate\.rewards\b", key) for key in changed)
    if recipe.evaluate.rewards is not None and not own and any(re.match(r"rewards\b", key) for key in changed):
        named = ", ".join(reward.label or reward.name for reward in recipe.evaluate.rewards)
        raise ValueError(
            f"`rewards` are trained on, and evaluate.rewards of {recipe.name} score an evaluation ({named}); write "
            "evaluate.rewards in place of rewards"
        )
    return recipe


def _evaluation_recipe(model: str, source: str | None, overrides: Sequence[str]) -> AnyRecipe:
    if is_run(model):
        if source is None:
            return recipe_of_run(model, overrides)
        how = [word for word in overrides if word.partition("=")[0].split(".")[0] in HOW]
        own = recipe_of_run(model, how, rewards=False)
        asked = load_recipe(source, [word for word in overrides if word not in how])
        if own.task != asked.task:
            raise ValueError(
                f"{model} makes {own.task}, but {asked.name} is a recipe of {asked.task}; name a recipe of {own.task}"
            )
        what = {"name": asked.name, "data": asked.data, "rewards": asked.rewards, "evaluate": _shown_alike(own, asked)}
        return own.model_copy(update=what)
    embedded = {
        "scenes": "default", "arithmetic": "text", "arithmetic:untrained": "text", "arithmetic:masked": "masked",
    }  # fmt: skip
    if source is None and model not in embedded:
        raise ValueError(
            f"{model} is not a run, so it has no prompts and rewards for an evaluation; name a recipe: "
            f"`flowgrpo evaluate {model} my-run.yaml` (the recipes `default`, `text` and `masked` have the prompts and "
            "rewards of the embedded models)"
        )
    return load_recipe(source or embedded[model], overrides)


def _shown_alike(own: AnyRecipe, asked: AnyRecipe) -> Any:
    """The section `evaluate` of a recipe; where it does not say how images are made, the run's own section does."""
    kept: dict[str, Any] = {}
    if isinstance(own, Recipe | MaskedRecipe) and isinstance(asked, Recipe | MaskedRecipe):
        kept["steps"] = own.evaluate.steps if asked.evaluate.steps is None else asked.evaluate.steps
    if isinstance(own, Recipe) and isinstance(asked, Recipe):
        kept["call"] = {**own.evaluate.call, **asked.evaluate.call}
        if "trained_share" not in asked.evaluate.model_fields_set:
            kept["trained_share"] = own.evaluate.trained_share
    return asked.evaluate.model_copy(update=kept)


def with_share(recipe: Recipe, share: float) -> Recipe:
    """The recipe with another share of the steps that the trained weights make in evaluations."""
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"trained_share": share})})


def own_share(model: str, recipe: Recipe, base: bool) -> Recipe:
    """The recipe for a model: one that is no run, or is the model before training, makes all steps alone."""
    return recipe if is_run(model) and not base else with_share(recipe, 1.0)
