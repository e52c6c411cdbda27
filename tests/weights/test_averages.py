"""The moving average: its recursion, its application and its resumption."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.weights.trained import Ema, TrainedWeights
from tests.pipelines.trained import SPEC, output, perturb
from tests.tiny_pipelines import TINY

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("every", "decay"), [(1, 0.3), (3, 0.9)])
def test_ema_follows_its_recursion(every: int, decay: float) -> None:
    weights = TrainedWeights.lora(TINY["sana"](), SPEC, seed=0)
    ema = Ema(weights, decay=decay, every=every)
    name = next(iter(weights.named_parameters()))
    expected = weights.state_dict()[name].double()
    updates = []
    for s in range(8):
        perturb(weights, seed=s)
        updates.append(ema.step())
        if (s + 1) % every == 0:
            d = min((1 + s) / (10 + s), decay) if s else 0.0
            expected = d * expected + (1 - d) * weights.state_dict()[name].double()
    assert updates == [(s + 1) % every == 0 for s in range(8)]
    state = ema.state_dict()
    assert state["steps"] == 8
    torch.testing.assert_close(state["average"][name].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_share_rises_from_the_first_one_after_some_steps() -> None:
    weights = TrainedWeights.lora(TINY["sana"](), SPEC, seed=0)
    ema = Ema(weights, decay=0.5, every=1, rise=0.1, first=0.2, after=2)
    assert [ema._decay_after(s) for s in range(7)] == pytest.approx([0.2, 0.2, 0.2, 0.3, 0.4, 0.5, 0.5])
    for wrong in ({"first": 1.0}, {"first": -0.1}, {"after": -1}):
        with pytest.raises(ValueError, match="use a first in"):
            Ema(weights, rise=0.1, **wrong)


def test_ema_is_applied_and_taken_back_bitwise() -> None:
    weights = TrainedWeights.lora(TINY["sana"](), SPEC, seed=0)
    ema = Ema(weights, every=1)
    for s in range(3):
        perturb(weights, seed=s)
        ema.step()
    live, average, changed = weights.state_dict(), ema.state_dict()["average"], output(weights.pipe, "sana")
    with ema.applied():
        assert all(torch.equal(t, average[name]) for name, t in weights.state_dict().items())
        assert not torch.equal(output(weights.pipe, "sana"), changed)
        with pytest.raises(ValueError, match="already active"), ema.applied():
            pass
        with pytest.raises(ValueError, match="within"):
            ema.step()
        assert all(torch.equal(t, average[name]) for name, t in ema.state_dict()["average"].items())
    with pytest.raises(RuntimeError, match="inside"), ema.applied():
        raise RuntimeError("inside")
    assert all(torch.equal(t, live[name]) for name, t in weights.state_dict().items())
    assert torch.equal(output(weights.pipe, "sana"), changed)


def test_ema_resumes_exactly_between_two_updates() -> None:
    def trained(ema: Ema, weights: TrainedWeights, steps: range) -> None:
        for s in steps:
            perturb(weights, seed=s)
            ema.step()

    weights = TrainedWeights.lora(TINY["sana"](), SPEC, seed=0)
    ema = Ema(weights, every=3)
    trained(ema, weights, range(4))
    kept, kept_average = weights.state_dict(), ema.state_dict()
    trained(ema, weights, range(4, 9))

    resumed_weights = TrainedWeights.lora(TINY["sana"](), SPEC, seed=1)
    resumed = Ema(resumed_weights, every=3)
    resumed_weights.load_state_dict(kept)
    resumed.load_state_dict(kept_average)
    trained(resumed, resumed_weights, range(4, 9))
    average, again = ema.state_dict(), resumed.state_dict()
    assert again["steps"] == average["steps"] == 9
    assert all(torch.equal(again["average"][name], t) for name, t in average["average"].items())

    first = next(iter(kept_average["average"]))
    del kept_average["average"][first]
    with pytest.raises(ValueError, match=first):
        resumed.load_state_dict(kept_average)
