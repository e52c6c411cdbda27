"""Checks that find faults in the folder of a pipeline without loading a weight."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .json_files import read_json, read_json_object

INDEX = "model_index.json"
DENOISERS = ("transformer", "transformer_2", "unet")
"""The names that a pipeline may give its denoisers."""
# Pipelines of all classes call these components; text encoders may be left out.
_NEEDED = ("transformer", "unet", "vae", "scheduler")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "tokenizer_config.json")
# Inpainting classes that take two kinds of denoisers only: of states alone, or of states with mask and picture.
_INPUT_CHANNELS = {
    "StableDiffusion3InpaintPipeline": ("transformer", (16, 33)),
    "StableDiffusionInpaintPipeline": ("unet", (4, 9)),
    "StableDiffusionXLInpaintPipeline": ("unet", (4, 9)),
    "StableDiffusionXLControlNetInpaintPipeline": ("unet", (4, 9)),
}
_LFS = b"version https://git-lfs"
_VARIANT = re.compile(r"(?:diffusion_pytorch_model|pytorch_model|model)(?:-\d+-of-\d+)?\.(\w+)(?:-\d+-of-\d+)?")
"""The name of a file of weights that is read only if its variant is asked for, without its last suffix."""


def pipeline_class(folder: Path, chosen: str | None = None) -> type | None:
    """The class of diffusers that loads a pipeline folder; None if the folder has its own class.

    Args:
        folder: of the pipeline.
        chosen: name of a class; without it, the folder names its class.

    Raises:
        ValueError: the index cannot be read, or diffusers has no such pipeline.
    """
    index = folder / INDEX
    name = read_json_object(index).get("_class_name")
    if chosen is not None:
        return named_pipeline(chosen, "the pipeline is ")
    if isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name):
        if not (folder / f"{name[0]}.py").is_file():
            raise ValueError(f"{index}: _class_name is {name!r}, but there is no file {folder / name[0]}.py")
        return None
    if not isinstance(name, str):
        raise ValueError(f"{index}: _class_name is {name!r}; it must be the name of a pipeline class of diffusers")
    return named_pipeline(name, f"{index}: _class_name is ", "give the folder of a whole pipeline")


def named_pipeline(name: str, place: str = "", mend: str = "name a class of a pipeline") -> type:
    """A pipeline class of diffusers by its name.

    Args:
        name: of the class.
        place: the beginning of a message about it.
        mend: what to do about a class that is no pipeline.

    Raises:
        ValueError: diffusers has no such pipeline.
    """
    import diffusers

    version, known = _names("diffusers")
    if name not in known:
        pipelines = [word for word in known if word.endswith("Pipeline")]
        raise ValueError(f"{place}{name!r}, which diffusers {version} does not have{_nearest(name, pipelines)}")
    kind = getattr(diffusers, name)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise ValueError(f"{place}{name!r}, which is not a pipeline; {mend}")
    return kind


def check_pipeline_folder(folder: Path, chosen: str | None = None) -> type | None:
    """Check every part of a pipeline folder; arguments and result are as in `pipeline_class`.

    Raises:
        ValueError: parts are missing, damaged, or of an unknown class; the message has a line for each fault.
    """
    kind = pipeline_class(folder, chosen)
    index = parts_of(read_json_object(folder / INDEX), kind)
    faults = [*_missing_parts(folder, index, kind)]
    named = () if kind is None else inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    for name, entry in index.items():
        faults += _part_faults(folder, name, entry, name in named)
    faults += _channel_faults(folder, kind)
    if faults:
        raise ValueError("\n".join(faults))
    return kind


def parts_of(index: Mapping[str, Any], kind: type | None) -> dict[str, Any]:
    """The entries of an index, without the settings of the pipeline, which may be lists too.

    Diffusers distinguishes parts and settings by the class: an argument with a default is a setting, unless the class
    lists it as an optional part. If `kind` is None, because the folder has its own class, all entries are returned.
    """
    parameters = {} if kind is None else inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    optional = set(getattr(kind, "_optional_components", None) or ())
    settings = {key for key, value in parameters.items() if value.default is not value.empty and key not in optional}
    return {name: entry for name, entry in index.items() if not name.startswith("_") and name not in settings}


def is_part(entry: Any) -> bool:
    """Whether an entry of an index names a library and a class."""
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry)


def weight_faults(folder: Path) -> Iterator[str]:
    """Faults of the weights in the folder of one model, one message for each."""
    files = sorted(folder.glob("*.safetensors"))
    for listing in sorted(folder.glob("*.index.json")):
        shards = read_json_object(listing).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            yield f"{listing} has no `weight_map`, which maps weights to files; get the file again"
            return
        for shard in sorted(set(shards.values())):
            if not (folder / shard).is_file():
                yield f"{folder / shard} is listed in {listing.name} but does not exist; get the model again"
    if not files and not any(folder.glob("*.bin")) and not any(folder.glob("*.index.json")):
        yield f"{folder} holds no weights (*.safetensors or *.bin); get the model again"
        return
    if (variant := _only_variant(folder)) is not None:
        yield (
            f"{folder} holds only weights of the variant {variant}, which are not read; get the files without "
            f"`.{variant}` in their names, or load the model with variant={variant!r} and save it with "
            "`save_pretrained`, which gives the files their usual names"
        )
        return
    for file in files:
        yield from safetensors_faults(file)


def _only_variant(folder: Path) -> str | None:
    """The variant of the weights of a model, such as `fp16`; None if there are weights without one."""
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    found = [_VARIANT.fullmatch(file.stem) for file in files]
    if any(folder.glob("*.index.json")) or not all(found):
        return None
    return next((match[1] for match in found if match is not None), None)


def safetensors_faults(file: Path) -> Iterator[str]:
    """Find a file that is cut short: its header says how long the file should be."""
    size, damaged = file.stat().st_size, f"{file} is cut short or damaged"
    with file.open("rb") as handle:
        head = handle.read(8)
        if (head + handle.read(24)).startswith(_LFS):
            yield f"{file} is a pointer of Git LFS and not the weights; fetch the weights with `git lfs pull`"
            return
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length + 8 > size:
            yield f"{damaged}: its header alone is longer than its {size:,} bytes; get the file again"
            return
        handle.seek(8)
        body = handle.read(length)
    try:
        entries = _head(body)
    except ValueError:
        yield f"{damaged}: its header is not JSON; get the file again"
        return
    needed = 8 + length + max((end for _, end in entries), default=0)
    if size < needed:
        yield f"{damaged}: it has {size:,} bytes and should have {needed:,}; get the file again"


def _head(body: bytes) -> list[tuple[int, int]]:
    import json

    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("no object")
    entries = [entry for name, entry in found.items() if name != "__metadata__"]
    return [(int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in entries]


def tokenizer_faults(folder: Path) -> Iterator[str]:
    """Faults of the folder of a tokenizer, one message for each."""
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES[:-1]):
        yield f"{folder} holds no tokenizer ({', '.join(_VOCABULARIES[:-1])}); get the model again"
    for file in sorted(folder.glob("*.json")):
        yield from _said(lambda file=file: read_json(file))  # type: ignore[misc]


@contextmanager
def from_hub(path: str) -> Iterator[None]:
    """A context in which a library loads a model; the error for an unreadable hub id becomes a clear message.

    Raises:
        ValueError: the hub id cannot be read.
    """
    try:
        yield
    except OSError as error:
        if Path(path).is_dir():
            raise
        cause = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"the model {path!r} is not a local folder and cannot be read from the hub ({cause:.300}); check its name "
            "and the network, sign in if the hub requires it, or give a folder"
        ) from error


def _missing_parts(folder: Path, index: Mapping[str, Any], kind: type | None) -> Iterator[str]:
    if kind is None:
        return
    optional = set(getattr(kind, "_optional_components", None) or ())
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    for parameter in parameters:
        if parameter.name in optional or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.name not in index and parameter.default is parameter.empty:
            yield f"{folder / INDEX} lists no {parameter.name}, which {kind.__name__} needs; get the model again"
        elif index.get(parameter.name) == [None, None] and parameter.name in _NEEDED:
            yield f"{folder / INDEX}: {parameter.name} is null, but {kind.__name__} needs it; give library and class"


def _channel_faults(folder: Path, kind: type | None) -> Iterator[str]:
    """A fault of a denoiser whose input is not what the class makes; diffusers would say it at the first call."""
    name, channels = _INPUT_CHANNELS.get("" if kind is None else kind.__name__, ("", ()))
    config = folder / name / "config.json"
    found = read_json_object(config).get("in_channels") if name and config.is_file() else None
    if kind is not None and type(found) is int and found not in channels:
        yield (
            f"{config}: in_channels is {found}, and {kind.__name__} takes {' or '.join(map(str, channels))}; name a "
            "model with such a denoiser, or another class as model.pipeline"
        )


def _part_faults(folder: Path, name: str, entry: Any, known: bool) -> Iterator[str]:
    if not is_part(entry):
        left_out = isinstance(entry, list) and len(entry) == 2 and entry[1] is None
        # An entry that the class does not name may be a setting of the folder's own class. A part has a folder.
        if isinstance(entry, (str, list)) and not left_out and (known or (folder / name).exists()):
            yield f"{folder / INDEX}: {name} is {entry!r}; it must be a list of library and class"
        return
    library, kind = entry
    wrong = _class_fault(folder, name, library, kind)
    if wrong:
        yield f"{folder / INDEX}: {name} {wrong}"
        return
    part = folder / name
    if not part.is_dir():
        yield f"{part} is not a folder, but {INDEX} lists {name}; get the model again"
        return
    yield from _said(lambda: _check_part(part, library, kind))


def _class_fault(folder: Path, name: str, library: str, kind: str) -> str | None:
    if library in ("diffusers", "transformers"):
        version, known = _names(library)
        # The list alone is not enough: a pipeline of diffusers may add a class to transformers when it is imported.
        if kind not in known and not hasattr(importlib.import_module(library), kind):
            return f"is of class {kind!r}, which {library} {version} does not have{_nearest(kind, known)}"
    elif not _own_module(folder, name, library):
        return f"is of library {library!r}, which is not installed; install it, or correct the name"
    scheduler, tokenizer = "Scheduler" in kind, _is_tokenizer(library, kind)
    if (name == "scheduler") != scheduler and (scheduler or name == "scheduler"):
        return f"is of class {kind!r}; name a {'scheduler' if name == 'scheduler' else 'model'}"
    if tokenizer and "tokenizer" not in name:
        return f"is of class {kind!r}; name a model"
    return None


@cache
def _names(library: str) -> tuple[str, frozenset[str]]:
    """Version of a library, and its names. To list the names takes half a second."""
    module = importlib.import_module(library)
    return str(module.__version__), frozenset(dir(module))


def _own_module(folder: Path, name: str, library: str) -> bool:
    """Whether a library is a pipeline's module in diffusers, a file beside the weights, or installed."""
    if any((place / f"{library}.py").is_file() for place in (folder, folder / name)):
        return True
    return any(importlib.util.find_spec(word) for word in (f"diffusers.pipelines.{library}", library.partition(".")[0]))


