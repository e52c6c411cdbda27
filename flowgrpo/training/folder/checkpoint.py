"""Checkpoints: everything that a run needs to continue with exactly the same numbers.

A checkpoint holds weights, optimizer, averages, critic and iteration. Noise, prompts and windows are addressed by seed
and iteration, so no generator state is kept. `state.json` lists every other file with its size and CRC-32, so a damaged
file is noticed. A CRC is enough against accidental damage, and it is the fastest checksum that Python has. The weights
of full models are many gigabytes.
"""

from __future__ import annotations

import copy
import io
import json
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_file, save_file

from ...intake.json_text import parse_json
from ...weights.pieces import wholes
from .files import write_text, writing

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ...weights.trained import TrainedWeights

WEIGHTS, RECIPE, STATE = "trained.safetensors", "config.yaml", "state.json"
SAMPLES, INPUTS, LAUNCH = "samples.json", "inputs.json", "launch.json"
LAST = 10_000_000
"""Largest number of iterations that a recipe allows. A larger number would be counted up to, one by one."""
_BLOCK = 2**22
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class Written(Protocol):
    """A part of a run that is written into a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the part needs to continue."""


@runtime_checkable
class Stateful(Written, Protocol):
    """A part of a run that is also read from a checkpoint."""

    def load_state_dict(self, state: Any) -> object:
        """Continue from a state."""


