"""How many masks a step reveals is drawn from a learned distribution; numbers and gradients by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.unmasking_schedules import count_log_probs, option_counts
from flowgrpo.samplers.plans import window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.transitions import Rollout
from flowgrpo.samplers.unmasking import MaskMoves, random
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.extensions import Pacing
from tests.samplers.test_unmasking import KERNEL, LENGTH, MASK, Model
from tests.training.test_processes import Threads

OFFSETS = torch.tensor([-1, 0, 1])


def test_numbers_of_masks_by_hand() -> None:
    """Four positions in two steps: the fixed schedule reveals 2 and leaves 2. Each step needs at least one mask."""
    assert option_counts(torch.tensor([4, 3]), 2, 1, OFFSETS).tolist() == [[1, 2, 3], [1, 1, 2]]
    assert option_counts(torch.tensor([3, 2, 1]), 0, 0, OFFSETS).tolist() == [[3] * 3, [2] * 3, [1] * 3]
    assert option_counts(torch.tensor([8]), 5, 2, 4 * OFFSETS).tolist() == [[1, 3, 6]]


def test_the_probability_of_a_number_is_that_of_all_its_options() -> None:
    """Probabilities 1/6, 2/6 and 3/6. Where the first two reveal one mask, their sum has the gradient of its log."""
    logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log().requires_grad_()
    options = torch.tensor([[1, 2, 3], [1, 1, 2], [3, 3, 3]])
    found = count_log_probs(logits, options, torch.tensor([3, 1, 3]))
    assert found.exp().tolist() == pytest.approx([1 / 2, 1 / 2, 1])
    assert torch.autograd.grad(found[1], logits, retain_graph=True)[0].tolist() == pytest.approx([1 / 6, 2 / 6, -3 / 6])
    assert torch.autograd.grad(found[2], logits)[0].tolist() == pytest.approx([0, 0, 0])


def paced(processes: Processes | None = None, rate: float = 1.0) -> tuple[Pacing, MaskMoves]:
    recipe = load_recipe("co_grpo", ["data.heldout=null"])
    pacing, moves = Pacing(rate=rate, recipe=recipe), MaskMoves(LENGTH, MASK, random)
    task: Any = SimpleNamespace(policy=SimpleNamespace(moves=moves))
    pacing.begin(task, processes or Processes(), None)  # type: ignore[arg-type]
    return pacing, moves


def rolled(pacing: Pacing, moves: MaskMoves, samples: int, keys: tuple[int, ...] = (3,)) -> Rollout:
    plan = window_plan(pacing.levels, range(2), KERNEL, samples=samples, stochastic=range(2))
    return RolloutRunner(Model(), plan, moves=moves, batch=10_000).run(keys)


def first_counts(rollout: Rollout) -> list[int]:
    return (rollout.transitions[0].x_next != MASK).sum(1).tolist()


def learn(pacing: Pacing, rollout: Rollout, advantages: torch.Tensor) -> None:
    batch: Any = SimpleNamespace(experience=SimpleNamespace(rollout=rollout))
    assert pacing.advantages_made(advantages, None, batch) is advantages  # type: ignore[arg-type]
    pacing.update_done(None, {})  # type: ignore[arg-type]


def test_rollouts_draw_from_the_distribution_and_end_without_masks() -> None:
    pacing, moves = paced()
    pacing.load_state_dict({"logits": torch.tensor([[0.2, 0.5, 0.3], [1, 1, 1]], dtype=torch.float64).log()})
    rollout = rolled(pacing, moves, 2000)
    counts = first_counts(rollout)
    shares = [counts.count(number) / 2000 for number in (1, 2, 3)]
    assert shares == pytest.approx([0.2, 0.5, 0.3], abs=0.03)
    assert not bool((rollout.x == MASK).any())
    for taken in rollout.transitions:
        mask = (taken.x[taken.state] == MASK) & (taken.x_next != MASK)
        assert bool((mask == (taken.token_log_prob != 0)).all())
    # An edge depends on its own key alone.
    alone = rolled(pacing, moves, 2000, (9, 3))
    assert first_counts(alone)[2000:] == counts
    moves.pace = None
    assert set(first_counts(rolled(pacing, moves, 8))) == {2}


def test_the_logits_move_along_the_gradient_by_hand() -> None:
    """At uniform logits, an edge of option k adds A (1[k] - 1/3) / (edges of both steps). The last step adds 0."""
    pacing, moves = paced(rate=0.5)
    rollout = rolled(pacing, moves, 6)
    advantages = torch.linspace(-1, 2, len(rollout.parent))
    expected = torch.zeros(3, dtype=torch.float64)
    for count, node in zip(first_counts(rollout), rollout.transitions[0].node.tolist()):
        expected += advantages[node].double() * (torch.eye(3, dtype=torch.float64)[count - 1] - 1 / 3)
    learn(pacing, rollout, advantages)
    assert torch.allclose(pacing.logits[0], 0.5 * expected / 12)
    assert pacing.logits[1].tolist() == pytest.approx([0, 0, 0])


def test_a_schedule_that_is_better_is_learned_and_kept() -> None:
    pacing, moves = paced(rate=4.0)
    for key in range(20):
        rollout = rolled(pacing, moves, 16, (key,))
        reward = torch.zeros(len(rollout.parent))
        reward[rollout.transitions[0].node] = -torch.tensor(first_counts(rollout)).float()
        learn(pacing, rollout, reward - reward[rollout.transitions[0].node].mean())
    assert float(pacing.logits[0].softmax(0)[0]) > 0.9
    assert pacing.record()["pace/early"] < -0.8
    assert pacing.record()["pace/late"] == pytest.approx(0, abs=1e-12)
    again, _ = paced()
    again.load_state_dict(pacing.state_dict())
    assert again.record() == pacing.record()


def test_all_processes_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(mine: Processes) -> list[list[float]]:
        pacing, moves = paced(mine)
        keys = tuple((5, 6)[k] for k in mine.share(2))
        rollout = rolled(pacing, moves, 4, keys)
        learn(pacing, rollout, (rollout.states != MASK).sum(1).float())  # type: ignore[union-attr]
        return [[round(value, 12) for value in row] for row in pacing.logits.tolist()]

    alone = Threads(1, monkeypatch).run(work)[0]
    assert max(map(abs, alone[0])) > 0.01
    assert Threads(2, monkeypatch).run(work) == [alone, alone]


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="only a masked model has masks"):
        load_recipe("text", ["extensions=[pacing]"])
