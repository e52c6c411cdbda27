"""The frozen teachers of a run (`model.teachers`): which prompt has which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ..configs.image_recipe import ModelConfig, TeacherConfig
from ..configs.schema import AnyRecipe, TextRecipe
from ..configs.text_recipe import LanguageModelConfig, LanguageTeacherConfig
from .data import PromptRow
from .model_paths import UNTRAINED, check_folder, language_folder

COLUMN = "teacher"
PRESENT = "its present weights"
T = TypeVar("T", TeacherConfig, LanguageTeacherConfig)


def named(teachers: Sequence[T]) -> dict[str, T]:
    """The teachers by name. A single teacher need not have a name."""
    return {teacher.name or COLUMN: teacher for teacher in teachers}


def teachers_of(model: ModelConfig | LanguageModelConfig, rows: Sequence[PromptRow]) -> tuple[str, ...]:
    """The name of each prompt's teacher; empty if there are no teachers."""
    names = names_of(model)
    if len(names) > 1:
        return tuple(str(row.columns[COLUMN]) for row in rows)
    return tuple(names) * len(rows)


def names_of(model: ModelConfig | LanguageModelConfig) -> list[str]:
    """The names of the teachers."""
    return [teacher.name or COLUMN for teacher in model.teachers]


def check_teachers(model: ModelConfig | LanguageModelConfig, rows: Sequence[PromptRow], source: str) -> None:
    """Check that each prompt names a teacher, if there are several, and no other teacher than one that has a name.

    Raises:
        ValueError: a prompt names none of them. The message names the prompt's place.
    """
    names = names_of(model)
    if len(names) < 2:
        return _check_alone(model, rows, source)
    for row in rows:
        found = row.columns.get(COLUMN)
        if found not in names:
            said = f"has no column `{COLUMN}`" if found is None else f"has {COLUMN} {found!r}"
            raise ValueError(
                f"{row.place or source} {said}, and model.teachers has several; write one of {', '.join(names)} there"
            )


def _check_alone(model: ModelConfig | LanguageModelConfig, rows: Sequence[PromptRow], source: str) -> None:
    """Refuse prompts that name another teacher than the only one, which would teach them all the same."""
    name = model.teachers[0].name if model.teachers else None
    for row in rows if name is not None else ():
        if (found := row.columns.get(COLUMN)) not in (None, name):
            raise ValueError(
                f"{row.place or source} has {COLUMN} {found!r}, and model.teachers has {name} alone; leave out the "
                "name of the teacher, and it teaches every prompt, or add the other teachers"
            )


def own_teacher(recipe: AnyRecipe) -> str | None:
    """In words, which weights of a policy teach the policy itself; None if it is not its own teacher."""
    objective = recipe.objective
    if not isinstance(recipe, TextRecipe) or objective.name != "distilled" or recipe.model.teachers:
        return None
    if objective.get("frozen"):
        return "the weights of the start"
    ema = objective.get("ema")
    return PRESENT if ema is None else f"an average of its weights (decay {ema.decay:g})"


def language_teacher(path: str, key: str = "model.teachers") -> str:
    """The folder or hub id of a language model that teaches: as `language_folder` takes it, or a finished run.

    Args:
        path: of the recipe.
        key: of the recipe, for messages.

    Raises:
        ValueError: it looks like a path, but there is no model, its weights are random, or the run has only a LoRA.
    """
    if path == UNTRAINED:
        raise ValueError(f"{key} {path!r} has random weights, which teach nothing; write arithmetic")
    folder = Path(path)
    if (folder / "config.yaml").is_file() and not (folder / "config.json").exists():
        if (folder / "model" / "config.json").is_file():
            return str(folder / "model")
        if (folder / "lora").is_dir():
            raise ValueError(
                f"{key} {path!r} is a run of a LoRA; add the LoRA into its model with `flowgrpo export {path} --merge "
                "--out FOLDER`, and give FOLDER"
            )
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists():
        raise ValueError(
            f"{key} {path!r} is a LoRA; add it into its model, as `flowgrpo export RUN --merge --out FOLDER` does for "
            "a run, and give FOLDER"
        )
    try:
        return language_folder(path)
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", key, 1)) from None


def check_model_of_teacher(key: str, path: str, pictures: bool) -> None:
    """Check the folder of a language model that teaches, as far as it is on this machine.

    Args:
        key: of the recipe, for messages.
        path: folder, run or hub id.
        pictures: whether it is shown pictures.

    Raises:
        ValueError: there is no such model, or it cannot teach.
    """
    folder = language_teacher(path, key)
    try:
        check_folder(folder, "text", pictures)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
