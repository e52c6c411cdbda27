"""Models of images outside a run: the recipe with which a model is called, and the model with its run's settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..configs.load import load_recipe
from ..configs.schema import AnyRecipe, MaskedRecipe, Recipe
from ..configs.yaml_text import parse_yaml
from ..intake.links import check_links
from ..pipelines.acceleration import compile_blocks, use_attention
from ..pipelines.capture import PipelineCall
from ..pipelines.denoiser import Denoiser
from ..pipelines.placement import place
from ..pipelines.policy import FlowPolicy
from ..pipelines.prompt_cache import PromptCache
from ..training.data import PromptRow
from ..training.distributed.processes import launched
from ..training.folder.run_folder import refuse_part_of_run
from ..training.images.conditioning import call_parameters, illustrated
from ..training.images.evaluator import Evaluator
from ..training.images.prompt_sizes import SIDES, sized
from ..training.images.sized_rollout import SizedPolicies
from ..training.lora_start import begin
from ..training.model_paths import DTYPES, call_arguments, load_pipeline, model_folder, quiet_libraries
from ..training.planning import steps_of
from ..training.prompt_embeddings import SPARE_EMBEDDINGS
from ..training.prompts.prompt_rows import Size
from ..training.recipe_models import call_faults
from ..training.session import flow_policy, lora_spec
from ..weights.adapters import scale_adapters
from ..weights.json_files import read_json_object
from ..weights.saving import local_folder
from ..weights.trained import TrainedWeights
from ..weights.whole_teachers import load_whole_teacher
from .checkpoints import find_checkpoint, hint_of, load_checkpoint

PLAIN = ("model={}", "evaluate={}", "sampler={}", "rollout={}", "rollout.batch=8", "rollout.decode_batch=8")
"""Settings for a model that is not a run: it is called with the arguments that its folder recommends, and in small
batches."""
GUIDANCE = ("guidance_scale", "true_cfg_scale")
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


@dataclass
class ImageModel:
    """A loaded model of images, called as a recipe says.

    Attributes:
        recipe: the recipe with which the model is called.
        pipe: the pipeline; if the model is a run, with the run's trained weights.
        call: arguments of the pipeline's call.
        weights: weights of the pipeline's denoiser.
        folder: the folder of the pipeline, or its hub id.
        most: how many encoded prompts are kept; None keeps all.
    """

    recipe: Recipe
    pipe: Any
    call: dict[str, Any]
    weights: TrainedWeights
    folder: str
    most: int | None = None

    @cached_property
    def cache(self) -> PromptCache:
        """The cache that encodes prompts, one at a time as in a run."""
        return PromptCache(self.pipe, self.call, most=self.most, spare=SPARE_EMBEDDINGS, overflow="cpu")

    def illustrated(self, rows: list[PromptRow], source: str | None) -> list[PromptRow]:
        """The prompts of a file, or of a command line, with their pictures, if the model takes any."""
        return illustrated(rows, source, self.call, PipelineCall(self.pipe, self.call).parameters)

    def sized(self, rows: Sequence[PromptRow]) -> list[PromptRow]:
        """The prompts of a file with their sizes, if the model takes any."""
        parameters = PipelineCall(self.pipe, self.call).parameters
        return sized(list(rows), self.recipe, self.folder, self.call, parameters)

    @torch.no_grad()
    def evaluator(self, prompts: Sequence[str]) -> Evaluator:
        """An object that makes images of the prompts in the same way as the evaluations of the recipe.

        Raises:
            PipelineError: no way of calling the pipeline is exact.
        """
        settings = self.recipe.model
        self.cache.encode(prompts)
        if settings.release_text_encoders:
            self.cache.release()
        steps = steps_of(self.recipe, evaluation=True)

        @torch.no_grad()
        def policy(size: Size | None = None) -> FlowPolicy:
            call = self.call if size is None else {**self.call, **dict(zip(SIDES, size))}
            denoiser = Denoiser(self.pipe, num_steps=steps, call=call, variant=settings.variant, example=prompts[0])
            denoiser.self_check(list(prompts[:2]))
            return flow_policy(self.recipe, denoiser, self.weights)

        own = policy()
        return Evaluator(self.recipe, own, SizedPolicies(own, policy))


def with_share(recipe: Recipe, share: float) -> Recipe:
    """The recipe with another share of the steps that the trained weights make in evaluations."""
    return recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"trained_share": share})})


def own_share(model: str, recipe: Recipe, base: bool) -> Recipe:
    """The recipe for a model: one that is no run, or is the model before training, makes all steps alone."""
    return recipe if is_run(model) and not base else with_share(recipe, 1.0)


def guidance_argument(model: str) -> str:
    """The argument of a pipeline's call that is the strength of its guidance.

    Args:
        model: a run folder, a model folder, a hub id or an embedded model.

    Raises:
        ValueError: the call has no such argument, or has two.
    """
    settings = image_recipe(model).model if is_run(model) else None
    folder = model_folder(model if settings is None else settings.path)
    parameters = call_parameters(folder, None if settings is None else settings.pipeline)
    found = ["guidance_scale"] if parameters is None else [name for name in GUIDANCE if name in parameters]
    if not found:
        raise ValueError(f"the call of the pipeline of {model} has no {' or '.join(GUIDANCE)}; leave --guidance out")
    if len(found) > 1:
        # A model that was distilled with guidance reads `guidance_scale`; another has a second, unguided prediction.
        config = Path(folder) / "transformer" / "config.json"
        embeds = read_json_object(config).get("guidance_embeds") if config.is_file() else None
        if isinstance(embeds, bool):
            return found[0] if embeds else found[1]
        raise ValueError(
            f"the pipeline of {model} has two kinds of guidance, {' and '.join(found)}; its documentation says which "
            "its model takes: write --set model.call.true_cfg_scale=NUMBER or --set model.call.guidance_scale=NUMBER"
        )
    return found[0]


def check_prompts(
    model: str,
    recipe: Recipe,
    rows: Sequence[PromptRow],
    source: str | None,
    base: bool,
    checkpoint: str | None,
    own_sizes: bool = True,
) -> None:
    """Refuse sizes and pictures of prompts that the pipeline cannot take, before the pipeline loads; see `open_images`.

    Args:
        model: see `open_images`.
        recipe: see `open_images`.
        rows: the prompts.
        source: their file; None for prompts of a command line.
        base: see `open_images`.
        checkpoint: see `open_images`.
        own_sizes: whether samples have the sizes that the columns of the prompts say.

    Raises:
        ValueError: a size is none, the pipeline cannot make it, or see `illustrated`. The message names file and line.
    """
    if checkpoint is not None:
        find_checkpoint(model, checkpoint)
    folder, _ = _files(model, recipe, base or checkpoint is not None)
    parameters = call_parameters(folder, recipe.model.pipeline)
    if parameters is not None:
        call = call_arguments(folder, recipe.model.call)
        if own_sizes:
            sized(list(rows), recipe, folder, call, parameters)
        illustrated(list(rows), source, call, parameters)


def check_call(model: str, recipe: Recipe) -> None:
    """Refuse arguments that the call of a model does not take, before it loads; see `open_images`.

    Raises:
        ValueError: an argument is wrong, or the pipeline is not there.
    """
    own = Path(model) / "pipeline"
    given = model if not is_run(model) else str(own) if own.is_dir() else recipe.model.path
    _check_call(model_folder(given), recipe)


def _check_call(folder: str, recipe: Recipe) -> None:
    """Refuse arguments that the pipeline's call does not take, before the pipeline loads."""
    parameters = call_parameters(folder, recipe.model.pipeline)
    faults = [] if parameters is None else list(call_faults(Path(folder), parameters, recipe.model.call))
    if faults:
        raise ValueError("\n".join(faults))


