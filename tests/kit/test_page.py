"""The page about the kit names what the code finds, and its example runs."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import flowgrpo.kit
from flowgrpo.kit.folder import materials, read_folder
from flowgrpo.media.video import write_video

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reward_kit.md"
KIT = Path(flowgrpo.kit.__file__).parent


def codes() -> set[str]:
    """First arguments of `report.add`, and first entries of the tables of versions, edges and causes."""
    found = set()
    for file in sorted(KIT.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            first = node.args[0] if isinstance(node, ast.Call) and node.args else None
            if isinstance(called, ast.Attribute) and called.attr == "add" and isinstance(first, ast.Constant):
                found.add(first.value)
            table = file.stem in ("versions", "contract", "drawn_sounds")
            entry = node.elts[0] if isinstance(node, ast.Tuple) and node.elts and table else None
            if isinstance(entry, ast.Constant):
                found.add(entry.value)
    return {code for code in found if isinstance(code, str) and re.fullmatch("[a-z-]+", code)}


def test_every_finding_is_explained():
    explained = set(re.findall(r"`([a-z-]+)`", PAGE.read_text(encoding="utf-8")))
    assert {"random", "blank", "noise", "whitespace", "hacking"} <= codes()
    # These notes explain themselves, and need no row.
    plain = {"draws", "sizes", "samples", "optimised", "preference"}
    assert codes() - plain - explained == set()


@pytest.mark.slow
def test_the_example_runs(capsys):
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (example,) = (one for one in examples if "check_reward" in one)
    exec(compile(example, "docs/reward_kit.md", "exec"), {"__name__": "example"})
    assert "6 samples of the embedded scenes model" in capsys.readouterr().out


def test_a_video_becomes_a_picture_as_the_page_says(tmp_path: Path):
    (block,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S) if "as_strip" in code
    ]
    names: dict[str, Any] = {}
    exec(block, names)
    shades = [Image.new("RGB", (256, 128), (level,) * 3) for level in (20, 120, 220)]
    write_video(tmp_path / "cat.mp4", shades, 8)
    frames = names["as_strip"](tmp_path / "cat.mp4", tmp_path / "cat.png")
    record = {"prompt": "a cat", "file_name": "cat.png", "frames": frames}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(record) + "\n")
    (material,) = materials(read_folder(tmp_path))
    assert material.images.shape == (1, 3, 3, 128, 256)
    assert (material.images.mean(dim=(0, 2, 3, 4)) * 255).tolist() == pytest.approx([20, 120, 220], abs=4)
