"""Models by the path that a recipe gives: an embedded model, a folder or a hub id."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..configs.masked_recipe import MaskedModelConfig
from ..configs.schema import AnyRecipe
from ..configs.text_recipe import LanguageModelConfig
from ..pipelines.known_pipelines import KNOWN
from ..pipelines.pictures import ENDINGS, Picture
from ..text.model_folder import check_language_folder
from ..weights.json_files import read_json_object
from ..weights.pipeline_folders import check_pipeline_folder, from_hub, named_pipeline
from ..weights.sampling_rates import rate_of, sampling_rate_in
from ..weights.saving import ADAPTER_FILE, left_out
from .folder.leftovers import RESULTS

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is checked without them.
    from ..weights.quantized import Quantized

MASKED = "arithmetic:masked"
UNTRAINED = "arithmetic:untrained"
RECOMMENDED = "flowgrpo.json"
ADAPTERS = ("pytorch_lora_weights.safetensors", ADAPTER_FILE)
"""Files by which a folder with a LoRA is known."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def embedded_pipeline() -> Path:
    """The folder of the embedded scenes pipeline.

    Raises:
        ValueError: this installation lacks the pipeline.
    """
    folder = Path(str(resources.files("flowgrpo.worlds.scenes") / "pipeline"))
    if not (folder / "model_index.json").is_file():
        raise ValueError("the embedded pipeline is not installed; build it with `flowgrpo build scenes --out FOLDER`")
    return folder


def model_folder(path: str) -> str:
    """The folder or hub id of a pipeline: `scenes`, a folder or a hub id.

    Raises:
        ValueError: it looks like a path, but there is no pipeline.
    """
    if path == "scenes":
        return str(embedded_pipeline())
    if path in ("arithmetic", UNTRAINED):
        raise ValueError(
            f"model.path {path!r} is a language model, for a recipe of task text; give a pipeline or scenes"
        )
    return _folder_or_id(path, "model_index.json", "a whole diffusers pipeline", "a pipeline folder", "scenes")


def sampling_rate_of_path(path: str, fetch: bool = False) -> int | None:
    """Samples a second of the sounds that the pipeline of a path makes; None if it makes pictures, or is not here.

    Args:
        path: of a recipe: `scenes`, a folder or a hub id.
        fetch: whether the one file that tells it is downloaded, if it is not on this machine.
    """
    if path in KNOWN:
        return rate_of(KNOWN[path].vae[1])
    with suppress(ValueError, OSError, HFValidationError):
        folder = Path(model_folder(path))
        if not folder.is_dir():
            folder = Path(hf_hub_download(path, "vae/config.json", local_files_only=not fetch)).parent.parent
        return sampling_rate_in(folder)
    return None


def sample_noun(recipe: AnyRecipe) -> str:
    """What a message calls one sample of a recipe: image, sound or completion. A video is an image too."""
    if recipe.task != "images":
        return "completion"
    return "image" if sampling_rate_of_path(recipe.model.path) is None else "sound"


def _folder_or_id(path: str, index: str, whole: str, what: str, embedded: str) -> str:
    """The path of a model, if it is a folder with its index, or can be a hub id."""
    folder = Path(path)
    if path and folder.is_dir() and not (folder / index).exists():
        result = next((folder / name for name in RESULTS if (folder / name / index).exists()), None)
        if result is not None and (folder / "config.yaml").is_file():
            raise ValueError(f"model.path {path!r} is a run; give its result, {str(result)!r}")
        if (folder / "config.yaml").is_file() and (folder / "lora").is_dir():
            raise ValueError(
                f"model.path {path!r} is a run of a LoRA; give the model that it was trained on, and "
                f"model.lora.start: {path}"
            )
        if any((folder / name).exists() for name in ADAPTERS):
            run = folder.parent if (folder.parent / "config.yaml").is_file() else "the folder of the run"
            raise ValueError(
                f"model.path {path!r} holds a LoRA and no model; give the model that it was trained on, and "
                f"model.lora.start: {path}. A command that takes a run takes {run}"
            )
        raise ValueError(f"model.path {path!r} holds no {index}; give the folder of {whole}")
    if folder.is_file():
        raise ValueError(
            f"model.path {path!r} is a file; load it with its library, write it with `save_pretrained`, and give {what}"
        )
    if not path or (not folder.is_dir() and looks_local(path)):
        raise ValueError(f"model.path {path!r} is not a folder; give {what}, a hub id (owner/name) or {embedded}")
    return path


def looks_local(path: str) -> bool:
    """Whether a path that does not exist looks like a path of this machine, and cannot be a hub id (`owner/name`)."""
    try:
        validate_repo_id(path)
    except HFValidationError:
        return True
    return path.count("/") != 1


def check_folder(path: str, task: str, pictures: bool = False, pipeline: str | None = None) -> type | None:
    """Check the folder of a model without loading a weight. A hub id is not checked.

    Args:
        path: as `model_folder` or `language_folder` returns it.
        task: "images", "text" or "masked".
        pictures: text: whether prompts show pictures to the model.
        pipeline: images: the class that loads the folder, if it is not the class that the folder names.

    Returns:
        The class of the pipeline; None if the folder does not say it.

    Raises:
        ValueError: a component is missing, damaged, or of an unknown class.
    """
    if not Path(path).is_dir():
        return None
    if task == "images":
        return check_pipeline_folder(Path(path), pipeline)
    check_language_folder(Path(path), masked=task == "masked", pictures=pictures)
    return None


