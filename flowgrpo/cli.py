"""The `flowgrpo` command."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .cli_gallery import gallery
from .cli_output import console, say, timed_report
from .cli_pipelines import pipelines_app
from .cli_rewards import rewards_app

if TYPE_CHECKING:
    from .configs.schema import Recipe, TextRecipe

app = typer.Typer(
    help="Align image and video generators with rewards.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip
build_app = typer.Typer(help="Build embedded models from nothing.", no_args_is_help=True)
app.add_typer(build_app, name="build")
app.add_typer(rewards_app, name="rewards")
app.add_typer(pipelines_app, name="pipelines")
app.command()(gallery)

RecipeArgument = Annotated[
    list[str] | None,
    typer.Argument(help="A recipe (name or YAML file), then key=value overrides.", metavar="[RECIPE] [KEY=VALUE]..."),
]


def _split(words: list[str] | None) -> tuple[str | None, list[str]]:
    """The recipe, if the first word is one, and the overrides."""
    given = list(words or [])
    if given and "=" not in given[0]:
        return given[0], given[1:]
    return None, given


def _new_run_name(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@app.command()
def train(
    words: RecipeArgument = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/RECIPE-TIME if left out.")] = None,
) -> None:
    """Train by a recipe (the embedded default if none is named), into a new run folder."""
    from .configs.load import load_recipe

    source, overrides = _split(words)
    recipe = load_recipe(source, overrides)
    folder = out or _new_run_name(recipe.name)
    say(f"run folder {folder}")
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
    trainer = session.trainer(reporter)
    if resume:
        trainer.resume()
    trainer.train()
    if main:
        page = build_gallery(session.run.path) if session.data.heldout else None
        reporter.say(f"trained weights: {session.run.path / session.task.result}")
        if page is not None:
            reporter.say(f"gallery: {page}")


@app.command()
def plan(
    words: RecipeArgument = None,
    draw: Annotated[bool, typer.Option("--draw", help="Draw the rollout tree of one prompt.")] = False,
    svg: Annotated[Path | None, typer.Option(help="SVG file to draw that tree to.")] = None,
    iteration: Annotated[int, typer.Option(min=0, help="Iteration whose tree is drawn.")] = 0,
) -> None:
    """Print what a recipe will do and cost, without loading a model."""
    from .configs.load import load_recipe
    from .configs.schema import TextRecipe
    from .training.planning import budget_line, clip_bounds, forecast, step_ranges

    source, overrides = _split(words)
    recipe = load_recipe(source, overrides)
    say(f"{recipe.name}: {recipe.paper or 'no paper named'}")
    if isinstance(recipe, TextRecipe):
        if draw or svg is not None:
            raise ValueError(f"{recipe.name} is a recipe of text, which has no tree of denoising steps to draw")
        return _plan_text(recipe)
    expected = forecast(recipe)
    say(
        f"{recipe.rollout.prompts} prompts × {expected.images // recipe.rollout.prompts} images = {expected.images} "
        f"images an iteration, {recipe.run.iterations} iterations"
    )
    say(
        f"{expected.optimizer_steps} optimizer step(s) an iteration, {expected.on_policy_steps} of them strictly "
        "on-policy"
    )
    if (line := budget_line(recipe)) is not None:
        say(f"before rounds; {line}")
    high, nats = clip_bounds(recipe, None)
    if nats is not None or high is not None:
        say(f"clip: {f'±{nats:g} nats per latent' if nats is not None else f'{high:g} on the mean-reduced ratio'}")
    say("per prompt, by window of trained steps:")
    say("  iterations  trained steps   evaluations (chains)  leaves  edges  trained edges  trained states")
    for counts, uses in zip(expected.counts, expected.windows):
        steps = step_ranges(counts.trained_steps)
        say(
            f"  {uses:>10}  {steps:>13}   {counts.evaluations:>11} ({counts.chain_evaluations:>6})  "
            f"{counts.leaves:>6}  {counts.edges:>5}  {counts.trained_edges:>13}  {counts.trained_states:>14}"
        )
    for warning in expected.warnings:
        say(f"note: {warning}")
    if draw or svg is not None:
        _draw_tree(recipe, iteration, draw, svg)


def _plan_text(recipe: TextRecipe) -> None:
    from .training.planning import budget_line

    rollout, optimizer = recipe.rollout, recipe.optimizer
    texts, longest = rollout.prompts * rollout.group, recipe.generation.max_tokens
    say(
        f"{rollout.prompts} prompts × {rollout.group} completions = {texts} completions an iteration, at most "
        f"{longest} tokens each, {recipe.run.iterations} iterations"
    )
    if (line := budget_line(recipe)) is not None:
        say(f"before rounds; {line}")
    say(f"{optimizer.updates * optimizer.epochs} optimizer step(s) an iteration, 1 of them strictly on-policy")
    say(f"at most {texts * longest:,} tokens sampled an iteration, and scored {optimizer.epochs} time(s)")


def _draw_tree(recipe: Recipe, iteration: int, draw: bool, svg: Path | None) -> None:
    from rich.text import Text

    from .samplers.drawing import draw_text, unfold
    from .samplers.drawing_svg import draw_svg
    from .samplers.schedules import shifted_sigmas
    from .training.planning import planner
    from .training.run_folder import write_text

    if iteration >= recipe.run.iterations:
        raise ValueError(f"--iteration is {iteration}; the recipe has iterations 0 to {recipe.run.iterations - 1}")
    own = recipe.sampler.sigmas
    tree = unfold(planner(recipe, own or shifted_sigmas(recipe.sampler.steps))(iteration))
    title, note = f"{recipe.name}, iteration {iteration}", "" if own else "noise levels without the model's own shift"
    if draw:
        text = Text("\n" + draw_text(tree, title, note))
        text.highlight_regex("[━╍┕┝]+", "bold orange3")
        console.print(text, end="", soft_wrap=True)
    if svg is not None:
        svg.parent.mkdir(parents=True, exist_ok=True)
        write_text(svg, draw_svg(tree, title, note))
        say(f"drawing: {svg}")


@app.command()
def sample(
    prompts: Annotated[list[str], typer.Argument(help="Prompts.")],
    model: Annotated[str, typer.Option(help="A run folder, a pipeline folder, a hub id, or `scenes`.")] = "scenes",
    out: Annotated[Path, typer.Option(help="Folder for the images.")] = Path("samples"),
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the initial noise.")] = 0,
    count: Annotated[int, typer.Option(help="Images per prompt.")] = 1,
    noise: Annotated[
        int | None, typer.Option(help="Seed of the noise itself, as a gallery shows it; in place of --seed.")
    ] = None,
) -> None:
    """Sample images with a plain diffusers pipeline, base or trained."""
    from .training.inference import sample_images

    for path in sample_images(model, prompts, out, steps=steps, seed=seed, count=count, noise=noise):
        say(str(path))


@app.command()
def evaluate(
    model: Annotated[
        str, typer.Argument(help="A run folder, a model folder, a hub id, `scenes` or `arithmetic`.")
    ] = "scenes",
    words: Annotated[list[str] | None, typer.Argument(help="A recipe and key=value overrides.")] = None,
) -> None:
    """Score a model on the held-out prompts of a recipe, by the recipe's evaluation rewards."""
    from .configs.load import load_recipe
    from .training.inference import evaluate_model

    source, overrides = _split(words)
    recipe = load_recipe(source, overrides)
    noun = "images" if recipe.task == "images" else "completions"
    for name, (mean, error, count) in evaluate_model(model, recipe).items():
        say(f"{name}: {mean:.4f} ± {error:.4f} ({count} {noun})")


