"""The `flowgrpo` command."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .cli_gallery import gallery
from .cli_heap import keep_freed_memory
from .cli_output import console, output_file, output_folder, say, say_once, timed_report
from .cli_pipelines import pipelines_app
from .cli_plan import RecipeArgument, plan, recipes, split
from .cli_rewards import rewards_app
from .cli_samples import evaluate, sample

app = typer.Typer(
    help="Align image and video generators with rewards.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip
build_app = typer.Typer(help="Build embedded models from nothing.", no_args_is_help=True)
app.add_typer(build_app, name="build")
app.add_typer(rewards_app, name="rewards")
app.add_typer(pipelines_app, name="pipelines")
app.command()(gallery)


def _new_run_name(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@app.command()
def train(
    words: RecipeArgument = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/RECIPE-TIME if left out.")] = None,
) -> None:
    """Train by a recipe (the embedded default if none is named), into a new run folder."""
    from .configs.load import load_recipe

    source, overrides = split(words)
    output_folder(out)
    recipe = load_recipe(source, overrides)
    folder = out or _new_run_name(recipe.name)
    say_once(f"run folder {folder}")
    from .training.session import start

    _run(start(recipe, folder), resume=False)


@app.command()
def resume(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Continue an interrupted run to the very same numbers."""
    from .configs.load import load_recipe
    from .training.run_folder import RunFolder

    folder = RunFolder.open(run)
    recipe = load_recipe(folder.config)
    from .training.session import Session

    _run(Session(recipe, folder), resume=True)


def _run(session: object, resume: bool) -> None:
    from .gallery.build import build_gallery
    from .training.progress import ConsoleReporter
    from .training.session import Session

    assert isinstance(session, Session)
    assert session.run is not None
    main = session.accelerator.is_main_process
    reporter = ConsoleReporter(console, main)
    for note in session.notes if main else ():
        reporter.say(f"note: {note}")
    trainer = session.trainer(reporter)
    if resume:
        trainer.resume()
    trainer.train()
    if main:
        page = build_gallery(session.run.path) if session.data.heldout else None
        reporter.say(f"trained weights: {session.run.path / session.task.result}")
        if page is not None:
            reporter.say(f"gallery: {page}")


app.command()(plan)
app.command()(sample)
app.command()(evaluate)


@app.command()
def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="diagnosis, prefix, batches, overhead, interruption, iteration, signal, shared-prefix, or claims."
        ),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(help="A recipe (claims: methods; all if none) and key=value overrides.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures; claims: folder of the report.")] = None,
    seeds: Annotated[str, typer.Option(help="claims: run seeds.")] = "0,1,2",
    scale: Annotated[float, typer.Option(help="claims: of the length of the runs; 1 is for 2 cores.")] = 1.0,
    results: Annotated[Path, typer.Option(help="claims: folder of result files and runs.")] = Path("runs/claims"),
    any_code: Annotated[bool, typer.Option(help="claims: use results of older code with an equal recipe.")] = False,
    report_only: Annotated[bool, typer.Option(help="claims: measure nothing.")] = False,
) -> None:
    """Measure a claim of the documentation again, or with `claims` those of the papers, whatever is missing of them."""
    import json
    import tempfile

    from .configs.load import load_image_recipe

    if name == "claims":
        from .training.claims.command import claims, settings_of

        output_folder(results)
        output_folder(out)
        settings, methods = settings_of(results, words or [], seeds, scale, any_code)
        return claims(settings, methods, out or results / "report", say, report_only)
    output_file(out)
    from .training.bench import MEASUREMENTS
    from .training.bench_model import iteration
    from .training.bench_overhead import overhead
    from .training.bench_signal import signal
    from .training.bench_text import TEXT_MEASUREMENTS

    measurements = {**MEASUREMENTS, "overhead": overhead, "iteration": iteration, "signal": signal}
    if name in TEXT_MEASUREMENTS:
        if words:
            raise ValueError(f"{name} takes no recipe; it measures a model of its own")
        figures = TEXT_MEASUREMENTS[name](say)
    elif name in measurements:
        source, overrides = split(words)
        with tempfile.TemporaryDirectory() as folder:
            figures = measurements[name](load_image_recipe(source, overrides), Path(folder) / "run", say)
    else:
        raise ValueError(
            f"no measurement {name!r}; use one of {', '.join([*measurements, *TEXT_MEASUREMENTS, 'claims'])}"
        )
    if out is not None:
        from .training.run_folder import write_text

        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(figures, indent=2) + "\n")


app.command()(recipes)


@build_app.command("scenes")
def build_scenes_command(
    out: Annotated[Path, typer.Option(help="New folder for pipeline, scorer and prompts.")],
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    scale: Annotated[float, typer.Option(help="Share of the training steps; 1 makes the shipped folder.")] = 1.0,
) -> None:
    """Train the embedded pipeline and its learned scorer from nothing (about 80 minutes on 2 cores)."""
    from .training.build import build_all

    output_folder(out)
    build_all(out, seed=seed, scale=scale, report=timed_report())


@build_app.command("arithmetic")
def build_arithmetic_command(
    out: Annotated[Path, typer.Option(help="New folder for model and problems.")],
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    scale: Annotated[float, typer.Option(help="Share of the training steps; 1 makes the shipped model.")] = 1.0,
) -> None:
    """Train the embedded language model from nothing (a minute or two on 2 cores)."""
    from .training.build import build_arithmetic_all

    output_folder(out)
    build_arithmetic_all(out, seed=seed, scale=scale, report=timed_report())


def _told(error: Exception) -> str:
    """What an error says; of the system's with the file first, and without the system's number for it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def main() -> None:
    """Entry point: errors a user can mend are one message, not a traceback."""
    keep_freed_memory()
    try:
        app()
    except Exception as error:
        # Imported only here: it loads torch, which `--help` and `recipes` do without.
        from .pipelines.recorder import PipelineError
        from .rewards.base import RewardError

        if not isinstance(error, (ValueError, PipelineError, RewardError, FloatingPointError, ImportError, OSError)):
            raise
        Console(stderr=True).print(
            f"error: {_told(error)}", style="red", highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print(
            "interrupted; continue with `flowgrpo resume RUN`", highlight=False, markup=False, emoji=False
        )
        sys.exit(130)
