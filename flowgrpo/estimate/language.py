"""Estimates of the memory of a run of text, from the model's configuration; docs/estimates.md explains the method."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..configs.schema import MaskedRecipe, TextRecipe
from ..core import categorical
from ..core.categorical import relative_logits
from ..core.distillation import coarse_divergence
from ..text.key_value_cache import cache_of, state_bytes
from ..text.masked_model import MaskedLanguageModel
from ..text.model import LanguageModel, LanguageWeights, linear_layers
from ..text.model_folder import load_processor
from ..text.prompt_batch import positions_of
from ..text.sampling import logits_kept
from ..text.scoring import Measure, Statistics, completion_statistics
from ..training.data import PromptRow
from ..training.model_paths import DTYPES, language_folder
from ..training.prompts.chosen_prompts import places_of
from ..training.session import lora_spec
from ..training.teachers import language_teacher
from ..training.text.self_teacher import likeliest
from ..training.text.whole_answers import compares
from ..weights.quantized import saved_bytes
from .estimates import GIB, GPUS, Gpu, memory_lines
from .footprint import Attention, FlopTally, GroupedProduct, LiveBytes, Remembered
from .known_models import shapes_of
from .memory import Shares, at_once, at_rest

MEASURED = 256
"""Number of prompts whose tokens are counted."""

PLACES = categorical.places
"""All places at which log-probs are computed."""

RENDERING = "rendering"
"""The phase of an iteration in which reward `rendered` makes images."""

ROOM = 0.8
"""The share of a GPU's memory up to which a larger batch is proposed."""


@dataclass(frozen=True)
class TextEstimate:
    """Estimated memory of a run of text, for each of several equal GPUs, in bytes.

    Attributes:
        gpu, gpus: the assumptions.
        prompt: tokens of the longest prompt.
        counted: whether this length was counted on prompts, and not taken from `generation.max_prompt_tokens`.
        scored: number of completions that are scored at once.
        recomputes: whether gradient checkpointing is on.
        resting: memory that is in use during the whole iteration, by name; gradients only in training.
        passing: memory of phases that follow one another, by name.
        levers: keys of the recipe with which less is sampled at once, and less is scored at once.
        sampled, share: number of completions that a GPU samples at once, and in an iteration; 0 if this is no choice.
        width: tokens of the longest prompt with the longest completion; 0 if `rollout.tokens` says nothing.
        packs: whether the frozen weights could be in 4 bits, and are not.
    """

    gpu: Gpu
    gpus: int
    prompt: int
    counted: bool
    scored: int
    recomputes: bool
    resting: dict[str, int]
    passing: dict[str, int]
    levers: tuple[str, str] = ("rollout.batch", "rollout.tokens")
    sampled: int = 0
    share: int = 0
    width: int = 0
    packs: bool = False

    @property
    def peak(self) -> int:
        """Largest number of bytes in use at once."""
        return max(at_once(self.resting, self.passing).values())


