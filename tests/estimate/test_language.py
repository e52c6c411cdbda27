"""Estimates of the memory of text against what the allocator really allocates."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import TextRecipe
from flowgrpo.core import categorical
from flowgrpo.estimate import language
from flowgrpo.estimate.estimates import GIB
from flowgrpo.estimate.known_models import known_config
from flowgrpo.estimate.language import estimate_text, scoring_flops, text_table
from flowgrpo.estimate.memory import at_once
from flowgrpo.text.model import LanguageModel, LanguageWeights, linear_layers, load_language_model
from flowgrpo.text.sampling import Sampled
from flowgrpo.text.scoring import completion_statistics
from flowgrpo.training.data import PromptRow, read_prompts
from flowgrpo.training.model_paths import DTYPES
from flowgrpo.training.session import lora_spec
from flowgrpo.training.text.text_policy import Completions, TextPolicy
from flowgrpo.worlds.arithmetic.problems import build_character_tokenizer, build_model, save_tokenizer
from tests.allocation import most_bytes

WIDTH, LAYERS, HEADS, VOCABULARY = 128, 3, 4, 1000
PROMPT, TOKENS = 24, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("language") / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build_model(VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS).save_pretrained(path)
    save_tokenizer(build_character_tokenizer(), path)
    return path


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are larger than all else that a batch keeps, as in large language models."""
    path = tmp_path_factory.mktemp("wordy") / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build_model(20 * VOCABULARY, width=32, layers=1, heads=2).save_pretrained(path)
    save_tokenizer(build_character_tokenizer(), path)
    return path


@pytest.fixture
def rows(tmp_path: Path) -> list[PromptRow]:
    path = tmp_path / "prompts.txt"
    path.write_text("1+1=\n" + "1" * (PROMPT - 1) + "=\n")
    return read_prompts(str(path))


def recipe(folder: Path, *words: str) -> TextRecipe:
    sizes = f"generation.max_tokens={TOKENS}", "rollout={prompts: 2, group: 4, batch: 8, tokens: 4096}"
    made = load_recipe("text", [f"model.path={folder}", *sizes, *words])
    assert isinstance(made, TextRecipe)
    return made


def trained(language: LanguageModel, made: TextRecipe) -> LanguageWeights:
    """The weights of a model that a recipe trains."""
    if made.model.train == "lora":
        weights = LanguageWeights.adapter(language, lora_spec(made.model.lora), seed=0)
    else:
        weights = LanguageWeights.whole(language)
    weights.gradient_checkpointing(made.model.gradient_checkpointing)
    return weights


def scored(made: TextRecipe, language: LanguageModel, weights: LanguageWeights) -> Any:
    """What a run does with a batch of its longest completions."""
    generator = torch.Generator().manual_seed(0)
    completions = torch.randint(3, 20, (8, TOKENS), generator=generator).tolist()

    def work() -> None:
        shared = made.model.shared_prefix and not made.model.gradient_checkpointing
        found = completion_statistics(
            language, [[4] * PROMPT, [5] * PROMPT], completions, [0] * 4 + [1] * 4, shared_prefix=shared
        )
        weights.backward(found.log_probs.sum())

    return work


@pytest.mark.parametrize(
    "words",
    [
        ("model.train=full",),
        ("model.train=lora",),
        ("model.train=lora", "model.gradient_checkpointing=true"),
        ("model.train=lora", "model.shared_prefix=false"),
        ("model.train=lora", "model.dtype=bfloat16"),
        ("model.train=lora", "model.dtype=bfloat16", "model.lora.compute=base"),
        ("model.train=full", "model.dtype=bfloat16", "model.gradient_checkpointing=true"),
    ],
)
def test_training_allocates_what_was_estimated(
    folder: Path, rows: list[PromptRow], words: tuple[str, ...], tmp_path: Path
) -> None:
    made = recipe(folder, *words)
    found = estimate_text(made, rows)
    assert (found.prompt, found.counted, found.scored) == (PROMPT, True, 8)
    language = load_language_model(str(folder), dtype=DTYPES[made.model.dtype])
    weights = trained(language, made)
    work = scored(made, language, weights)
    work()  # the gradients stay, and are not counted again
    assert most_bytes(work, tmp_path / "trace.json") == pytest.approx(found.passing["training"], rel=0.12)


