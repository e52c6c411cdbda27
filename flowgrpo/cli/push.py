"""`flowgrpo push`: the trained weights of a run, with their model card, into a repository on the hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .output import say
from .trusting import TrustOption, trust_run

AlsoOption = Annotated[
    list[str] | None,
    typer.Option(
        "--also",
        help="A file or folder within the run to upload too, as it is, such as config.yaml or metrics.jsonl. "
        "Repeatable. Nothing else of the run is uploaded.",
    ),
]


def push(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, or a folder that `flowgrpo export` wrote.")],
    repository: Annotated[str, typer.Argument(help="Repository on the hub: OWNER/NAME.", metavar="REPO_ID")],
    private: Annotated[bool, typer.Option("--private", help="Only its owner may see the new repository.")] = False,
    also: AlsoOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Upload without asking first.")] = False,
    trust: TrustOption = False,
) -> None:
    """Upload the trained weights of a run, with their model card, to the hub of Hugging Face.

    Nothing else of the run is uploaded. The command first shows each file and asks. It needs a token that may write
    (`hf auth login`, or HF_TOKEN).
    """
    from ..inference.exporting import result_of
    from ..inference.hub import find_repository, send
    from ..inference.uploads import collect

    config = run / "config.yaml"
    trust_run(trust, [run, result_of(run)], {str(config): False} if config.is_file() else {})
    upload = collect(run, repository, also or [])
    sizes = upload.sizes()
    for name, size in sizes.items():
        say(f"{_in_units(size):>10}  {name}")
    say(f"{_in_units(sum(sizes.values())):>10}  in {len(sizes)} files")
    for note in upload.notes:
        say(f"note: {note}")
    found = find_repository(repository)
    if private and found.private is False:
        raise ValueError(
            f"{found.url} exists and is public, so --private would hide nothing; make it private on its page, or name "
            "a new repository"
        )
    seen = {None: "new, " + ("private" if private else "public"), True: "exists, private", False: "exists, public"}
    say(f"to {found.url} ({seen[found.private]}); files of the same names are replaced there")
    if not yes:
        _ask()
    say(f"uploaded: {send(upload, found, private=private, message=f'Upload {run.resolve().name} with flowgrpo')}")


def _ask() -> None:
    if not sys.stdin.isatty():
        raise ValueError("nothing is uploaded yet, and there is no terminal to ask; add --yes to upload this")
    if not typer.confirm("upload?"):
        say("nothing was uploaded")
        raise typer.Exit(1)


def _in_units(count: float) -> str:
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB"
