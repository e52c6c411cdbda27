"""`flowgrpo sample`: samples of a model, base or trained."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .export import CheckpointOption
from .loading import loading
from .output import output_folder, say_first
from .recipe_words import HintedCommand, value_of
from .trusting import TrustOption, trust_run

if TYPE_CHECKING:
    from ..training.data import PromptRow
    from ..training.masked.masked_policy import UnmaskedTexts
    from ..training.text.text_policy import Completions

LARGEST_SEED = 2**62
"""The samples of a prompt have seeds from the given one on, and every seed must fit into 63 bits."""
ONLY = {
    "images": (
        "steps", "noise", "height", "width", "guidance", "lora_scale", "trained_share", "animation", "fps", "image",
    ),
    "text": ("temperature", "top_p", "top_k", "max_tokens", "image"),
    "masked": ("temperature", "steps", "max_tokens"),
}  # fmt: skip
"""Options of `flowgrpo sample` that not every task has."""


def sample(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A prompt file, like `data.train` of a recipe, in place of PROMPTS.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="A run folder, a model folder, a hub id, `scenes` or `arithmetic`.")
    ] = "scenes",
    base: Annotated[bool, typer.Option("--base", help="For a run, take the model before training.")] = False,
    checkpoint: CheckpointOption = None,
    task: Annotated[
        str | None,
        typer.Option(help="`images`, `text` or `masked`; by default the model's own task, for a hub id `images`."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for images, and for index.jsonl, which lists the images or texts.")
    ] = Path("samples"),
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=LARGEST_SEED, help="Seed of a prompt's first sample; its next samples have the next seeds."
        ),
    ] = 0,
    count: Annotated[int, typer.Option(min=1, help="Number of samples of each prompt.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Images: denoising steps; by default as in the run's evaluations, or 10.")
    ] = None,
    height: Annotated[
        int | None,
        typer.Option(min=1, help="Images: height in pixels; by default as in the run, or the pipeline's own."),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(min=1, help="Images: width in pixels; by default as in the run, or the pipeline's own."),
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(help="Images: strength of the guidance; by default as in the run, or the pipeline's own."),
    ] = None,
    lora_scale: Annotated[
        float | None, typer.Option(help="Images, a run of a LoRA: factor of its effect; 1 is as trained, 0 is off.")
    ] = None,
    trained_share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Images, a run: share of the steps that the trained weights make; the model before training makes the "
            "last ones. By default as in the run's evaluations, or 1.",
        ),
    ] = None,
    noise: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**63 - 1, help="Images: seed of the noise itself, as a gallery shows it; in place of --seed."
        ),
    ] = None,
    animation: Annotated[
        Path | None, typer.Option(help="Videos: also write a .mp4, .webm, .webp or .gif; one for each sample.")
    ] = None,
    fps: Annotated[
        float | None, typer.Option(help="--animation: frames a second, 0.1 to 240; by default as in the call, or 16.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Text: 0 or more; 0 takes the likeliest token; by default as in the run, or 1."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Text: sample from the likeliest tokens with this total probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Text: sample from this many of the likeliest tokens.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Text: longest completion; by default as in the run, or 256.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="A picture that PROMPTS show to a model that takes pictures; give it again for several."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights; by default as in the run, or float32.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples made at once; by default as in the run, or 8 images or 64 texts.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="KEY=VALUE of a recipe, such as model.call.guidance_scale=4; by default as in the run."
        ),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Sample images or completions with a model, base or trained, in the same way as its run evaluates it."""
    given = {
        "steps": steps, "noise": noise, "height": height, "width": width, "guidance": guidance,
        "lora_scale": lora_scale, "trained_share": trained_share, "animation": animation, "fps": fps,
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens, "image": image or None,
    }  # fmt: skip
    keys = {
        "model.dtype": dtype, "evaluate.steps": steps, "model.call.height": height, "model.call.width": width,
        "generation.top_p": top_p, "generation.top_k": top_k, "evaluate.trained_share": trained_share,
    }  # fmt: skip
    output_folder(out)
    output_folder(None if animation is None else animation.parent)
    if fps is not None and animation is None:
        raise ValueError("--fps is the rate of a video; name the video with --animation, or leave --fps out")
    trust_run(trust, [Path(model)], {str(Path(model) / "config.yaml"): False})
    _check_run(model)
    one_model(base, checkpoint)
    # typer's `min` accepts "nan" in some versions.
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(f"--temperature is {temperature}; give a finite number of 0 or more")
    kind = _kind(model, task, given)
    if trained_share is not None or gives_share(settings or []):
        check_shared(model, base)
    rows = _rows(prompts, file, image or [])
    batches = {"images": ("rollout.batch", "rollout.decode_batch"), "text": ("evaluate.batch",)}.get(
        kind, ("rollout.batch",)
    )
    keys |= dict.fromkeys(batches, batch)
    if kind == "masked":
        # The steps of the rollout must fit the tokens too, although nothing is rolled out here.
        keys["sampler.steps"] = steps
    keys["generation.tokens" if kind == "masked" else "generation.max_tokens"] = max_tokens
    if guidance is not None:
        from ..inference.opening import guidance_argument

        keys[f"model.call.{guidance_argument(model)}"] = guidance
    overrides = [*(settings or []), *(f"{key}={value}" for key, value in keys.items() if value is not None)]
    if kind == "images":
        with loading():
            from ..inference.image_samples import sample_images
            from ..training.distributed.processes import part

        sample_images(
            model, _plain(rows), out, seed=seed, count=count, noise=noise, overrides=overrides, base=base,
            checkpoint=checkpoint, lora_scale=lora_scale, animation=animation, fps=fps, rows=rows,
            source=None if file is None else str(file), own_sizes=height is None and width is None, say=say_first,
        )  # fmt: skip
        part()
        return
    with loading():
        from ..inference.text_inference import sample_texts
        from ..training.distributed.processes import part

    def made(numbers: Sequence[int], part: Sequence[PromptRow], found: Completions | UnmaskedTexts) -> None:
        _show(numbers, part, found, seed)

    index, _ = sample_texts(
        model, rows, out, seed=seed, count=count, temperature=temperature, overrides=overrides, base=base,
        checkpoint=checkpoint, masked=kind == "masked", source=None if file is None else str(file), made=made,
    )  # fmt: skip
    say_first(f"written to {index}")
    part()


