"""`flowgrpo export`: the trained weights of a run as a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import output_folder, say
from .trusting import TrustOption, trust_run

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        help="For a run, take a checkpoint: `latest`, or the number of iterations before it, such as 40. With its "
        "averaged weights, if the run has them."
    ),
]


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, finished or not.")],
    out: Annotated[Path, typer.Option(help="New folder for the weights.")],
    checkpoint: CheckpointOption = None,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="A run of a LoRA: write the whole model, with the LoRA added into its weights."),
    ] = False,
    trust: TrustOption = False,
) -> None:
    """Write the trained weights of a run into a folder that plain diffusers (text: transformers) loads.

    The folder is what a finished run has as `lora`, `pipeline` or `model`. Without `--checkpoint`, it is the result of
    the finished run. With `--merge`, it is a whole pipeline or model also where a LoRA was trained, for programs that
    load no LoRA.
    """
    output_folder(out)
    trust_run(trust, [run], {str(run / "config.yaml"): False})
    from ..inference.exporting import export_weights
    from ..training.folder.files import writing

    with writing(out):
        export_weights(str(run), out, checkpoint=checkpoint, merge=merge)
    say(f"written to {out}")
