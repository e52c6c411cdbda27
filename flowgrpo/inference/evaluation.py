"""Evaluations outside a run, made in exactly the same way as the run's own evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..configs.schema import AnyRecipe, Recipe
from ..pipelines.experience import Experience
from ..rewards.base import RewardError
from ..rewards.runner import RewardSet
from ..training.checking import reward_specs
from ..training.credit.pooling import asked
from ..training.data import PromptRow, column_names
from ..training.distributed.processes import Processes, ended_together
from ..training.evaluating import Scored, evaluation_key
from ..training.images.evaluator import Evaluator
from ..training.images.sized_rollout import chosen
from ..training.recipe_prompts import columns_of_run, kind_of_run, read_split
from ..training.reporting.clock import Clock
from ..training.reporting.records import reward_means, sample_records, standard_errors
from ..training.tasks import FlowTask
from .image_samples import Say, how, named, on_processes, silent
from .kept_samples import ONWARD, UNSCORED, KeptSamples
from .model_recipes import check_not_run, own_share, with_share
from .opening import check_prompts, open_images
from .text_inference import how_text, iterations_done, task_of, text_task

CPU = torch.device("cpu")
EVERY_SECONDS = 5.0
NOUNS = {"heldout": "held-out", "test": "test", "train": "training"}


@ended_together(ONWARD)
def evaluate_model(
    model: str,
    recipe: AnyRecipe,
    *,
    split: str = "heldout",
    out: Path | None = None,
    base: bool = False,
    checkpoint: str | None = None,
    say: Say = silent,
) -> dict[str, tuple[float, float, int]]:
    """Mean, standard error over prompts, and count of each evaluation reward on the held-out prompts, or other ones.

    For a run with its own recipe, the means on held-out prompts equal the means of the run's last evaluation. They are
    equal to the last bit if as many processes made that evaluation on devices of the same kind. Prompts with the same
    place in their files start from the same noise. Several processes share the prompts.

    Args:
        model: a run folder, a model folder, a hub id or an embedded model.
        recipe: says how samples are made, and has the prompts, rewards and lengths; of images or of text.
        split: the prompts: one of `SPLITS`.
        out: folder for the samples with their rewards: `index.jsonl` in the format of a run's `samples/index.jsonl`,
            and for images `eval-NNNN.png`. Samples are written as they are made, and their rewards at the end. Only
            completions that a form writes are written all at once.
        base: for a run, evaluate the model before training.
        checkpoint: for a run, evaluate this checkpoint: `latest`, or the number of iterations before it.
        say: called with lines that say what is evaluated, and how many samples are done.

    Raises:
        ValueError: the recipe is of another task than the model or has no prompts of the split, a reward cannot score
            the samples, a file exists, or the run has no weights yet.
    """
    if isinstance(recipe, Recipe):
        recipe = own_share(model, recipe, base)
    [scored] = _scored(model, [(recipe, out)], split, base, checkpoint, say)
    return summaries(scored)


@ended_together(ONWARD)
def evaluate_shares(
    run: str,
    recipe: Recipe,
    shares: Sequence[float],
    *,
    split: str = "heldout",
    out: Path | None = None,
    checkpoint: str | None = None,
    say: Say = silent,
) -> list[Scored]:
    """The scores of a run whose trained weights make only a share of the steps, for one share after another.

    All shares start from the same noises.

    Args:
        run: a run folder.
        recipe: as in `evaluate_model`.
        shares: each from 0, the model before training, to 1, the trained model.
        split: as in `evaluate_model`.
        out: has a folder `trained-SHARE` for each share; see `evaluate_model`.
        checkpoint: as in `evaluate_model`.
        say: as in `evaluate_model`.

    Raises:
        ValueError: as in `evaluate_model`, or a whole model was trained and the model before training is gone.
    """
    if out is not None:
        check_not_run(out, "evaluation")
    ways = [(with_share(recipe, share), None if out is None else out / f"trained-{share:g}") for share in shares]
    return _scored(run, ways, split, False, checkpoint, say)


def _scored(
    model: str,
    ways: Sequence[tuple[AnyRecipe, Path | None]],
    split: str,
    base: bool,
    checkpoint: str | None,
    say: Say,
) -> list[Scored]:
    """The scores of evaluations of one model. Their recipes differ only in the share of the trained weights.

    `ways` has the recipe of each evaluation, and the folder for its samples.
    """
    recipe = ways[0][0]
    made = task_of(model)
    if made not in (recipe.task, None):
        raise ValueError(
            f"{model} makes {made}, but {recipe.name} is a recipe of {recipe.task}; name a recipe of {made}"
        )
    source, rows = recipe.data.source(split), read_split(recipe, split)
    if not source or not rows:
        raise ValueError(
            f"data.{split} of {recipe.name} is null, but an evaluation needs {NOUNS[split]} prompts; name a file with "
            f"data.{split}=FILE"
        )
    rewards = RewardSet(reward_specs(recipe.evaluate.rewards or recipe.rewards))
    columns, kind = column_names(rows, columns_of_run(recipe, evaluation=True)), kind_of_run(recipe, fetch=True)
    for reward in rewards.rewards:
        reward.check(kind, columns, grouped=True)
    processes, count = Processes.of_this_run(), recipe.evaluate.seeds
    iteration = 0 if base else iterations_done(model, checkpoint)
    folders = [None if out is None else KeptSamples(out, iteration, processes=processes) for _, out in ways]
    say(
        f"{named(model, checkpoint)}{on_processes(processes)}: {len(rows)} prompts of {source}, "
        f"{len(rows) * count} samples, scored by {', '.join(rewards.names)}"
    )
    # The pipeline is asked about all prompts, and each process samples its own.
    if isinstance(recipe, Recipe):
        check_prompts(model, recipe, rows, source, base, checkpoint)
    places = processes.share(len(rows))
    own = chosen(rows, places)
    sampler = _sampler(model, [way for way, _ in ways], own, source, base, checkpoint, say) if own else None
    numbered = [place * count + seed for place in places for seed in range(count)]
    whose = "" if processes.count == 1 else f" of process {processes.rank}"
    found = []
    for (way, _), kept in zip(ways, folders, strict=True):
        made_of, scores, experience = list[tuple[int, list[float]]](), UNSCORED, None
        if sampler is not None:
            experience = sampler(way, kept, numbered, progress(len(numbered), say, whose))
            say(f"scoring {len(own) * count} samples{whose}")
            rewards.keeps_rendered = kept is not None
            try:
                scores = rewards.score(*asked(own, experience))
            except RewardError:
                if kept is not None:
                    say(f"{kept.index} lists the samples without rewards")
                raise
            made_of = [(places[p], values) for p, values in zip(experience.prompt_of_sample, scores.values.tolist())]
        # Samples of several sizes are in the order of the sizes; the run's evaluation is in the order of the prompts.
        everything, numbers = processes.pool(made_of, [owner for owner, _ in made_of])
        if kept is not None:
            records = sample_records(own, experience, scores, numbers) if experience is not None else []
            kept.scored(numbers, records, experience.samples if experience is not None else [], scores.rendered)
        owners, values = zip(*everything, strict=True)
        found.append(Scored(rewards.names, torch.tensor(owners), torch.tensor(values)))
    rewards.close()
    return found


Sampler = Callable[[Any, KeptSamples | None, Sequence[int], Callable[[int], None]], Any]
"""Called with a recipe, a folder that gets the samples as they are made, their numbers, and a function that is told how
many are done. The numbers are prompt by prompt, among the samples of all processes."""


def _sampler(
    model: str,
    ways: Sequence[AnyRecipe],
    rows: list[PromptRow],
    source: str,
    base: bool,
    checkpoint: str | None,
    say: Say,
) -> Sampler:
    """A function that makes the samples of an evaluation, of the prompts of this process, by each of some recipes."""
    keys = [evaluation_key(row) for row in rows]
    if not isinstance(ways[0], Recipe):
        say(how_text(ways[0]))
        task: Any = text_task(model, ways[0], base=base, checkpoint=checkpoint)

        def completions(
            way: AnyRecipe, kept: KeptSamples | None, numbered: Sequence[int], seen: Callable[[int], None]
        ) -> Any:
            written = 0

            def keep(part: Any) -> None:
                nonlocal written
                if kept is not None:
                    kept.add(rows, part, numbered[written : written + len(part.samples)])
                    written += len(part.samples)

            found = task.evaluation(rows, keys, Clock(CPU, task.clock_parts), seen, keep)
            if not written:
                keep(found)
            return found

        return completions
    shares = [way.evaluate.trained_share for way in ways if isinstance(way, Recipe)]
    # Where the base makes a step, its weights are loaded too.
    opened = open_images(model, with_share(ways[0], min(shares)), base=base, checkpoint=checkpoint)
    rows[:] = opened.illustrated(opened.sized(rows), source)
    evaluator = opened.evaluator([row.prompt for row in rows])

    def images(way: Recipe, kept: KeptSamples | None, numbered: Sequence[int], seen: Callable[[int], None]) -> Any:
        say(how(way))
        done = 0

        def made(own: Sequence[PromptRow], experience: Experience, numbers: Sequence[int]) -> None:
            nonlocal done
            done += len(numbers)
            if kept is not None:
                kept.add(own, experience, chosen(numbered, numbers))
            seen(done)

        clock = Clock(CPU, FlowTask.clock_parts)
        return Evaluator(way, evaluator.policy, evaluator.sized).evaluation(rows, keys, clock, made)

    return images


def progress(total: int, say: Say, whose: str = "") -> Callable[[int], None]:
    """A function that reports how many samples are done: at the first call, every few seconds, and for the last.

    Args:
        total: number of samples.
        say: called with the lines.
        whose: words that follow the number of samples.
    """
    began = time.perf_counter()
    said = began - EVERY_SECONDS

    def seen(count: int) -> None:
        nonlocal said
        now = time.perf_counter()
        if count >= total or now - said >= EVERY_SECONDS:
            said = now
            say(f"{count} of {total} samples{whose}, {now - began:.0f} s")

    return seen


def summaries(scored: Scored) -> dict[str, tuple[float, float, int]]:
    """Mean, standard error over prompts, and count of each reward."""
    means, errors = reward_means(scored.values), standard_errors(scored.values, scored.owners)
    counts = (~scored.values.isnan()).sum(0)
    return {
        name: (float(mean), float(error), int(count))
        for name, mean, error, count in zip(scored.names, means, errors, counts)
    }
