"""What a recipe must be like for a launch of several processes."""

from __future__ import annotations

from ..configs.schema import AnyRecipe, Recipe, TextRecipe
from ..parts.asked import asked
from .distributed.context_groups import context_of
from .recipe_plans import check_edges


def check_ranks(recipe: AnyRecipe, ranks: int) -> None:
    """Check that the prompts can be shared by processes, and that nothing of the recipe needs all of them in one.

    Raises:
        ValueError: the recipe does not run in so many processes.
    """
    prompts, context = recipe.rollout.prompts, context_of(recipe)
    if ranks % context:
        raise ValueError(
            f"model.context_parallel is {context}, and {ranks} process{'es' if ranks > 1 else ''} cannot be divided "
            f"into groups of {context}; launch a multiple of {context} processes (docs/scaling.md), or write "
            "model.context_parallel: 1"
        )
    if context > 1 and prompts < ranks // context:
        raise ValueError(
            f"rollout.prompts is {prompts} on {ranks // context} groups of {context} processes, and one group makes "
            f"all samples of a prompt; use {ranks // context} prompts or more, or fewer processes"
        )
    if context == 1 and prompts < ranks:
        raise ValueError(
            f"rollout.prompts is {prompts} on {ranks} processes, and one process makes all samples of a prompt; use "
            f"{ranks} prompts or more, or fewer processes"
        )
    if ranks > 1 and (recipe.credit.name == "value" or recipe.credit.get("scale") == "batch"):
        raise ValueError(
            "credit value, and turning or minimum with credit.scale batch, compare the steps of all prompts, and these "
            "steps are on several processes; use one process, or another credit"
        )
    step = prompts // recipe.optimizer.updates
    if ranks > 1 and step <= ranks // context and _measures_drift(recipe):
        raise ValueError(
            f"answer loss {recipe.objective['loss'].short} asks for drift, which a process measures on answers behind "
            f"other prompts of its own, and an optimizer step has {step} prompts for {ranks} processes; raise "
            "rollout.prompts, lower optimizer.updates, or use fewer processes"
        )
    if not isinstance(recipe, TextRecipe):
        check_edges(recipe, ranks // context)
    if isinstance(recipe, Recipe) and recipe.critic is not None and ranks > 1:
        raise ValueError("a critic is trained in one process only; use one process, or a recipe without `critic`")


def _measures_drift(recipe: AnyRecipe) -> bool:
    loss = recipe.objective.get("loss") if isinstance(recipe, TextRecipe) else None
    return loss is not None and "drift" in asked(loss.target)


def check_shards(recipe: AnyRecipe) -> None:
    """Check that the full weights of a recipe, or the frozen weights of its LoRA, can be cut into shards (FSDP2).

    Raises:
        ValueError: they cannot; the message says what to change.
    """
    if not isinstance(recipe, Recipe):
        raise ValueError(
            "full weights are sharded for pipelines of diffusers only; train a language model with model.train lora, "
            "or launch with --multi_gpu in place of --use_fsdp"
        )
    if recipe.model.train == "lora" and recipe.model.teachers:
        raise ValueError(
            "a LoRA with teachers (model.teachers) is not cut into shards; launch with --multi_gpu in place of "
            "--use_fsdp"
        )
    if any(teacher.path is not None for teacher in recipe.model.teachers):
        raise ValueError(
            "a whole teacher (model.teachers[].path) is not cut into shards; launch with --use_deepspeed "
            "--zero_stage 2 in place of --use_fsdp, or train a LoRA with model.train lora and --multi_gpu"
        )
    if recipe.model.quantize is not None:
        raise ValueError(
            f"a base in {recipe.model.quantize} is not cut into shards; leave model.quantize out, or launch with "
            "--multi_gpu in place of --use_fsdp"
        )
    if recipe.optimizer.type != "adamw" and recipe.model.train == "full":
        raise ValueError(
            f"the averages of optimizer.type {recipe.optimizer.type} are not cut into shards; use optimizer.type "
            "adamw, or launch with --multi_gpu in place of --use_fsdp"
        )
    if recipe.evaluate.trained_share < 1 and recipe.optimizer.ema is not None:
        raise ValueError(
            "evaluations take the average of the weights, and sharded weights cannot be the base's for the last steps "
            "at the same time; leave evaluate.trained_share out, and evaluate the finished run with `flowgrpo evaluate "
            "RUN --trained-share SHARE`"
        )
    if recipe.model.compile:
        raise ValueError("sharded blocks are not compiled; use model.compile false")
    if recipe.model.dtype == "float16":
        raise ValueError(
            "gradients of float16 would be too small for the format, because the losses of sharded weights are not "
            "scaled; use model.dtype bfloat16"
        )
