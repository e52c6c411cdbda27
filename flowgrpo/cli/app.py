"""The `flowgrpo` command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.console import Console

from ..rewards.given_up import ended_for_sure
from .adapter import adapter
from .allocator import keep_freed_memory
from .convert import convert
from .evaluate import evaluate
from .export import export
from .fork import fork
from .gallery import gallery
from .loading import loading
from .measuring import bench
from .openmp import few_threads, sleep_soon
from .output import console, is_first, output_folder, say, timed_report
from .pairs import pairs
from .parts import parts
from .pipelines import pipelines_app
from .plan import plan
from .push import push
from .recipe_words import RecipeArgument, RecipeCommand, split
from .recipes import recipes
from .rewards import rewards_app
from .sample import SampleCommand, sample
from .stop import stoppable
from .trusting import TrustOption, trust_run
from .warnings_shown import warnings_shown
from .watching import watch

if TYPE_CHECKING:
    from ..training.reporting.progress import ConsoleReporter
    from ..training.session import Session
    from ..training.stopping import Stop


class Commands(typer.core.TyperGroup):
    """Commands that end with status 0 only if they run to their end, whatever the code does that they call."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; `sys.exit` within it counts as a failure, because typer's own exits are other exceptions."""
        try:
            return super().invoke(ctx)
        except SystemExit as error:
            if isinstance(error.__context__, BrokenPipeError):
                # The reader of the output has closed the pipe, as `head` does; what is left to flush has no reader.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(1) from None
            raise RuntimeError(
                f"code that this command called raised {error!r} before the command had ended; the traceback says "
                "which code"
            ) from error


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
build_app = typer.Typer(help="Build embedded models from nothing.", no_args_is_help=True)
app.add_typer(build_app, name="build")
app.add_typer(rewards_app, name="rewards")
app.add_typer(pipelines_app, name="pipelines")
app.command()(gallery)
app.command()(adapter)
app.command()(pairs)
app.command()(parts)
app.command()(convert)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        parts = [f"{name} {version(name)}" for name in ("flowgrpo", "torch", "diffusers", "transformers")]
        say(f"{', '.join(parts)}, Python {sys.version.split()[0]}")
        raise typer.Exit()


ALONE = ("adapter", "bench", "build", "convert", "export", "fork", "gallery", "pairs", "pipelines", "push", "rewards")
"""Commands that write what several processes would write twice, or that start processes of their own."""
SAID_ONCE = ("parts", "plan", "recipes", "watch")
"""Commands that print what every process would print in the same words."""


@app.callback()
def flowgrpo(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and end.")
    ] = False,
) -> None:
    """Align image and video generators, and language models, with rewards."""
    # A cluster may set the number of processes alone, for a command that no launcher starts.
    several = "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    if several and (name := context.invoked_subcommand) in ALONE:
        raise ValueError(f"`flowgrpo {name}` takes one process, and a launcher started several; start it by itself")
    if several and not is_first() and context.invoked_subcommand in SAID_ONCE:
        raise typer.Exit()


def _new_run_name(name: str) -> Path:
    """The folder of a new run of a recipe with this name.

    Raises:
        ValueError: the name is a path.
    """
    if not name or Path(name).name != name:
        raise ValueError(
            f"name is {name!r}, and the run folder is named after it; write a name without / or give --out"
        )
    folder = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Runs may begin in the same second. Processes of one run agree on the folder later.
    numbered = (folder.with_name(f"{folder.name}-{k}") for k in count(2))
    return folder if not folder.exists() else next(path for path in numbered if not path.exists())


@app.command(cls=RecipeCommand)
def train(
    words: RecipeArgument = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/RECIPE-TIME if left out.")] = None,
    trust: TrustOption = False,
) -> None:
    """Train by a recipe (the embedded default if none is named), into a new run folder."""
    with loading():
        from ..configs.load import load_recipe

    source, overrides = split(words)
    output_folder(out)
    trust_run(trust, [], {source: True})
    with _starting():
        recipe = load_recipe(source, overrides)
    folder = out or _new_run_name(recipe.name)
    with stoppable(folder) as stop, _reporting(stop) as reporter:
        with loading():
            from ..training.session import start

        def made(path: Path) -> None:
            if reporter.log:
                reporter.log.open(path)
            reporter.say(f"run folder {path}")

        session = start(recipe, folder, made, reporter.doing)
        _run(session, reporter, stop, resume=False)