def open_images(
    model: str, recipe: Recipe, *, base: bool = False, checkpoint: str | None = None, lora_scale: float | None = None
) -> ImageModel:
    """Load a model of images onto the accelerator, or onto the CPU if there is none; a run with its trained weights.

    Args:
        model: a run folder, a model folder, a hub id or an embedded model.
        recipe: the recipe with which the model is called; for a run, the recipe also names the base model.
        base: for a run, load the model before training.
        checkpoint: for a run, load this checkpoint, see `find_checkpoint`.
        lora_scale: factor of the LoRA's effect; 1 is as trained.

    Raises:
        ValueError: the run has no trained weights yet or no such checkpoint, `base` is set and the model is not a run,
            the pipeline's call does not take an argument of the recipe, there is no LoRA to scale, or the recipe has
            another base model for a run that trained whole weights.
    """
    quiet_libraries()
    recipe = own_share(model, recipe, base)
    kept = None if checkpoint is None else find_checkpoint(model, checkpoint)
    folder, adapter = _files(model, recipe, base or kept is not None)
    _check_call(folder, recipe)
    settings, dtype = recipe.model, DTYPES[recipe.model.dtype]
    pipe = load_pipeline(folder, dtype, settings.quantize, settings.pipeline)
    place(pipe, launched().device, settings.offload)
    if settings.attention is not None:
        use_attention(pipe, settings.attention)
    begins = is_run(model) and settings.lora.start is not None
    if adapter is not None or ((kept is not None or begins) and settings.train == "lora"):
        weights = TrainedWeights.lora(pipe, lora_spec(settings.lora), seed=recipe.run.seed)
        if recipe.evaluate.trained_share < 1:
            with _making_last_steps(settings.lora.start):
                begin(weights, recipe)
        elif adapter is None and kept is None:
            begin(weights, recipe)
        if adapter is not None:
            weights.load_lora(adapter)
    else:
        # A model that is not a run may be the result of a run that trained all weights.
        weights = TrainedWeights.given(pipe, settings.train if is_run(model) else "full")
        weights.source = folder
        if recipe.evaluate.trained_share < 1:
            _keep_base(weights, recipe, whole=kept is None)
    if kept is not None:
        load_checkpoint(weights, kept, recipe)
    if lora_scale is not None:
        scale_adapters(weights.modules, lora_scale)
    if settings.compile:
        compile_blocks(pipe)
    return ImageModel(recipe, pipe, call_arguments(folder, settings.call), weights, folder)


