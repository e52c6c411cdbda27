"""Checks of the folder of a language model, without loading any weights."""

from __future__ import annotations

from pathlib import Path

from ..weights.json_files import read_json_object
from ..weights.pipeline_folders import tokenizer_faults, weight_faults


def check_language_folder(folder: Path, *, masked: bool = False) -> None:
    """Check the configuration, the tokenizer and the weights.

    Args:
        folder: of transformers.
        masked: whether it should hold a masked language model, and not a causal one.

    Raises:
        ValueError: if something is missing, damaged, or of a type that transformers does not have; one line for each
            fault.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    wanted = "masked" if masked else "causal"
    classes = (
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES if masked else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    path = folder / "config.json"
    config = read_json_object(path)
    kind = config.get("model_type")
    faults = []
    # A model that brings its own code can be checked only by its files.
    if "auto_map" not in config:
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES:
            faults.append(
                f"{path}: model_type is {kind!r}, which transformers does not have; get the model again, or a newer "
                "transformers"
            )
        elif kind not in classes:
            faults.append(
                f"{path}: model_type is {kind!r}, which is not a {wanted} language model; use a model that is one"
            )
    elif masked:
        faults.append(
            f"{path}: the model brings its own code (auto_map), and code of a model is not run; use a model whose "
            "class transformers has"
        )
    faults += [*tokenizer_faults(folder), *weight_faults(folder)]
    if faults:
        raise ValueError("\n".join(faults))


def is_masked_folder(folder: Path) -> bool:
    """Whether the configuration of a folder names a class for masked language modelling."""
    named = read_json_object(folder / "config.json").get("architectures")
    return isinstance(named, list) and any(str(name).endswith("ForMaskedLM") for name in named)
