"""`flowgrpo pairs`: the best and the worst sample of each prompt, as a data set to train on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from .output import output_folder, say
from .trusting import LinksOption, trust_run


def pairs(
    samples: Annotated[
        Path,
        typer.Argument(
            help="A folder that `evaluate --out` has written, or a run; only its training samples are taken."
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder for the pairs.")],
    reward: Annotated[str | None, typer.Option(help="The reward that compares, if the samples have several.")] = None,
    gap: Annotated[float, typer.Option(help="A pair must differ by more than this.")] = 0.0,
    trust: LinksOption = False,
) -> None:
    """Write pairs of the best and the worst sample of each prompt by a reward, for a recipe such as `diffusion_dpo`."""
    from ..gallery.scored_pairs import write_scored_pairs

    if not math.isfinite(gap) or gap < 0:
        raise ValueError(f"--gap is {gap}; give a number of 0 or more")
    output_folder(out.parent)
    trust_run(trust, [samples])
    path, notes = write_scored_pairs(samples, out, reward, gap)
    for line in (str(path), *notes):
        say(line)
