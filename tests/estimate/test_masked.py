"""Estimates of the memory of masked models against what the allocator really allocates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import MaskedRecipe
from flowgrpo.estimate.known_models import known_diffusion_config, masked_shapes_of
from flowgrpo.estimate.language import text_table
from flowgrpo.estimate.masked import estimate_masked
from flowgrpo.text.diffusion_models import model_class
from flowgrpo.text.dream import DreamModel
from flowgrpo.text.llada import LLaDAModelLM
from flowgrpo.text.llada2 import LLaDA2MoeModelLM
from flowgrpo.text.llada_moe import LLaDAMoEModelLM
from flowgrpo.text.sdar import SDARForCausalLM
from flowgrpo.training.data import read_prompts
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.masked.masked_task import MaskedTask
from flowgrpo.training.session import Session
from flowgrpo.worlds.arithmetic.masked_building import build_masked_model
from tests.allocation import most_bytes
from tests.text.diffusion_folders import BLOCK_FOLDERS, FOLDERS
from tests.training.test_masked import saved

TOKENS, PROMPT = 36, 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose logits and activations are large beside what any pass needs besides."""
    place = tmp_path_factory.mktemp("masked")
    found = {kind: make(place / kind) for kind, make in (FOLDERS | BLOCK_FOLDERS).items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found["bert"] = saved(build_masked_model(2000, width=128, layers=3, heads=4), place / "bert")
        for kind, model, sizes in (
            ("llada", LLaDAModelLM, {"d_model": 128, "n_layers": 3, "embedding_size": 2000, "mlp_hidden_size": 256}),
            ("dream", DreamModel, {"hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 2000}),
            ("lladamoe", LLaDAMoEModelLM, {"hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 2000}),
            ("sdar", SDARForCausalLM, {"hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 2000}),
            ("llada2", LLaDA2MoeModelLM, {"hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 2000}),
        ):
            config = masked_shapes_of(str(found[kind]))
            for name, value in sizes.items():
                setattr(config, name, value)
            config.layer_types = ["full_attention"] * 3
            config.mlp_only_layers, config.moe_layer_freq = [0], [0, 1, 1]
            # Older versions of torch have no fused attention on the CPU for fewer heads of keys than of queries.
            setattr(config, "n_kv_heads" if kind == "llada" else "num_key_value_heads", 4)
            model(config).save_pretrained(found[kind])
    return found


def skip_listed_experts(kind: str) -> None:
    mixed = kind in ("lladamoe", "llada2")
    if mixed and not hasattr(pytest.importorskip("transformers.integrations.moe"), "_grouped_mm"):
        pytest.skip("experts run one by one in this version of transformers, which needs the values of a tensor")


def recipe(name: str, folder: Path, data: Path, *words: str) -> MaskedRecipe:
    made = load_recipe(
        name,
        [
            f"model.path={folder}", f"data={{train: {data}, heldout: null}}", f"generation.tokens={TOKENS}",
            "model.train=lora", "sampler.steps=2", "rollout={prompts: 4, group: 4, batch: 8}", "model.chat=false",
            "rewards=[{name: digit_share}]", "optimizer.epochs=1", *words,
        ],
    )  # fmt: skip
    assert isinstance(made, MaskedRecipe)
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{k}{'1' * (PROMPT - 2)}=\n" for k in range(4)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llada", "lladamoe", "dream"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("masked", ()),
        ("masked", ("model.train=full", "model.dtype=bfloat16")),
        ("masked", ("model.gradient_checkpointing=true", "penalties=[{name: kl, weight: 0.1}]")),
        ("diffu_grpo", ()),
        ("coupled_grpo", ("model.dtype=bfloat16",)),
        ("spg", ("generation.stop_at_end=false",)),
    ],
)
def test_a_run_allocates_what_was_estimated(
    name: str, words: tuple[str, ...], kind: str, folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    skip_listed_experts(kind)
    compare(recipe(name, folders[kind], data, *words), data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("sdar", "masked", ()),
        ("sdar", "masked", ("model.train=full", "model.dtype=bfloat16")),
        ("sdar", "trace_rl", ("rollout.cache=true",)),
        ("sdar", "trace_rl", ("rollout.cache=true", "model.dtype=bfloat16")),
        ("sdar", "coupled_grpo", ()),
        ("llada2", "masked", ()),
        ("llada2", "trace_rl", ("rollout.cache=true",)),
    ],
)
def test_a_model_of_blocks_allocates_what_was_estimated(
    kind: str, name: str, words: tuple[str, ...], folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    skip_listed_experts(kind)
    made = recipe(name, folders[kind], data, "model.block=12", "sampler.steps=6", "optimizer.updates=1", *words)
    # The last steps have the longest rows.
    compare(made, data, tmp_path, place=-1)


def compare(made: MaskedRecipe, data: Path, tmp_path: Path, place: int = 0) -> None:
    """Compare an estimate with what the allocator gives out, in sampling and in training of one of the batches."""
    found = estimate_masked(made, read_prompts(str(data)))
    assert found.counted
    assert found.scored == 8
    session = Session(made, RunFolder.create(tmp_path / "run", ""))
    task = session.task
    assert isinstance(task, MaskedTask)
    trainer = session.trainer(Silent())
    rows, experience = trainer.collect(0)
    assert len(rows) == 4

    def sample() -> None:
        trainer.collect(1)

    advantages = torch.randn(len(experience.rollout.parent), generator=torch.Generator().manual_seed(0))

    def score() -> None:
        objective: Any = trainer.objective
        objective.prepare(experience)
        batch = list(objective.batches(experience, 0, None))[place]
        objective.backward(experience, batch, advantages, None, torch.tensor(1.0))

    score()  # the gradients stay, and are not counted again
    assert most_bytes(sample, tmp_path / "sample.json") == pytest.approx(found.passing["sampling"], rel=0.2)
    assert most_bytes(score, tmp_path / "score.json") == pytest.approx(found.passing["training"], rel=0.2)


@pytest.mark.parametrize(
    ("path", "kind", "numbers"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", "llada", 8_015_581_184),
        ("GSAI-ML/LLaDA-1.5", "llada", 8_015_581_184),
        ("Dream-org/Dream-v0-Instruct-7B", "Dream", 7_615_616_512),
        ("apple/DiffuCoder-7B-cpGRPO", "Dream", 7_615_616_512),
        ("Gen-Verse/MMaDA-8B-MixCoT", "mmada", 8_082_690_048),
        ("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "lladamoe", 7_356_880_896),
        ("inclusionAI/LLaDA2.0-mini", "llada2_moe", 16_255_638_528),
        ("JetLM/SDAR-4B-Chat", "sdar", 4_411_424_256),
        ("JetLM/SDAR-8B-Chat-b16", "sdar", 8_190_735_360),
        ("Gen-Verse/TraDo-8B-Thinking", "sdar", 8_190_735_360),
    ],
)
def test_shapes_of_published_models_need_no_download(path: str, kind: str, numbers: int) -> None:
    config = known_diffusion_config(path)
    assert config is not None
    assert config.model_type == kind
    with torch.device("meta"):
        model = model_class(kind)(config)
    assert sum(weight.numel() for weight in model.parameters()) == numbers


def test_other_models_are_not_known(data: Path) -> None:
    assert known_diffusion_config("GSAI-ML/LLaDA-MoE-7B") is None
    with pytest.raises(ValueError, match=r"of GSAI-ML/LLaDA-MoE-7B is not .* are known of GSAI-ML/LLaDA-8B, GSAI-ML"):
        estimate_masked(recipe("masked", Path("GSAI-ML/LLaDA-MoE-7B"), data), [])


def test_what_does_not_fit_says_which_key_to_change(data: Path) -> None:
    words = ("rollout={prompts: 64, group: 16, batch: 64}", "generation.tokens=1024", "model.dtype=bfloat16")
    made = recipe("masked", Path("GSAI-ML/LLaDA-8B-Base"), data, *words)
    found = estimate_masked(made, [], gpu="4090")
    assert not found.counted
    assert text_table(found)[-1] == (
        "  note: this is more memory than the GPU has; for sampling, a smaller rollout.chunk or rollout.batch; for "
        "training, model.gradient_checkpointing: true, or a smaller rollout.batch"
    )
