"""A model of images outside a run, loaded with the weights and the settings of its run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..configs.schema import Recipe
from ..pipelines.acceleration import compile_blocks, use_attention
from ..pipelines.capture import PipelineCall
from ..pipelines.denoiser import Denoiser
from ..pipelines.placement import place
from ..pipelines.policy import FlowPolicy
from ..pipelines.prompt_cache import PromptCache
from ..training.data import PromptRow
from ..training.distributed.processes import launched
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
from .model_recipes import image_recipe, is_run, own_share, refuse_other_path

GUIDANCE = ("guidance_scale", "true_cfg_scale")


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
    _check_call(pipeline_of(model, recipe), recipe)


def pipeline_of(model: str, recipe: Recipe) -> str:
    """The folder of the pipeline of a model, or its hub id; see `open_images`.

    Raises:
        ValueError: the pipeline is not there.
    """
    own = Path(model) / "pipeline"
    return model_folder(model if not is_run(model) else str(own) if own.is_dir() else recipe.model.path)


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
