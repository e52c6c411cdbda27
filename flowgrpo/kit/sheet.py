"""A sheet of many pictures: samples before and after a run, with their scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from ..training.folder.run_folder import write_atomically
from .optimise import OptimisedSample

SIDE, GAP, LINES, COLUMNS = 192, 12, 3, 3


def write_sheet(path: Path, samples: Sequence[OptimisedSample], names: Sequence[str], most: int = 12) -> None:
    """Write the samples that gained most by the first of the rewards, before on the left and after on the right.

    Args:
        path: the PNG file to write.
        samples: samples that are pictures.
        names: rewards; the scores of the first ones are written below the pictures.
        most: largest number of samples that are shown.
    """
    known = [sample for sample in samples if sample.gain(names[0]) == sample.gain(names[0])]
    shown = sorted(known, key=lambda sample: -sample.gain(names[0]))[:most]
    font = ImageFont.load_default(13)
    width, height = 2 * SIDE + GAP, SIDE + LINES * 18 + GAP
    rows = -(-len(shown) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (width + GAP) + GAP, max(rows, 1) * height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, sample in enumerate(shown):
        left = GAP + number % COLUMNS * (width + GAP)
        top = GAP + number // COLUMNS * height
        for place, file in enumerate((sample.before, sample.after)):
            with Image.open(file) as picture:
                fitted = picture.convert("RGB")
                fitted = fitted.resize(_fit(fitted.size), Image.Resampling.LANCZOS)
            sheet.paste(fitted, (left + place * SIDE, top))
        words = [sample.prompt, *(_scores(sample, name) for name in names[: LINES - 1])]
        for line, text in enumerate(words):
            draw.text((left, top + SIDE + 2 + 18 * line), _cut(text, font, width), fill="black", font=font)
    write_atomically(path, lambda temporary: sheet.save(temporary, format="PNG"))


def _fit(size: tuple[int, int]) -> tuple[int, int]:
    longest = max(size)
    return max(1, size[0] * (SIDE - 4) // longest), max(1, size[1] * (SIDE - 4) // longest)


def _scores(sample: OptimisedSample, name: str) -> str:
    one, other = sample.scores_before[name], sample.scores_after[name]
    return f"{name} {'–' if one is None else f'{one:.3g}'} to {'–' if other is None else f'{other:.3g}'}"


def _cut(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    text = " ".join(text.split())
    while text and font.getlength(text) > width:
        text = text[:-2].rstrip("…") + "…" if len(text) > 2 else ""
    return text
