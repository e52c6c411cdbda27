"""Steps of masked diffusion in the executor of every rollout: densities, orders, trees and shared prefixes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowgrpo.core.addressing import address
from flowgrpo.samplers import unmasking
from flowgrpo.samplers.plan_parts import Setting, window
from flowgrpo.samplers.plans import Plan, StepPlan, branch_plan, spine_plan, window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.transitions import Rollout, join_rollouts, replay
from flowgrpo.samplers.unmasking import (
    MaskMoves,
    blocks,
    confidence,
    cosine,
    linear,
    mask_levels,
    part,
    random,
    reveal_log_probs,
    unmask_kernel,
    with_part,
    without_mask,
)
from flowgrpo.samplers.windows import progressive
from tests.allocation import most_bytes

VOCABULARY, MASK, LENGTH = 4, 3, 4
KERNEL = unmask_kernel(1.0)


class Model:
    """Logits that depend on the whole state, the position and the prompt; counts the states."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(LENGTH, VOCABULARY, LENGTH, VOCABULARY, generator=generator)
        self.states = 0

    def __call__(self, x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        self.states += len(x)
        # [N, L, V]: the sum of what each token at each place says about every other place.
        known = torch.nn.functional.one_hot(x, VOCABULARY).float()
        return torch.einsum("nlv,lvkw->nkw", known, self.table) + torch.tensor(list(prompts))[:, None, None] * 0.1


def run(plan: Plan, keys: Sequence[int] = (1, 2), order=random, model: Model | None = None, batch: int = 64) -> Rollout:
    moves = MaskMoves(LENGTH, MASK, order)
    return RolloutRunner(model or Model(), plan, moves=moves, batch=batch).run(keys)


def chains(samples: int, trained: Sequence[int] = range(4)) -> Plan:
    return window_plan(mask_levels(LENGTH, 4), trained, KERNEL, samples=samples, stochastic=range(4))


@pytest.mark.parametrize("tokens", [1, 3, 8, 64])
@pytest.mark.parametrize("schedule", [linear, cosine])
def test_schedules_reveal_every_token_once_and_one_at_least_in_a_step(schedule, tokens: int) -> None:
    for steps in range(1, tokens + 1):
        counts = schedule(tokens, steps)
        assert len(counts) == steps
        assert sum(counts) == tokens
        assert min(counts) >= 1


def test_schedules_by_hand() -> None:
    assert linear(8, 3) == [3, 3, 2]
    # 64 cos(pi k / 8) is 59.1, 45.3, 24.5 and 0.
    assert cosine(64, 4) == [5, 14, 21, 24]
    assert mask_levels(8, 3) == (1.0, 0.625, 0.25, 0.0)
    with pytest.raises(ValueError, match="use 1 to 4 steps"):
        mask_levels(4, 5)


def test_orders_by_hand() -> None:
    chance = torch.tensor([[0.1, 0.7, 0.4, 0.2]]).log()
    uniform = torch.tensor([[0.9, 0.2, 0.5, 0.3]], dtype=torch.float64)

    def ranked(priority: Tensor) -> list[int]:
        return priority.sort(descending=True, stable=True).indices[0].tolist()

    assert ranked(confidence(chance, uniform)) == [1, 2, 3, 0]
    assert ranked(random(chance, uniform)) == [0, 2, 3, 1]
    assert ranked(random(chance, None)) == [1, 2, 3, 0]
    assert ranked(blocks(chance, uniform, size=1)) == [0, 1, 2, 3]
    assert ranked(blocks(chance, uniform, size=2)) == [1, 0, 2, 3]
    # The Gumbel noise of 0.9 is 2.25, of 0.5 is 0.37: the first place wins by noise, and not without.
    assert ranked(confidence(chance, uniform, gumbel=5.0))[0] == 0


@pytest.mark.parametrize("block", [0, 63, 2047])
@pytest.mark.parametrize(
    "tokens", [[0.9991, 0.9995, 0.9999, 0.9998], [1e-6, 2e-6, 3.5e-6, 3e-6], [1e-4, 1.01e-4, 1.03e-4, 1.02e-4]]
)
def test_blocks_tell_apart_tokens_that_are_almost_equally_likely(tokens: list[float], block: int) -> None:
    chance = torch.full((1, 4 * 2048), -torch.inf)
    chance[0, 4 * block : 4 * block + 4] = torch.tensor(tokens).log()
    found = blocks(chance, None, size=4)[0, 4 * block : 4 * block + 4]
    assert found.argsort(descending=True).tolist() == [2, 3, 1, 0]


def test_orders_put_tokens_above_a_threshold_before_all_others() -> None:
    chance = torch.tensor([[0.0, 0.95, 0.7, 0.92], [0.0, 0.0, 0.4, 0.97]]).log()
    found = confidence(chance, None, threshold=0.9)
    assert (found == torch.inf).tolist() == [[False, True, False, True], [False, False, False, True]]
    assert torch.equal(found[found != torch.inf], chance[found != torch.inf])
    # In blocks, only the first block that has masks counts: places 0 and 1 of the first row, 2 and 3 of the second.
    found = blocks(chance, None, size=2, threshold=0.9)
    assert (found == torch.inf).tolist() == [[False, True, False, False], [False, False, False, True]]
    uniform = torch.full((2, 4), 0.5, dtype=torch.float64)
    noisy = confidence(chance, uniform, gumbel=100.0, threshold=0.9)
    assert (noisy == torch.inf).sum() == 3


def sure(chances: Sequence[float]) -> Tensor:
    """[L, 4] logits under which token 1 has these chances, token 0 the rest, and token 2 and the mask none."""
    chance = torch.tensor(list(chances))
    return torch.stack([(1 - chance).log(), chance.log(), *[torch.full_like(chance, -50.0)] * 2], dim=1)


def test_a_state_ahead_of_its_level_reveals_one_token_a_step_and_is_finished_before_the_last_step() -> None:
    logits, calls = sure([0.6, 0.95, 0.7, 0.99, 0.55, 0.8]), list[int]()
    moves = MaskMoves(6, MASK, partial(confidence, threshold=0.9))

    def model(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        calls.append(int(moves.going(x).sum()))
        return logits.expand(len(x), -1, -1)

    plan = Plan(mask_levels(6, 6), (StepPlan(),) * 6)
    rollout = RolloutRunner(model, plan, moves=moves).run([1])
    assert rollout.states is not None
    hidden = [row.nonzero().flatten().tolist() for row in rollout.states == MASK]
    assert hidden == [[0, 1, 2, 3, 4, 5], [0, 2, 4, 5], [0, 2, 4], [0, 4], [4], [], []]
    assert calls == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("order", [confidence, partial(blocks, size=2)])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_threshold_leaves_no_mask_and_finishes_no_state_later(threshold: float, order, steps: int) -> None:
    plan = window_plan(mask_levels(LENGTH, steps), range(steps), KERNEL, samples=8, stochastic=range(steps))
    rollout = run(plan, keys=[1], order=partial(order, threshold=threshold))
    assert not bool((rollout.x == MASK).any())
    for transitions in rollout.transitions:
        before, after = transitions.x[transitions.state] == MASK, transitions.x_next == MASK
        most = round(plan.sigmas[transitions.step + 1] * LENGTH)
        assert int(after.sum(1).max()) <= most
        assert bool((before.sum(1) > after.sum(1))[before.any(1)].all())
        assert bool((transitions.log_prob == 0)[~before.any(1)].all())


@pytest.mark.parametrize("block", [2, 4])
def test_a_threshold_reveals_tokens_of_the_open_block_alone(block: int) -> None:
    rollout = in_blocks(chains(12), block, partial(confidence, threshold=0.4))[0]
    assert rollout.states is not None
    counts = (rollout.states == MASK).view(-1, LENGTH // block, block).sum(2)
    counts = counts[counts.any(1)]
    open_at = (counts > 0).int().argmax(1)
    for row, place in zip(counts.tolist(), open_at.tolist()):
        assert row[place + 1 :] == [block] * (len(row) - place - 1)
    # Some states are ahead of the schedule of one token a step.
    depth = rollout.depth
    assert bool(((rollout.states == MASK).sum(1) < LENGTH - depth).any())


def test_what_follows_the_end_of_a_text_is_not_written() -> None:
    """Token 1 ends a text: by the order of the chances it is at place 1 first, and the text is whole with place 0."""
    logits = sure([0.2, 0.9, 0.8, 0.3])
    moves = MaskMoves(4, MASK, confidence, ends=(1,))
    plan = Plan(mask_levels(4, 4), (StepPlan(),) * 4)
    rollout = RolloutRunner(lambda x, i, prompts: logits.expand(len(x), -1, -1), plan, moves=moves).run([1])
    assert rollout.states is not None
    assert rollout.states.tolist()[1:] == [[3, 1, 3, 3], [0, 1, 3, 3], [0, 1, 3, 3], [0, 1, 3, 3]]
    assert moves.going(rollout.states).tolist() == [True, True, False, False, False]
    assert moves.counted(rollout.x).tolist() == [[True, True, False, False]]
    assert MaskMoves(4, MASK, confidence).counted(rollout.x).all()


def test_the_tokens_of_a_random_order_have_the_density_that_is_recorded() -> None:
    """Two places, two tokens: the chances of the four rows by enumeration, over both orders, against the sampler."""
    table = torch.tensor([[0.3, -0.6], [1.1, 0.2]])

    def model(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        # The logits of a place depend on the token at the other place.
        other = x.flip(1)
        logits = torch.where(
            (other == 2)[..., None], table[0], torch.where((other == 1)[..., None], table[1], -table[1])
        )
        return torch.cat([logits, torch.zeros(*x.shape, 1)], dim=-1)

    def chance(first: int, row: tuple[int, int]) -> float:
        state = torch.tensor([[2, 2]])
        total = 0.0
        for place in (first, 1 - first):
            total += float(model(state, 0, [0])[0, place, :2].log_softmax(-1)[row[place]])
            state[0, place] = row[place]
        return math.exp(total)

    plan = window_plan(mask_levels(2, 2), range(2), KERNEL, samples=4000)
    rollout = RolloutRunner(model, plan, moves=MaskMoves(2, 2, random), batch=10_000).run([7])
    counted = Counter(map(tuple, rollout.x.tolist()))
    for row in itertools.product((0, 1), repeat=2):
        wanted = (chance(0, row) + chance(1, row)) / 2
        assert counted[row] / 4000 == pytest.approx(wanted, abs=4 * math.sqrt(wanted / 4000))
    # The record of a chain is the log-prob of its own order.
    parents, leaf = rollout.parent, rollout.leaf
    found = (rollout.log_prob[leaf] + rollout.log_prob[parents[leaf]]).exp()
    for row, value in zip(map(tuple, rollout.x.tolist()), found.tolist()):
        assert min(abs(value - chance(first, row)) for first in (0, 1)) < 1e-6


def test_every_step_reveals_its_share_and_changes_nothing_else() -> None:
    rollout = run(chains(6))
    for transitions in rollout.transitions:
        before, after = transitions.x[transitions.state], transitions.x_next
        assert ((before == MASK).sum(1) - (after == MASK).sum(1)).tolist() == [1] * len(after)
        assert torch.equal(torch.where(before == MASK, after, before), after)
        assert transitions.token_log_prob is not None
        assert torch.equal(transitions.token_log_prob != 0, (before == MASK) & (after != MASK))
        assert torch.equal(transitions.token_log_prob.sum(1), transitions.log_prob)
    assert not bool((rollout.x == MASK).any())


def test_the_last_step_is_trained_too_and_windows_reach_it() -> None:
    setting = Setting(mask_levels(LENGTH, 4), KERNEL, group=3)
    assert window(setting, 0, window=lambda iteration, steps, seed: range(steps - 1)).trained_steps == (0, 1, 2, 3)
    assert window(setting, 0, window=partial(progressive, size=4)).trained_steps == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="does not fit in 4 steps"):
        window(setting, 0, window=partial(progressive, size=5))


def test_until_the_weights_move_every_log_prob_is_the_same_to_the_last_bit() -> None:
    model = Model()
    rollout = run(chains(5), model=model, batch=3)
    seen = 0
    for transitions in rollout.transitions:
        for batch in transitions.batches:
            replayed = replay(model, transitions, batch)
            after, rows = transitions.x_next[replayed.edges], replayed.rows()
            before = transitions.x[batch][rows]
            logits = without_mask(replayed.velocity, MASK)[rows]
            found = reveal_log_probs(logits, after, (before == MASK) & (after != MASK), 1.0)
            assert transitions.token_log_prob is not None
            assert torch.equal(found, transitions.token_log_prob[replayed.edges])
            seen += len(after)
    assert seen == 2 * 5 * 4


@pytest.mark.parametrize("split", [0, 1, 2, 3])
def test_a_tree_shares_every_evaluation_before_its_split(split: int) -> None:
    model = Model()
    levels = mask_levels(LENGTH, 4)
    plan = branch_plan(levels, [split], KERNEL, width=3, stochastic=[split])
    rollout = run(plan, keys=[1], model=model)
    assert model.states == rollout.evaluations == plan.counts().evaluations == (split + 1) + 3 * (3 - split)


def test_a_deterministic_step_has_one_child_and_takes_the_likeliest_tokens() -> None:
    model = Model()
    plan = Plan(mask_levels(LENGTH, 2), (StepPlan(), StepPlan()))
    rollout = run(plan, keys=[1], order=confidence, model=model)
    state = torch.full((1, LENGTH), MASK)
    for i in range(2):
        log_p = without_mask(model(state, i, [0]), MASK).log_softmax(-1)
        best, token = log_p.max(-1)
        for place in best.masked_fill(state != MASK, -torch.inf)[0].topk(2).indices.tolist():
            state[0, place] = token[0, place]
    assert torch.equal(rollout.x, state)


def test_side_branches_skip_levels() -> None:
    """TempFlow's branches, finished in one step: the step reveals all that is left."""
    plan = spine_plan(mask_levels(LENGTH, 4), [1], KERNEL, branches=2, completions=(0,))
    rollout = run(plan, keys=[1])
    assert rollout.x.shape == (2, LENGTH)
    assert not bool((rollout.x == MASK).any())


def test_a_sample_depends_on_its_key_alone() -> None:
    both, alone = run(chains(3), keys=[8, 9]), run(chains(3), keys=[9])
    # The number of the prompt is part of the model's input, so the prompts get the same number here.
    shifted = RolloutRunner(Model(), chains(3), moves=MaskMoves(LENGTH, MASK, random)).run([9], first=1)
    assert torch.equal(both.x[3:], shifted.x)
    assert len(alone.x) == 3
    other = run(chains(3), keys=[10])
    assert not torch.equal(other.x, alone.x)


def test_chunks_join_with_the_log_probs_of_their_tokens() -> None:
    whole = run(chains(3), keys=[8, 9])
    parts = [
        RolloutRunner(Model(), chains(3), moves=MaskMoves(LENGTH, MASK, random)).run([key], first=number)
        for number, key in enumerate((8, 9))
    ]
    joint = join_rollouts(parts)
    assert torch.equal(joint.x, whole.x)
    for one, other in zip(joint.transitions, whole.transitions):
        assert one.token_log_prob is not None
        assert other.token_log_prob is not None
        assert torch.equal(one.token_log_prob, other.token_log_prob)


def test_the_temperature_flattens_the_draw() -> None:
    """At a high temperature the recorded chance of every token is about a third, at a low temperature about 1."""
    for temperature, wanted in ((1e4, math.log(1 / 3)), (1e-3, 0.0)):
        plan = window_plan(mask_levels(LENGTH, 1), [0], unmask_kernel(temperature), samples=4)
        found = run(plan, keys=[address(3)])
        assert torch.allclose(found.transitions[0].token_log_prob, torch.tensor(wanted), atol=2e-3)


def drawn_step(moves: MaskMoves, logits: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.full(logits.shape[:2], MASK)
    coefficients = Plan((1.0, 0.5, 0.0), (StepPlan(kernel=unmask_kernel(0.8)),) * 2).coefficients(0)[0]
    found = moves.sample(logits, x, coefficients, range(len(x)), [0] * len(x), None, None)
    return found.x, found.log_prob


def test_how_many_masks_are_drawn_at_once_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 6, 9, generator=torch.Generator().manual_seed(2))
    moves = MaskMoves(6, MASK, confidence)
    whole = drawn_step(moves, logits)
    monkeypatch.setattr(unmasking, "NUMBERS", 4 * 9)
    for found, expected in zip(drawn_step(moves, logits), whole):
        assert torch.equal(found, expected)


def test_a_draw_makes_few_copies_of_the_logits(tmp_path: Path) -> None:
    """Drawing all masks at once would take 26 bytes for each logit: it needs float32 twice and float64 once."""
    logits = torch.randn(6, 40, 50_000, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    moves = MaskMoves(40, MASK, confidence)
    assert most_bytes(lambda: drawn_step(moves, logits), tmp_path / "trace.json") < 11 * logits.numel()


def in_blocks(plan: Plan, block: int, order=confidence, keys: Sequence[int] = (1, 2), batch: int = 64):
    """A rollout of a model of blocks, whose logits at a place do not depend on later blocks."""
    moves, model = MaskMoves(LENGTH, MASK, order, block=block), Model()

    def logits(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        places = moves.places(x)
        assert places is not None
        later = torch.arange(LENGTH) > places.max(1, keepdim=True).values
        found = model(x.masked_fill(later, 0), i, prompts)
        return found.gather(1, places[..., None].expand(-1, -1, VOCABULARY))

    return RolloutRunner(logits, plan, moves=moves, batch=batch).run(keys), logits, moves


@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_model_of_blocks_finishes_a_block_before_the_next(block: int) -> None:
    rollout, logits, moves = in_blocks(chains(5), block, batch=3)
    assert rollout.states is not None
    for state in rollout.states:
        has = (state == MASK).view(-1, block).any(1)
        # After the first block with a mask, all is masked.
        first = int(has.int().argmax()) if bool(has.any()) else len(has)
        assert bool((state.view(-1, block)[first + 1 :] == MASK).all())
    assert not bool((rollout.x == MASK).any())
    for transitions in rollout.transitions:
        assert transitions.token_log_prob is not None
        assert torch.equal(transitions.token_log_prob.sum(1), transitions.log_prob)
        for batch in transitions.batches:
            replayed = replay(logits, transitions, batch)
            after, rows = transitions.x_next[replayed.edges], replayed.rows()
            before = transitions.x[batch][rows]
            places, revealed = moves.places(before), (before == MASK) & (after != MASK)
            found = reveal_log_probs(
                without_mask(replayed.velocity, MASK)[rows], part(after, places), part(revealed, places), 1.0
            )
            whole = with_part(torch.zeros(after.shape), places, found)
            assert torch.equal(whole, transitions.token_log_prob[replayed.edges])
            assert torch.equal(transitions.token_log_prob[replayed.edges] != 0, revealed)


def test_one_block_of_the_whole_length_is_no_block() -> None:
    plan = window_plan(mask_levels(LENGTH, 4), range(4), KERNEL, samples=5, stochastic=range(4))
    assert torch.equal(in_blocks(plan, LENGTH, random)[0].x, run(plan).x)


def test_blocks_without_noise_take_the_likeliest_tokens_of_the_open_block() -> None:
    plan = Plan(mask_levels(LENGTH, 2, block=2), (StepPlan(), StepPlan()))
    rollout, logits, _ = in_blocks(plan, 2, keys=[1])
    state = torch.full((1, LENGTH), MASK)
    for start in (0, 2):
        state[0, start : start + 2] = without_mask(logits(state, 0, [0]), MASK)[0].argmax(-1)
    assert torch.equal(rollout.x, state)


@pytest.mark.parametrize(
    ("completions", "lead", "jumps"),
    [
        ((1,), 0, set()),
        ((0,), 0, {(2, 6)}),
        ((2,), 0, {(2, 4), (4, 6)}),
        ((1, 3), 0, {(2, 5)}),
        ((3,), 3, set()),
        ((0,), 2, {(4, 6)}),
    ],
)
def test_jumps_of_side_branches_by_hand(completions: tuple[int, ...], lead: int, jumps: set[tuple[int, int]]) -> None:
    plan = spine_plan(mask_levels(6, 6), [1], KERNEL, branches=2, completions=completions, lead=lead)
    assert plan.jumps() == jumps
    assert plan.jumps() == {(int(level), int(after)) for level, after in walked(plan) if after > level + 1}


def walked(plan: Plan) -> set[tuple[int, int]]:
    """The levels of the edges of a rollout."""
    rollout = run(plan)
    inner = rollout.parent >= 0
    return set(zip(rollout.depth[rollout.parent[inner]].tolist(), rollout.depth[inner].tolist()))


def test_steps_of_a_model_of_blocks_end_with_its_blocks() -> None:
    assert mask_levels(8, 4, block=4) == (1.0, 0.75, 0.5, 0.25, 0.0)
    assert mask_levels(8, 2, block=4) == (1.0, 0.5, 0.0)
    with pytest.raises(ValueError, match=r"generation\.tokens is 10, and the model writes blocks of 4 tokens .* as 12"):
        mask_levels(10, 5, block=4)
    with pytest.raises(ValueError, match=r"evaluate\.steps=3, a step would reveal .* one of 2, 4, 8 steps"):
        mask_levels(8, 3, block=4, key="evaluate.steps")
    with pytest.raises(ValueError, match="use schedule linear and one of 4, 8, 16 steps"):
        mask_levels(16, 8, "cosine", block=4)


def test_side_branches_that_skip_steps_are_refused_in_blocks() -> None:
    plan = spine_plan(mask_levels(LENGTH, 4), [1], KERNEL, branches=2, completions=(0,))
    with pytest.raises(ValueError, match=r"a step goes from 2 to 4 tokens at once, and .* one block of 1 tokens"):
        in_blocks(plan, 1, keys=[1])
