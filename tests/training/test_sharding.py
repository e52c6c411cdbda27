"""Full weights in shards: two processes give the run of one, unequal work included, and go on with one; and errors."""

import json
import multiprocessing
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.training.distributed.launching import load_whole_models, notes_on_launch, sharding_of
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.weights.sharding import Shards
from flowgrpo.worlds.scenes.flow import CALL
from tests.training.ranks import free_port
from tests.training.test_processes import ITERATIONS, REWARDS, Runs, lines, numbers, printed, run_all, statuses

# As the launcher of accelerate sets it.
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
KEPT = {"FSDP_RESHARD_AFTER_FORWARD": "false"}


def recipes(small: list[str], folder: Path) -> dict[str, Recipe]:
    """Three prompts for two processes, so that their work is never equal.

    `steps` has a reference, an average, batches that are skipped for want of a selected image, and an optimizer step
    for which one process has nothing. `forward` samples with weights that lag behind, and has two forward passes in a
    loss.
    """
    rewards = folder / "rewards.py"
    rewards.write_text(REWARDS)
    shared = [
        *small,
        "rollout={prompts: 3, group: 4, batch: 2, decode_batch: 4}",
        f"rewards=[{{name: '{rewards}:level'}}, {{name: '{rewards}:contrast', weight: 0.5}}]",
        f"evaluate={{every: 2, prompts: 1, seeds: 3, rewards: [{{name: '{rewards}:level'}}]}}",
        f"run={{iterations: {ITERATIONS}, checkpoint_every: 1, keep: 9, sample_every: 1, seed: 0}}",
        "model.train=full",
        "model.gradient_checkpointing=true",
    ]
    # The plan of this recipe trains no steps, so it has no window.
    windowless = [word for word in shared if not word.startswith("sampler.plan.window")]
    optimizer = "optimizer={updates: 2, eps: 0.01, learning_rate: 0.2, weight_decay: 0.0, ema: {decay: 0.5, every: 1}}"
    return {
        "steps": load_recipe("mixgrpo_flash_guard", [
            *shared, optimizer, "penalties.kl.weight=0.1", "sampler.plan.shared_noise=false",
            "select=[{name: extremes, keep: 2}]",
            "model.release_text_encoders=true",
        ]),
        # Its gradients are ten thousand times as large: at the rate of `steps` a rounding would grow from step to step.
        "forward": load_recipe(
            "diffusion_nft", [*windowless, optimizer, "optimizer.learning_rate=0.02", "rollout.batch=4"]
        ),
        # Only the frozen weights are cut. The reference is the base, without its adapter.
        "adapter": load_recipe("mixgrpo_flash_guard", [
            *shared, optimizer, "model.train=lora", "penalties.kl.weight=0.1", "sampler.plan.shared_noise=false",
            "select=[{name: extremes, keep: 2}]", "model.dtype=bfloat16", "model.lora.compute=float32",
        ]),
        # Of one iteration, as a rounding of the first gradient is seen in the second one's samples.
        "half": load_recipe("mixgrpo_flash_guard", [
            *shared, optimizer, "penalties.kl.weight=0.1", "model.dtype=bfloat16", "run.iterations=1",
        ]),
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("sharding")
    found, jobs = Runs(logs=folder), []
    for name, recipe in recipes(small, folder).items():
        source = folder / f"{name}.yaml"
        source.write_text(dump_recipe(recipe))
        found.two[name], found.one[name] = folder / f"{name}-two", folder / f"{name}-one"
        words = ["train", str(source), "--out"]
        jobs.append({"words": [*words, str(found.two[name])], "log": name, "count": 2, "environment": FSDP})
        jobs.append({"words": [*words, str(found.one[name])], "log": f"{name}-one", "count": 1})
        kept = found.two[f"{name}-kept"] = folder / f"{name}-kept"
        jobs.append({"words": [*words, str(kept)], "log": f"{name}-kept", "count": 2, "environment": FSDP | KEPT})
    run_all(jobs, folder)
    return found


def resumed(run: Path, copy: Path, runs: Runs, count: int, launched: Mapping[str, str] = FSDP) -> Path:
    """A copy of a finished run as it was after its first iteration, continued with `count` processes."""
    shutil.copytree(run, copy)
    for folder in RunFolder.open(copy).list_checkpoints()[1:]:
        shutil.rmtree(folder)
    for result in ("lora", "pipeline"):
        shutil.rmtree(copy / result, ignore_errors=True)
    environment = dict(launched) if count > 1 else {}
    words, log = ["resume", str(copy)], copy.name
    run_all([{"words": words, "log": log, "count": count, "environment": environment}], runs.logs)
    assert statuses(runs, log) == [0] * count, printed(runs, log, 0)
    assert "resumed before iteration 1" in printed(runs, log, 0)
    return copy


def require_equal(run: Path, other: Path) -> None:
    """The runs are equal, except for the order in which gradients were added."""
    for ours, theirs in zip(lines(run, "metrics.jsonl"), lines(other, "metrics.jsonl"), strict=True):
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-3, abs=1e-6, nan_ok=True)
    for ours, theirs in zip(lines(run, "samples/index.jsonl"), lines(other, "samples/index.jsonl"), strict=True):
        assert ours.pop("rewards") == pytest.approx(theirs.pop("rewards"), rel=1e-4)
        assert ours == theirs
    weights, expected = (load_file(result_of(r)) for r in (run, other))
    assert set(weights) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def result_of(run: Path) -> Path:
    lora = run / "lora" / "pytorch_lora_weights.safetensors"
    return lora if lora.exists() else weights_of(run / "pipeline")


