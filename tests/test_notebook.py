"""The notebook of a first run: it runs from its first cell to its last, and what is committed shows a real run."""

import base64
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "first_run.ipynb"
SHORT = "run.iterations=2 evaluate.prompts=4 evaluate.every=1 rollout.prompts=2 rollout.group=4"
# Where the machine keeps its files is nobody's business.
LOCAL = re.compile(r"(?<![\w.~])(/(tmp|root|home|work|Users|opt|usr|var|private)/|[A-Z]:\\)|site-packages|file://")
MOST = 300_000  # bytes


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def text_of(output: dict[str, Any]) -> str:
    """What an output says, without its pictures."""
    data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
    return "".join(["".join(output.get("text", [])), *("".join(value) for value in data.values())])


def test_every_cell_has_run_once_in_order_and_without_a_fault() -> None:
    code = cells("code")
    assert len(code) >= 6
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert not [cell for cell in code[1:] if not cell["outputs"]]


def test_the_committed_run_is_the_whole_default_run() -> None:
    (settings,) = (cell for cell in cells("code") if "settings = " in "".join(cell["source"]))
    assert 'settings = ""' in "".join(settings["source"])
    said = "".join(text_of(output) for output in cells("code")[1]["outputs"])
    assert "held-out after 0 iterations" in said
    assert "held-out after 120 iterations" in said


def test_it_shows_pictures_and_no_place_of_a_machine() -> None:
    assert NOTEBOOK.stat().st_size < MOST
    outputs = [output for cell in cells("code") for output in cell["outputs"]]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 3
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode("".join(picture)))) as image:
            image.load()
            assert len(set(image.convert("L").tobytes())) > 2
    for output in outputs:
        assert not LOCAL.search(text_of(output)), text_of(output)
        assert "\x1b[2K" not in text_of(output)  # a moving line would leave all its states


def test_its_links_lead_somewhere() -> None:
    written = "".join("".join(cell["source"]) for cell in cells("markdown"))
    links = re.findall(r"\]\(([^)#]+)", written)
    assert len(links) >= 4
    assert all((NOTEBOOK.parent / link).is_file() for link in links)


@pytest.mark.slow
def test_it_runs_from_its_first_cell_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    program = tmp_path / "bin" / "flowgrpo"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flowgrpo "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    book = nbformat.read(NOTEBOOK, 4)
    settings = next(cell for cell in book.cells if 'settings = ""' in cell.source)
    settings.source = settings.source.replace('settings = ""', f'settings = "{SHORT}"')
    place = tmp_path / "reader"
    place.mkdir()
    client = nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": place}})
    client.execute()
    run = place / "runs" / "notebook"
    assert "held-out after 2 iterations" in (run / "run.log").read_text(encoding="utf-8")
    assert (run / "gallery.html").is_file()
    shown = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in shown) == 3
    assert not any("\x1b[2K" in text_of(output) for output in shown)
