"""The teachers of a run (`model.teachers`): which prompt has which, and what a teacher knows of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..configs.image_recipe import ModelConfig, TeacherConfig
from ..configs.schema import AnyRecipe, Recipe, TextRecipe
from ..configs.text_recipe import LanguageModelConfig, LanguageTeacherConfig
from .data import PromptRow, fields_of, templated, told_in
from .model_paths import UNTRAINED, check_folder, language_folder

COLUMN = "teacher"
PRESENT, START = "its present weights", "the weights of the start"
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


def know_more(model: ModelConfig | LanguageModelConfig) -> bool:
    """Whether a teacher of images reads or sees something else than the model."""
    return isinstance(model, ModelConfig) and any(teacher.knows_more for teacher in model.teachers)


def contexts_of(model: ModelConfig, rows: Sequence[PromptRow]) -> list[PromptRow]:
    """Each prompt as its teacher knows it; empty if all teachers read the prompts themselves.

    Raises:
        ValueError: a prompt lacks a column that its teacher reads.
    """
    if not know_more(model):
        return []
    teachers = named(model.teachers)
    places = {name: f"model.teachers.{k}" for k, name in enumerate(teachers)}
    return [_known(teachers[name], row, places[name]) for name, row in zip(teachers_of(model, rows), rows)]


def checked_on(model: ModelConfig, rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The prompts on which the calls of a pipeline are checked: the first two, and the first of each teacher."""
    found = list(rows[:2])
    if know_more(model):
        first: dict[str, PromptRow] = {}
        for name, row in zip(teachers_of(model, rows), rows):
            first.setdefault(name, row)
        found += [row for row in first.values() if row not in found]
    return found


def _known(teacher: TeacherConfig, row: PromptRow, key: str) -> PromptRow:
    """A prompt as a teacher knows it."""
    if teacher.template is not None:
        told = {name: told_in(row, name, key) for name in fields_of(teacher.template)}
        if empty := [name for name, text in told.items() if not text.strip()]:
            raise ValueError(
                f"{key}: the template has {{{empty[0]}}}, and {row.place or f'{row.text!r:.80}'} has nothing in column "
                f"{empty[0]!r}; fill in the column, or leave the prompt out"
            )
        row = templated(row, teacher.template, **told)
    return row if teacher.image is None else replace(row, pictures=row.teaching)


def _check_contexts(model: ModelConfig, rows: Sequence[PromptRow], source: str) -> None:
    """Refuse a teacher that reads of every prompt what the model reads."""
    names, known = teachers_of(model, rows), contexts_of(model, rows)
    for k, (name, teacher) in enumerate(named(model.teachers).items()):
        own = [(row, one) for row, one, whose in zip(rows, known, names) if whose == name]
        if teacher.template is not None and teacher.image is None and all(row.text == one.text for row, one in own):
            raise ValueError(
                f"model.teachers.{k}: the template {teacher.template!r:.80} gives the very words of all {len(own)} "
                f"prompts of {source}, so the teacher knows no more than the model; name a column with other words"
            )


def check_teachers(model: ModelConfig | LanguageModelConfig, rows: Sequence[PromptRow], source: str) -> None:
    """Check that each prompt names a teacher, if there are several, and has what its teacher reads.

    A single teacher needs no name in the prompts, and they name no other.

    Raises:
        ValueError: a prompt names none of them, or lacks a column that its teacher reads, or a teacher reads of all
            prompts what the model reads. The message names the place.
    """
    _check_names(model, rows, source)
    if isinstance(model, ModelConfig):
        _check_contexts(model, rows, source)


def _check_names(model: ModelConfig | LanguageModelConfig, rows: Sequence[PromptRow], source: str) -> None:
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
    """In words, which weights of a policy teach the policy itself; None if it is not its own teacher.

    A teacher of images that reads and sees what the model reads and sees is not called its own teacher.
    """
    objective = recipe.objective
    if isinstance(recipe, Recipe):
        own = [weights_in_words(recipe, one) for one in recipe.model.teachers if one.is_own and one.knows_more]
        return " and ".join(dict.fromkeys(own)) or None
    if not isinstance(recipe, TextRecipe) or objective.name != "distilled" or recipe.model.teachers:
        return None
    if objective.get("frozen"):
        return START
    ema = objective.get("ema")
    return PRESENT if ema is None else f"an average of its weights (decay {ema.decay:g})"


def weights_in_words(recipe: Recipe, teacher: TeacherConfig) -> str:
    """Which weights of the trained model a teacher has."""
    if teacher.weights == "start":
        return START
    if teacher.weights == "present" or recipe.reference is None:
        return PRESENT
    decay = recipe.reference.decay
    return f"an average of its weights (decay {decay:g})" if decay else "a copy of its weights"


def taught_lines(recipe: AnyRecipe) -> list[str]:
    """For each teacher of a run of images, a line that says what it is, and what it reads and sees."""
    if not isinstance(recipe, Recipe):
        return []
    return [
        f"a teacher{'' if teacher.name is None else f' ({teacher.name})'} says how it would take each trained step: "
        f"{teacher_in_words(recipe, teacher)}"
        for teacher in recipe.model.teachers
    ]


def teacher_in_words(recipe: Recipe, teacher: TeacherConfig) -> str:
    """What a teacher of images is, and what it reads and sees in place of the prompt."""
    who = f"the model itself, with {weights_in_words(recipe, teacher)}" if teacher.is_own else None
    parts = [who or teacher.path or f"the LoRA {teacher.lora}"]
    if teacher.template is not None:
        parts.append(f"reads {teacher.template!r}")
    if teacher.image is not None:
        parts.append(f"sees the pictures of column {teacher.image}")
    if teacher.call:
        parts.append("is called with " + ", ".join(f"{name} {value}" for name, value in teacher.call.items()))
    return parts[0] + (f"; it {' and '.join(parts[1:])}" if parts[1:] else "")


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
