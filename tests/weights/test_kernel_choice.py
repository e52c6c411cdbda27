"""Which kernels a process may use: cuDNN's attention is ruled out, and a recipe can ask for sums in a fixed order."""

import os
from collections.abc import Iterator

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.distributed.processes import launched
from flowgrpo.training.session import Session
from flowgrpo.weights.kernel_choice import in_a_fixed_order


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the settings of the process back."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cuda, filled = torch.backends.cuda, torch.utils.deterministic.fill_uninitialized_memory
    fused = cuda.mem_efficient_sdp_enabled()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    cuda.enable_mem_efficient_sdp(fused)


def test_whoever_asks_for_a_device_has_no_attention_by_cudnn() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    launched()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_fixed_order() -> None:
    in_a_fixed_order()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_a_recipe_asks_for_it_and_numbers_on_a_cpu_stay(small_text: list[str], asked: bool) -> None:
    recipe = load_recipe("text", [*small_text, f"run.fixed_order={str(asked).lower()}"])
    session = Session(recipe)
    assert torch.are_deterministic_algorithms_enabled() == asked
    assert session.task.device.type == "cpu" or torch.cuda.is_available()
