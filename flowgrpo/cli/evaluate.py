"""`flowgrpo evaluate`: scores of a model on held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .export import CheckpointOption
from .loading import loading
from .output import output_folder, say_first, summary_lines
from .recipe_words import split
from .sample import check_shared, gives_share, one_model
from .trusting import TrustOption, trust_run


def evaluate(
    model: Annotated[
        str, typer.Argument(help="A run folder, a model folder, a hub id, `scenes` or `arithmetic`.")
    ] = "scenes",
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A recipe that gives the prompts and rewards, and key=value overrides; a run has its own recipe."
        ),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="For a run, take the model before training.")] = False,
    checkpoint: CheckpointOption = None,
    on: Annotated[
        str,
        typer.Option(
            "--split", help="Prompts: `heldout`, `test` or `train`, the file that `data` of the recipe names."
        ),
    ] = "heldout",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the samples: images, and an `index.jsonl` with the rewards of every sample. Several "
            "shares have a folder each in it."
        ),
    ] = None,
    trained_share: Annotated[
        str | None,
        typer.Option(
            help="Images, a run: shares of the steps that the trained weights make, with commas between them; the "
            "model before training makes the last steps. Differences from the first share are in brackets.",
        ),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Score a model on the held-out prompts of a recipe, by the recipe's evaluation rewards.

    A run is evaluated by its own recipe, if no other is named. Samples are made as in the run: with its dtype, steps,
    batch and arguments of the call. A model that is not from a run needs a recipe. No run reads the test prompts: use
    `--split test` for a final figure, and choose nothing by it.
    """
    from ..configs.sections import SPLITS

    if on not in SPLITS:
        raise ValueError(f"--split is {on!r}; use {', '.join(SPLITS[:-1])} or {SPLITS[-1]}")
    if "=" in model and "/" not in model.partition("=")[0] and not Path(model).exists():
        raise ValueError(
            f"the first word names a model, and {model!r} is no folder; write `flowgrpo evaluate scenes {model}`"
        )
    output_folder(out)
    one_model(base, checkpoint)
    source, overrides = split(words)
    shares = _shares(trained_share)
    if shares or gives_share(overrides):
        check_shared(model, base)
    with loading():
        from ..configs.schema import Recipe
        from ..inference.evaluation import evaluate_model, evaluate_shares
        from ..inference.model_recipes import evaluation_recipe
        from ..inference.shares import share_lines
        from ..training.distributed.processes import part
        from ..training.model_paths import sample_noun

    trust_run(trust, [Path(model)], {str(Path(model) / "config.yaml"): source is None, source: True})
    recipe = evaluation_recipe(model, source, overrides)
    if not shares:
        found = evaluate_model(model, recipe, split=on, out=out, base=base, checkpoint=checkpoint, say=say_first)
        lines = summary_lines(found, sample_noun(recipe))
    elif isinstance(recipe, Recipe):
        by_share = evaluate_shares(model, recipe, shares, split=on, out=out, checkpoint=checkpoint, say=say_first)
        lines = share_lines(recipe, shares, by_share)
    else:
        raise ValueError(f"--trained-share is for images, and {model} makes {recipe.task}; leave it out")
    for line in lines:
        say_first(line)
    if out is not None:
        say_first(f"written to {out if shares else out / 'index.jsonl'}")
    part()


def _shares(text: str | None) -> list[float]:
    """The numbers of `--trained-share`; empty without the option."""
    if text is None:
        return []
    try:
        # -0.0 is 0 too.
        shares = [float(part) + 0.0 for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise ValueError(
            f"--trained-share is {text!r}; write numbers from 0 to 1 with commas between them, such as 0,0.5,0.8,1"
        )
    # The table and the folders of the samples name a share by these digits.
    named = [f"{share:g}" for share in shares]
    if repeated := [name for name in named if named.count(name) > 1]:
        raise ValueError(f"--trained-share has {repeated[0]} more than once; write it once")
    return shares