def weights_of(pipeline: Path) -> Path:
    return pipeline / "transformer" / "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("name", ["steps", "forward", "adapter"])
def test_two_processes_with_a_shard_each_give_the_run_of_one(runs: Runs, name: str) -> None:
    assert statuses(runs, name) == [0, 0], printed(runs, name, 0) + printed(runs, name, 1)
    assert statuses(runs, f"{name}-one") == [0], printed(runs, f"{name}-one", 0)
    require_equal(runs.two[name], runs.one[name])
    record = lines(runs.two[name], "metrics.jsonl")[0]
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0.0
    assert "kl" in record
    kind = "frozen" if name == "adapter" else "full"
    assert f"{kind} weights in shards by FSDP2" in printed(runs, name, 0)


@pytest.mark.parametrize("name", ["steps", "forward", "adapter"])
def test_so_they_do_where_weights_stay_gathered_until_the_backward_pass(runs: Runs, name: str) -> None:
    assert statuses(runs, f"{name}-kept") == [0, 0], printed(runs, f"{name}-kept", 0)
    require_equal(runs.two[f"{name}-kept"], runs.one[name])
    assert lines(runs.two[f"{name}-kept"], "metrics.jsonl")[0]["ratio/first_error"] == 0.0


def test_shards_of_half_precision_weights_compute_in_it_and_are_trained_in_float32(runs: Runs) -> None:
    for log in ("half", "half-one", "half-kept"):
        assert set(statuses(runs, log)) == {0}, printed(runs, log, 0)
    expected = numbers(lines(runs.one["half"], "metrics.jsonl")[0])
    for run in (runs.two["half"], runs.two["half-kept"]):
        found = lines(run, "metrics.jsonl")[0]
        assert found["ratio/first_error"] == 0.0
        # From the second optimizer step on, weights differ by roundings of bfloat16.
        for name in ("reward/total", "advantage/largest", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=0.02), name
        mine, theirs = (RunFolder.open(one).list_checkpoints()[-1] for one in (run, runs.one["half"]))
        masters, others = (load_file(folder / "trained.safetensors") for folder in (mine, theirs))
        assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
        assert set(masters) == set(others)
        assert {tensor.dtype for tensor in load_file(result_of(run)).values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["steps", "forward"])