def _is_tokenizer(library: str, kind: str) -> bool:
    """Whether a class makes tokens of texts; diffusers has models that make tokens of sound."""
    return "Tokenizer" in kind and library != "diffusers"


def _check_part(part: Path, library: str, kind: str) -> None:
    if _is_tokenizer(library, kind):
        faults = list(tokenizer_faults(part))
    elif "Scheduler" in kind:
        read_json_object(part / "scheduler_config.json")
        faults = []
    elif "Processor" in kind or "FeatureExtractor" in kind or _has_own_config(part):
        faults = []
    else:
        made = read_json_object(part / "config.json").get("_class_name")
        faults = list(weight_faults(part))
        if isinstance(made, str) and made != kind:
            faults.insert(0, f"{part / 'config.json'} is of class {made}, but {INDEX} says {kind}; correct one of them")
    if faults:
        raise ValueError("\n".join(faults))


def _has_own_config(part: Path) -> bool:
    """Whether a part is not a model but has a config file with another name, such as a guider."""
    found = {path.name for path in part.glob("*_config.json")} - {"generation_config.json"}
    return bool(found) and not (part / "config.json").exists()


def _said(check: Any) -> Iterator[str]:
    try:
        check()
    except ValueError as error:
        yield str(error)


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.8)
    return f"; did you mean {close[0]!r}?" if close else "; install a version that has it, or correct the name"