def _keep_base(weights: TrainedWeights, recipe: Recipe, whole: bool) -> None:
    """Keep the weights before training for the last steps; `whole` says whether a run's whole weights are loaded now.

    Raises:
        ValueError: the model before training is not where it was, or is another one now.
    """
    if not whole:
        weights.keep_reference()
        return
    path, dtype = recipe.model.path, DTYPES[recipe.model.dtype]
    with _making_last_steps(path):
        folder = local_folder(model_folder(path))
        others = load_whole_teacher("model.path", folder, weights.pipe, weights.modules, dtype)
    weights.keep_reference(others)


@contextmanager
def _making_last_steps(path: str | None) -> Iterator[None]:
    """Say why a model is loaded, if it cannot be loaded."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"the model before training, {path}, makes the last steps, and cannot be loaded ({error}); put it back "
            "there, or let the trained weights make all steps, with a share of 1"
        ) from error


def _files(model: str, recipe: Recipe, base: bool) -> tuple[str, Path | None]:
    """The folder of a pipeline, and the folder of the adapter for it."""
    run = Path(model)
    if not is_run(model):
        if base:
            raise ValueError(f"{model} is not a run, so it has no model before training; leave out --base")
        return local_folder(model_folder(model)), None
    if not base and (run / "pipeline").is_dir():
        refuse_other_path(model, recipe)
        return str(run / "pipeline"), None
    if not base and not (run / "lora").is_dir():
        raise ValueError(f"{run} has no trained weights yet; finish it with `flowgrpo resume {run}`{hint_of(run)}")
    return local_folder(model_folder(recipe.model.path)), None if base else run / "lora"
