"""Compose the README's picture from a run: samples of held-out prompts before and after training, with equal seeds.

    python docs/make_before_after.py RUN docs/images/before-after.png

The picture shows pairs whose verdict changed, for better or worse. They are evenly spaced in the order of the file, so
nobody chooses them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

CELL, GAP, TEXT, COLUMNS, SHOWN = 112, 6, 40, 4, 16


def verdict(record: dict[str, Any]) -> float:
    """1 if the verifier was satisfied, else 0."""
    return float(record["sub_scores"]["gold"]["satisfied"])


def pairs(run: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """`SHOWN` of the (before, after) record pairs whose verdict changed, evenly spaced in file order."""
    lines = (run / "samples" / "index.jsonl").read_text(encoding="utf-8").splitlines()
    records = [r for r in map(json.loads, lines) if r["phase"] == "eval"]
    last = max(r["iteration"] for r in records)
    before, after = ({(r["prompt_id"], r["seed"]): r for r in records if r["iteration"] == k} for k in (0, last))
    changed = [(before[key], after[key]) for key in sorted(before) if verdict(before[key]) != verdict(after[key])]
    gained = sum(verdict(b) > verdict(a) for a, b in changed)
    print(f"{gained} pairs gained and {len(changed) - gained} lost, of {len(before)}")
    return [changed[k * len(changed) // SHOWN] for k in range(min(SHOWN, len(changed)))]


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
            satisfied = verdict(record) == 1.0
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
