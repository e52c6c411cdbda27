"""Reads the corpus of hostile inputs, and writes the files of a case."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from tests.gallery.folders import record, write_run, written

FOLDER = Path(__file__).parent / "cases"
PROMPTS = "".join(
    f"a {colour} {shape}\n" for colour in ("red", "blue", "green") for shape in ("cup", "hat", "box", "car")
)


@dataclass(frozen=True)
class Case:
    """One hostile input.

    Attributes:
        group: the file of the corpus that it stands in.
        case: what is wrong, in words.
        run: words of the command line.
        says: what the message must hold: what is wrong, where, and what to write.
        start: names of `STARTS`, written first.
        files: path -> text; or a mapping with one key of `KINDS`.
        status: exit status.
    """

    group: str
    case: str
    run: str
    says: list[str]
    start: list[str] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)
    status: int = 1


def cases() -> Iterator[Case]:
    """The whole corpus."""
    for path in sorted(FOLDER.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            yield Case(path.stem, **entry)


def write_case(case: Case, folder: Path) -> None:
    """Write what a case starts with, then its own files."""
    for name in case.start:
        STARTS[name](folder)
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_bytes(content.encode("utf-8", "surrogatepass"))
        else:
            ((kind, value),) = content.items()
            KINDS[kind](path, value)


def _embedded(world: str, data: str, name: str) -> Callable[[Path], None]:
    """A copy of an embedded model, whose weights are links: they are read and never written."""

    def link(source: str, target: str) -> None:
        if source.endswith(".safetensors"):
            Path(target).symlink_to(source)
        else:
            shutil.copy2(source, target)

    source = Path(str(resources.files(f"flowgrpo.worlds.{world}")))
    return lambda folder: shutil.copytree(source / data, folder / name, copy_function=link) and None


def _prompts(folder: Path) -> None:
    (folder / "prompts.txt").write_text(PROMPTS)


def _image_run(folder: Path) -> None:
    from flowgrpo.configs.load import dump_recipe, load_recipe

    rows = [record(at, prompt, 5, at / 4) for at in (0, 2) for prompt in (0, 1)]
    write_run(folder / "run", rows, [{"iteration": 0, "loss": 1.0}, {"iteration": 1, "loss": 0.5}])
    _write_config(folder, dump_recipe(load_recipe("mixgrpo_flash_guard", ["run.iterations=2"])))


def _text_run(folder: Path) -> None:
    from flowgrpo.configs.load import dump_recipe, load_recipe

    rows = [written(at, prompt, f"answer {at}") for at in (0, 2) for prompt in (0, 1)]
    write_run(folder / "run", rows, [{"iteration": 0, "loss": 1.0}])
    _write_config(folder, dump_recipe(load_recipe("text", ["run.iterations=2"])))


def _write_config(folder: Path, text: str) -> None:
    (folder / "run" / "config.yaml").write_text(text)


def _set(path: Path, changes: dict[str, Any]) -> None:
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "-"}))


def _cut(path: Path, size: int) -> None:
    content = path.read_bytes()[:size]
    path.unlink()
    path.write_bytes(content)


def _remove(path: Path, _: Any) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _picture(path: Path, size: list[int]) -> None:
    Image.new("RGB", (size[0], size[1]), (90, 120, 30)).save(path)


STARTS: dict[str, Callable[[Path], None]] = {
    "pipeline": _embedded("scenes", "pipeline", "pipeline"),
    "arithmetic": _embedded("arithmetic", "model", "arithmetic"),
    "prompts": _prompts,
    "run": _image_run,
    "text run": _text_run,
}

KINDS: dict[str, Callable[[Path, Any], object]] = {
    "hex": lambda path, value: path.write_bytes(bytes.fromhex(value)),
    "repeat": lambda path, value: path.write_text("".join(text * count for text, count in value), newline=""),
    "folder": lambda path, _: path.mkdir(parents=True),
    "picture": _picture,
    "set": _set,
    "cut": _cut,
    "remove": _remove,
    "lines": lambda path, value: path.write_text("".join(json.dumps(row) + "\n" for row in value)),
    "add": lambda path, value: path.write_text(path.read_text() + value),
}
