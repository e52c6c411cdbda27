"""Samples and evaluations outside a run, made in exactly the same way as in the run's own evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..configs.schema import AnyRecipe, Recipe
from ..core.addressing import address
from ..pipelines.capture import ConditionedPrompt
from ..pipelines.experience import Experience
from ..rewards.base import RewardError
from ..rewards.runner import RewardSet
from ..training.checking import reward_specs
from ..training.credit.pooling import asked
from ..training.data import PromptRow, column_names
from ..training.distributed.processes import Processes, ended_together
from ..training.evaluating import Scored, evaluation_key
from ..training.folder.run_folder import save_image
from ..training.images.evaluator import Evaluator, company_of
from ..training.images.sized_rollout import chosen, sizes_of
from ..training.planning import base_from, steps_of
from ..training.prompts.prompt_rows import Size
from ..training.recipe_prompts import columns_of_run, read_heldout, read_split
from ..training.reporting.clock import Clock
from ..training.reporting.records import reward_means, sample_records, standard_errors
from ..training.tasks import FlowTask
from .animations import Animation
from .kept_samples import ONWARD, UNSCORED, KeptSamples, SampledImages
from .opening import ImageModel, check_not_run, check_prompts, image_recipe, is_run, open_images, own_share, with_share
from .text_inference import how_text, iterations_done, task_of, text_task

Say = Callable[[str], None]
CPU = torch.device("cpu")
EVERY_SECONDS = 5.0
NOUNS = {"heldout": "held-out", "test": "test", "train": "training"}


def silent(line: str) -> None:
    """Say nothing."""


def model_images(
    model: str, prompts: Sequence[str], noises: Sequence[int], overrides: Sequence[str] = ()
) -> torch.Tensor:
    """Images [N, 3, H, W] in [0, 1] of N prompts, each from the noise of its seed.

    Args:
        model: as in `opening.open_images`.
        prompts: texts.
        noises: seeds.
        overrides: changed keys of the recipe with which the model is called.
    """
    opened = open_images(model, image_recipe(model, overrides))
    images = opened.evaluator(prompts).images(prompts, noises)
    assert isinstance(images, torch.Tensor)
    return images


@ended_together(ONWARD)
def sample_images(
    model: str,
    prompts: Sequence[str],
    out: Path,
    *,
    seed: int = 0,
    count: int = 1,
    noise: int | None = None,
    overrides: Sequence[str] = (),
    base: bool = False,
    checkpoint: str | None = None,
    lora_scale: float | None = None,
    animation: Path | None = None,
    fps: float | None = None,
    rows: Sequence[PromptRow] = (),
    source: str | None = None,
    own_sizes: bool = True,
    say: Say = silent,
) -> list[Path]:
    """Sample and write PNG files, and `index.jsonl` with a line for each; existing files are not overwritten.

    Images are made as in the evaluations of a run: with the run's dtype, steps, batch size and arguments of the call.
    With the `noise` of an image that an evaluation made of a held-out prompt, this image is reproduced to the last bit.
    For this purpose the other images of its batch are made too. Several processes share the prompts.

    Args:
        model: as in `opening.open_images`.
        prompts: texts.
        out: folder.
        seed: of the first image of a prompt; the next images have the next seeds.
        count: number of images of each prompt.
        noise: seed of the generator of the initial noise, as in `samples/index.jsonl` of a run.
        overrides: changed keys of the run's recipe, or of the defaults if the model is not a run.
        base: for a run, use the model before training.
        checkpoint: for a run, use this checkpoint: `latest`, or the number of iterations before it.
        lora_scale: for a LoRA, the factor of its effect; 1 is as trained.
        animation: file of a video, see `Animation`; the frames of a PNG file stand side by side.
        fps: frames a second of the video; by default as the call says.
        rows: the prompts with their columns and pictures, if they have any; as many as `prompts`.
        source: the file of `rows`; None if they are from a command line.
        own_sizes: whether images have the sizes that the columns of `rows` say.
        say: called with lines that say what is done, and with the path of each file as it is written.

    Raises:
        ValueError: a file with the name of an image exists, the folder is a run folder or lists other samples, `noise`
            is given with several images of a prompt, there is an `animation` and the model makes images, or the
            pipeline cannot take the pictures of the prompts.
    """
    if noise is not None and count != 1:
        raise ValueError(f"--noise belongs to one image, but --count is {count}; leave one of them out")
    first = seed if noise is None else noise
    paths = [out / f"{p:03d}-{first + k}.png" for p in range(len(prompts)) for k in range(count)]
    processes = Processes.of_this_run()
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} exists; name another folder with --out")
    check_not_run(out, "sampled")
    moving = None if animation is None else Animation(animation, paths, fps)
    listed = SampledImages(out, 0 if base else iterations_done(model, checkpoint), processes)
    recipe = own_share(model, image_recipe(model, overrides), base)
    check_prompts(model, recipe, rows, source, base, checkpoint, own_sizes)
    say(f"{len(paths)} image(s) by {_named(model, checkpoint)}{_shared(processes)}: {how(recipe)}")
    mine = processes.share(len(prompts))
    if mine:
        opened = open_images(model, recipe, base=base, checkpoint=checkpoint, lora_scale=lora_scale)
        rows, prompts = chosen(rows, mine) if rows else [], chosen(prompts, mine)
        if rows:
            rows = opened.illustrated(opened.sized(rows) if own_sizes else rows, source)
            prompts = [row.prompt for row in rows]
        texts: Sequence[str] = [text for text in prompts for _ in range(count)]
        keys = [address(seed + k, p) for p in mine for k in range(count)]
        places = list(range(len(texts)))
        sizes = [row.size for row in rows for _ in range(count)] or [None] * len(texts)
        if noise is not None:
            keys = [noise] * len(prompts)
            if is_run(model) and len(paths) == 1 and not overrides:
                texts, keys, places, sizes = _company(opened, prompts[0], noise, sizes[0], say)
        evaluator = opened.evaluator(texts)
        out.mkdir(parents=True, exist_ok=True)
        # The numbers of the wanted images among the images of all processes.
        numbers = dict(zip(places, (p * count + k for p in mine for k in range(count)), strict=True))
        shown: dict[int, torch.Tensor] = {}
        for place, image in evaluator.each_image(texts, keys, sizes):
            if place in numbers:
                path, (prompt, k) = paths[numbers[place]], divmod(places.index(place), count)
                save_image(path, image)
                columns = rows[prompt].columns if rows else {}
                listed.add(path, image, str(prompts[prompt]), first + k, keys[place], columns)
                say(str(path))
                if moving is not None:
                    shown[numbers[place]] = image
        if moving is not None:
            moving.write(shown, opened.call, say)
    listed.join()
    return paths


def _named(model: str, checkpoint: str | None) -> str:
    return model if checkpoint is None else f"{model}, checkpoint {checkpoint}"


def _shared(processes: Processes) -> str:
    return "" if processes.count == 1 else f", on {processes.count} processes"


def how(recipe: Recipe) -> str:
    """One line that says how images are made."""
    steps, switch = steps_of(recipe, evaluation=True), base_from(recipe)
    call = "".join(f", {name} {value}" for name, value in recipe.model.call.items())
    shared = "" if switch is None else f", the first {switch} by the trained weights"
    return f"{recipe.model.dtype}, {steps} steps{shared}, batch {recipe.rollout.batch}{call}"


def _company(
    opened: ImageModel, prompt: str, noise: int, size: Size | None, say: Say
) -> tuple[Sequence[str], list[int], list[int], list[Size | None]]:
    """What a run's evaluations made in one batch with an image: prompts, noises, the image's place, and sizes.

    The whole batch is needed, because the rounding of a state depends on the other states of its batch. An image that
    is not from the run's evaluations is alone.
    """
    recipe = opened.recipe
    try:
        rows = [row for row in opened.sized(read_heldout(recipe)) for _ in range(recipe.evaluate.seeds)]
    except (OSError, ValueError) as error:
        say(f"the image is made alone, so it is the same up to rounding: {error}")
        return [prompt], [noise], [0], [size]
    keys = evaluation_noises(rows, recipe.evaluate.seeds)
    places = [k for k, row in enumerate(rows) if row.text == prompt and keys[k] == noise]
    if places and isinstance(prompt, ConditionedPrompt):
        [row] = opened.illustrated([rows[places[0]]], str(recipe.data.heldout))
        places = places if getattr(row.prompt, "mark", None) == prompt.mark else []
    if not places:
        say("no image of the run's evaluations has this prompt and noise; the image is made alone")
        return [prompt], [noise], [0], [size]
    # A batch holds images of one size.
    mates = [k for k, row in enumerate(rows) if row.size == rows[places[0]].size]
    place = mates.index(places[0])
    first = place // company_of(recipe) * company_of(recipe)
    together = mates[first : first + company_of(recipe)]
    company = opened.illustrated(chosen(rows, together), str(recipe.data.heldout))
    say(f"the image is made with the {len(company) - 1} other image(s) of its batch, as in the run's evaluations")
    return [row.prompt for row in company], chosen(keys, together), [place - first], sizes_of(company)


def evaluation_noises(rows: Sequence[PromptRow], seeds: int) -> list[int]:
    """Seeds of the initial noises of evaluations; `rows` has each row `seeds` times, once for each image."""
    return [address(evaluation_key(row), 0, k % seeds) for k, row in enumerate(rows)]


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
    columns = column_names(rows, columns_of_run(recipe, evaluation=True))
    for reward in rewards.rewards:
        reward.check("images" if recipe.task == "images" else "completions", columns, grouped=True)
    processes, count = Processes.of_this_run(), recipe.evaluate.seeds
    iteration = 0 if base else iterations_done(model, checkpoint)
    folders = [None if out is None else KeptSamples(out, iteration, processes=processes) for _, out in ways]
    say(
        f"{_named(model, checkpoint)}{_shared(processes)}: {len(rows)} prompts of {source}, "
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
            kept.scored(numbers, records, experience.samples if experience is not None else [])
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
