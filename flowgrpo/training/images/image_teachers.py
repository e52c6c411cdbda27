"""The weights of a pipeline's teachers: LoRAs beside the trained one, or whole denoisers beside the trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...configs.image_recipe import LORA_TEACHERS, ModelConfig, TeacherConfig
from ...configs.schema import Recipe
from ...intake.links import check_links
from ...weights.adapter_files import StartAdapter, read_start
from ...weights.borrowing import replaced
from ...weights.lora_conversion import BasePipeline
from ...weights.pipeline_folders import INDEX
from ...weights.whole_teachers import check_whole_teacher, load_whole_teacher
from ..lora_start import base_of, note_left_out
from ..model_paths import DTYPES, embedded_pipeline, looks_local
from ..recipe_findings import Checked, Fault, hub_note
from ..teachers import named

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is checked without them.
    from torch import nn

    from ...weights.trained import TrainedWeights

PIPELINE, LORA = "pipeline", "lora"
"""The results of runs of images, in their folders."""


def source_of(teacher: TeacherConfig, place: str, base: BasePipeline) -> StartAdapter | str | None:
    """Where the weights of a teacher are.

    Args:
        teacher: the teacher.
        place: its key in the recipe.
        base: the pipeline of the run.

    Returns:
        A LoRA, the folder or hub id of a pipeline, or None for the model that training begins from.

    Raises:
        ValueError: there is no LoRA, or no pipeline.
    """
    if teacher.path is not None:
        return _whole_or_lora(teacher.path, f"{place}.path", base)
    if teacher.lora is None:
        return None
    if _is_run(Path(teacher.lora)) and (Path(teacher.lora) / PIPELINE).is_dir():
        raise ValueError(
            f"{place}.lora {teacher.lora} is a run that trained all weights; write path: {teacher.lora} in its place"
        )
    return read_start(teacher.lora, base)


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _whole_or_lora(path: str, place: str, base: BasePipeline) -> StartAdapter | str:
    folder = Path(path)
    if path == "scenes":
        return str(embedded_pipeline())
    if _is_run(folder):
        check_links(folder)
        if (folder / PIPELINE / INDEX).is_file():
            return str(folder / PIPELINE)
        if (folder / LORA).is_dir():
            return read_start(path, base)
        raise ValueError(
            f"{place} {path} is a run without the folder {PIPELINE} or {LORA}: it is not finished, or it is no run of "
            f"images. Write a checkpoint with `flowgrpo export {path} --checkpoint latest --out FOLDER`, and give "
            "FOLDER"
        )
    if (folder / INDEX).is_file():
        return path
    if folder.exists() or looks_local(path):
        what = f"holds no {INDEX}" if folder.is_dir() else "is a file" if folder.exists() else "is not a folder"
        raise ValueError(
            f"{place} {path} {what}; give a finished run, the folder of a whole diffusers pipeline or a hub id "
            "(owner/name), and name a LoRA with lora in place of path"
        )
    return path


def _checked_source(teacher: TeacherConfig, place: str, model: ModelConfig) -> StartAdapter | str | None:
    return source_of(teacher, place, base_of(model, fetches=False))


def check_teacher_weights(found: Checked, recipe: Recipe) -> None:
    """Check the files of the teachers of a recipe, after its model."""
    student = Path(found.folder) if Path(found.folder, INDEX).is_file() and "model" not in found.faulty else None
    for number, teacher in enumerate(recipe.model.teachers):
        place = f"model.teachers.{number}"
        key = place if teacher.is_own else f"{place}.{'lora' if teacher.path is None else 'path'}"
        source = found.attempt(key, _checked_source, teacher, place, recipe.model)
        if isinstance(source, StartAdapter):
            note_left_out(found, key, source)
        if isinstance(source, StartAdapter) and recipe.model.train == "full":
            text = f"{key} {teacher.path} is a run of a LoRA, and {LORA_TEACHERS}"
            found.findings.append(Fault("fault", text, key))
        elif isinstance(source, str) and Path(source).is_dir():
            found.attempt(key, check_whole_teacher, key, Path(source), student)
        elif isinstance(source, str):
            found.findings.append(Fault("unknown", hub_note(key, source), key))


def add_teachers(weights: TrainedWeights, model: ModelConfig) -> None:
    """Put the LoRAs of the teachers beside the trained LoRA, and whole teachers beside the trained denoisers.

    Teachers with the same path share their weights.

    Raises:
        ValueError: weights cannot be read, or do not fit the model.
    """
    loaded: dict[str, dict[str, nn.Module]] = {}
    for number, (name, teacher) in enumerate(named(model.teachers).items()):
        place = f"model.teachers.{number}"
        source = source_of(teacher, place, base_of(model))
        if isinstance(source, StartAdapter):
            weights.add_teacher(name, source, model.lora.compute)
        elif source is not None:
            if source not in loaded:
                loaded[source] = _loaded(weights, model, f"{place}.path", source)
            weights.add_whole_teacher(name, loaded[source])


def _loaded(weights: TrainedWeights, model: ModelConfig, place: str, path: str) -> dict[str, nn.Module]:
    """The denoisers of a pipeline, on the device of the trained ones, and computing as they do."""
    from ...pipelines.acceleration import compile_blocks, use_attention

    pipe: Any = weights.pipe
    modules = load_whole_teacher(place, path, pipe, weights.modules, DTYPES[model.dtype])
    device = next(next(iter(weights.modules.values())).parameters()).device
    for module in modules.values():
        module.to(device)
    with replaced(pipe, **modules):
        if model.attention is not None:
            use_attention(pipe, model.attention)
        if model.compile:
            compile_blocks(pipe)
    return modules
