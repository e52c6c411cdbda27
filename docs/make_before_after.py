"""Compose the README's picture from a run: held-out prompts before and after training, the same seeds.

    python docs/make_before_after.py RUN docs/images/before-after.png

Prompts are taken in file order, two of each skill: no choosing.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

CELL, GAP, TEXT, COLUMNS = 112, 6, 40, 4


def pairs(run: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Two (before, after) record pairs of each skill, in file order."""
    lines = (run / "samples" / "index.jsonl").read_text(encoding="utf-8").splitlines()
    records = [r for r in map(json.loads, lines) if r["phase"] == "eval" and r["seed"] == 0]
    last = max(r["iteration"] for r in records)
    before = {r["prompt_id"]: r for r in records if r["iteration"] == 0}
    after = {r["prompt_id"]: r for r in records if r["iteration"] == last}
    chosen = defaultdict(list)
    for key in sorted(before):
        chosen[before[key]["columns"]["tag"]].append((before[key], after[key]))
    return [pair for skill in chosen.values() for pair in skill[:2]]


def compose(run: Path) -> Image.Image:
    """The picture: a grid of pairs, each with its prompt and whether the verifier is satisfied."""
    shown = pairs(run)
    width, height = 2 * CELL + 3 * GAP, CELL + TEXT + GAP
    rows = -(-len(shown) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * width + GAP, rows * height + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for number, pair in enumerate(shown):
        left, top = GAP + number % COLUMNS * width, GAP + number // COLUMNS * height
        for side, record in enumerate(pair):
            picture = Image.open(run / "samples" / record["image"]).resize((CELL, CELL), Image.Resampling.NEAREST)
            x = left + side * (CELL + GAP)
            sheet.paste(picture, (x, top))
            satisfied = record["sub_scores"]["gold"]["satisfied"] == 1.0
            pen.rectangle(
                (x, top, x + CELL - 1, top + CELL - 1), outline="#2a8f4a" if satisfied else "#c8c8c8", width=2
            )
        pen.text((left, top + CELL + 3), _wrapped(pair[0]["prompt"]), fill="#222222", font=font, spacing=2)
    return sheet


def _wrapped(text: str, width: int = 38) -> str:
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    compose(Path(sys.argv[1])).save(sys.argv[2], optimize=True)
