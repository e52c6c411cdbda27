"""AdamW with averages in 8 bits: near AdamW's steps, a quarter of the bytes, and resuming to the bit."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_image_recipe, load_recipe
from flowgrpo.estimate.memory import moments_of
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.folder.checkpoint import WEIGHTS
from flowgrpo.training.folder.forking import fork
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.recipe_launches import check_shards
from flowgrpo.training.session import Session, start
from flowgrpo.training.updating import Optimizer

EIGHT = "optimizer.type=adamw_8bit"


class Weights:
    """A large matrix, and a bias that is too small for 8 bits."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        self._parameters = [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in ((96, 64), (7,))]

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def write(self) -> None: ...


def optimizer(*words: str) -> Optimizer:
    recipe = load_recipe("default", ["optimizer.learning_rate=0.01", "optimizer.max_grad_norm=1e6", *words])
    return Optimizer(recipe, Weights(), Processes.of_this_run())  # type: ignore[arg-type]


def step(one: Optimizer, steps: range) -> list[torch.Tensor]:
    """The weights after steps whose gradients have a direction and noise."""
    for k in steps:
        drawn = torch.Generator().manual_seed(100 + k)
        for parameter in one.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=drawn) + 1
        one.step()
    return [parameter.detach().clone() for parameter in one.parameters]


def test_the_steps_are_near_the_steps_of_adamw() -> None:
    pytest.importorskip("bitsandbytes")
    began = Weights().parameters()
    (whole, small), (packed, same) = step(optimizer(), range(20)), step(optimizer(EIGHT), range(20))
    assert (whole - packed).norm() < 0.05 * (whole - began[0]).norm()
    assert not torch.equal(whole, packed)
    assert torch.allclose(small, same, atol=1e-6)


def test_a_saved_state_goes_on_to_the_bit() -> None:
    pytest.importorskip("bitsandbytes")
    whole, one, other = optimizer(EIGHT), optimizer(EIGHT), optimizer(EIGHT)
    expected = step(whole, range(6))
    moved = step(one, range(3))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    for parameter, value in zip(other.parameters, moved, strict=True):
        parameter.data.copy_(value)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert all(map(torch.equal, step(other, range(3, 6)), expected))


def test_the_bytes_of_the_averages() -> None:
    pytest.importorskip("bitsandbytes")
    one = optimizer(EIGHT)
    step(one, range(1))
    state = one._inner.state[one.parameters[0]]
    held = sum(state[name].nbytes for name in ("state1", "state2", "absmax1", "absmax2"))
    assert held == moments_of(one.recipe, 96 * 64) == 2 * (96 * 64 + 4 * 24)
    assert moments_of(optimizer().recipe, 96 * 64) == 8 * 96 * 64


def test_a_missing_library_is_told_before_the_model_loads(
    small_text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    said = "optimizer.type adamw_8bit needs bitsandbytes .* pip install .* or leave optimizer.type out"
    with pytest.raises(ValueError, match=said):
        start(load_recipe("text", [*small_text, EIGHT]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_averages_in_8_bits_are_not_cut() -> None:
    with pytest.raises(ValueError, match=r"the averages of optimizer\.type adamw_8bit are not cut into shards"):
        check_shards(load_image_recipe("default", [EIGHT]))
    check_shards(load_image_recipe("flow_grpo", [EIGHT, "model.train=lora", "model.dtype=bfloat16"]))


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_no_fork_changes_the_averages(small_text: list[str], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = [*small_text, EIGHT, "model.train=full", "optimizer.schedule=constant", "optimizer.learning_rate=1e-3"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trainer = start(load_recipe("text", words), whole).trainer(Silent())
    trainer.train()
    assert any(entry["state1"].dtype == torch.uint8 for entry in trainer.optimizer._inner.state.values())
    start(load_recipe("text", [*words, "run.iterations=2"]), broken).trainer(Silent()).train()
    shutil.rmtree(broken / "model")
    again = Session(load_recipe("text", words), RunFolder(broken)).trainer(Silent())
    again.resume()
    again.train()
    one, two = (load_file(run / "checkpoints" / "iter-000004" / WEIGHTS) for run in (whole, broken))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(ValueError, match=r"has averages of optimizer\.type adamw_8bit; leave optimizer\.type as it is"):
        fork(RunFolder(whole), whole / "checkpoints" / "iter-000004", tmp_path / "other", ["optimizer.type=adamw"])
