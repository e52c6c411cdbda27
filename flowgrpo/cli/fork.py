"""`flowgrpo fork`: a new run that goes on from a checkpoint of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import output_folder, say
from .trusting import TrustOption, trust_run


def fork(
    run: Annotated[Path, typer.Argument(help="Run folder, finished or not.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="What is other in the new run, such as `optimizer.learning_rate=1e-4`.", metavar="[KEY=VALUE]..."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the new run; RUN-fork-N if left out.")] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint: `latest`, or the number of iterations before it, such as 40.")
    ] = "latest",
    trust: TrustOption = False,
) -> None:
    """Make a run that goes on from a checkpoint of another run, with any key changed. The other run stays as it is.

    `flowgrpo resume` then continues the new run: its optimizer, averages and metrics are what they were at the
    checkpoint. Without changes it makes the same numbers again. `run.keep` says how many checkpoints a run keeps.
    """
    from ..inference.checkpoints import find_checkpoint
    from ..training.folder.checkpoint import RECIPE
    from ..training.folder.forking import fork as forked
    from ..training.folder.run_folder import RunFolder, unused

    output_folder(out)
    trust_run(trust, [run])
    folder = RunFolder.open(run)
    chosen = find_checkpoint(str(run), checkpoint)
    trust_run(trust, [], {str(chosen / RECIPE): True})
    number = int(chosen.name.removeprefix("iter-"))
    # The path may be `.`, which has no name.
    named = run if run.name not in ("", "..") else run.resolve()
    new = unused(named.with_name(f"{named.name}-fork-{number}")) if out is None else out
    for note in forked(folder, chosen, new, words or []):
        say(f"note: {note}")
    say(f"{new} is the run of {run} before iteration {number}; go on with `flowgrpo resume {new}`")