def estimate_text(recipe: TextRecipe, rows: Sequence[PromptRow], gpu: str = "h100", gpus: int = 1) -> TextEstimate:
    """Memory of a recipe of text, without its weights.

    Every completion is counted with `generation.max_tokens` tokens, after a prompt of the longest length.

    Args:
        recipe: of text.
        rows: training prompts; their lengths are counted if the model's tokenizer is on this machine.
        gpu: a key of `GPUS`.
        gpus: number of GPUs that share the prompts.

    Raises:
        ValueError: the GPU or the shapes of the model are unknown, or there are fewer prompts than GPUs.
    """
    refuse_cards(recipe, gpu, gpus)
    rollout, generation = recipe.rollout, recipe.generation
    path = language_folder(recipe.model.path)
    found = _longest(recipe, path, rows)
    prompt = min(found or generation.max_prompt_tokens, generation.max_prompt_tokens)
    language = _language(recipe, path)
    size = model_bytes(recipe, language)
    weights = trained_part(recipe, language)
    groups, alone = _scored_together(recipe, prompt, gpus)
    computing = [p for p in language.model.parameters() if p.requires_grad and p.dtype != torch.float32]
    share = Shares.of(recipe, gpus, None)
    trained, rounded = sum(p.numel() for p in weights.parameters()), sum(p.numel() for p in computing)
    completions = math.ceil(rollout.prompts / gpus) * rollout.group
    together = min(rollout.batch, completions)
    training = _training(recipe, language, weights, groups, alone, prompt)
    return TextEstimate(
        gpu=GPUS[gpu],
        gpus=gpus,
        prompt=prompt,
        counted=found is not None,
        scored=groups * alone,
        recomputes=recipe.model.gradient_checkpointing,
        resting=at_rest(recipe, "model", size, trained, rounded, compares(recipe), share) | _teachers(recipe),
        passing=_sampling(recipe, language, together, prompt)
        | {"training": max([training, *_reading(recipe, groups, alone, prompt)])},
        sampled=together,
        share=completions,
        width=prompt + generation.max_tokens,
        packs=could_pack(recipe),
    )


def refuse_cards(recipe: TextRecipe | MaskedRecipe, gpu: str, gpus: int) -> None:
    """Raise ValueError if the GPU is unknown, or there are fewer prompts than GPUs."""
    if gpu not in GPUS:
        raise ValueError(f"no figures for the GPU {gpu!r}; use one of {', '.join(GPUS)}")
    if gpus > recipe.rollout.prompts:
        raise ValueError(
            f"rollout.prompts is {recipe.rollout.prompts} on {gpus} GPUs, but one GPU makes all samples of a prompt; "
            "use fewer GPUs, or more prompts"
        )


def scoring_flops(recipe: TextRecipe, prompt: int) -> float:
    """FLOPs to score one of the longest completions of a recipe and to compute its gradient, once.

    Args:
        recipe: of text.
        prompt: tokens of each prompt.

    Raises:
        ValueError: the shapes of the model are unknown.
    """
    language = _language(recipe, language_folder(recipe.model.path))
    trained_part(recipe, language)
    groups, alone = _scored_together(recipe, prompt, 1)
    with on_meta() as tally, tally.flops:
        _score(recipe, language, groups, alone, prompt)
    return tally.total / (groups * alone)


def text_table(found: TextEstimate) -> list[str]:
    """The lines of an estimate, aligned."""
    length = f"prompts of {found.prompt:,} tokens" + ("" if found.counted else " (generation.max_prompt_tokens)")
    counted = "rewards are not counted"
    if RENDERING in found.passing:
        counted = "of rewards, only the pipelines of rendered are counted"
    lines = [
        f"estimate of memory for {found.gpus} × {found.gpu.label}, from shapes alone; {counted} (docs/estimates.md)",
        f"  the longest completions, after {length}; {found.scored} completions are scored at once",
        *memory_lines(found.gpu, found.resting, found.passing, found.peak)[1],
    ]
    if found.peak > found.gpu.gib * GIB:
        lines.append(f"  note: this is more memory than the GPU has; {'; '.join(_mends(found))}")
    elif larger := _larger_batch(found):
        lines.append(larger)
    return lines


def _larger_batch(found: TextEstimate) -> str | None:
    """A note on fewer and larger batches of sampling that fit; None if there are none.

    A step of sampling reads all weights for one token of each completion, so one large batch takes less time.
    """
    if "sampling" not in found.passing or not found.sampled:
        return None
    each, batches = found.passing["sampling"] / found.sampled, math.ceil(found.share / found.sampled)
    for fewer in range(1, batches):
        size = math.ceil(found.share / fewer)
        most = at_once(found.resting, {**found.passing, "sampling": math.ceil(size * each)})["sampling"]
        if most < ROOM * found.gpu.gib * GIB:
            return (
                f"  note: {found.share} completions are sampled in {batches} batches, one after another; "
                f"with rollout.batch={size} it is {fewer}, and sampling takes {most / GIB:.1f} GiB at most"
            )
    return None


