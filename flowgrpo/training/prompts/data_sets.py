"""Data sets of the library `datasets`: a folder of `save_to_disk`, a folder like a repository of the hub, and the hub.

The library finds out which files belong to a split. The files are read here, and only files that hold values. So a data
set never runs code, and it names no file outside itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...configs.prompt_source import PromptSource
from ...configs.yaml_text import parse_yaml
from ...weights.json_files import read_json_object
from .prompt_files import TEXTS, Entry, file_entries
from .stored_table import FilePart, StoredTable, arrow_table, parquet_table, whole_table

CARD = "README.md"
STATE, SPLITS = "state.json", "dataset_dict.json"
FORMATS = (".parquet", ".arrow", *TEXTS)
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)?")
_FRONT = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_LONGEST_CARD = 2**24


class MissingFiles(ValueError):
    """Files of a data set are not there. They may be there elsewhere, if the data set was downloaded in part."""


@dataclass(frozen=True)
class OpenedSet:
    """The rows of a data set.

    Attributes:
        rows: the table, or the entries of text files.
        chosen: the numbers of the rows that the source names.
    """

    rows: StoredTable | list[Entry]
    chosen: range


def library() -> Any:
    """The package datasets, without its bars of progress.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError(
            "reading a data set needs the package datasets, which is not installed: pip install datasets"
        ) from None
    datasets.disable_progress_bars()
    return datasets


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` has written a folder."""
    return (folder / STATE).is_file() or (folder / SPLITS).is_file()


def open_folder(folder: Path, source: PromptSource) -> OpenedSet:
    """The rows of a folder that `save_to_disk` has written, or of a folder like a repository of the hub.

    Raises:
        ValueError: there is no data set, a file is damaged, or the split or the configuration is not there. The message
            says which there are.
    """
    if is_saved(folder):
        return _saved(folder, source)
    return read_files(folder, *set_files(folder.resolve().as_posix(), _card(folder), source), source)


def read_files(folder: Path, names: Sequence[str], split: str, source: PromptSource) -> OpenedSet:
    """The rows of files below a folder, one file after the other."""
    files = [folder / name for name in names]
    ending = files[0].suffix.lower()
    if ending == ".parquet":
        rows: StoredTable | list[Entry] = parquet_table(files)
    elif ending == ".arrow":
        rows = arrow_table(files)
    else:
        rows = [entry for file in files for entry in file_entries(file, lines_too=True)]
    return OpenedSet(rows, _range(source, split, len(rows)))


def set_files(base: str, card: str, source: PromptSource) -> tuple[list[str], str]:
    """The files of a split, as paths below the data set, and the name of the split.

    Args:
        base: the data set: the path of a folder, or its address on the hub.
        card: the text of its README.md, whose head may list files; "" if there is none.
        source: says which split and configuration.

    Raises:
        MissingFiles: the data set has no files that can be read, or not all files of the split.
        ValueError: it has not this split or configuration.
    """
    found = library().data_files
    listed, home = _patterns(base, card, source)
    try:
        patterns = found.get_data_patterns(home) if listed is None else listed
    except (FileNotFoundError, ValueError):
        raise MissingFiles(_nothing_in(source)) from None
    try:
        split = _choose(source, [str(split) for split in patterns])
    except ValueError as error:
        raise (MissingFiles(str(error)) if listed is None else error) from None
    try:
        paths = found.DataFilesList.from_patterns(patterns[split], base_path=home, allowed_extensions=list(FORMATS))
    except FileNotFoundError as error:
        raise MissingFiles(f"{source} names files that are not there ({error})") from None
    names = [path.removeprefix(f"{base}/") for path in dict.fromkeys(paths)]
    if not names:
        raise MissingFiles(_nothing_in(source))
    endings = sorted({PurePosixPath(name).suffix.lower() for name in names})
    if len(endings) > 1:
        raise ValueError(f"split {split} of {source} has files of several kinds ({', '.join(endings)}); keep one kind")
    _require_shards(names, source)
    return names, split


def _nothing_in(source: PromptSource) -> str:
    what = "data set" if source.hub else "folder"
    return (
        f"{source} has no prompts that can be read: no file in the {what} ends in {', '.join(FORMATS)}; name a file, a "
        "folder that `save_to_disk` of the library datasets has written, or a folder like a data set of the hub"
    )


def _card(folder: Path) -> str:
    card = folder / CARD
    if not card.is_file():
        return ""
    if card.stat().st_size > _LONGEST_CARD:
        raise ValueError(f"{card} is larger than {_LONGEST_CARD // 2**20} MiB; shorten it")
    return card.read_text(encoding="utf-8-sig", errors="replace")


def _patterns(base: str, card: str, source: PromptSource) -> tuple[dict[str, list[str]] | None, str]:
    """Patterns of the files of each split, if the card lists them; and the folder or address where they start."""
    front = _FRONT.match(card)
    head = parse_yaml(front[1], f"{source}: {CARD}") if front else None
    listed = head.get("configs") if isinstance(head, Mapping) else None
    configs = {
        str(entry["config_name"]): entry
        for entry in listed or ()
        if isinstance(entry, Mapping) and "config_name" in entry
    }
    if not configs:
        if source.config not in (None, "default"):
            raise ValueError(f"{source} has one configuration only; leave config out")
        return None, base
    chosen = configs[_config(source, configs)]
    where = chosen.get("data_dir")
    home = base if where is None else f"{base}/{_inside(where, source)}"
    files = chosen.get("data_files")
    if files is None:
        return None, home
    entries = files if isinstance(files, list) else [files]
    by_split: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, Mapping) else ("train", entry)
        for path in paths if isinstance(paths, list) else [paths]:
            by_split.setdefault(str(split), []).append(_inside(path, source))
    return by_split, home


def _config(source: PromptSource, configs: Mapping[str, Mapping[str, Any]]) -> str:
    if source.config is not None:
        if source.config not in configs:
            raise ValueError(f"{source} has no configuration {source.config!r}; it has {', '.join(configs)}")
        return source.config
    chosen = [name for name, entry in configs.items() if entry.get("default") is True or name == "default"]
    chosen = chosen or list(configs)
    if len(chosen) > 1:
        raise ValueError(
            f"{source} has the configurations {', '.join(configs)}; write one of them, as in config={chosen[0]}"
        )
    return chosen[0]


def _inside(path: Any, source: PromptSource) -> str:
    """A path or pattern of a card. It may not leave the data set, because the card may be a stranger's."""
    if not isinstance(path, str) or not path or "://" in path or "::" in path or "\\" in path:
        raise ValueError(f"{source}: {CARD} names {path!r:.200} as files; name files of the data set")
    if path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{source}: {CARD} names {path!r:.200}, which is no file of the data set")
    return path


def _require_shards(names: Sequence[str], source: PromptSource) -> None:
    """Refuse a split of which some files are missing, for example after a download that was cut short."""
    there: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if (match := _SHARD.fullmatch(name)) is not None:
            there.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in there.items():
        if missing := sorted(set(range(count)) - numbers):
            raise MissingFiles(
                f"{source} is incomplete: {len(missing)} of {count} files {stem}-…-of-{count:05d} are missing; "
                "download or write it again"
            )


def _saved(folder: Path, source: PromptSource) -> OpenedSet:
    """The rows of a folder that `save_to_disk` has written. The arrow files are mapped into memory."""
    if source.config is not None:
        raise ValueError(f"{source}: a folder of save_to_disk has no configurations; leave config out")
    datasets = library()
    split, place = "train", folder
    if not (folder / STATE).is_file():
        listed = read_json_object(folder / SPLITS).get("splits")
        splits = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        split = _choose(source, splits)
        place = folder / split
        if len(Path(split).parts) != 1 or not (place / STATE).is_file():
            raise ValueError(f"{folder / SPLITS} names the split {split!r}, and {place} is no data set; write it again")
    else:
        own = read_json_object(folder / STATE).get("_split")
        split = _choose(source, [own if isinstance(own, str) else "train"])
    for entry in read_json_object(place / STATE).get("_data_files") or ():
        name = entry.get("filename") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or len(Path(name).parts) != 1 or not (place / name).is_file():
            raise ValueError(
                f"{place / STATE} names the file {name!r:.200}, which is not in the folder; write it again"
            )
    read_json_object(place / "dataset_info.json")
    try:
        found = datasets.Dataset.load_from_disk(str(place))
        table = found.with_format("arrow")[:]
    except Exception as error:  # a damaged folder raises errors of many kinds
        raise ValueError(f"{place} cannot be read as a data set ({type(error).__name__}: {error})") from None
    rows = whole_table(table, [FilePart(str(place), len(table))])
    return OpenedSet(rows, _range(source, split, len(rows)))


def _choose(source: PromptSource, splits: Sequence[str]) -> str:
    """The split that a source names, without its range."""
    asked = None if source.split is None else source.split.partition("[")[0]
    if asked is None and len(splits) == 1:
        return splits[0]
    if asked in splits and asked is not None:
        return asked
    listed = ", ".join(splits) or "none"
    if asked is None:
        words = str(source) + ("&" if "?" in str(source) else "?")
        raise ValueError(f"{source} has the splits {listed}; write one of them, as in {words}split={splits[0]}")
    raise ValueError(f"{source} has no split {asked!r}; it has {listed}")


def _range(source: PromptSource, split: str, count: int) -> range:
    """The rows of a split that a source names, such as all but the first 500 for `train[500:]`."""
    if source.split is None or "[" not in source.split:
        return range(count)
    instruction = library().ReadInstruction
    try:
        (found,) = instruction.from_spec(source.split).to_absolute({split: count})
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f"{source}: split {source.split} is no range of {count:,} rows ({error}); write for example {split}[:500], "
            f"{split}[500:] or {split}[:10%]"
        ) from None
    chosen = range(count)[found.from_ : found.to]
    if not chosen:
        raise ValueError(f"{source}: split {source.split} holds no prompt; {split} has {count:,}")
    return chosen
