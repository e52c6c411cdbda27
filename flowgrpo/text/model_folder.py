"""Checks of the folder of a language model, without loading any weights."""

from __future__ import annotations

from pathlib import Path

from ..weights.json_files import read_json_object
from ..weights.pipeline_folders import tokenizer_faults, weight_faults


def check_language_folder(folder: Path) -> None:
    """Check the configuration, the tokenizer and the weights.

    Raises:
        ValueError: if something is missing, damaged, or of a type that transformers does not have; one line for each
            fault.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
        elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            faults.append(
                f"{path}: model_type is {kind!r}, which is not a causal language model; use a model that is one"
            )
    faults += [*tokenizer_faults(folder), *weight_faults(folder)]
    if faults:
        raise ValueError("\n".join(faults))
