"""`flowgrpo gallery`: pages and files for people who look at pictures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .cli_output import say


def gallery(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are shown against each other.")],
    out: Annotated[Path | None, typer.Option(help="Another folder to write to; needed for several runs.")] = None,
    link: Annotated[bool, typer.Option("--link", help="With --out: show the runs' own images, copy none.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow runs that are still going.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="--watch: seconds between looks.")] = 5.0,
    single: Annotated[Path | None, typer.Option(help="Write the whole gallery as this one HTML file.")] = None,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG).")] = None,
    animation: Annotated[Path | None, typer.Option(help="Write an animated comparison (.webp or .gif).")] = None,
    dataset: Annotated[Path | None, typer.Option(help="Write a folder that Hugging Face datasets reads.")] = None,
    reward: Annotated[str | None, typer.Option(help="Sheet, animation: the reward that orders; the first.")] = None,
    order: Annotated[str, typer.Option(help="Sheet, animation: gained, lost, cheating, high, low or file.")] = "gained",
    count: Annotated[int, typer.Option(min=1, max=500, help="Sheet, animation: how many prompts.")] = 12,
) -> None:
    """Write the static gallery of runs, or exports of it."""
    from .gallery.build import build_gallery
    from .gallery.exports import write_animation, write_dataset, write_sheet, write_single
    from .gallery.watch import watch as follow

    exports = []
    if sheet is not None:
        exports.append(write_sheet(runs, sheet, reward, order, count))
    if animation is not None:
        exports.append(write_animation(runs, animation, reward, order, count))
    if single is not None:
        exports.append(write_single(runs, single))
    if dataset is not None:
        exports.append(write_dataset(runs, dataset))
    for path in exports:
        say(str(path))
    if exports and out is None and not watch:
        return
    if watch:
        say(str(follow(runs, out, lambda: time.sleep(every), say, link=link)))
    else:
        say(str(build_gallery(runs, out, link=link)))
