"""Parameters that a class does not draw are the same each time, and the drawn ones are as without the context."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.random_weights import random_pipeline
from flowgrpo.pipelines.zeroed import Zeroed


class Padded(nn.Module):
    """A layer, and a token that is left as its memory was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.token = nn.Parameter(torch.empty(7))


@pytest.fixture
def memory_holds_nan() -> Iterator[None]:
    """New memory holds NaN, as it may by chance."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_holds_nan")
def test_what_is_not_drawn_is_zero_and_what_is_drawn_stays_as_it_was() -> None:
    torch.manual_seed(4)
    plain = Padded()
    torch.manual_seed(4)
    with Zeroed(), torch.device("cpu"):
        module = Padded()
    assert plain.token.isnan().all()
    assert torch.equal(module.token, torch.zeros(7))
    assert torch.equal(module.layer.weight, plain.layer.weight)
    assert torch.equal(module.layer.bias, plain.layer.bias)


@pytest.mark.slow
@pytest.mark.usefixtures("memory_holds_nan")
@pytest.mark.parametrize("name", ["LuminaPipeline", "ZImagePipeline"])
def test_a_tiny_instance_has_no_weight_by_chance(name: str) -> None:
    assert all(bool(parameter.isfinite().all()) for parameter in TINY[name].fresh().transformer.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("memory_holds_nan")
def test_a_pipeline_with_random_weights_has_none_by_chance(tmp_path: object) -> None:
    TINY["ZImagePipeline"].fresh().save_pretrained(str(tmp_path))
    pipe = random_pipeline(str(tmp_path), dict(TINY["ZImagePipeline"].call), torch.float32, torch.device("cpu"))
    assert all(bool(parameter.isfinite().all()) for parameter in pipe.transformer.parameters())
