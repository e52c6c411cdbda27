"""The `bench` command: measures claims of the documentation again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .output import output_file, output_folder, refuse_idle, say
from .recipe_words import split
from .stop import ended_by_signals

SEEDS = "0,1,2"
REPEATS = 3

MEASURED = "mixgrpo_flash_guard"
"""The recipe of `bench`, unless one is named: it has a window and ratios, which most measurements are about."""


def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="first-run, diagnosis, prefix, batches, overhead, interruption, kills, iteration, signal, "
            "shared-prefix, claims, race."
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A recipe, mixgrpo_flash_guard by default (first-run: default), and key=value overrides. claims: "
            "claims, and recipes for a short run. race: recipes; RECIPE=RATE gives a recipe its learning rate. Both "
            "take all if none is named."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for the figures; claims, race: folder of the report.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="claims, race, first-run: the seeds of the runs.")] = SEEDS,
    scale: Annotated[float, typer.Option(help="claims, race: factor of the runs' length; 1 suits 2 cores.")] = 1.0,
    results: Annotated[
        Path | None,
        typer.Option(help="claims, race: folder of result files and runs; runs/claims or runs/race by default."),
    ] = None,
    any_code: Annotated[
        bool, typer.Option(help="claims, race: also use results of older code, for equal recipes.")
    ] = False,
    budget: Annotated[float, typer.Option(help="claims, race: hours after which no further run begins.")] = 1.0,
    report_only: Annotated[bool, typer.Option(help="claims, race: measure nothing.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="iteration: number of iterations that count.")] = REPEATS,
) -> None:
    """Measure a claim of the documentation again.

    `claims` measures the claims of papers that have no result yet, and `race` makes the runs of the race that are
    missing. `first-run` makes runs as `flowgrpo train` does, one after another, and scores them on test prompts. If
    a seed fails, the others go on, and the exit status is 1. `--out` is written after each seed.
    """
    with ended_by_signals():
        if name in ("claims", "race"):
            refuse_idle({"--repeats": repeats != REPEATS}, f"for {name}")
            _table(name, words or [], out, seeds, scale, results, any_code, budget, report_only)
            return
        output_file(out, ".json")
        idle = {
            "--scale": scale != 1, "--results": results is not None, "--any-code": any_code, "--budget": budget != 1,
            "--report-only": report_only, "--repeats": repeats != REPEATS and name != "iteration",
            "--seeds": seeds != SEEDS and name != "first-run",
        }  # fmt: skip
        refuse_idle(idle, f"for {name}")
        write = partial(_write, out)
        figures = _figures(name, words, seeds, repeats, write)
        write(figures)
        if name == "kills" and (failed := figures["failed"]):
            raise ValueError(
                f"{len(failed)} of {sum(figures['cases'].values())} cases failed. The first one is {failed[0]['how']} "
                f"at {failed[0]['operation']}: {failed[0]['fault']}"
            )


def _table(
    name: str, words: list[str], out: Path | None, seeds: str, scale: float, results: Path | None, any_code: bool,
    budget: float, report_only: bool,
) -> None:  # fmt: skip
    """Measure what the claims or the race lack, and write their report."""
    from ..bench.claims import trainings
    from ..bench.claims.gather import claims, settings_of
    from ..bench.claims.results import default_results, refuse_settled
    from ..bench.race import race_runs
    from ..bench.race.race_report import race

    results = results or default_results(name)
    output_folder(results)
    output_folder(out)
    settings, methods = settings_of(results, words, seeds, scale, any_code, budget)
    measure, settled = (claims, trainings.SETTLED) if name == "claims" else (race, race_runs.SETTLED)
    refuse_settled(name, settings.overrides, settled)
    measure(settings, methods, out or results / "report", say, report_only)


def _figures(
    name: str, words: list[str] | None, seeds: str, repeats: int, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The figures of a measurement that is neither of claims nor a race; `write` is called with figures so far."""
    from ..bench.children import workplace
    from ..bench.claims.gather import seeds_of
    from ..bench.first_run import first_run
    from ..bench.kills import kills
    from ..bench.measures import MEASUREMENTS
    from ..bench.model_iteration import iteration
    from ..bench.overhead import overhead
    from ..bench.signal import signal
    from ..bench.text_measures import TEXT_MEASUREMENTS
    from ..configs.load import load_image_recipe, load_recipe

    measurements: dict[str, Callable[..., dict[str, Any]]] = {
        "first-run": partial(first_run, seeds=seeds_of(seeds), write=write), **MEASUREMENTS, "kills": kills,
        "overhead": overhead, "iteration": partial(iteration, repeats=repeats), "signal": signal,
    }  # fmt: skip
    if name in TEXT_MEASUREMENTS:
        if words:
            raise ValueError(f"{name} takes no recipe; it measures a model of its own")
        return TEXT_MEASUREMENTS[name](say)
    if name not in measurements:
        raise ValueError(
            f"no measurement {name!r}; use one of {', '.join([*measurements, *TEXT_MEASUREMENTS, 'claims', 'race'])}"
        )
    source, overrides = split(words)
    load = load_recipe if name in ("kills", "iteration") else load_image_recipe
    recipe = load(source or ("default" if name == "first-run" else MEASURED), overrides)
    with workplace(name) as folder:
        return measurements[name](recipe, folder / "run", say)


def _write(out: Path | None, figures: dict[str, Any]) -> None:
    from ..training.folder.files import write_text

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(figures, indent=2) + "\n")