@app.command()
def bench(
    name: Annotated[
        str, typer.Argument(help="diagnosis, prefix, batches, overhead, interruption, shared-prefix, or claims.")
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

        settings, methods = settings_of(results, words or [], seeds, scale, any_code)
        return claims(settings, methods, out or results / "report", say, report_only)
    from .training.bench import MEASUREMENTS
    from .training.bench_text import TEXT_MEASUREMENTS

    if name in TEXT_MEASUREMENTS:
        if words:
            raise ValueError(f"{name} takes no recipe; it measures a model of its own")
        figures = TEXT_MEASUREMENTS[name](say)
    elif name in MEASUREMENTS:
        source, overrides = _split(words)
        with tempfile.TemporaryDirectory() as folder:
            figures = MEASUREMENTS[name](load_image_recipe(source, overrides), Path(folder) / "run", say)
    else:
        raise ValueError(
            f"no measurement {name!r}; use one of {', '.join([*MEASUREMENTS, *TEXT_MEASUREMENTS, 'claims'])}"
        )
    if out is not None:
        from .training.run_folder import write_text

        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(figures, indent=2) + "\n")


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    from .configs.load import recipe_names

    for name, line in recipe_names().items():
        say(f"{name:<20} {line}")


@build_app.command("scenes")
def build_scenes_command(
    out: Annotated[Path, typer.Option(help="New folder for pipeline, scorer and prompts.")],
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    scale: Annotated[float, typer.Option(help="Share of the training steps; 1 makes the shipped folder.")] = 1.0,
) -> None:
    """Train the embedded pipeline and its learned scorer from nothing (about 80 minutes on 2 cores)."""
    from .training.build import build_all

    build_all(out, seed=seed, scale=scale, report=timed_report())


@build_app.command("arithmetic")
def build_arithmetic_command(
    out: Annotated[Path, typer.Option(help="New folder for model and problems.")],
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    scale: Annotated[float, typer.Option(help="Share of the training steps; 1 makes the shipped model.")] = 1.0,
) -> None:
    """Train the embedded language model from nothing (a minute or two on 2 cores)."""
    from .training.build import build_arithmetic_all

    build_arithmetic_all(out, seed=seed, scale=scale, report=timed_report())


def main() -> None:
    """Entry point: errors a user can mend are one message, not a traceback."""
    try:
        app()
    except Exception as error:
        # Imported only here: it loads torch, which `--help` and `recipes` do without.
        from .rewards.base import RewardError

        if not isinstance(error, (ValueError, RewardError, FloatingPointError, ImportError, OSError)):
            raise
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; continue with `flowgrpo resume RUN`", highlight=False, markup=False)
        sys.exit(130)