class Gathered:
    """The state of sharded weights, or of a part that works on them, at the moment of construction.

    Every process must construct it. Only the state of the first process is whole.
    """

    def __init__(self, part: Written) -> None:
        self._state: dict[str, Any] = wholes(part.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors on the CPU."""
        return self._state


class Kept:
    """A copy of the state of a part at the moment of construction."""

    def __init__(self, part: Written) -> None:
        self._state: dict[str, Any] = copy.deepcopy(part.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The copy."""
        return self._state


def check_readable(part: str, state: Any, place: str = "") -> None:
    """Refuse a state that a checkpoint can hold and that no resume can read, because its types could run code.

    Args:
        part: name of the part in the checkpoint, for the message.
        state: what its `state_dict` returned.
        place: where in the state this value is.

    Raises:
        ValueError: a value is none of numbers, text, tensors, and lists and mappings of them. The message names its
            place.
    """
    if type(state) in _PLAIN or isinstance(state, torch.Tensor):
        return
    if type(state) is dict:
        for key, value in state.items():
            check_readable(part, key, f"{place}, key {key!r}")
            check_readable(part, value, f"{place}[{key!r}]")
    elif type(state) in (list, tuple):
        for number, value in enumerate(state):
            check_readable(part, value, f"{place}[{number}]")
    else:
        _check_round_trip(part, state, place)


def _check_round_trip(part: str, value: Any, place: str) -> None:
    """Check a value of a type that is not plain, as torch has a list of further types that it reads."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ValueError(
            f"the state_dict() of {part} has a {kind}{place and f' at {place}'}, which no resume can read; return "
            "numbers, text, tensors, and lists and mappings of them (of NumPy values, write .item() or .tolist())"
        ) from error


class DamagedCheckpoint(ValueError):
    """A checkpoint has changed since it was written."""


def write_checkpoint(
    folder: Path,
    iteration: int,
    weights: TrainedWeights | Gathered,
    parts: Mapping[str, Written],
    recipe: str = "",
    samples: int | None = None,
    inputs: Mapping[str, Any] | None = None,
    processes: int | None = None,
) -> None:
    """Fill an empty folder with the state before `iteration`: the weights, a file for each part, and the recipe.

    The file of a part called `FOLDER/NAME` is in the subfolder FOLDER. `samples` is the number of samples that the run
    has saved before `iteration`; a resume compares it with the index. `inputs` are the sizes and checksums of the files
    that the recipe names; a resume compares them too. `processes` is the number of processes of the run.

    Raises:
        OSError: a file could not be written; the error names the file.
        ValueError: a state could not be read again, see `check_readable`.
    """
    tensors = {k: v.contiguous() for k, v in weights.state_dict().items()}
    states = {f"{name}.pt": part.state_dict() for name, part in parts.items()}
    for name, state in states.items():
        check_readable(name.removesuffix(".pt"), state)
    needed = _bytes_of([tensors, *states.values()])
    with writing(folder / WEIGHTS, needed):
        save_file(tensors, folder / WEIGHTS)
    for name, state in states.items():
        # Python opens the file, because torch's own writer does not say why it fails.
        (folder / name).parent.mkdir(exist_ok=True)
        with writing(folder / name, needed), (folder / name).open("wb") as handle:
            torch.save(state, handle)
    with writing(folder / RECIPE, needed):
        write_text(folder / RECIPE, recipe)
        if samples is not None:
            write_text(folder / SAMPLES, json.dumps({"saved": samples}) + "\n")
        if inputs is not None:
            write_text(folder / INPUTS, json.dumps(dict(inputs)) + "\n")
        if processes is not None:
            write_text(folder / LAUNCH, json.dumps({"processes": processes}) + "\n")
        files = {_name(folder, file): measured(file) for file in sorted(folder.rglob("*")) if file.is_file()}
        write_text(folder / STATE, json.dumps({"iteration": iteration, "files": files}, indent=1) + "\n")


def _name(folder: Path, file: Path) -> str:
    """The name of a file, relative to the folder of its checkpoint."""
    return file.relative_to(folder).as_posix()


def _bytes_of(state: Any) -> int:
    """Bytes of the tensors in a state."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return sum(_bytes_of(value) for value in inner)


def verify_checkpoint(folder: Path) -> None:
    """Read every file of a checkpoint and compare its size and checksum with `state.json`.

    Raises:
        DamagedCheckpoint: a file differs, is missing or cannot be read; the message names the file.
    """
    state = folder / STATE
    try:
        noted = parse_json(state.read_text(encoding="utf-8"))
        files = {str(name): (int(entry["bytes"]), str(entry["crc32"])) for name, entry in noted["files"].items()}
        iteration = int(noted["iteration"])
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{state} is missing") from None
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{state} cannot be read ({error})") from None
    if not 0 <= iteration <= LAST:
        raise DamagedCheckpoint(f"{state} is of iteration {iteration}, and a run has at most {LAST:,}")
    if folder.name != f"iter-{iteration:06d}":
        raise DamagedCheckpoint(f"{state} belongs to iteration {iteration}")
    for name in (WEIGHTS, RECIPE):
        if name not in files:
            raise DamagedCheckpoint(f"{state} does not list {name}")
    for name, (size, crc) in files.items():
        file = folder / name
        if "/".join(PurePosixPath(name).parts[-2:]) != name or ".." in name:
            raise DamagedCheckpoint(f"{state} lists {name!r}, which is not a file of a checkpoint")
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is missing")
        if file.stat().st_size != size:
            raise DamagedCheckpoint(f"{file} has {file.stat().st_size} bytes of {size}")
        try:
            found = measured(file)
        except OSError as error:
            raise DamagedCheckpoint(f"{file} cannot be read ({error.strerror})") from None
        if found["crc32"] != crc:
            raise DamagedCheckpoint(f"{file} is not what was written (its checksum differs)")


def samples_before(folder: Path) -> int | None:
    """The number of samples that a run had saved when a checkpoint was written; None if the checkpoint is older.

    Call `verify_checkpoint` first.
    """
    file = folder / SAMPLES
    return int(parse_json(file.read_text(encoding="utf-8"))["saved"]) if file.is_file() else None


def processes_before(folder: Path) -> int | None:
    """The number of processes of the run that wrote a checkpoint; None if the checkpoint is older.

    Call `verify_checkpoint` first.
    """
    file = folder / LAUNCH
    return int(parse_json(file.read_text(encoding="utf-8"))["processes"]) if file.is_file() else None


def inputs_before(folder: Path) -> dict[str, Any]:
    """The `inputs` with which a checkpoint was written; empty if the checkpoint is older.

    Call `verify_checkpoint` first.
    """
    file = folder / INPUTS
    return dict(parse_json(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def measured(file: Path) -> dict[str, Any]:
    """Size in bytes and CRC-32 of a file.

    Raises:
        OSError: the file cannot be read.
    """
    size = crc = 0
    with file.open("rb") as handle:
        while block := handle.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def read_checkpoint(
    folder: Path, weights: TrainedWeights, parts: Mapping[str, Stateful], anew: Collection[str] = ()
) -> int:
    """Load a checkpoint; returns the next iteration. Call `verify_checkpoint` first.

    The parts of `anew` stay as they are if the checkpoint lacks them.

    Raises:
        ValueError: the checkpoint lacks a part that the recipe asks for, or weights do not fit.
    """
    lacking = [name for name in parts if not (folder / f"{name}.pt").exists()]
    if missing := [name for name in lacking if name not in anew]:
        raise ValueError(
            f"{folder} holds no {', '.join(missing)}; resume with the recipe of the run that wrote it, in its "
            "config.yaml"
        )
    weights.load_state_dict(load_file(folder / WEIGHTS))
    for name, part in parts.items():
        if name in lacking:
            continue
        # The file is memory-mapped, because each process reads only its own shards.
        state = torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True, mmap=True)
        part.load_state_dict(state)
    noted: dict[str, Any] = parse_json((folder / STATE).read_text(encoding="utf-8"))
    return int(noted["iteration"])
