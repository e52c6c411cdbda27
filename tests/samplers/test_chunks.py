"""A rollout in chunks against the rollout in one call, with a velocity whose rows are independent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flowgrpo.samplers.kernels import Kernel
from flowgrpo.samplers.plans import Plan, StepPlan, branch_plan, ode_plan, spine_plan, window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.samplers.transitions import Rollout, Transitions, batches_of, chunks_of, join_rollouts

FIVE = shifted_sigmas(5, 3.0)
SDE = Kernel("flow_sde", 0.7)
KEYS = (11, 12, 13)
PLANS = {
    "window": window_plan(FIVE, [1, 2], SDE, samples=2, shared_noise=False),
    "shared": window_plan(FIVE, [2], SDE, samples=2),
    "branch": branch_plan(FIVE, [1, 3], SDE, width=2),
    "spine": spine_plan(FIVE, [1, 2], SDE, branches=2, completions=(1, 0)),
}


def velocity(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
    return 0.6 * x.float() + torch.tensor([float(p) for p in prompts])[:, None] + 0.1 * i


def run(plan: Plan, size: int | None, batch: int = 2, cuts: Sequence[int] = (), **options: object) -> Rollout:
    runner = RolloutRunner(velocity, plan, (3,), batch=batch, cuts=cuts, **options)  # type: ignore[arg-type]
    return join_rollouts([runner.run(KEYS[chunk], chunk.start) for chunk in chunks_of(len(KEYS), size)])


def ancestry(rollout: Rollout, node: int) -> list[tuple[float, ...]]:
    """Facts about a node and the nodes above it, without the node's number."""
    found = []
    while node >= 0:
        columns = (rollout.depth, rollout.prompt, rollout.root, rollout.branch, rollout.stride, rollout.log_prob)
        found.append(tuple(float(column[node]) for column in columns))
        node = int(rollout.parent[node])
    return found


def same_edges(one: Transitions, other: Transitions) -> None:
    assert (one.step, one.coefficients, one.prompt) == (other.step, other.coefficients, other.prompt)
    for name in ("x", "velocity", "state", "x_next", "log_prob"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_ranges_of_prompts() -> None:
    assert list(chunks_of(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(chunks_of(2, 2)) == list(chunks_of(2, 9)) == list(chunks_of(2, None)) == [slice(0, 2)]
    assert list(chunks_of(0, None)) == []


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("size", [1, 2])
def test_chunks_give_the_rollout_of_one_call(name: str, size: int) -> None:
    whole, joined = run(PLANS[name], None), run(PLANS[name], size)
    assert torch.equal(whole.x, joined.x)
    assert whole.evaluations == joined.evaluations
    assert whole.leaf_prompt.tolist() == joined.leaf_prompt.tolist()
    assert len(whole.parent) == len(joined.parent)
    for one, other in zip(whole.leaf.tolist(), joined.leaf.tolist(), strict=True):
        assert ancestry(whole, one) == ancestry(joined, other)
    for one, other in zip(whole.transitions, joined.transitions, strict=True):
        same_edges(one, other)
        for a, b in zip(one.node.tolist(), other.node.tolist(), strict=True):
            assert ancestry(whole, a) == ancestry(joined, b)


def test_batches_are_those_that_were_evaluated() -> None:
    """Three prompts of two states in batches of two: a chunk of two prompts, then one, end where batches end."""
    whole, joined = run(PLANS["window"], None), run(PLANS["window"], 2)
    assert [batch for _, batch in batches_of(joined)] == [batch for _, batch in batches_of(whole)]
    # Batches of four: two prompts of the first chunk, and 2 of the second.
    assert joined.transitions[0].batches == (slice(0, 2), slice(2, 4), slice(4, 6))
    assert run(PLANS["window"], 2, batch=4).transitions[0].batches == (slice(0, 4), slice(4, 6))
    # A part of the rollout that begins with prompt 1 begins a batch, whatever the chunk.
    assert run(PLANS["window"], 2, batch=4, cuts=[1]).transitions[0].batches == (slice(0, 2), slice(2, 4), slice(4, 6))


def test_what_a_guide_added_is_joined() -> None:
    def guide(x: Tensor, v: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        return torch.full_like(x, float(i)) + torch.tensor([float(p) for p in prompts])[:, None]

    joined = run(PLANS["window"], 1, guide=guide)
    assert joined.transitions[0].shift is not None
    # Step 1, prompts 0, 1 and 2, two samples each.
    assert joined.transitions[0].shift[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert torch.equal(joined.x, run(PLANS["window"], None, guide=guide).x)


@pytest.mark.parametrize("name", ["window", "branch", "both", "neighbours"])
def test_a_state_that_chunks_store_once_is_joined_once(name: str) -> None:
    both = StepPlan(SDE, side=1, side_kernel=SDE, trained=True)
    plans = {
        **PLANS,
        "both": Plan(FIVE, (both, both, *[StepPlan()] * 3)),
        "neighbours": ode_plan(FIVE, samples=2, trained=range(4)),
    }
    counts = plans[name].counts()
    for size in (1, 2, None):
        joined = run(plans[name], size)
        held = [joined.x, *(x for t in joined.transitions for x in (t.x, t.velocity, t.x_next))]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
        assert sum(storages.values()) == 4 * 3 * 3 * (counts.stored_states + counts.trained_states)


def test_a_chunk_of_exact_predictions_is_joined_with_others() -> None:
    """The predictions of prompt 0 are exact in 16 bits, and the predictions of the other prompts are not."""

    def own(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        exact = torch.tensor([p == 0 for p in prompts])[:, None]
        return torch.where(exact, x.bfloat16().float(), velocity(x, i, prompts))

    runner = RolloutRunner(own, PLANS["window"], (3,), batch=2)
    chunks = [runner.run(KEYS[k : k + 1], k) for k in range(3)]
    assert [chunk.transitions[0].velocity.dtype for chunk in chunks] == [torch.bfloat16, torch.float32, torch.float32]
    whole, joined = runner.run(KEYS), join_rollouts(chunks)
    for one, other in zip(whole.transitions, joined.transitions, strict=True):
        same_edges(one, other)


def test_chunks_are_let_go_as_they_are_joined() -> None:
    runner = RolloutRunner(velocity, PLANS["window"], (3,))
    chunks = [runner.run(KEYS[:2]), runner.run(KEYS[2:], 2)]
    join_rollouts(chunks)
    assert chunks == []
