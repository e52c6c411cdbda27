"""What `flowgrpo push` uploads of a run: its trained weights with their model card, and no paths of this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..configs.yaml_text import parse_yaml
from ..intake.links import check_links
from ..training.folder.card_snippets import BASE_LINE, RESULT_LINE, repository_line, unknown_base_line
from ..training.folder.model_card import CARD, FORMER, base_model, edited
from ..training.model_paths import embedded_pipeline, language_folder
from ..weights.json_files import read_json
from .checkpoints import hint_of, iterations_of
from .exporting import add_card, any_recipe, result_of
from .model_recipes import is_run

CONFIGS = ("config.json", "model_index.json", "flowgrpo.json")
"""Ends of the names of files in which libraries write paths. In other files, a token may look like a path."""
SEARCHED = 2**24
"""Bytes of the longest text file that is searched for folders of this machine."""
TEXTS = (".json", ".jsonl", ".yaml", ".md", ".txt", ".log", ".csv", ".html", ".js")
WEIGHTS = ("pytorch_lora_weights.safetensors", "adapter_config.json", "model_index.json", "config.json")
"""A folder that `flowgrpo export` wrote has one of these files."""


@dataclass(frozen=True)
class Upload:
    """Files to upload.

    Attributes:
        files: path in the repository -> the file, or what is uploaded in its place.
        notes: sentences that a person must read before.
    """

    files: dict[str, Path | bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {name: _size(held) for name, held in self.files.items()}


def collect(source: Path, repository: str, also: Sequence[str] = ()) -> Upload:
    """The files to upload. A result without a model card gets one.

    Args:
        source: folder of a finished run, or a folder that `flowgrpo export` wrote.
        repository: OWNER/NAME, which the program of the card names in place of the folder.
        also: paths within the run folder that are asked for beside the result.

    Raises:
        ValueError: there are no trained weights, a path is not within the run, or links lead out of the folder.
    """
    check_links(source)
    if is_run(str(source)):
        result = _with_card(source)
    else:
        result = source
        if not any((source / name).is_file() for name in WEIGHTS):
            raise ValueError(
                f"{source} is neither a run folder (no config.yaml) nor a folder of trained weights; name a run, or a "
                "folder that `flowgrpo export` wrote"
            )
        if also:
            raise ValueError(f"{source} is not a run, and --also names files of a run; leave --also out")
    check_links(result)  # a link within the run would still upload what is no part of the result
    upload = Upload()
    for file in _files(result):
        name = file.relative_to(result).as_posix()
        if name == CARD:
            upload.files[name] = _public_card(file, repository, upload.notes)
        elif name != FORMER:
            upload.files[name] = _cleaned(file, name, upload.notes)
    for asked in also:
        upload.files.update(_asked(source, asked))
    upload.notes.extend(_remarks(source, upload))
    return upload


def _with_card(run: Path) -> Path:
    result = result_of(run)
    if result is None:
        raise ValueError(f"{run} has no trained weights yet; finish it with `flowgrpo resume {run}`{_export(run)}")
    if not (result / CARD).exists():
        recipe = any_recipe(str(run))
        add_card(result, recipe, run, iterations_of(run, recipe.evaluate.results, recipe.run.iterations))
    return result


def _export(run: Path) -> str:
    hint = hint_of(run)
    return hint and f"{hint} for `flowgrpo export`, and push what that writes"


def _files(folder: Path) -> Iterator[Path]:
    """Files below a folder that are not hidden, in a fixed order."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts):
            yield file


def _asked(run: Path, asked: str) -> dict[str, Path | bytes]:
    """The files of a path within a run."""
    inside = PurePosixPath(Path(asked).as_posix())
    place = run / inside
    if inside.is_absolute() or ".." in inside.parts or not inside.parts or not place.exists():
        raise ValueError(f"--also {asked} is not a file or folder of {run}; give a path within it, such as config.yaml")
    check_links(place)
    found = list(_files(place)) if place.is_dir() else [place]
    if not found:
        raise ValueError(f"{place} holds no files; leave this --also out")
    return {file.relative_to(run).as_posix(): file for file in found}


# -- paths -------------------------------------------------------------------------------------------------------------


def public_name(path: str) -> str:
    """The name of a model as others may read it: an embedded model, a hub id, or the last part of a path."""
    embedded: tuple[tuple[str, Callable[[], str | Path]], ...] = (
        ("scenes", embedded_pipeline),
        ("arithmetic", lambda: language_folder("arithmetic")),
    )
    for name, folder in embedded:
        with suppress(ValueError):
            if Path(path) == Path(folder()):
                return name
    return base_model(path)[0]


def _public_card(file: Path, repository: str, notes: list[str]) -> bytes:
    """A card whose program names the repository, and no folder of this machine."""

    def change(card: str) -> str:
        card = RESULT_LINE.sub(lambda _: repository_line(repository), card)
        return BASE_LINE.sub(lambda line: unknown_base_line(public_name(line[1])), card)

    text = file.read_bytes().decode(errors="surrogateescape")  # a person's bytes stay as they are
    if BASE_LINE.search(text):
        notes.append(f"{CARD}: the base model is a folder, so the program names no place where others find it")
    return edited(text, change).encode(errors="surrogateescape")


def _cleaned(file: Path, name: str, notes: list[str]) -> Path | bytes:
    """A file, or its content with names in place of paths. Libraries write where a model was loaded from."""
    if not file.name.endswith(CONFIGS) or file.stat().st_size > SEARCHED:
        return file
    content = read_json(file)
    replaced: dict[str, str] = {}
    clean = _without_paths(content, "", replaced)
    if not replaced:
        return file
    listed = ", ".join(f"{key} is uploaded as {value!r}" for key, value in replaced.items())
    notes.append(f"{name}: {listed}, without the folders of this machine")
    return (json.dumps(clean, indent=2, ensure_ascii=False) + "\n").encode()


def _without_paths(value: Any, key: str, replaced: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _without_paths(inner, name, replaced) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner, key, replaced) for inner in value]
    if not isinstance(value, str) or not (key.endswith("name_or_path") or _is_path(value)):
        return value
    public = public_name(value)
    if public != value:
        replaced[key] = public
    return public


def _is_path(text: str) -> bool:
    """Whether a text is an absolute path of two parts or more. A chat template or a token may begin with a slash."""
    if any(mark in text for mark in "\n{<"):
        return False
    if text.startswith("~/"):
        return True
    return any(path.is_absolute() and len(path.parts) > 2 for path in (PurePosixPath(text), PureWindowsPath(text)))


def _remarks(source: Path, upload: Upload) -> Iterable[str]:
    card = upload.files.get(CARD)
    if isinstance(card, bytes) and not _names_licence(card.decode(errors="replace")):
        yield f"{CARD} names no licence; write one into its head as `license: NAME`, now or later"
    folders = {str(Path.home()), os.path.realpath(source), os.getcwd()}
    own = [folder.encode() for folder in folders if len(Path(folder).parts) > 2]
    for name, held in upload.files.items():
        if Path(name).suffix in TEXTS and _size(held) <= SEARCHED:
            text = held if isinstance(held, bytes) else held.read_bytes()
            if any(folder in text for folder in own):
                yield f"{name} names folders of this machine"


def _size(held: Path | bytes) -> int:
    return len(held) if isinstance(held, bytes) else held.stat().st_size


def _names_licence(card: str) -> bool:
    head = card.split("---\n", 2)
    with suppress(ValueError):
        found = parse_yaml(head[1], CARD) if len(head) == 3 else None
        return isinstance(found, dict) and bool(found.get("license"))
    return False