def check_template(model: LanguageModelConfig | MaskedModelConfig, folder: str) -> None:
    """Check that the tokenizer in a folder has the chat template that a recipe asks for.

    Raises:
        ValueError: it has none, or the template does not read a variable of the recipe.
    """
    from transformers import AutoTokenizer

    from ..text.chat_templates import uses_template

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    uses_template(tokenizer, model.path, model.chat, model.system, model.chat_template_kwargs)


def loading_options(model: Any) -> dict[str, Any]:
    """The arguments with which the language model of a recipe is loaded.

    Args:
        model: the section `model` of a recipe of text or of a masked model.
    """
    return {
        "dtype": DTYPES[model.dtype],
        "attention": model.attention,
        "chat": model.chat,
        "system": model.system,
        "chat_template_kwargs": model.chat_template_kwargs,
        "quantize": model.quantize,
        **({"block": model.block} if isinstance(model, MaskedModelConfig) else {}),
        **({"pictures": model.pictures} if isinstance(model, LanguageModelConfig) else {}),
    }


def language_folder(path: str) -> str:
    """The folder or hub id of a language model: `arithmetic`, `arithmetic:untrained`, a folder or a hub id.

    Raises:
        ValueError: it looks like a path, but there is no model.
    """
    if path in ("arithmetic", UNTRAINED):
        folder = Path(str(resources.files("flowgrpo.worlds.arithmetic") / "model"))
        if not (folder / "config.json").is_file():
            raise ValueError(
                "the embedded language model is not installed; build it with `flowgrpo build arithmetic --out FOLDER`"
            )
        return str(folder)
    if path == "scenes":
        raise ValueError(f"model.path {path!r} is a pipeline, for a recipe of task images; give a model or arithmetic")
    return _folder_or_id(path, "config.json", "a transformers model", "a model folder", "arithmetic")


def masked_folder(path: str) -> str:
    """The folder or hub id of a masked language model: `arithmetic:masked`, a folder or a hub id.

    Raises:
        ValueError: it looks like a path, but there is no model.
    """
    if path == MASKED:
        folder = Path(str(resources.files("flowgrpo.worlds.arithmetic") / "masked"))
        if not (folder / "config.json").is_file():
            raise ValueError(
                "the embedded masked language model is not installed; build it with `flowgrpo build masked --out "
                "FOLDER`, and give FOLDER/model"
            )
        return str(folder)
    return _folder_or_id(path, "config.json", "a transformers model", "a folder of a masked model", MASKED)


def call_arguments(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the pipeline's call: the arguments that its folder recommends, overridden by the recipe's arguments.

    The recommended arguments are in `flowgrpo.json`. The name of a picture file is replaced by the picture.

    Raises:
        ValueError: a picture cannot be read.
    """
    return {**recommended_arguments(path), **with_pictures_read(given, "model.call.")}


def with_pictures_read(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Arguments of a call with pictures in the place of the names of their files.

    Args:
        given: the arguments.
        place: text before the name of an argument in messages, such as "model.call.".

    Raises:
        ValueError: a picture cannot be read.
    """
    found = dict(given)
    for name, value in given.items():
        if isinstance(value, str) and "prompt" not in name and Path(value).suffix.lower() in ENDINGS:
            found[name] = Picture(Path(value), f"{place}{name}").read()
    return found


def recommended_arguments(path: str) -> dict[str, Any]:
    """Arguments of the call that a pipeline folder recommends in its `flowgrpo.json`; none without the file.

    Raises:
        ValueError: the file is not JSON, or has no object `call`.
    """
    note = Path(path) / RECOMMENDED
    if not note.is_file():
        return {}
    call = read_json_object(note).get("call")
    if not isinstance(call, dict):
        raise ValueError(
            f"{note}: call is {call!r:.80}; write an object from arguments of the pipeline's call to values"
        )
    return call


def load_pipeline(path: str, dtype: torch.dtype, quantize: Quantized | None = None, pipeline: str | None = None) -> Any:
    """Load a diffusers pipeline in `dtype`; with `quantize`, the linear weights of its denoisers have fewer bits.

    They have 8 bits at once, and 4 bits when the pipeline is moved to a device.

    `pipeline` is the class that loads it, if it is not the class that the folder names. Components that the folder
    leaves out are passed as None, as diffusers asks.
    """
    from diffusers import DiffusionPipeline

    from ..weights.precision import in_dtype
    from ..weights.quantized import loading_arguments
    from ..weights.quantized import quantize as put_in_fewer_bits
    from ..weights.trained import trainable_modules

    check_folder(path, "images", pipeline=pipeline)
    kind: Any = DiffusionPipeline if pipeline is None else named_pipeline(pipeline, "the pipeline is ")
    fewer = loading_arguments(quantize)
    with from_hub(path):
        pipe = kind.from_pretrained(path, **in_dtype(dtype), **left_out(path), **fewer)
    if quantize is not None and not fewer:
        for module in trainable_modules(pipe).values():
            put_in_fewer_bits(module, quantize)
    pipe.set_progress_bar_config(disable=True)
    vae = getattr(pipe, "vae", None)
    if isinstance(vae, torch.nn.Module) and not any(p.ndim == 5 for p in vae.parameters()):
        vae.to(memory_format=torch.channels_last)  # decoding takes two thirds of the time
    return pipe


def quiet_libraries() -> None:
    """Keep libraries from writing over the progress of a run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Newer versions of diffusers and transformers rename these, and the oldest supported ones know only the old names.
    # The autoencoders of sounds use a function of torch that has a newer form.
    for name in ("torch_dtype", "gradient_checkpointing", "weight_norm"):
        warnings.filterwarnings("ignore", message=f".*{name}.*", category=FutureWarning)
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("peft").setLevel(logging.ERROR)