def test_weights_move(runs: Runs, random_pipeline: Path, name: str) -> None:
    before, after = load_file(weights_of(random_pipeline)), load_file(weights_of(runs.two[name] / "pipeline"))
    # Fifty times the difference that is allowed between one process and two.
    assert max(float((after[name] - value).abs().max()) for name, value in before.items()) > 5e-4


def test_plain_diffusers_loads_the_result(runs: Runs, random_pipeline: Path) -> None:
    folder, other = (r["steps"] / "pipeline" for r in (runs.two, runs.one))
    configs = [json.loads((f / "transformer" / "config.json").read_text()) for f in (folder, other)]
    assert configs[0] == configs[1]
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    saved = load_file(weights_of(folder))
    assert all(torch.equal(value, saved[name]) for name, value in pipe.transformer.state_dict().items())
    made = pipe(prompt="a red circle", num_inference_steps=2, output_type="pt", **CALL).images
    assert float(made.std()) > 0
    assert {path.name for path in folder.iterdir()} == {path.name for path in random_pipeline.iterdir()} | {"README.md"}


@pytest.mark.parametrize("name", ["steps", "forward", "adapter"])
def test_a_sharded_run_goes_on_whole(runs: Runs, name: str, tmp_path: Path) -> None:
    require_equal(resumed(runs.two[name], tmp_path / f"{name}-alone", runs, 1), runs.one[name])


def test_a_whole_run_goes_on_sharded(runs: Runs, tmp_path: Path) -> None:
    require_equal(resumed(runs.one["steps"], tmp_path / "steps-shared", runs, 2), runs.one["steps"])


def test_checkpoints_hold_whole_tensors(runs: Runs) -> None:
    ours, theirs = (RunFolder.open(r["steps"]).list_checkpoints()[0] for r in (runs.two, runs.one))
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in theirs.iterdir())
    moments, expected = (torch.load(folder / "optimizer.pt")["state"] for folder in (ours, theirs))
    for number, entry in expected.items():
        for key, value in entry.items():
            assert type(moments[number][key]) is torch.Tensor
            torch.testing.assert_close(moments[number][key], value, rtol=1e-4, atol=1e-7)