def _mends(found: TextEstimate) -> list[str]:
    """What to change, for each part that does not fit."""
    rest, room = sum(found.resting.values()), found.gpu.gib * GIB
    if rest > room:
        full = found.resting["LoRA"] == 0
        fewer = "model.dtype: bfloat16 with model.quantize: nf4, or " if found.packs else ""
        return [
            f"the weights and their copies take {rest / GIB:.0f} GiB at any batch: use {fewer}a smaller model"
            + (", or model.train: lora with a learning rate for a LoRA" if full else "")
            + (", or serve rendered on another card" if RENDERING in found.passing else "")
        ]
    again = "model.gradient_checkpointing: true, or "
    smaller = _smaller(found)
    change = {
        "sampling": f"for sampling, {smaller['sampling']}",
        "training": f"for training, {'' if found.recomputes else again}{smaller['training']}",
        RENDERING: "for rendering, a smaller rollout.batch or rollout.decode_batch in `set` of rendered",
    }
    return [change[name] for name, size in at_once(found.resting, found.passing).items() if size > room]


def _smaller(found: TextEstimate) -> dict[str, str]:
    """The batches that fit, if memory grows with the number of completions; masked models have other batches."""
    words = {name: f"a smaller {key}" for name, key in zip(("sampling", "training"), found.levers)}
    counts = {"sampling": found.sampled, "training": found.scored}
    if not found.width or not found.sampled:
        return words
    together = at_once(found.resting, found.passing)
    for name, count in counts.items():
        size, most = found.passing[name], together[name]
        fits = int(count * (ROOM * found.gpu.gib * GIB - (most - size)) / size)
        if fits >= 1:
            words[name] = f"{found.levers[name == 'training']}={fits if name == 'sampling' else fits * found.width}"
    return words


