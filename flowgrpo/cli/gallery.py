"""`flowgrpo gallery`: pages and files for people who look at pictures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .output import output_file, output_folder, refuse_without, say
from .trusting import LinksOption, trust_run

SETS, ORDER, COUNT, EVERY = "base,last", "gained", 12, 5.0
"""Defaults of options that belong to others: with another value they ask for an option that uses them."""


def gallery(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several runs are shown side by side.")],
    out: Annotated[Path | None, typer.Option(help="Another folder to write to; needed for several runs.")] = None,
    link: Annotated[bool, typer.Option("--link", help="With --out: show the runs' own images, copy none.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow runs that are still going.")] = False,
    every: Annotated[float, typer.Option(help="--watch: seconds between readings, 0.2 to 86400.")] = EVERY,
    single: Annotated[Path | None, typer.Option(help="Write the whole gallery as this one HTML file.")] = None,
    sheet: Annotated[Path | None, typer.Option(help="Write a contact sheet (PNG).")] = None,
    animation: Annotated[
        Path | None, typer.Option(help="Write an animated comparison (.webp, .gif, .mp4, .webm).")
    ] = None,
    fps: Annotated[
        float | None, typer.Option(help="Videos: frames a second, 0.1 to 240; by default as in the call, or 16.")
    ] = None,
    dataset: Annotated[Path | None, typer.Option(help="Write a folder that Hugging Face datasets reads.")] = None,
    reward: Annotated[
        str | None, typer.Option(help="Sheet, animation: the reward that orders the prompts; by default the first.")
    ] = None,
    order: Annotated[
        str, typer.Option(help="Sheet, animation: which prompts come first: gained, lost, cheating, high, low or file.")
    ] = ORDER,
    count: Annotated[int, typer.Option(min=1, max=500, help="Sheet, animation: number of prompts.")] = COUNT,
    vote: Annotated[
        bool, typer.Option("--vote", help="Ask people which of two samples is better, on a local page.")
    ] = False,
    report: Annotated[bool, typer.Option("--report", help="Print what people have chosen so far.")] = False,
    votes: Annotated[
        Path | None, typer.Option(help="File of the choices; by default RUN/votes.jsonl, for one run.")
    ] = None,
    favourites: Annotated[
        Path | None,
        typer.Option(help="Write the favourites in this file of the page as choices, to a new file --votes."),
    ] = None,
    vote_dataset: Annotated[Path | None, typer.Option(help="Write the choices as a folder of preferences.")] = None,
    sets: Annotated[
        str,
        typer.Option(
            help="--vote: evaluations to compare, with commas: base, last or numbers; one alone: its samples."
        ),
    ] = SETS,
    session: Annotated[
        str | None, typer.Option(help="--vote: name of the voter's session; by default the last in the file.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="--vote: also show pairs that have a vote.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="--vote: port of the page; 0 for a free one.")] = 0,
    trust: LinksOption = False,
) -> None:
    """Write the static gallery of runs, or exports of it, or ask people to choose."""
    from ..gallery.build import build_gallery
    from ..gallery.exports import write_animation, write_dataset, write_sheet, write_single
    from ..gallery.watch import watch as follow
    from ..media.video import check_rate

    # typer's `min` accepts "nan" in some versions.
    if not 0.2 <= every <= 86400:
        raise ValueError(f"--every is {every}; give seconds from 0.2 to 86400")
    if fps is not None:
        check_rate(fps, "--fps")
    if not vote:
        given = {"--session": session is not None, "--again": again, "--port": port, "--sets": sets != SETS}
        refuse_without(given, "--vote")
    if sheet is None and animation is None:
        given = {"--reward": reward is not None, "--order": order != ORDER, "--count": count != COUNT}
        refuse_without(given, "--sheet or --animation")
    if out is None:
        refuse_without({"--link": link}, "--out")
    if not watch:
        refuse_without({"--every": every != EVERY}, "--watch")
    if not (vote or report or vote_dataset is not None or favourites is not None):
        refuse_without({"--votes": votes is not None}, "--vote, --report, --vote-dataset or --favourites")
    output_folder(out)
    trust_run(trust, [*runs, out])
    for path in (single, sheet, animation, dataset, vote_dataset):
        output_folder(None if path is None else path.parent)
    exports = []
    if sheet is not None:
        exports.append(write_sheet(runs, sheet, reward, order, count))
    if animation is not None:
        exports.append(write_animation(runs, animation, reward, order, count, fps))
    if single is not None:
        exports.append(write_single(runs, single, fps))
    if dataset is not None:
        exports.append(write_dataset(runs, dataset))
    for path in exports:
        say(str(path))
    voting = vote or report or vote_dataset is not None or favourites is not None
    page = out is not None or not (exports or voting)
    if watch:
        say(str(follow(runs, out, lambda: time.sleep(every), say, link=link, fps=fps)))
    elif page:
        say(str(build_gallery(runs, out, link=link, fps=fps)))
    if not watch and (exports or page):
        _say_what_is_shown(runs, counted=page or single is not None)
    if voting:
        file = _votes_file(runs, votes)
        if favourites is not None:
            _write_favourites(runs, favourites, file)
        if vote:
            _serve_votes(runs, file, sets, session, again, port, fps)
        if vote_dataset is not None:
            _write_votes(runs, file, vote_dataset)
        if report or vote:
            _print_votes(runs, file)


def _say_what_is_shown(runs: list[Path], *, counted: bool) -> None:
    """Print what the gallery leaves out. `counted`: a page was made, which shows all other samples."""
    from ..gallery.build import read_runs
    from ..gallery.notes import counts_of, notes_on

    read = read_runs(runs)
    if counted:
        say(counts_of(read))
    for note in notes_on(read):
        say(f"note: {note}")


def _votes_file(runs: list[Path], votes: Path | None) -> Path:
    if votes is None and len(runs) > 1:
        raise ValueError(f"{len(runs)} runs have no common folder; name a file for the choices with --votes")
    from ..votes.file import FILE

    return runs[0] / FILE if votes is None else votes


def _write_favourites(runs: list[Path], marks: Path, file: Path) -> None:
    from ..gallery.favourites import write_favourites

    count = write_favourites(runs, marks, file)
    say(f"{count} choices of favourites over samples beside them: {file}")


def _serve_votes(
    runs: list[Path], file: Path, sets: str, session: str | None, again: bool, port: int, fps: float | None
) -> None:
    from ..gallery.build import read_runs
    from ..gallery.vote_pairs import sources_of
    from ..gallery.vote_server import Booth, VoteServer

    output_file(file)
    read = read_runs(runs)
    booth = Booth(read, sources_of(read, sets), file, session, again, fps)
    with VoteServer(booth, port) as server:
        count = booth.progress()
        say(f"{count['total']} pairs, {count['voted']} of them done in session {booth.session}; choices go to {file}")
        say(f"open {server.url} and end with Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")


def _write_votes(runs: list[Path], file: Path, out: Path) -> None:
    from ..gallery.vote_dataset import write_preferences

    path, notes = write_preferences(runs, file, out)
    for line in (str(path), *notes):
        say(line)


def _print_votes(runs: list[Path], file: Path) -> None:
    from ..gallery.build import read_runs
    from ..gallery.vote_report import report_on

    if not file.exists():
        say(f"there is no file {file} yet: ask people with --vote")
    for line in report_on(read_runs(runs), file).lines():
        say(line)