class SampleCommand(HintedCommand):
    """`sample`, whose errors know the options of other tools."""

    def hint(self, option: str, args: list[str]) -> str:
        """The option that is called otherwise here, or the key of a recipe that `--set` takes."""
        from ..configs.key_hints import known_key

        name, value = option.lstrip("-").replace("_", "-"), value_of(option, args)
        if name in ("prompt", "prompts"):
            return f"Prompts are written without an option: {shlex.quote(value)}"
        if name in ("lora", "lora-path"):
            return "A run is named with --model, and its LoRA is loaded with it"
        if name in RENAMED:
            return f"Write {RENAMED[name]} {shlex.quote(value)}"
        key = known_key(name)
        return f"A key of a recipe is set as --set {key}={shlex.quote(value)}" if key else ""


RENAMED = {
    **dict.fromkeys(("num-inference-steps", "num-steps", "inference-steps"), "--steps"),
    **dict.fromkeys(("guidance-scale", "cfg", "cfg-scale"), "--guidance"),
    **dict.fromkeys(("num-images", "num-images-per-prompt", "num-samples", "samples", "n"), "--count"),
    **dict.fromkeys(("output", "output-dir", "outdir", "save-dir"), "--out"),
    **dict.fromkeys(("run", "pretrained-model-name-or-path", "path"), "--model"),
    **dict.fromkeys(("batch-size",), "--batch"),
    **dict.fromkeys(("max-new-tokens", "max-length"), "--max-tokens"),
    **dict.fromkeys(("prompt-file", "prompts-file"), "--file"),
    **dict.fromkeys(("lora-strength", "lora-weight"), "--lora-scale"),
}
"""Names that other tools give to options of `sample`."""


def one_model(base: bool, checkpoint: str | None) -> None:
    """Raise ValueError if two of the models of a run are named."""
    if base and checkpoint is not None:
        raise ValueError(
            f"--base is the model before training, and --checkpoint {checkpoint} is another; leave one of them out"
        )


def gives_share(overrides: Sequence[str]) -> bool:
    """Whether an override is a share of the trained weights; the recipe of a run may have one for its evaluations."""
    from ..configs.yaml_text import parse_yaml

    for key, _, value in (word.partition("=") for word in overrides):
        section = parse_yaml(value, key) if key == "evaluate" else None
        if key == "evaluate.trained_share" or (isinstance(section, dict) and "trained_share" in section):
            return True
    return False