def _language(recipe: TextRecipe, path: str) -> LanguageModel:
    """The model of a recipe on `meta`, from its configuration on this machine."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = shapes_of(path)
    # Kernels that need a GPU are counted as the fused attention of PyTorch, which keeps as much.
    options = {"attn_implementation": "eager"} if recipe.model.attention == "eager" else {}
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if recipe.model.pictures else AutoModelForCausalLM).from_config(
            config, dtype=DTYPES[recipe.model.dtype], trust_remote_code=False, **options
        )
    return LanguageModel(model.eval(), SimpleNamespace(pad_token_id=0, eos_token_id=0))


def _teachers(recipe: TextRecipe) -> dict[str, int]:
    """Bytes of the frozen models that teach, if there are any."""
    paths = {language_teacher(teacher.path) for teacher in recipe.model.teachers}
    weights = [tensor for path in sorted(paths) for tensor in held(_language(recipe, path).model)]
    return {"teachers": sum(tensor.numel() * tensor.element_size() for tensor in weights)} if paths else {}


def held(model: nn.Module) -> list[Tensor]:
    """The weights and the buffers of a model."""
    return [*model.parameters(), *model.buffers()]


def could_pack(recipe: TextRecipe | MaskedRecipe) -> bool:
    """Whether the frozen weights of a recipe could be in 4 bits, and are not."""
    return recipe.model.train == "lora" and recipe.model.quantize != "nf4"


def model_bytes(recipe: TextRecipe | MaskedRecipe, language: LanguageModel | MaskedLanguageModel) -> int:
    """Bytes of a model on `meta`, as a run of the recipe loads it; call it before the model has an adapter."""
    whole = sum(tensor.numel() * tensor.element_size() for tensor in held(language.model))
    kind = recipe.model.quantize
    return whole if kind is None else whole - saved_bytes(language.model, kind, linear_layers(language.model))


def trained_part(recipe: TextRecipe | MaskedRecipe, language: LanguageModel | MaskedLanguageModel) -> LanguageWeights:
    """The trained weights of a model on `meta`, with gradient checkpointing if the recipe asks for it."""
    if recipe.model.train == "lora":
        # peft would draw the numbers of the adapter on the CPU.
        with torch.device("meta"):
            weights = LanguageWeights.adapter(language, lora_spec(recipe.model.lora), seed=recipe.run.seed)
    else:
        weights = LanguageWeights.whole(language)
    weights.gradient_checkpointing(recipe.model.gradient_checkpointing)
    return weights


def _longest(recipe: TextRecipe, path: str, rows: Sequence[PromptRow]) -> int | None:
    """Tokens of the longest of some prompts; None if they cannot be counted here."""
    from transformers import AutoTokenizer

    model, some = recipe.model, [rows[place] for place in places_of(len(rows), MEASURED, "spread")]
    try:
        processor = load_processor(path, local=True) if model.pictures else None
        tokenizer = (
            AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            if processor is None
            else processor.tokenizer
        )
        chat = bool(getattr(tokenizer, "chat_template", None)) if model.chat is None else model.chat
        language = LanguageModel(None, tokenizer, model.system, chat, model.chat_template_kwargs, processor)
        return max((len(language.encode(row.text, row.messages, row.pictures)) for row in some), default=None)
    except (OSError, ValueError, TypeError):  # transformers 4.56 has a TypeError for files that are missing
        return None


def _scored_together(recipe: TextRecipe, prompt: int, gpus: int) -> tuple[int, int]:
    """How many groups are scored at once, and how many completions of each, as `batches_of` finds them."""
    rollout, width = recipe.rollout, prompt + recipe.generation.max_tokens
    if rollout.group * width > rollout.tokens:
        return 1, max(rollout.tokens // width, 1)
    part = math.ceil(rollout.prompts / gpus / recipe.optimizer.updates)
    return min(rollout.tokens // (rollout.group * width), part), rollout.group


def _training(
    recipe: TextRecipe, language: LanguageModel, weights: LanguageWeights, groups: int, alone: int, prompt: int
) -> int:
    """Most bytes alive at once while completions are scored and their gradient is computed, gradients left out."""
    for parameter in weights.parameters():
        parameter.grad = torch.empty_like(parameter)
    live = LiveBytes()
    # The counter of FLOPs would keep tensors alive, so it is not used here.
    with on_meta(), live:
        _score(recipe, language, groups, alone, prompt)
    return live.most


def _reading(recipe: TextRecipe, groups: int, alone: int, prompt: int) -> Iterator[int]:
    """Most bytes alive at once while a teacher of objective `distilled` reads a batch; one number for each teacher."""
    if recipe.objective.name != "distilled":
        return
    paths = {language_teacher(teacher.path) for teacher in recipe.model.teachers}
    measure = partial(likeliest, top=recipe.objective["top"], tokens=None, temperature=recipe.generation.temperature)
    for path in sorted(paths) or [language_folder(recipe.model.path)]:
        language, live = _language(recipe, path), LiveBytes()
        with on_meta(), live, torch.no_grad():
            _statistics(recipe, language, groups, alone, prompt, measure, entropy=recipe.objective["doubt"] > 0)
        yield live.most


def _score(recipe: TextRecipe, language: LanguageModel, groups: int, alone: int, prompt: int) -> None:
    """Score a batch of the longest completions on `meta`, and compute the gradient."""
    distils = recipe.objective.name == "distilled"
    with torch.enable_grad():
        found = _statistics(recipe, language, groups, alone, prompt, partial(_compared, recipe) if distils else None)
        loss = found.log_probs.sum()
        if found.measured is not None:
            student = found.measured + found.log_probs[..., None]
            direction = recipe.objective["direction"]
            loss = loss + coarse_divergence(student, torch.zeros_like(student), direction=direction).sum()
        torch.autograd.backward([loss])


def _compared(recipe: TextRecipe, logits: Tensor, ids: Tensor, rows: Sequence[int], first: int) -> Tensor:
    """The log-probs of a teacher's likeliest tokens, see `Target.gaps`."""
    count = min(recipe.objective["top"], logits.shape[-1])
    told = torch.zeros(*ids.shape, count, dtype=torch.long, device=ids.device)
    return relative_logits(logits, ids, told, recipe.generation.temperature)


