"""Images sampled outside a run, made in exactly the same way as in the run's own evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..configs.schema import Recipe
from ..core.addressing import address
from ..pipelines.capture import ConditionedPrompt
from ..training.data import PromptRow
from ..training.distributed.processes import Processes, ended_together
from ..training.evaluating import evaluation_key
from ..training.folder.run_folder import save_sample
from ..training.images.evaluator import company_of
from ..training.images.sized_rollout import chosen, sizes_of
from ..training.model_paths import sample_noun
from ..training.planning import base_from, steps_of
from ..training.prompts.prompt_rows import Size
from ..training.recipe_prompts import read_heldout
from .animations import Animation
from .kept_samples import ONWARD, SampledImages
from .model_recipes import check_not_run, image_recipe, is_run, own_share
from .opening import ImageModel, check_prompts, open_images
from .text_inference import iterations_done

Say = Callable[[str], None]


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

    A pipeline of sounds writes a WAV file beside each PNG file, which shows the spectrum.

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
    say(f"{len(paths)} {sample_noun(recipe)}(s) by {named(model, checkpoint)}{on_processes(processes)}: {how(recipe)}")
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
        rate = evaluator.policy.denoiser.sampling_rate
        out.mkdir(parents=True, exist_ok=True)
        # The numbers of the wanted images among the images of all processes.
        numbers = dict(zip(places, (p * count + k for p in mine for k in range(count)), strict=True))
        shown: dict[int, torch.Tensor] = {}
        for place, image in evaluator.each_image(texts, keys, sizes):
            if place in numbers:
                path, (prompt, k) = paths[numbers[place]], divmod(places.index(place), count)
                save_sample(path, image, rate)
                columns = rows[prompt].columns if rows else {}
                listed.add(path, image, str(prompts[prompt]), first + k, keys[place], columns, rate)
                say(str(path))
                if moving is not None:
                    shown[numbers[place]] = image
        if moving is not None:
            moving.write(shown, opened.call, say)
    listed.join()
    return paths


def named(model: str, checkpoint: str | None) -> str:
    """The words that name a model and its checkpoint."""
    return model if checkpoint is None else f"{model}, checkpoint {checkpoint}"


def on_processes(processes: Processes) -> str:
    """Words for the number of processes, if there are several."""
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
    recipe, noun = opened.recipe, sample_noun(opened.recipe)
    try:
        rows = [row for row in opened.sized(read_heldout(recipe)) for _ in range(recipe.evaluate.seeds)]
    except (OSError, ValueError) as error:
        say(f"the {noun} is made alone, so it is the same up to rounding: {error}")
        return [prompt], [noise], [0], [size]
    keys = evaluation_noises(rows, recipe.evaluate.seeds)
    places = [k for k, row in enumerate(rows) if row.text == prompt and keys[k] == noise]
    if places and isinstance(prompt, ConditionedPrompt):
        [row] = opened.illustrated([rows[places[0]]], str(recipe.data.heldout))
        places = places if getattr(row.prompt, "mark", None) == prompt.mark else []
    if not places:
        say(f"no {noun} of the run's evaluations has this prompt and noise; the {noun} is made alone")
        return [prompt], [noise], [0], [size]
    # A batch holds images of one size.
    mates = [k for k, row in enumerate(rows) if row.size == rows[places[0]].size]
    place = mates.index(places[0])
    first = place // company_of(recipe) * company_of(recipe)
    together = mates[first : first + company_of(recipe)]
    company = opened.illustrated(chosen(rows, together), str(recipe.data.heldout))
    say(f"the {noun} is made with the {len(company) - 1} other {noun}(s) of its batch, as in the run's evaluations")
    return [row.prompt for row in company], chosen(keys, together), [place - first], sizes_of(company)


def evaluation_noises(rows: Sequence[PromptRow], seeds: int) -> list[int]:
    """Seeds of the initial noises of evaluations; `rows` has each row `seeds` times, once for each image."""
    return [address(evaluation_key(row), 0, k % seeds) for k, row in enumerate(rows)]