@app.command(cls=RecipeCommand)
def resume(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="What changes from here on: the length (`run.iterations=200`), `evaluate.*`, and what the run writes.",
            metavar="[KEY=VALUE]...",
        ),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Continue an interrupted run to the very same numbers, or a finished run to a greater length."""
    with loading():
        from ..configs.load import dump_recipe, load_recipe
        from ..configs.trust import remember_run

    with stoppable(run) as stop, _reporting(stop) as reporter:
        with loading():
            from ..training.distributed.processes import ended_together
            from ..training.folder.changing import with_changes
            from ..training.folder.run_folder import RunFolder

        with ended_together():
            trust_run(trust, [run], {str(run / "config.yaml"): True})
            folder = RunFolder.open(run)
            if is_first():
                folder.claim()
            recipe = with_changes(folder, words) if words else load_recipe(folder.config)
            if words and (unremembered := remember_run(run, dump_recipe(recipe))) is not None:
                folder.notes.append(unremembered)
        if reporter.log:
            reporter.log.open(run)
        with loading():
            from ..training.session import Session
        _run(Session(recipe, folder, doing=reporter.doing), reporter, stop, resume=True)


@contextmanager
def _starting() -> Iterator[None]:
    """Show on a terminal that something happens. The libraries take seconds to load."""
    from ..training.reporting.activity import Activity

    activity = Activity(console)
    if is_first():
        activity.begin("starting")
    try:
        yield
    finally:
        activity.end()


@contextmanager
def _reporting(stop: Stop) -> Iterator[ConsoleReporter]:
    from ..training.folder.run_log import RunLog
    from ..training.reporting.progress import ConsoleReporter

    main = is_first()
    with RunLog(main) as log, ConsoleReporter(console, main, log) as reporter:
        stop.say = reporter.say
        reporter.doing("starting")
        with warnings_shown(reporter.note if main else None):
            yield reporter


def _run(session: Session, reporter: ConsoleReporter, stop: Stop, resume: bool) -> None:
    from ..gallery.build import build_gallery

    assert session.run is not None
    for note in session.notes if session.accelerator.is_main_process else ():
        reporter.say(f"note: {note}")
    trainer = session.trainer(reporter, stop)
    if resume:
        trainer.resume()
    trainer.train()
    if session.accelerator.is_main_process:
        reporter.doing("making the gallery")
        page = build_gallery(session.run.path) if session.data.heldout else None
        reporter.say(f"trained weights: {session.run.path / session.task.result}")
        if page is not None:
            reporter.say(f"gallery: {page}")
        elif session.run.index.exists():
            reporter.say(f"gallery: not made without held-out prompts; `flowgrpo gallery {session.run.path}` makes one")


app.command(cls=RecipeCommand)(fork)
app.command()(watch)
app.command(cls=RecipeCommand)(plan)
app.command(cls=SampleCommand)(sample)
app.command(cls=RecipeCommand)(evaluate)
app.command()(export)
app.command()(push)
app.command(cls=RecipeCommand)(bench)
app.command(cls=RecipeCommand)(recipes)


@build_app.command("scenes")
def build_scenes_command(
    out: Annotated[
        Path,
        typer.Option(
            help="New folder for pipeline, scorer and prompts. The folder of an interrupted build with the same seed "
            "and scale is continued."
        ),
    ],
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    scale: Annotated[float, typer.Option(help="Share of the training steps; 1 makes the shipped folder.")] = 1.0,
) -> None:
    """Train the embedded pipeline and its learned scorer from nothing (about 85 minutes on 2 cores)."""
    from ..worlds.building import build_all

    output_folder(out)
    build_all(out, seed=seed, scale=scale, report=timed_report())


@build_app.command("arithmetic")
def build_arithmetic_command(
    out: Annotated[Path, typer.Option(help="New folder for model and problems.")],
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    scale: Annotated[float, typer.Option(help="Share of the training steps; 1 makes the shipped model.")] = 1.0,
) -> None:
    """Train the embedded language model from nothing (a minute or two on 2 cores)."""
    from ..worlds.building import build_arithmetic_all

    output_folder(out)
    build_arithmetic_all(out, seed=seed, scale=scale, report=timed_report())


@build_app.command("masked")
def build_masked_command(
    out: Annotated[Path, typer.Option(help="New folder for model and problems.")],
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    scale: Annotated[float, typer.Option(help="Share of the training steps; 1 makes the shipped model.")] = 1.0,
) -> None:
    """Train the embedded masked language model from nothing (a few minutes on 2 cores)."""
    from ..worlds.building import build_masked_all

    output_folder(out)
    build_masked_all(out, seed=seed, scale=scale, report=timed_report())


@ended_for_sure()
def main() -> None:
    """Entry point: an error that a user can mend is printed as one message, without a traceback."""
    keep_freed_memory()
    sleep_soon()
    few_threads()
    try:
        app()
    except Exception as error:
        # Imported only here: it loads torch, which `--help` and `recipes` do without.
        from ..intake.visible import visible
        from ..training.mendable import message_of

        if (text := message_of(error)) is None:
            raise
        Console(stderr=True).print(
            f"error: {visible(text)}", style="red", highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted", highlight=False, markup=False)
        sys.exit(130)