def _statistics(
    recipe: TextRecipe,
    language: LanguageModel,
    groups: int,
    alone: int,
    prompt: int,
    measure: Measure | None,
    entropy: bool = False,
) -> Statistics:
    """The statistics of a batch of the longest completions."""
    rest = [0] * (recipe.generation.max_tokens - 1)
    return completion_statistics(
        language,
        [[0] * prompt] * groups,
        # Equal completions of a prompt would be scored once.
        [[k, *rest] for _ in range(groups) for k in range(alone)],
        [group for group in range(groups) for _ in range(alone)],
        temperature=recipe.generation.temperature,
        shared_prefix=recipe.model.shared_prefix and not recipe.model.gradient_checkpointing,
        entropy=entropy,
        measure=measure,
    )


def _sampling(recipe: TextRecipe, language: LanguageModel, at_once: int, prompt: int) -> dict[str, int]:
    """Bytes of the keys and values of all tokens, of states, and of the numbers from which a token is drawn."""
    if recipe.generation.engine != "transformers":
        return {}  # an engine of its own takes the share of the GPU that its options name
    model, live = language.model, LiveBytes()
    with on_meta(), live, torch.no_grad():
        ids = torch.zeros(1, prompt, dtype=torch.long, device="meta")
        mask = torch.ones_like(ids)
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=True,
            **logits_kept(model, 1),
        )  # fmt: skip
        vocabulary = out.logits.shape[-1]
        cache = cache_of(out)
        del out, ids, mask
        kept, states = live.now, state_bytes(cache)
    del cache
    # Each logit is there in the model's type twice, twice in float32, and once in float64 (`categorical.pick`).
    drawn = vocabulary * (2 * DTYPES[recipe.model.dtype].itemsize + 16)
    longest = prompt + recipe.generation.max_tokens
    return {"sampling": at_once * (states + (kept - states) * longest // prompt + drawn)}


class _Untrue(TorchFunctionMode):
    """Lets a condition on a tensor without content be false: a batch of completions has padding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return False
        return func(*args, **(kwargs or {}))


def _experts(grouped: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Lets the experts of a model run on `meta`; older versions of transformers have no such product."""
    try:
        from transformers.integrations import moe
    except ImportError:
        return contextlib.nullcontext()
    known = hasattr(moe, "_grouped_mm")
    return patch.object(moe, "_grouped_mm", grouped) if known else contextlib.nullcontext()


def _two_places(logits: Tensor, ids: Tensor) -> Iterator[tuple[slice, slice]]:
    """The first two places at which log-probs are computed. A long batch has ten thousand of them, all alike."""
    return itertools.islice(PLACES(logits, ids), 2)


@contextlib.contextmanager
def on_meta() -> Iterator[FlopTally]:
    """Within this context a language model runs on `meta`, with attention that keeps what a fused kernel keeps.

    Yields what counts the FLOPs of attention, and can count the FLOPs of other products.
    """
    tally = FlopTally()

    def fused(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return Attention.apply(query, key, value, tally)

    def grouped(rows: Tensor, weight: Tensor, *_: Any, **__: Any) -> Any:
        return GroupedProduct.apply(rows, weight, tally)

    # A mode of torch functions would not see the blocks that a backward pass computes again.
    attention = patch.object(nn.functional, "scaled_dot_product_attention", fused)
    # Models turn autocast off for their rotations, and torch before 2.9 has no autocast to turn off on `meta`.
    autocast = patch.object(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    few = patch.object(categorical, "places", _two_places)
    with torch.device("meta"), Remembered(), _Untrue(), attention, autocast, few, _experts(grouped):
        yield tally