def check_shared(model: str, base: bool) -> None:
    """Raise ValueError if a model has no trained weights that could make a share of the steps."""
    from ..inference.model_recipes import is_run

    if not is_run(model):
        raise ValueError(
            f"a share of the trained weights is for a run, which has a model before training too, and {model} is not a "
            "run; leave --trained-share or evaluate.trained_share out"
        )
    if base:
        raise ValueError("--base is the model before training alone; write --trained-share 0, or leave --base out")


def _check_run(model: str) -> None:
    """Read the recipe of a run before anything else is read; raise ValueError if `load_recipe` refuses the recipe."""
    from ..configs.load import load_recipe
    from ..intake.links import check_links

    config = Path(model) / "config.yaml"
    if config.is_file():
        check_links(Path(model))
        load_recipe(config, rewards=False)


def _kind(model: str, task: str | None, given: dict[str, Any]) -> str:
    """The task of the model.

    Raises:
        ValueError: `task` is unknown or is not the model's task, or an option belongs to the other task.
    """
    from ..inference.text_inference import task_of

    made = task_of(model)
    if task not in (None, *ONLY):
        raise ValueError(f"--task is {task!r}; use images, text or masked")
    if task is not None and made not in (None, task):
        raise ValueError(f"--task is {task}, but {model} makes {made}; leave --task out")
    kind = task or made or "images"
    for name in dict.fromkeys(name for names in ONLY.values() for name in names if name not in ONLY[kind]):
        if given[name] is not None:
            option = f"--{name.replace('_', '-')}"
            hint = "; with a hub id of a language model write --task text as well" if made is None else ""
            raise ValueError(f"{option} is not for {kind}, which {model} makes; leave it out{hint}")
    return kind


def _rows(prompts: list[str] | None, file: Path | None, images: Sequence[Path]) -> list[PromptRow]:
    from ..pipelines.pictures import Picture
    from ..training.data import IMAGE, PromptRow, read_prompts

    if file is not None and images:
        raise ValueError(
            "--image is for prompts that are written here; name the pictures of --file in its column image"
        )
    if file is not None and prompts:
        raise ValueError("both prompts and --file are given; give only one of the two")
    if file is not None:
        return read_prompts(str(file))
    if not prompts:
        raise ValueError("no prompt is given; write one, or name a file with --file")
    for number, text in enumerate(prompts):
        if not text.strip():
            raise ValueError(f"prompt {number + 1} is empty; write its words")
        # A prompt that happens to be a path is far rarer than a model or a file without its option.
        if _is_model(text):
            raise ValueError(f"prompt {number + 1} is the folder of a model; name the model with --model {text}")
        if text.endswith((".txt", ".jsonl", ".csv", ".parquet")) and Path(text).is_file():
            raise ValueError(f"prompt {number + 1} is a file; name a prompt file with --file {text}")
    shown = tuple(Picture(path, "--image") for path in images)
    for picture in shown:
        _ = picture.size  # raises for a missing file, before anything is loaded
    # A pipeline may take one picture, and no list.
    alone = len(shown) == 1
    columns = {IMAGE: str(images[0]) if alone else [str(path) for path in images]} if images else {}
    pictures = shown[0] if alone else shown or None
    return [PromptRow(number, text, columns, pictures=pictures) for number, text in enumerate(prompts)]


def _is_model(text: str) -> bool:
    """Whether a text is the path of a run or of a model."""
    try:
        return any((Path(text) / name).is_file() for name in ("config.yaml", "config.json", "model_index.json"))
    except OSError:
        # A prompt may be longer than a name of a file.
        return False


def _plain(rows: list[PromptRow]) -> list[str]:
    for row in rows:
        if row.messages is not None:
            raise ValueError(
                f"{row.place or 'the prompts'}: prompt {row.id + 1} is a conversation, which only language "
                "models can read; write its words as `prompt`"
            )
    return [row.text for row in rows]


def _show(numbers: Sequence[int], rows: Sequence[PromptRow], found: Completions | UnmaskedTexts, seed: int) -> None:
    """Print completions below their prompts, with the numbers of the prompts. The first process prints its own."""
    seen = [0] * len(rows)
    for text, owner, length in zip(found.samples, found.prompt_of_sample, found.described()):
        if seen[owner] == 0:
            say_first(f"prompt {numbers[owner] + 1}: {rows[owner].text}")
        say_first(f"  seed {seed + seen[owner]}, {length}:")
        for line in text.split("\n"):
            say_first(f"    {line}")
        seen[owner] += 1
