"""Checks of the folder of a language model, without loading any weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..weights.json_files import read_json_object
from ..weights.pipeline_folders import tokenizer_faults, weight_faults
from .diffusion_models import DIFFUSION_TYPES
from .seeing_types import sight_of

_NAMED = 3
"""How many missing weights a message names."""


def check_language_folder(folder: Path, *, masked: bool = False, pictures: bool = False) -> None:
    """Check the configuration, the tokenizer and the weights.

    Args:
        folder: of transformers.
        masked: whether it should hold a masked language model, and not a causal one.
        pictures: whether it should hold a causal language model that is shown pictures.

    Raises:
        ValueError: if something is missing, damaged, or of a type that transformers does not have; one line for each
            fault.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    wanted = "masked" if masked else "causal"
    seeing = set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    classes = (
        {*modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *DIFFUSION_TYPES}
        if masked
        else seeing
        if pictures
        else set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    )
    path = folder / "config.json"
    config = read_json_object(path)
    kind = config.get("model_type")
    faults = []
    known = isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES | dict.fromkeys(DIFFUSION_TYPES)
    # Some models bring code of their own and have a class in transformers or here, too, which is taken.
    if kind in DIFFUSION_TYPES and not masked:
        faults.append(f"{path}: model_type is {kind!r}, which is a masked language model; write task: masked")
    elif "auto_map" in config and not (known and kind in classes):
        faults.append(
            f"{path}: the model brings its own code (auto_map), and code of a model is not run; use a model whose "
            "class transformers has"
        )
    elif not known:
        faults.append(
            f"{path}: model_type is {kind!r}, which transformers does not have; get the model again, or a newer "
            "transformers"
        )
    elif pictures and kind not in classes:
        faults.append(
            f"{path}: model_type is {kind!r}, which is not a language model that is shown pictures; use a model that "
            "is one, or leave out model.pictures"
        )
    elif kind not in classes and not masked and kind in seeing:
        faults.append(
            f"{path}: model_type is {kind!r}, which is a language model that is shown pictures; write model.pictures: "
            "true, and give the prompts a column `image`"
        )
    elif kind not in classes:
        faults.append(
            f"{path}: model_type is {kind!r}, which is not a {wanted} language model; use a model that is one"
        )
    faults += [*tokenizer_faults(folder), *weight_faults(folder)]
    if faults:
        raise ValueError("\n".join(faults))


def check_sight_of(path: str, pictures: bool) -> None:
    """Refuse a hub id whose model must be loaded otherwise; `check_language_folder` does it for a folder.

    Raises:
        ValueError: the model is shown pictures and `pictures` is off, or it is not and `pictures` is on.
    """
    sight = sight_of(path)
    if pictures and sight == "never":
        raise ValueError(f"{path} is not a language model that is shown pictures; leave out model.pictures")
    if not pictures and sight == "always":
        raise ValueError(
            f"{path} is a language model that is shown pictures; write model.pictures: true, and give the prompts a "
            "column `image`"
        )


def load_processor(path: str, *, local: bool = False) -> Any:
    """The processor of a model that is shown pictures; its tokenizer has the chat template.

    Args:
        path: a folder or hub id.
        local: take only files that are on this machine.

    Raises:
        ValueError: the processor is missing, or has no chat template.
    """
    from transformers import AutoProcessor

    try:
        found = AutoProcessor.from_pretrained(path, local_files_only=local, trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: model.pictures needs the processor of the model, which cannot be loaded ({error}); get all files "
            "of the model again, preprocessor_config.json among them"
        ) from error
    if not hasattr(found, "tokenizer") or not hasattr(found, "image_processor"):
        raise ValueError(
            f"{path}: model.pictures needs a processor of text and pictures, and the folder has a "
            f"{type(found).__name__}; get all files of the model again, preprocessor_config.json among them"
        )
    if not isinstance(template := getattr(found, "chat_template", None) or found.tokenizer.chat_template, str):
        raise ValueError(
            f"{path}: model.pictures needs a chat template, and the processor has none; add one and save it"
        )
    found.tokenizer.chat_template = template
    return found


def load_whole(kind: Any, path: str, **options: Any) -> Any:
    """A model of transformers in evaluation mode. Code that a model brings with it is never run.

    Args:
        kind: an auto class of transformers.
        path: a folder or hub id.
        options: of `from_pretrained`.

    Raises:
        ValueError: weights of the model are missing, which transformers would draw at random, or the model needs code
            of its own.
    """
    try:
        model, report = kind.from_pretrained(path, output_loading_info=True, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"the model {path} brings its own code, and code of a model is not run; use a model whose class "
            "transformers has"
        ) from None
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ValueError(
            f"{path} lacks weights of {type(model).__name__}: {', '.join(missing[:_NAMED])}{more}. They would be drawn "
            "at random, anew at each start; get the model again, or give a folder that was saved from this class"
        )
    return model.eval()


def is_masked_folder(folder: Path) -> bool:
    """Whether the configuration of a folder names a class for masked language modelling."""
    config = read_json_object(folder / "config.json")
    named = config.get("architectures")
    masked = isinstance(named, list) and any(str(name).endswith("ForMaskedLM") for name in named)
    return masked or config.get("model_type") in DIFFUSION_TYPES