@pytest.mark.parametrize(
    "words",
    [
        ("model.train=lora",),
        ("model.train=lora", "model.shared_prefix=false"),
        ("model.train=lora", "model.gradient_checkpointing=true", "objective.doubt=0.5"),
        ("model.train=full", "model.dtype=bfloat16", "objective.top=400"),
    ],
)
def test_distilling_allocates_what_was_estimated(
    wordy: Path, rows: list[PromptRow], words: tuple[str, ...], tmp_path: Path
) -> None:
    taught = (f"model.teachers=[{{path: {wordy}}}]", "objective={name: distilled, others: none}")
    made = recipe(wordy, *taught, "rollout.tokens=600", *words)
    found = estimate_text(made, rows)
    model = load_language_model(str(wordy), dtype=DTYPES[made.model.dtype])
    weights = trained(model, made)
    ids = torch.randint(3, 20, (8, TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    sampled = Sampled(ids, [[-1.0] * TOKENS for _ in ids], [True] * 8)
    e = Completions([[4] * PROMPT, [5] * PROMPT], sampled, [""] * 8, [0] * 4 + [1] * 4, taught_by=("teacher",) * 2)
    objective = made.objective.make(made, TextPolicy(model, weights, made), None, engine="transformers")
    batch = next(iter(objective.batches(e, 0, None)))
    assert len(batch) == found.scored

    def work() -> None:
        objective.backward(e, batch, torch.zeros(8), None, torch.tensor(float(8 * TOKENS)))

    work()  # the gradients stay, and are not counted again
    assert most_bytes(work, tmp_path / "trace.json") == pytest.approx(found.passing["training"], rel=0.12)


@pytest.mark.parametrize(
    "words",
    [
        ("model.train=full",),
        ("model.train=lora",),
        ("model.train=lora", "model.shared_prefix=false"),
        ("model.train=full", "model.gradient_checkpointing=true"),
    ],
)
def test_products_are_counted_as_in_a_real_pass(folder: Path, words: tuple[str, ...]) -> None:
    made = recipe(folder, "model.attention=eager", *words)
    language = load_language_model(str(folder), attention="eager")
    weights = trained(language, made)
    # The counter of torch does not know products that add to a tensor in place, as LoRA layers have them.
    in_place = {torch.ops.aten.addmm_: lambda added, a, b, **_: 2 * math.prod(a) * b[-1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counted:
        scored(made, language, weights)()
    assert 8 * scoring_flops(made, PROMPT) == pytest.approx(counted.get_total_flops(), rel=0.01)


def test_sampling_keeps_keys_and_values_of_every_token(folder: Path, rows: list[PromptRow]) -> None:
    found = estimate_text(recipe(folder), rows)
    kept = 2 * LAYERS * WIDTH * 4 * (PROMPT + TOKENS)
    assert found.passing["sampling"] == 8 * (kept + VOCABULARY * 24)


def test_two_places_of_log_probs_take_as_much_as_all(
    folder: Path, rows: list[PromptRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(categorical, "NUMBERS", 4 * VOCABULARY)
    assert len(list(categorical.places(torch.empty(8, TOKENS, VOCABULARY), torch.empty(8, TOKENS)))) > 8
    two = estimate_text(recipe(folder), rows).passing
    monkeypatch.setattr(language, "_two_places", categorical.places)
    assert estimate_text(recipe(folder), rows).passing == two


def test_an_engine_of_its_own_is_not_counted(folder: Path, rows: list[PromptRow]) -> None:
    found = estimate_text(recipe(folder, "generation.engine=vllm"), rows)
    assert found.passing.keys() == {"training"}


def test_a_larger_batch_of_sampling_is_proposed_if_it_fits(folder: Path, rows: list[PromptRow]) -> None:
    words = "rollout.prompts=2", "rollout.group=8"  # sixteen completions

    def notes(batch: int, room: float = 80.0, gpus: int = 1) -> list[str]:
        found = estimate_text(recipe(folder, *words, f"rollout.batch={batch}"), rows, gpus=gpus)
        found = replace(found, gpu=replace(found.gpu, gib=room), passing=found.passing | {"training": 0})
        return [line for line in text_table(found) if "sampled in" in line]

    assert notes(16) == notes(8, gpus=2) == []
    assert notes(3) == [
        "  note: 16 completions are sampled in 6 batches, one after another; with rollout.batch=16 it is 1, and "
        "sampling takes 0.0 GiB at most"
    ]
    whole = estimate_text(recipe(folder, *words, "rollout.batch=16"), rows)
    rest, each = sum(whole.resting.values()) - whole.resting["gradients"], whole.passing["sampling"] / 16
    # Eight completions at once fit, and nine do not.
    assert "with rollout.batch=8 it is 2," in notes(3, (rest + 8.5 * each) / 0.8 / GIB)[0]
    assert notes(8, (rest + 8.5 * each) / 0.8 / GIB) == []


def test_weights_and_what_belongs_to_them(folder: Path, rows: list[PromptRow]) -> None:
    model = build_model(VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    whole = estimate_text(recipe(folder, "model.train=full", "optimizer.ema=null"), rows).resting
    assert whole["model"] == pytest.approx(4 * numbers, rel=0.001)
    assert (whole["gradients"], whole["optimizer"]) == (4 * numbers, 8 * numbers)
    assert whole["averages"] == whole["LoRA"] == whole["reference"] == whole["masters"] == 0
    half = estimate_text(recipe(folder, "model.train=full", "model.dtype=bfloat16"), rows).resting
    assert half["masters"] == half["averages"] == 4 * numbers
    kept = estimate_text(recipe(folder, "model.train=full", "penalties=[{name: kl, weight: 0.1}]"), rows).resting
    assert kept["reference"] == 4 * numbers


@pytest.mark.parametrize(
    ("sizes", "scored_at_once"),
    [
        ("{prompts: 2, group: 4, batch: 8, tokens: 64}", 1),
        ("{prompts: 2, group: 4, batch: 8, tokens: 200}", 3),
        ("{prompts: 2, group: 4, batch: 8, tokens: 256}", 4),
        ("{prompts: 6, group: 4, batch: 8, tokens: 4096}", 24),
    ],
)
def test_as_many_completions_are_scored_at_once_as_the_budget_allows(
    folder: Path, rows: list[PromptRow], sizes: str, scored_at_once: int
) -> None:
    assert estimate_text(recipe(folder, f"rollout={sizes}"), rows).scored == scored_at_once


def test_prompts_that_cannot_be_counted_have_the_longest_length(
    folder: Path, rows: list[PromptRow], tmp_path: Path
) -> None:
    config = tmp_path / "model"
    config.mkdir()
    (config / "config.json").write_bytes((folder / "config.json").read_bytes())
    found = estimate_text(recipe(config, "generation.max_prompt_tokens=50"), rows)
    assert (found.prompt, found.counted) == (50, False)
    assert "  the longest completions, after prompts of 50 tokens (generation.max_prompt_tokens); 8 completions" in (
        "\n".join(text_table(found))
    )


def test_a_model_of_seven_billion_parameters_does_not_fit_into_24_gb() -> None:
    """The note says what would help for each phase. No weights are needed, and hardly any memory."""
    model, lora = Path("Qwen/Qwen2.5-7B-Instruct"), ("model.train=lora",)
    words = "model.dtype=bfloat16", "generation.max_prompt_tokens=200", "generation.max_tokens=1000"
    found = estimate_text(recipe(model, *words, *lora, "rollout.tokens=8000"), [], "4090")
    assert found.resting["model"] == pytest.approx(2 * 7_615_616_512, rel=1e-6)
    more = "  note: this is more memory than the GPU has; "
    scoring = "for training, model.gradient_checkpointing: true, or a smaller rollout.tokens"
    assert text_table(found)[-1] == more + scoring
    again = "model.gradient_checkpointing=true"
    less = estimate_text(recipe(model, *words, *lora, again), [], "4090")
    assert less.peak < 24 * GIB < found.peak
    assert "note" not in text_table(less)[-1]
    many = "rollout={prompts: 64, group: 8, batch: 512, tokens: 30000}"
    wide = estimate_text(recipe(model, *words, *lora, again, many), [], "4090")
    mended = "for sampling, rollout.batch=54; for training, rollout.tokens=4800"
    assert text_table(wide)[-1] == more + mended
    smaller = ("rollout.batch=54", "rollout.tokens=4800")
    fits = estimate_text(recipe(model, *words, *lora, again, many, *smaller), [], "4090")
    assert 0.7 * 24 * GIB < fits.peak < 0.85 * 24 * GIB
    assert all(size > 0.7 * 24 * GIB for size in at_once(fits.resting, fits.passing).values())
    none = estimate_text(recipe(model, *words, *lora, again, "generation.max_tokens=200000"), [], "4090")
    assert "for training, a smaller rollout.tokens" in text_table(none)[-1]
    full = estimate_text(recipe(model, *words, "model.train=full"), [], "4090")
    assert "GiB at any batch: use a smaller model, or model.train: lora" in text_table(full)[-1]


def test_a_large_base_may_have_4_bits(folder: Path) -> None:
    """All weights but those of the output layer and the embeddings."""
    lora = "model.train=lora", "model.dtype=bfloat16"
    plain, packed = (estimate_text(recipe(folder, *lora, *more), []) for more in ((), ("model.quantize=nf4",)))
    small = replace(plain, gpu=replace(plain.gpu, gib=1e-3))
    advice = "GiB at any batch: use model.dtype: bfloat16 with model.quantize: nf4, or a smaller model"
    assert advice in text_table(small)[-1]
    assert "nf4" not in text_table(replace(packed, gpu=small.gpu))[-1]
    model = load_language_model(str(folder)).model
    numbers = [model.get_submodule(name).weight.numel() for name in linear_layers(model)]
    left = sum(-(-n // 2) + (scales := -(-n // 64)) + 4 * -(-scales // 256) for n in numbers)
    assert plain.resting.pop("model") - packed.resting.pop("model") == 2 * sum(numbers) - left > 0
    assert plain.resting == packed.resting


@pytest.mark.parametrize(
    ("model", "numbers"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B-Base", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
    ],
)
def test_known_models_have_their_published_numbers_of_parameters(model: str, numbers: int) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(known_config(model))
    assert sum(parameter.numel() for parameter in made.parameters()) == numbers


def test_a_known_model_needs_no_files() -> None:
    words = "model.train=lora", "model.dtype=bfloat16", "generation.max_prompt_tokens=100"
    found = estimate_text(recipe(Path("Qwen/Qwen2.5-0.5B-Instruct"), *words), [])
    assert found.resting["model"] == pytest.approx(2 * 494_032_768, rel=0.001)
    assert not found.counted


def test_what_is_not_on_this_machine_has_no_estimate() -> None:
    with pytest.raises(ValueError, match=r"the configuration of somebody/something is not on this machine"):
        estimate_text(recipe(Path("somebody/something")), [])
