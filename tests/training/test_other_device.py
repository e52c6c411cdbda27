"""A whole run with every tensor of the model on another device than the CPU's, which is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training import session as session_module
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from tests.simulated import SimulatedDevice, simulated_device
from tests.training.test_text import numbers

pytestmark = pytest.mark.slow
SHORT = "run.iterations=2"
"""The second iteration has all that a later one has: moments of the optimizer, an average, and a window that moved."""


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """The simulated device; a run takes it for the device of its process."""
    with simulated_device() as device:
        monkeypatch.setattr(Accelerator, "device", property(lambda self: device.device))
        yield device


def trained(recipe: str, changes: list[str], folder: Path) -> Session:
    session = Session(load_recipe(recipe, changes), RunFolder.create(folder, ""))
    session.trainer(Silent()).train()
    return session


def require_there(session: Session, device: SimulatedDevice) -> None:
    """Check that the trained weights are on the device, so that the run was what the test means."""
    parameters = session.task.weights.parameters()
    assert parameters
    assert all(parameter.device == device.device for parameter in parameters)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("mixgrpo_flash_guard", ["optimizer.updates=2", "penalties=[{name: kl, weight: 0.1}]", "rollout.store=host"]),
        ("dgpo", ["rollout.chunk=1", "rollout.store=host"]),
        ("fdfo", ["rollout.group=2", "optimizer.updates=2", "rollout.store=host"]),
        ("draft", ["rewards=[{name: proxy}]", "optimizer.updates=2", "rollout.chunk=1", "rollout.store=host"]),
        ("refl", ["rewards=[{name: proxy}]", "sampler.plan.window.start=1", "penalties=[{name: kl, weight: 0.1}]"]),
    ],
)
def test_images(recipe: str, changes: list[str], other: SimulatedDevice, small: list[str], tmp_path: Path) -> None:
    own = [change for change in small if recipe == "mixgrpo_flash_guard" or not change.startswith("sampler.plan")]
    require_there(trained(recipe, [*own, SHORT, *changes], tmp_path / "run"), other)


def test_embeddings_beyond_a_bound_wait_in_host_memory(
    other: SimulatedDevice, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are moved where they are used, and no number of the run changes."""
    words = [*small, SHORT]
    near, found = trained("mixgrpo_flash_guard", words, tmp_path / "near"), []
    monkeypatch.setattr(session_module, "SPARE_EMBEDDINGS", 1)
    far = trained("mixgrpo_flash_guard", words, tmp_path / "far")
    for session, name, device in ((near, "near", other.device), (far, "far", torch.device("cpu"))):
        cache = session.task.policy.denoiser.pipe.encode_prompt.prompt_cache
        tensors = [tensor for entry in cache._entries.values() for tensor in entry if isinstance(tensor, torch.Tensor)]
        assert len(tensors) > 4
        assert all(tensor.device == device for tensor in tensors)
        found.append(numbers(tmp_path / name))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "changes",
    [
        ["optimizer.updates=3", "penalties=[{name: kl, weight: 0.1}]", "objective.entropy={target: 0.5}"],
        ["generation.temperature=0.7", "generation.top_k=5", "generation.top_p=0.9", "model.shared_prefix=false"],
    ],
)
def test_text(changes: list[str], other: SimulatedDevice, small_text: list[str], tmp_path: Path) -> None:
    require_there(trained("text", [*small_text, SHORT, *changes], tmp_path / "run"), other)


def test_a_tensor_left_on_the_cpu_fails(
    other: SimulatedDevice, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowgrpo.pipelines.policy.brought", lambda x, device: x.cpu())
    with pytest.raises(RuntimeError, match="same device"):
        trained("mixgrpo_flash_guard", small, tmp_path / "run")
