"""The tokens of a sample on two processes: predictions and all gradients are one process's, texts of any length too."""

import json
import multiprocessing
import os
from itertools import count
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from tests.training.ranks import free_port

TEXTS = 7
"""Tokens of a text, which two processes cannot share; the second text of a call has 5 of them."""


def qwen() -> nn.Module:
    torch.manual_seed(0)
    network = diffusers.QwenImageTransformer2DModel(
        in_channels=8, out_channels=2, num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=6,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def inputs(height: int = 4) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(1)
    mask = torch.ones(2, TEXTS, dtype=torch.bool)
    mask[1, 5:] = False
    return {
        "hidden_states": torch.randn(2, 4 * height, 8, generator=drawn).requires_grad_(),
        "encoder_hidden_states": torch.randn(2, TEXTS, 6, generator=drawn),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([0.5, 0.5]),
        "img_shapes": [[(1, height, 4)]] * 2,
        "return_dict": False,
    }


def derivatives(network: nn.Module) -> dict[str, Tensor]:
    """The prediction, its derivative by the state, and its derivatives by the weights."""
    given = inputs()
    (made,) = network(**given)
    (made * torch.randn(made.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    by_weight = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {"made": made.detach(), "state": given["hidden_states"].grad, **by_weight}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, as a share of the largest number of its tensor."""
    assert set(found) == set(expected)
    return max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items())


def split(rank: int, port: int, folder: str) -> None:
    """What one of two processes finds."""
    import torch.distributed as dist

    from flowgrpo.weights.token_split import split_tokens

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    expected, network = derivatives(qwen()), qwen()
    network.enable_gradient_checkpointing()  # type: ignore[operator]
    split_tokens({"transformer": network}, 2)
    with torch.no_grad():
        network(**inputs())
    found = derivatives(network)
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(found[name])
    said = []
    with torch.no_grad():
        try:
            network(**inputs() | {"hidden_states": torch.zeros(2, 15, 8), "img_shapes": [[(1, 5, 3)]] * 2})
        except ValueError as error:
            said.append(str(error))
        other = qwen()
        split_tokens({"transformer": other}, 2)
        calls = count(1)
        other.norm_out.register_forward_hook(lambda module, given, made: made * next(calls))
        try:
            other(**inputs())
        except ValueError as error:
            said.append(str(error))
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"worst": worst(found, expected), "said": said}))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_predict_and_differentiate_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The processes that are started have to find this module.
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    context, port = multiprocessing.get_context("spawn"), free_port()
    started = [context.Process(target=split, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["worst"] < 1e-5
        divides, differs = found["said"]
        assert "do not divide into so many equal parts" in divides
        assert "predicts something else than whole" in differs
