"""DeepSpeed's ZeRO stage 2: two processes with a part of the optimizer each give the run of one; and errors."""

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor, nn

from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.training.distributed import processes
from flowgrpo.training.distributed.launching import zero_of
from flowgrpo.training.distributed.processes import Processes, launched
from flowgrpo.training.distributed.zero import ZeroOptimizer
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import start
from tests.training import test_processes
from tests.training.ranks import free_port
from tests.training.test_processes import Runs, lines, printed, run_all, statuses
from tests.training.test_sharding import accelerator, recipes, require_equal, result_of, resumed

ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def runs(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`steps` and `forward` train full weights, `lora` an adapter; three prompts for two processes."""
    folder = tmp_path_factory.mktemp("zero")
    found, jobs = Runs(logs=folder), []
    chosen = {**recipes(small, folder), "lora": test_processes.recipes(small, folder)["batch"]}
    bounded = chosen["steps"].optimizer.model_copy(update={"max_grad_norm": 1e-3})  # some of its gradients are larger
    chosen["steps"] = chosen["steps"].model_copy(update={"optimizer": bounded})
    for name, recipe in chosen.items():
        source = folder / f"{name}.yaml"
        source.write_text(dump_recipe(recipe))
        found.two[name], found.one[name] = folder / f"{name}-two", folder / f"{name}-one"
        words = ["train", str(source), "--out"]
        jobs.append({"words": [*words, str(found.two[name])], "log": name, "count": 2, "environment": ZERO})
        jobs.append({"words": [*words, str(found.one[name])], "log": f"{name}-one", "count": 1})
    run_all(jobs, folder)
    return found


@needs_deepspeed
@pytest.mark.parametrize("name", ["steps", "forward", "lora"])
def test_two_processes_give_the_run_of_one(runs: Runs, name: str) -> None:
    assert statuses(runs, name) == [0, 0], printed(runs, name, 0) + printed(runs, name, 1)
    assert statuses(runs, f"{name}-one") == [0], printed(runs, f"{name}-one", 0)
    require_equal(runs.two[name], runs.one[name])
    record = lines(runs.two[name], "metrics.jsonl")[0]
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0.0


@needs_deepspeed
def test_weights_move(runs: Runs) -> None:
    checkpoints = [load_file(c / "trained.safetensors") for c in RunFolder.open(runs.two["steps"]).list_checkpoints()]
    before, after = checkpoints[0], checkpoints[-1]
    assert (
        max(float((after[name] - value).abs().max()) for name, value in before.items()) > 1e-4
    )  # gradients are bounded
    assert result_of(runs.two["lora"]).parent.name == "lora"


@needs_deepspeed
@pytest.mark.parametrize("name", ["steps", "lora"])
def test_a_run_goes_on_alone(runs: Runs, name: str, tmp_path: Path) -> None:
    require_equal(resumed(runs.two[name], tmp_path / f"{name}-alone", runs, 1), runs.one[name])


@needs_deepspeed
def test_a_run_goes_on_in_shards(runs: Runs, tmp_path: Path) -> None:
    require_equal(resumed(runs.two["steps"], tmp_path / "steps-shards", runs, 2), runs.one["steps"])


@needs_deepspeed
@pytest.mark.parametrize("name", ["steps", "lora"])
def test_a_run_of_one_goes_on_in_parts(runs: Runs, name: str, tmp_path: Path) -> None:
    require_equal(resumed(runs.one[name], tmp_path / f"{name}-parts", runs, 2, ZERO), runs.one[name])


@needs_deepspeed
def test_checkpoints_hold_the_whole_state_of_adamw(runs: Runs) -> None:
    ours, theirs = (RunFolder.open(r["steps"]).list_checkpoints()[0] for r in (runs.two, runs.one))
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    found, expected = (torch.load(folder / "optimizer.pt") for folder in (ours, theirs))
    assert set(found["state"]) == set(expected["state"])
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(found["state"][number][key], value, rtol=1e-4, atol=1e-7)
    assert found["param_groups"] == expected["param_groups"]


# -- what the launcher asks for ------------------------------------------------------------------------------------


@needs_deepspeed
@pytest.mark.parametrize(
    ("environment", "precision", "words"),
    [
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "no", "ZeRO stage 1 is not supported; launch with --zero_stage 2"),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "no", "with --use_fsdp --fsdp_version 2"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "no", "--offload_optimizer_device none"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "no", "--gradient_accumulation_steps 1"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.3"}, "no", "--gradient_clipping 0.3 is not optimizer.max_grad_norm, 1.0"),
        ({}, "bf16", "launch with --mixed_precision no"),
    ],
)
def test_what_does_not_fit_is_refused(
    environment: dict[str, str], precision: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {**ZERO, **environment}.items():
        monkeypatch.setenv(key, value)
    recipe = load_recipe("mixgrpo_flash_guard", ["model.train=full"])
    assert zero_of(recipe, accelerator(1, precision)) is None
    with pytest.raises(ValueError, match=words):
        zero_of(recipe, accelerator(2, precision))


@needs_deepspeed
def test_settings_of_a_configuration_file_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "zero.json"
    config.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true, "reduce_bucket_size": "auto"}}')
    for key, value in {**ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}.items():
        monkeypatch.setenv(key, value)
    found: Any = zero_of(load_recipe("mixgrpo_flash_guard", []), accelerator(2))
    assert found == {"stage": 2, "overlap_comm": True}


@needs_deepspeed
def test_settings_that_change_the_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `round_robin_gradients`, DeepSpeed puts a loaded state into the places of other parameters."""
    config = tmp_path / "zero.json"
    config.write_text('{"zero_optimization": {"stage": 2, "round_robin_gradients": true, "sub_group_size": 1000}}')
    for key, value in {**ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match=r"^round_robin_gradients in the section zero_optimization .* take it out"):
        zero_of(load_recipe("mixgrpo_flash_guard", []), accelerator(2))
    config.write_text('{"zero_optimization": {"stage": 2, "round_robin_gradients": false}}')
    assert zero_of(load_recipe("mixgrpo_flash_guard", []), accelerator(2)) == {"stage": 2}


@needs_deepspeed
def test_an_optimizer_in_a_configuration_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "zero.json"
    config.write_text('{"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}')
    for key, value in {**ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match="has the section optimizer"):
        zero_of(load_recipe("mixgrpo_flash_guard", []), accelerator(2))


def test_without_deepspeed_its_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(processes, "is_deepspeed_available", lambda: False)
    with pytest.raises(ValueError, match="pip install 'deepspeed"):
        launched()


def test_deepspeed_that_cannot_be_imported_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deepspeed.py").write_text("raise OSError('CUDA_HOME is not set')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(processes, "is_deepspeed_available", lambda: True)
    with pytest.raises(
        ValueError, match=r"cannot be imported \(OSError: CUDA_HOME is not set\); mend its installation"
    ):
        start(load_recipe("mixgrpo_flash_guard", []), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fsdp_and_deepspeed_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(processes, "is_deepspeed_available", lambda: True)
    with pytest.raises(ValueError, match="use one of --use_fsdp and --use_deepspeed"):
        launched()


# -- experts, and processes with unequal work ------------------------------------------------------------------------

RECIPE = ["optimizer={learning_rate: 0.1, max_grad_norm: 1.0, weight_decay: 0.1, eps: 1.0e-4, ema: null}"]
STEPS: list[list[list[tuple[str, float]]]] = [
    # Of each optimizer step, of each process, the backward passes: the expert, and the factor of its loss.
    [[("transformer", 1.0), ("transformer", 2.0), ("transformer", -0.5)], [("transformer", 3.0)]],
    [[], [("transformer_2", 0.01)]],
    [[("transformer_2", 1.0)], [("transformer", 0.5), ("transformer_2", 2.0)]],
]


class Experts:
    """Two experts of two weights each, of odd sizes; the last of each takes no part in a loss."""

    steps: Any = None

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(0)
        sizes = {"inner.weight": (3, 5), "spare": (2,)}
        names = [
            (f"{expert}.{name}", size) for expert in ("transformer", "transformer_2") for name, size in sizes.items()
        ]
        self.named = {name: nn.Parameter(torch.randn(size, generator=made)) for name, size in names}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return self.named

    def write(self) -> None:
        """Nothing: the parameters are their own masters."""

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad(loss, list(self.named.values()), allow_unused=True))

    def loss(self, expert: str, factor: float) -> Tensor:
        weight = self.named[f"{expert}.inner.weight"]
        return factor * (weight * torch.arange(1.0, 16).view(3, 5)).sin().sum()


def in_parts(rank: int, port: int, folder: str) -> None:
    """One of two processes that take the steps, with an interruption after the second."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    os.environ |= {"LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
    PartialState(cpu=True)
    recipe, norms, sizes = load_recipe("mixgrpo_flash_guard", RECIPE), [], []
    weights, optimizer = parted(recipe, rank)
    for number, step in enumerate(STEPS):
        if number == 2:
            state, kept = optimizer.state_dict(), {name: value.detach() for name, value in weights.named.items()}
            everyone = [state]
            dist.broadcast_object_list(everyone, src=0)
            weights, optimizer = parted(recipe, rank)
            for name, value in weights.named.items():
                value.data.copy_(kept[name])
            optimizer.load_state_dict(everyone[0])
        for expert, factor in step[rank]:
            weights.steps.backward(weights.loss(expert, factor))
        norms.append(float(optimizer.step()))
        sizes += [own.numel() for own in optimizer._own]
        assert all(value.grad is None for value in weights.named.values())
    values = {name: value.detach().clone() for name, value in weights.named.items()}
    weights.steps.backward(weights.loss("transformer", float("nan")))
    with pytest.raises(FloatingPointError, match="the gradient is not finite"):
        optimizer.step()
    assert all(torch.equal(value, values[name]) for name, value in weights.named.items())
    torch.save({"weights": values, "norms": norms, "sizes": sizes}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def parted(recipe: Any, rank: int) -> tuple[Any, ZeroOptimizer]:
    weights: Any = Experts()
    zero = {"stage": 2, "reduce_bucket_size": 16}
    made = ZeroOptimizer(recipe, weights, Processes(rank, 2, lambda: weights.steps.meet()), zero)
    return weights, made


@pytest.mark.slow
@needs_deepspeed
def test_parts_of_two_experts_follow_adamw_on_summed_gradients(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    port = free_port()
    started = [context.Process(target=in_parts, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0]
    plain, norms = Experts(), []
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-4}
    inner = torch.optim.AdamW(plain.named.values(), **settings)
    for step in STEPS:
        for expert, factor in [work for share in step for work in share]:
            plain.loss(expert, factor).backward()
        # The engine has a gradient of 0 for what takes no part in an expert that others do, and its decay moves it.
        for expert in ("transformer", "transformer_2"):
            if plain.named[f"{expert}.inner.weight"].grad is not None:
                plain.named[f"{expert}.spare"].grad = torch.zeros(2)
        norms.append(float(nn.utils.clip_grad_norm_(plain.named.values(), 1.0)))
        inner.step()
        inner.zero_grad()
    assert norms[0] > 1.0 > norms[1]  # one of them is bounded
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        assert found["sizes"] == [10, 10] * 3  # 17 weights an expert, 3 of padding
        for name, value in plain.named.items():
            torch.testing.assert_close(found["weights"][name], value.detach(), rtol=1e-5, atol=1e-6)
