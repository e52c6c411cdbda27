"""Runs whose parts and states wait in host memory give the same numbers as runs in which nothing waits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.pipelines import placement as offload
from flowgrpo.pipelines import policy
from flowgrpo.training.session import start
from flowgrpo.training.trainer import Trainer

MAY = {"__getitem__", "__len__", "__get__", "size", "dim", "is_pinned", "is_floating_point", "__repr__"}


class Waiting(torch.Tensor):
    """A tensor that may be cut, joined and brought to the device of the model, as one in host memory may be."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch._C.DisableTorchFunctionSubclass()
        with plain:
            found = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to:
            return found.as_subclass(torch.Tensor)
        if func is torch.cat or func.__name__ == "__getitem__":
            return found.as_subclass(cls)
        if func.__name__ in MAY:
            return found
        raise AssertionError(f"{func.__name__} was computed on a state that waits in host memory")


def wait(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().as_subclass(Waiting)


def train(recipe: str, overrides: list[str], folder: Path) -> Trainer:
    trainer = start(load_recipe(recipe, overrides), folder).trainer(Silent())
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("mixgrpo_flash_guard", ["optimizer.updates=2", "penalties.kl.weight=0.01"]),
        ("mixgrpo_flash_guard", ["rollout.chunk=1"]),
        ("branchgrpo", ["rollout.group=16"]),
        ("euphonium", ["critic.warmup=1", "sampler.plan.window={name: random, size: 1, interval: 1, stop: 3}"]),
        ("neighbor_grpo", ["sampler.plan.window.size=2"]),
        ("diffusion_nft", ["optimizer.updates=2"]),
        ("ac_flow", ["critic.warmup=1", "sampler.plan.window={name: random, size: 1, interval: 1, stop: 3}"]),
    ],
)
def test_states_that_wait_are_brought_before_anything_is_computed_with_them(
    name: str, more: list[str], small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [entry for entry in small if name == "mixgrpo_flash_guard" or not entry.startswith("sampler.plan.window")]
    given += ["run={iterations: 2, checkpoint_every: 2, sample_every: 1, seed: 0}", *more]
    train(name, [*given, "rollout.store=device"], tmp_path / "device")
    stored: list[int] = []
    monkeypatch.setattr(policy, "to_host", lambda x: stored.append(len(x)) or wait(x))
    train(name, [*given, "rollout.store=host"], tmp_path / "host")
    assert stored
    assert contents(tmp_path / "device") == contents(tmp_path / "host")


def test_a_state_that_waits_cannot_be_computed_with() -> None:
    x = wait(torch.ones(2, 3))
    assert type(x[:1]) is type(torch.cat([x, x])) is Waiting
    assert x.shape == (2, 3)
    assert type(x.to("cpu")) is torch.Tensor
    with pytest.raises(AssertionError, match="waits in host memory"):
        _ = x + 1


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What was fetched and sent back since the last call, by the name of its class."""
    found: list[str] = []
    monkeypatch.setattr(offload, "move", lambda part, device: found.append(type(part).__name__))

    def since() -> list[str]:
        seen = found[:]
        found.clear()
        return seen

    return since


def test_text_encoders_are_fetched_once_before_a_rollout_and_the_vae_once_to_decode(
    small: list[str], tmp_path: Path, watched: Callable[[], list[str]]
) -> None:
    recipe = load_recipe(
        "mixgrpo_flash_guard", [*small, "model.offload=[vae, text_encoders]", "rollout.decode_batch=1"]
    )
    trainer = start(recipe, tmp_path / "run").trainer(Silent())
    encoders = [type(part).__name__ for part in _text_encoders(trainer)]
    watched()
    trainer.collect(0)
    # Two prompts, three images each, decoded one by one.
    assert watched() == [*encoders, *encoders, "AutoencoderKL", "AutoencoderKL"]
    trainer.collect(0)
    assert watched() == ["AutoencoderKL", "AutoencoderKL"]


def test_a_run_with_parts_that_wait_is_the_same_run(small: list[str], tmp_path: Path) -> None:
    train("mixgrpo_flash_guard", small, tmp_path / "there")
    train("mixgrpo_flash_guard", [*small, "model.offload=[vae, text_encoders]"], tmp_path / "waiting")
    assert contents(tmp_path / "there") == contents(tmp_path / "waiting")


def test_released_text_encoders_do_not_wait() -> None:
    with pytest.raises(ValueError, match="write release_text_encoders: false, or leave text_encoders out of offload"):
        load_recipe("mixgrpo_flash_guard", ["model.offload=[text_encoders]", "model.release_text_encoders=true"])


def _text_encoders(trainer: Trainer) -> list[torch.nn.Module]:
    pipe = trainer.task.policy.denoiser.pipe  # type: ignore[attr-defined]
    parts = {name: part for name, part in pipe.components.items() if name.startswith("text_encoder")}
    return [part for part in parts.values() if part is not None]
