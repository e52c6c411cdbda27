"""Sampling of completions outside a run, with a plain model or with the model of a run before or after training.

The model is a causal language model or a masked one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ..configs.load import load_recipe
from ..configs.schema import MaskedRecipe, Recipe, TextRecipe
from ..configs.yaml_text import read_yaml_mapping
from ..core.addressing import address
from ..text.diffusion_models import BLOCK_TYPES, block_size, type_of
from ..text.masked_model import load_masked_model
from ..text.model import LanguageModel, LanguageWeights, load_language_model, reinitialise
from ..text.model_folder import is_masked_folder
from ..text.seeing_types import may_see, sight_of
from ..training.data import IMAGE, PromptRow
from ..training.distributed.processes import Processes, ended_together, launched
from ..training.lora_start import begin
from ..training.masked.masked_policy import MaskedPolicy, UnmaskedTexts
from ..training.masked.masked_task import MaskedTask
from ..training.model_paths import MASKED, UNTRAINED, language_folder, loading_options, masked_folder, quiet_libraries
from ..training.planning import steps_of
from ..training.recipe_prompts import pictured, shows_pictures
from ..training.session import lora_spec
from ..training.text.text_policy import Completions, TextPolicy
from ..training.text.text_task import TextTask
from ..weights.pipeline_folders import from_hub
from .checkpoints import find_checkpoint, hint_of, iterations_of, load_checkpoint
from .kept_samples import ONWARD, PHASE, KeptSamples, new_index
from .model_recipes import is_run, recipe_of_run, refuse_other_path, run_config

WordsRecipe = TextRecipe | MaskedRecipe
STEPS = 128
"""Most steps of a diffusion language model outside a run."""


def task_of(model: str) -> Literal["images", "text", "masked"] | None:
    """The task of a model; None for a hub id, because only its files would tell.

    Args:
        model: a run folder, a model folder, a hub id or an embedded model.
    """
    folder = Path(model)
    if is_run(model):
        settings = read_yaml_mapping(run_config(model), "the recipe of the run, or train again")
        task = settings.get("task")
        return "text" if task == "text" else "masked" if task == "masked" else "images"
    if model in ("arithmetic", UNTRAINED):
        return "text"
    if model == MASKED:
        return "masked"
    if model == "scenes" or (folder / "model_index.json").is_file():
        return "images"
    if not (folder / "config.json").is_file():
        return None
    return "masked" if is_masked_folder(folder) else "text"


def recipe_of(model: str, overrides: Sequence[str] = (), *, masked: bool = False) -> WordsRecipe:
    """The recipe of a run of text; for another model, a recipe whose model and lengths are the schema's defaults.

    The lengths of the embedded masked model are as it was trained.

    Args:
        model: a run folder, a model folder, a hub id or an embedded model.
        overrides: changed keys.
        masked: whether a hub id is of a masked model; of other models, the files tell.

    Raises:
        ValueError: the model is a run of images, the schema refuses an override, or an override says which weights a
            run trains.
    """
    if is_run(model):
        recipe = recipe_of_run(model, overrides, rewards=False)
    elif masked or task_of(model) == "masked":
        # The text is the same without what follows its end.
        written = "generation={stop_at_end: true}"
        plain = [] if model == MASKED else ["model={}", written, "sampler.steps=8", "rollout.batch=64"]
        published = _as_published(model, [*plain, *overrides])
        # Objective `trajectory` of recipe `masked` does not go with a cache.
        name = "trace_rl" if any(word.startswith("model.block=") for word in published) else "masked"
        recipe = load_recipe(name, [*plain, *published, *overrides])
    else:
        plain = ["model={}", "generation={}", "evaluate.batch=64"]
        recipe = load_recipe("text", [*plain, *_shown(model), *overrides])
    if isinstance(recipe, Recipe):
        raise ValueError(f"{model} is a run of images, and makes no completions; name a run or a model of text")
    return recipe


def _shown(model: str) -> list[str]:
    """The override that shows pictures to a model that must be shown them; loading a hub id says that it is needed."""
    here = (Path(model) / "config.json").is_file()
    return ["model.pictures=true"] if here and sight_of(model) == "always" else []


def _as_published(model: str, words: Sequence[str]) -> list[str]:
    """How the published code of a diffusion language model samples.

    LLaDA and Dream write blocks of 32 tokens, in up to 128 steps. A model that writes block after block has blocks of
    its own size, and reveals at each step the likeliest token of a block, and those above a threshold.
    """
    if model == MASKED:
        return []
    with from_hub(model):
        kind = type_of(model)
        block = block_size(model, kind) if kind in BLOCK_TYPES else None
    if kind is None:
        return []
    # The number of tokens is read, whatever the other words say about steps and blocks.
    own = [] if block is None else [f"model.block={block}"]
    given = load_recipe("masked" if block is None else "trace_rl", [*words, *own, "sampler.steps=1"])
    assert isinstance(given, MaskedRecipe)
    tokens = given.generation.tokens
    if block is not None:
        order = f"sampler.order={{name: confidence, threshold: {BLOCK_TYPES[str(kind)]}}}"
        return [f"model.block={block}", f"sampler.steps={tokens}", order, "rollout.cache=true"]
    return [f"sampler.steps={min(tokens, STEPS)}", "sampler.order={name: blocks, size: 32}"]


def open_language_model(
    model: str, recipe: TextRecipe, *, base: bool = False, checkpoint: str | None = None
) -> LanguageModel:
    """Load a language model onto the accelerator, or onto the CPU if there is none; a run with its trained weights.

    Args:
        model: a run folder, a model folder, a hub id or an embedded model.
        recipe: for precision, chat template and system message.
        base: for a run, load the model before training.
        checkpoint: for a run, load this checkpoint, see `find_checkpoint`.

    Raises:
        ValueError: the run has no trained weights yet or no such checkpoint, `base` is set and the model is not a run,
            or the recipe has another base model for a run that trained whole weights.
    """
    return open_weights(model, recipe, base=base, checkpoint=checkpoint).pipe  # type: ignore[no-any-return]


def _loaded(path: str, recipe: WordsRecipe) -> Any:
    """A language model or a masked language model from a folder, with the precision of the recipe."""
    load = load_masked_model if isinstance(recipe, MaskedRecipe) else load_language_model
    return load(path, **loading_options(recipe.model))


def open_weights(
    model: str, recipe: WordsRecipe, *, base: bool = False, checkpoint: str | None = None
) -> LanguageWeights:
    """Load a language model as `open_language_model` does; returns it with its trained weights."""
    quiet_libraries()
    run, find = Path(model), masked_folder if isinstance(recipe, MaskedRecipe) else language_folder
    kept = None if checkpoint is None else find_checkpoint(model, checkpoint)
    weights = None
    if not is_run(model):
        if base:
            raise ValueError(f"{model} is not a run, so it has no model before training; leave out --base")
        language = _loaded(find(model), recipe)
        if model == UNTRAINED:
            reinitialise(language, recipe.run.seed)
    elif (run / "model").is_dir() and not base and kept is None:
        refuse_other_path(model, recipe)
        language = _loaded(str(run / "model"), recipe)
    elif (run / "lora").is_dir() or base or kept is not None:
        trained = recipe_of(model)
        language = _loaded(find(trained.model.path), recipe)
        # The same setting as in the run, because torch chooses kernels by it, see `TrainedWeights.given`.
        language.model.requires_grad_(trained.model.train == "full")
        if trained.model.path == UNTRAINED:
            reinitialise(language, trained.run.seed)
        lora = trained.model.lora
        if trained.model.train == "lora" and (not base or lora.start is not None):
            weights = LanguageWeights.adapter(language, lora_spec(lora), seed=trained.run.seed)
            if base:
                begin(weights, trained)
            elif kept is None:
                weights.load_lora(run / "lora")
    else:
        raise ValueError(f"{run} has no trained weights yet; finish it with `flowgrpo resume {run}`{hint_of(run)}")
    weights = weights or LanguageWeights(language, language.components, "full")
    if kept is not None:
        load_checkpoint(weights, kept, recipe)
    language.model.to(launched().device)
    return weights


def text_task(
    model: str, recipe: WordsRecipe, *, base: bool = False, checkpoint: str | None = None
) -> TextTask | MaskedTask:
    """A language model as a task that samples; see `open_language_model`."""
    language: Any = open_weights(model, recipe, base=base, checkpoint=checkpoint).pipe
    weights = LanguageWeights(language, language.components, "full")
    if isinstance(recipe, MaskedRecipe):
        return MaskedTask(recipe, MaskedPolicy(language, weights, recipe))
    return TextTask(recipe, TextPolicy(language, weights, recipe))


def how_text(recipe: WordsRecipe) -> str:
    """One line that says how completions are made in evaluations."""
    heat = recipe.evaluate.temperature
    if isinstance(recipe, MaskedRecipe):
        return (
            f"{recipe.model.dtype}, {recipe.generation.tokens} tokens in {steps_of(recipe, evaluation=True)} steps, "
            f"{f'temperature {heat:g}' if heat else 'the likeliest tokens'}, batch {recipe.rollout.batch}"
        )
    form = recipe.rollout.form
    formed = f", form {form.short}" if getattr(form.target, "in_evaluations", False) else ""
    return (
        f"{recipe.model.dtype}, temperature {heat:g}, at most {recipe.generation.max_tokens} "
        f"tokens, batch {recipe.evaluate.batch or recipe.rollout.batch}{formed}"
    )


@ended_together(ONWARD)
def sample_texts(
    model: str,
    rows: Sequence[PromptRow],
    out: Path,
    *,
    seed: int = 0,
    count: int = 1,
    temperature: float | None = None,
    overrides: Sequence[str] = (),
    base: bool = False,
    checkpoint: str | None = None,
    masked: bool = False,
    source: str | None = None,
    made: Callable[[Sequence[int], Sequence[PromptRow], Completions | UnmaskedTexts], None] | None = None,
) -> tuple[Path, list[str]]:
    """Complete prompts, and write the completions with the fields of a run's `samples/index.jsonl`, batch by batch.

    A completion depends only on the model, the place of its prompt and its seed. For example, the completion with seed
    3 equals the fourth completion from seed 0. Several processes share the prompts.

    Args:
        model: as in `open_language_model`.
        rows: prompts.
        out: folder for `index.jsonl`.
        seed: of the first completion of a prompt; the next completions have the next seeds.
        count: number of completions of each prompt.
        temperature: 0 takes the likeliest token; None means the temperature of the run's rollouts, or 1 if the model is
            not a run.
        overrides: changed keys of the run's recipe, or of the defaults if the model is not a run.
        base: for a run, use the model before training.
        checkpoint: for a run, use this checkpoint.
        masked: as in `recipe_of`.
        source: the file of the prompts, for the pictures that they show.
        made: called with the numbers, the prompts and the completions of each batch, after they are written.

    Returns:
        The file, and the completions of all processes, in the order of the prompts.

    Raises:
        ValueError: the file exists, the model has no trained weights, a setting is out of range, or a conversation is
            given to a model without a chat template.
    """
    new_index(out, "sampled")
    if any(row.columns.get(IMAGE) for row in rows) and not masked and not is_run(model) and may_see(Path(model)):
        overrides = ["model.pictures=true", *overrides]
    recipe = recipe_of(model, overrides, masked=masked)
    heat = recipe.generation.temperature if temperature is None else temperature
    if source is not None:
        rows = pictured(recipe, list(rows), source)
    elif any(row.pictures for row in rows) and not shows_pictures(recipe):
        raise ValueError(f"{model} is not shown pictures; leave out --image, or name a model that sees")
    processes = Processes.of_this_run()
    mine, texts = processes.share(len(rows)), list[str]()
    task = text_task(model, recipe, base=base, checkpoint=checkpoint) if mine else None
    kept = KeptSamples(out, 0 if base else iterations_done(model, checkpoint), PHASE, "sampled", processes)
    size = 1 if task is None else task.at_once(count)
    for places in (mine[first : first + size] for first in range(0, len(mine), size)):
        assert task is not None
        part, several = [rows[place] for place in places], [(place, k) for place in places for k in range(count)]
        found = task.seeded(part, [address(seed + k, place) for place, k in several], count, heat)
        kept.add(part, found, [place * count + k for place, k in several], seed)
        texts += found.samples
        if made is not None:
            made(places, part, found)
    kept.join()
    return kept.index, processes.pool(texts, [place for place in mine for _ in range(count)])[0]


def iterations_done(model: str, checkpoint: str | None = None) -> int:
    """Number of iterations that trained the weights of a run, or its checkpoint; 0 if the model is not a run."""
    if checkpoint is not None:
        return int(find_checkpoint(model, checkpoint).name.removeprefix("iter-"))
    if not is_run(model):
        return 0
    return iterations_of(Path(model), recipe_of_run(model, [], rewards=False).evaluate.results)
