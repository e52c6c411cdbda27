"""Small run folders, and what is read back from a gallery of them."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from PIL import Image

HOSTILE = '</script><img src=x onerror="alert(1)"> <!--<script> &lt; \u2028\u2029 @@policy@@'


def record(iteration: int, prompt_id: int, seed: int, gold: float | None, **changes: Any) -> dict[str, Any]:
    name = f"iter-{iteration:06d}/eval-{prompt_id}-{seed}-{changes.get('sample', 0)}.png"
    return {
        "phase": "eval",
        "iteration": iteration,
        "prompt": f"prompt {prompt_id}",
        "prompt_id": prompt_id,
        "seed": seed,
        "sample": 0,
        "image": name,
        "rewards": {"gold": gold},
        "sub_scores": {"gold": {"dense": 0.5}},
        "notes": {"gold": "found two circles"},
        "columns": {"skill": "counting"},
    } | changes


def written(iteration: int, prompt_id: int, completion: object, **changes: Any) -> dict[str, Any]:
    """A record of a text run."""
    row = record(iteration, prompt_id, 7, float(iteration > 0), **changes)
    del row["image"]
    return row | {"completion": completion}


def picture(path: Path, colour: tuple[int, int, int] = (200, 30, 40), size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def add_records(folder: Path, records: list[dict[str, Any]]) -> None:
    """Append records to the index, and write an image for each record, each with another colour."""
    index = folder / "samples" / "index.jsonl"
    start = len(index.read_text().splitlines()) if index.exists() else 0
    with index.open("a") as log:
        log.writelines(json.dumps(row) + "\n" for row in records)
    for number, row in enumerate((row for row in records if isinstance(row.get("image"), str)), start):
        image = folder / "samples" / row["image"]
        if image.suffix == ".png" and image.resolve().is_relative_to(folder.resolve()):
            picture(image, (number % 256, 7 * number % 256, 99))


def write_run(
    folder: Path,
    records: list[dict[str, Any]],
    metrics: list[dict[str, Any]] | None = None,
    name: str = "a run",
    **sections: Any,
) -> Path:
    (folder / "samples").mkdir(parents=True)
    recipe = {"name": name, "recipe": "flow_grpo", "run": {"iterations": 10}, **sections}
    (folder / "config.yaml").write_text(json.dumps(recipe))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics or []))
    add_records(folder, records)
    return folder


class Elements(HTMLParser):
    """The page as a browser parses it: tags, attributes, the text in each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.texts.append("")
        self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data

    @property
    def written(self) -> str:
        """All text on the page, without scripts and styles."""
        return "\n".join(text for (tag, _), text in zip(self.tags, self.texts) if tag not in ("script", "style"))

    def text(self, tag: str, **attributes: str) -> str:
        wanted = [
            text
            for (name, has), text in zip(self.tags, self.texts)
            if name == tag and all(has.get(key) == value for key, value in attributes.items())
        ]
        return wanted[-1]


def data_of(page: Path) -> dict[str, Any]:
    """All data files of a gallery by name, as its page reads them."""
    found = {}
    for file in sorted((page.parent / "data").iterdir()):
        match = re.fullmatch(r'flowgrpoGallery\(("[^"]*"),("(?:[^"\\]|\\.)*")\);\n', file.read_text(encoding="ascii"))
        assert match is not None, file
        name = json.loads(match[1])
        assert file.name == f"{name}.js"
        found[name] = json.loads(json.loads(match[2]))
    return found


def film(path: Path, frames: int = 12, size: tuple[int, int] = (16, 12)) -> None:
    """A video as a run saves it: frames side by side, each of another grey."""
    strip = Image.new("RGB", (frames * size[0], size[1]))
    for at in range(frames):
        strip.paste((20 * at % 256,) * 3, (at * size[0], 0, (at + 1) * size[0], size[1]))
    strip.save(path)


def write_films(folder: Path, frames: int = 12) -> Path:
    """A run of videos: two prompts, evaluated at 0 and 10."""
    rows = [record(at, prompt, 0, at * prompt / 10, frames=frames) for at in (0, 10) for prompt in (1, 2)]
    write_run(folder, rows, name="films")
    for number, row in enumerate(rows):
        film(folder / "samples" / row["image"], frames, (16, 12 + 2 * number))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