class Stack(nn.Module):
    """Two blocks of three weights, whose sum multiplies x."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


def cut_beside_an_adapter(port: int, folder: str) -> None:
    """Alone in its group: which weights of a model with one trained block are cut, and their numbers."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    stack = Stack().bfloat16()
    frozen, trained = stack.blocks[0].weight, stack.blocks[1].weight
    frozen.requires_grad_(False)
    trained.data = trained.data.float()
    shards = Shards({"transformer": stack}, init_device_mesh("cpu", (1,)))
    made = stack(torch.ones(2, dtype=torch.bfloat16))
    shards.steps.backward(made.sum())
    weights = {name: [isinstance(p, DTensor), str(p.dtype)] for name, p in stack.named_parameters()}
    gradient = stack.blocks[1].weight.grad
    assert gradient is not None
    found = {"weights": weights, "same": stack.blocks[1].weight is trained, "gradient": gradient.tolist()}
    (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def gathered_weights(port: int, folder: str) -> None:
    """Alone in its group: which weights are whole after an evaluation, and after its backward pass."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    found = {}
    for keep in (False, True):
        stack = Stack()
        shards = Shards({"transformer": stack}, init_device_mesh("cpu", (1,)), keep=keep)

        def whole(stack: nn.Module = stack) -> list[bool]:
            return [not isinstance(value, DTensor) for value in stack.parameters()]

        with torch.no_grad():
            stack(torch.ones(2))
        states = [whole()]
        made = stack(torch.ones(2))
        states.append(whole())
        shards.steps.backward(made.sum())
        states.append(whole())
        stack(torch.ones(2))
        shards.steps.meet()
        states.append(whole())
        found[str(keep)] = [all(state) if state[0] == state[-1] else None for state in states]
    (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
def test_what_is_trained_beside_frozen_shards_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    words = (free_port(), str(tmp_path))
    process = multiprocessing.get_context("spawn").Process(target=cut_beside_an_adapter, args=words)
    process.start()
    process.join()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["weights"] == {
        "blocks.0.weight": [True, "torch.bfloat16"], "blocks.1.weight": [False, "torch.float32"],
    }  # fmt: skip
    assert found["same"]
    # Two inputs of 1, times 3 in the first block.
    assert found["gradient"] == [6.0, 6.0, 6.0]


@pytest.mark.slow
def test_weights_stay_gathered_from_an_evaluation_to_its_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process that is started has to find this module.
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    process = multiprocessing.get_context("spawn").Process(target=gathered_weights, args=(free_port(), str(tmp_path)))
    process.start()
    process.join()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"False": [False, False, False, False], "True": [False, True, False, False]}


# -- what the launcher asks for ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "name", "override", "words"),
    [
        ({}, "mixgrpo_flash_guard", "model={train: full, dtype: float16}", "use model.dtype bfloat16"),
        ({"FSDP_VERSION": "1"}, "mixgrpo_flash_guard", "model.train=full", "launch with --fsdp_version 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "mixgrpo_flash_guard", "model.train=full", "--fsdp_offload_params false"),
        (
            {"FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "mixgrpo_flash_guard",
            "model.train=full",
            "set model.gradient_checkpointing",
        ),
        ({}, "mixgrpo_flash_guard", "model={train: full, compile: true}", "use model.compile false"),
        ({}, "text", "model.train=full", "model.train lora"),
        ({}, "mixgrpo_flash_guard", "model={quantize: int8, dtype: bfloat16}", "a base in int8 is not cut"),
        ({}, "diffusion_opd", "model.train=lora", "a LoRA with teachers .* is not cut into shards"),
    ],
)
def test_what_does_not_fit_shards_is_refused(
    environment: dict[str, str], name: str, override: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {**FSDP, **environment}.items():
        monkeypatch.setenv(key, value)
    load_whole_models()  # as every run does first
    recipe = load_recipe(name, [override])
    assert sharding_of(recipe, accelerator(1)) is None
    with pytest.raises(ValueError, match=words):
        sharding_of(recipe, accelerator(2))


def test_mixed_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in FSDP.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match="launch with --mixed_precision no"):
        sharding_of(load_recipe("mixgrpo_flash_guard", ["model.train=full"]), accelerator(2, "bf16"))


def test_a_language_model_with_a_lora_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in FSDP.items():
        monkeypatch.setenv(key, value)
    recipe = load_recipe("text", ["model.train=lora"])
    assert sharding_of(recipe, accelerator(2)) is None
    [note] = notes_on_launch(recipe, accelerator(2))
    assert note.startswith("--use_fsdp changes nothing here: FSDP2 divides denoisers")
    assert notes_on_launch(recipe, accelerator(1)) == []
    assert notes_on_launch(load_recipe("mixgrpo_flash_guard", []), accelerator(2)) == []
    assert notes_on_launch(load_recipe("mixgrpo_flash_guard", ["model.train=full"]), accelerator(2)) == []


def test_options_of_the_launcher_that_change_nothing_are_named() -> None:
    recipe = load_recipe("mixgrpo_flash_guard", [])
    assert notes_on_launch(recipe, accelerator(2)) == []
    notes = notes_on_launch(recipe, accelerator(1, "bf16", 4))
    assert [note.partition(" changes nothing here: ")[0] for note in notes] == [
        "--mixed_precision bf16", "--gradient_accumulation_steps 4",
    ]  # fmt: skip


def accelerator(count: int, precision: str = "no", accumulated: int = 1) -> Any:
    return SimpleNamespace(
        num_processes=count, state=SimpleNamespace(), device=torch.device("cpu"), mixed_precision=precision,
        gradient_accumulation_steps=accumulated,
    )  # fmt: skip
