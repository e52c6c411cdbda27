"""Context parallelism: processes that share the tokens of a sample give the run of one process; and errors."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flowgrpo.configs.load import RecipeError, dump_recipe, load_recipe
from flowgrpo.estimate.estimates import estimate, table
from flowgrpo.rewards.base import RewardSpec
from flowgrpo.rewards.runner import RewardSet
from flowgrpo.training.collecting import OverlappedScoring
from flowgrpo.training.distributed import processes
from flowgrpo.training.distributed.context_groups import LedRewards
from flowgrpo.training.distributed.launching import zero_of
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.folder.changing import may_change
from flowgrpo.training.recipe_launches import check_ranks
from flowgrpo.weights.token_split import split_tokens
from tests.training.family_runs import overrides
from tests.training.test_processes import Runs, lines, printed, run_all, statuses
from tests.training.test_sharding import FSDP, require_equal, result_of, resumed

# Of a group, only the first process may be asked.
REWARD = """
import os

def level(images, **columns):
    assert int(os.environ["RANK"]) % 2 == 0
    return images.double().flatten(1).mean(1) + images.double().flatten(1).std(1)
"""
SHARED = [
    "optimizer={updates: 2, eps: 0.01, learning_rate: 0.1, weight_decay: 0.0, ema: {decay: 0.5, every: 1}}",
    "rollout={prompts: 2, group: 3, batch: 3, decode_batch: 3}",
    "run={iterations: 2, checkpoint_every: 1, keep: 9, sample_every: 1, seed: 0}",
    "evaluate={every: 2, seeds: 1}",
    "penalties.kl.weight=0.1",
]  # fmt: skip
NAMES = {"flux": ("FluxPipeline", "lora"), "wan": ("WanPipeline", "full")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found, jobs = Runs(logs=tmp_path_factory.mktemp("context")), []
    for name, (family, train) in NAMES.items():
        folder = found.logs / name
        folder.mkdir()
        words = [*overrides(family, folder, train), *SHARED, "model.gradient_checkpointing=true"]
        (folder / "reward.py").write_text(REWARD)
        # Four processes are two groups, each with a prompt, and share the weights out as well.
        many = ("four", 4, FSDP) if train == "full" else ("two", 2, {})
        words += ["run.iterations=1"] if train == "full" else []
        for kind, count, environment in (("one", 1, {}), many):
            context = min(count, 2)
            recipe = load_recipe("mixgrpo_flash_guard", [*words, f"model.context_parallel={context}"])
            source = folder / f"{kind}.yaml"
            source.write_text(dump_recipe(recipe))
            out = found.two[f"{name}-{kind}"] = folder / kind
            job = {"words": ["train", str(source), "--out", str(out)], "log": f"{name}-{kind}"}
            jobs.append({**job, "count": count, "environment": environment})
    run_all(jobs, found.logs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("log", "count"), [("flux-two", 2), ("wan-four", 4)])
def test_processes_that_share_tokens_give_the_run_of_one(runs: Runs, log: str, count: int) -> None:
    alone = log.partition("-")[0] + "-one"
    assert statuses(runs, log) == [0] * count, "".join(printed(runs, log, rank) for rank in range(count))
    assert statuses(runs, alone) == [0], printed(runs, alone, 0)
    assert "the tokens of each sample on 2 of them" in printed(runs, log, 0)
    require_equal(runs.two[log], runs.two[alone])
    assert lines(runs.two[log], "metrics.jsonl")[0]["ratio/first_error"] == 0.0


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(runs: Runs, tmp_path: Path) -> None:
    run = runs.two["flux-two"]
    again = resumed(run, tmp_path / "again", runs, 2, {})
    weights, expected = (load_file(result_of(one)) for one in (again, run))
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


# -- who speaks for a group ----------------------------------------------------------------------------------------


def test_a_group_has_one_share_of_the_prompts() -> None:
    members = [Processes(rank, 4, context=2) for rank in range(4)]
    assert [list(one.share(5)) for one in members] == [[0, 2, 4], [0, 2, 4], [1, 3], [1, 3]]
    assert [one.leads for one in members] == [True, False, True, False]
    assert members[3].cuts(4, 2) == (1,)


def test_the_first_process_of_a_group_speaks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [[(0, "a"), (2, "c")], [(9, "wrong")], [(1, "b")], [(9, "wrong")]]
    monkeypatch.setattr(processes, "gather_object", lambda thing: told)
    member = Processes(3, 4, context=2)
    assert member.gather(None) == [told[0], told[2]]
    assert member.hear(None) == told
    assert member.pool(["wrong"], [9]) == (["a", "b", "c"], [1])


@pytest.mark.parametrize(("rank", "expected"), [(0, 3.0), (1, 0.0)])
def test_a_group_counts_once_in_a_sum(rank: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "reduce", lambda tensor, kind: tensor)
    assert Processes(rank, 2, context=2).add(torch.tensor(3.0)).item() == expected


class Told:
    """A group of which this process is not the first."""

    def told(self, work: Callable[[], str]) -> str:
        return "what the first process was told"


def test_only_the_first_process_of_a_group_asks_the_rewards() -> None:
    group: Any = Told()
    rewards = LedRewards([RewardSpec("jpeg_compressibility")], group)
    found: Any = rewards.score(torch.zeros(1, 3, 8, 8), ["a"])
    assert found == "what the first process was told"
    # A reward that runs elsewhere is not asked early, because a group asks together.
    for one, early in ((rewards, []), (RewardSet([RewardSpec("jpeg_compressibility")]), [0])):
        one.rewards[0].remote = True
        assert OverlappedScoring(one, torch.device("cpu"))._elsewhere == early


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "count", "words"),
    [
        ([], 1, "1 process cannot be divided into groups of 2"),
        ([], 3, "launch a multiple of 2 processes"),
        (["rollout.prompts=2"], 8, "rollout.prompts is 2 on 4 groups of 2 processes"),
    ],
)
def test_processes_that_make_no_groups_are_refused(overrides: list[str], count: int, words: str) -> None:
    recipe = load_recipe("mixgrpo_flash_guard", ["model.context_parallel=2", *overrides])
    with pytest.raises(ValueError, match=words):
        check_ranks(recipe, count)
    check_ranks(load_recipe("mixgrpo_flash_guard", ["model.context_parallel=2", "rollout.prompts=2"]), 4)


def test_compiled_blocks_share_no_tokens() -> None:
    with pytest.raises(RecipeError, match="write compile: false"):
        load_recipe("mixgrpo_flash_guard", ["model.context_parallel=2", "model.compile=true"])


def test_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2}})
    launched: Any = SimpleNamespace(
        num_processes=2, mixed_precision="no", state=SimpleNamespace(deepspeed_plugin=plugin)
    )
    with pytest.raises(ValueError, match=r"model\.context_parallel does not run with DeepSpeed"):
        zero_of(load_recipe("mixgrpo_flash_guard", ["model.context_parallel=2"]), launched)


@pytest.mark.parametrize("other", ["ulysses_degree", "context_parallel_size", "sp_size"])
def test_names_of_other_tools_are_known(other: str) -> None:
    with pytest.raises(RecipeError, match=r"model\.context_parallel"):
        load_recipe("mixgrpo_flash_guard", [f"model.{other}=2"])


class FluxTransformer2DModel(nn.Module):
    """A class that is known, with three heads."""

    _cp_plan: ClassVar[dict[str, Any]] = {}
    config = SimpleNamespace(num_attention_heads=3)


class QwenImageTransformer2DModel(FluxTransformer2DModel):
    """A class without the plan of its masks, as in diffusers 0.37."""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(1, 1), "the transformer is of class Linear"),
        (FluxTransformer2DModel(), "has 3 heads of attention"),
        (QwenImageTransformer2DModel(), "diffusers is too old for it"),
    ],
)
def test_denoisers_that_cannot_be_split_are_refused(module: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_tokens({"transformer": module}, 2)


@pytest.mark.parametrize(("words", "may"), [([], True), (["optimizer.cut=edges"], False)])
def test_a_run_may_go_on_with_another_number_of_processes_in_a_group(words: list[str], may: bool) -> None:
    assert may_change("model.context_parallel", load_recipe("mixgrpo_flash_guard", words)) == may


# -- the estimate --------------------------------------------------------------------------------------------------


def test_an_estimate_divides_activations_and_evaluations_by_the_processes_of_a_group() -> None:
    words = ["model.path=black-forest-labs/FLUX.1-dev", "model.dtype=bfloat16", "evaluate.prompts=8"]
    one, two = (
        estimate(load_recipe("mixgrpo", [*words, f"model.context_parallel={context}"]), gpus=4 * context)
        for context in (1, 2)
    )
    assert two.flops["sampling"] == one.flops["sampling"] / 2
    assert two.flops["training"] == pytest.approx(one.flops["training"] / 2)
    assert two.flops["decoding"] == one.flops["decoding"]
    assert two.passing["training"] == pytest.approx(one.passing["training"] / 2, rel=1e-6)
    assert two.passing["sampling"] == pytest.approx(one.passing["sampling"] / 2, rel=1e-6)
    assert two.resting == one.resting
    assert "the tokens of each sample on 2 of them" in table(two)[0]


def test_gpus_that_make_no_groups_have_no_estimate() -> None:
    recipe = load_recipe("mixgrpo", ["model.path=black-forest-labs/FLUX.1-dev", "model.context_parallel=3"])
    with pytest.raises(ValueError, match="use a multiple of 3 GPUs"):
        estimate(recipe, gpus=4)
    with pytest.raises(ValueError, match="but 3 GPUs make all samples of a prompt"):
        estimate(recipe, gpus=300)
