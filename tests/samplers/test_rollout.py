"""The executor against each leaf's own chain, with a velocity whose rows are independent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowgrpo.core.addressing import address
from flowgrpo.samplers.kernels import KERNELS, Kernel, step
from flowgrpo.samplers.moves import draw_noise
from flowgrpo.samplers.plans import ODE, Plan, StepPlan, branch_plan, ode_plan, spine_plan, window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.samplers.solvers import History, observe, solve
from flowgrpo.samplers.transitions import Rollout, Transitions, batches_of, narrowed, replay

SHAPE = (2, 3)
FIVE = shifted_sigmas(5, 3.0)
FLOW, DANCE = Kernel("flow_sde", 0.7), Kernel("dance_sde", 0.4)
STOCHASTIC = [name for name in KERNELS if name != "ode"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Path = tuple[tuple[int, int] | None, ...]


class Model:
    """A velocity that depends on state, step and prompt, and remembers every call.

    Sums, products and clamps only: vectorised transcendental functions may round by an element's place in memory,
    and then rows would depend on the batch.
    """

    def __init__(self, keys: Sequence[int], scale: float = 0.6) -> None:
        self.bias = [(key % 7) / 7 for key in keys]
        self.scale = torch.tensor(scale, requires_grad=True)
        self.calls: list[tuple[int, Tensor, list[int]]] = []

    def __call__(self, x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        self.calls.append((i, x.clone(), list(prompts)))
        bias = torch.tensor([self.bias[p] for p in prompts]).reshape(-1, *[1] * (x.ndim - 1))
        x = x.float()
        return self.scale * x - 0.4 * x.roll(1, dims=-1).clamp(-1.0, 1.0) + bias + 0.1 * i

    def rows(self, i: int) -> int:
        return sum(len(x) for step, x, _ in self.calls if step == i)


def run(
    plan: Plan,
    keys: Sequence[int] = (11,),
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 64,
    cuts: Sequence[int] = (),
    shape: Sequence[int] = SHAPE,
) -> tuple[Rollout, Model]:
    model = Model(keys)
    return RolloutRunner(model, plan, shape, dtype=dtype, batch=batch, cuts=cuts).run(keys), model


def leaf_paths(plan: Plan) -> list[Path]:
    """What happens on the way to each leaf of one root: per step None, or (0 main, 1 side; number of the child), or
    (2, stride) on a side branch that goes on without noise."""
    main: list[Path] = [()]
    side: list[Path] = []
    copies = plan.samples

    def finish(path: Path, level: int, strides: Sequence[int]) -> list[Path]:
        if level == plan.num_steps:
            return [path]
        ends = [
            ((*path, (2, s)), level + s if s and level + s < plan.num_steps else plan.num_steps, s) for s in strides
        ]
        return [leaf for further, reached, s in ends for leaf in finish(further, reached, (s,))]

    for i, planned in enumerate(plan.steps):
        stochastic = planned.kernel.coefficients(plan.sigmas, i).std > 0
        children = planned.children * (copies if stochastic else 1)
        copies = 1 if stochastic else copies
        if planned.side_kernel and planned.side_kernel.coefficients(plan.sigmas, i).std > 0:
            left = [(*path, (1, c)) for path in main for c in range(planned.side)]
            side += [leaf for path in left for leaf in finish(path, i + 1, planned.completions)]
        elif planned.side_kernel:
            side += [leaf for path in main for leaf in finish(path, i, planned.completions)]
        main = [(*path, (0, c) if stochastic else None) for path in main for c in range(children)]
    return side + (main if plan.main_leaf else [])


def level_of(plan: Plan, path: Path) -> int:
    """The noise level that a path has reached."""
    level = 0
    for choice in path:
        stride = choice[1] if choice is not None and choice[0] == 2 else 1
        level = min(level + stride, plan.num_steps) if stride else plan.num_steps
    return level


def walk(plan: Plan, key: int, root: int, path: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """One leaf's own chain, a batch of one from its initial noise on."""
    model, place, history = Model([key]), address(key, 0, root), History()
    noise = draw_noise(SHAPE, [place])
    if plan.root_spread is not None:
        noise = (draw_noise(SHAPE, [address(key, 0, -1)]) + plan.root_spread * noise) / (1 + plan.root_spread**2) ** 0.5
    x = noise.to(dtype)
    for k, choice in enumerate(path):
        i, reached = level_of(plan, path[:k]), level_of(plan, path[: k + 1])
        planned, (main, side) = plan.steps[i], plan.coefficients(i)
        v = model(x, i, [0]).detach()
        if choice is None or choice[0] == 2:
            last = reached == plan.num_steps
            moved, _ = solve(planned.solver, v, x, plan.sigmas[i], plan.sigmas[reached], history, last)
            following = moved.to(dtype)
        else:
            kind, child = choice
            coefficients = side if kind else main
            assert coefficients is not None
            noise = draw_noise(SHAPE, [address(place, i + 1, kind, child)])
            if planned.spread is not None:
                shared = draw_noise(SHAPE, [address(place, i + 1, 2 + kind)])
                noise = (shared + planned.spread * noise) / (1 + planned.spread**2) ** 0.5
            place = address(place, i + 1, kind, child)
            following = step(v, x, coefficients, noise=noise, dtype=dtype).x_next
        history, x = observe(v, x, plan.sigmas[i]), following
    return x[0]


def in_order(states: Sequence[Tensor]) -> list[list[float]]:
    return sorted(state.flatten().tolist() for state in states)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    total = draw(st.integers(2, 4))
    start = draw(st.sampled_from([1.0, 0.95]))
    sigmas = (*(start * (1 - k / total) ** 0.8 for k in range(total)), 0.0)
    kernels = st.sampled_from([ODE, DANCE, FLOW, Kernel("cps", 0.5)])
    steps = []
    skipping = draw(st.booleans())
    for i in range(total):
        kernel, side = draw(kernels), draw(st.sampled_from([0, 0, 1, 2]))
        last, noisy = i == total - 1, kernel.coefficients(sigmas, i).std > 0
        probe = side == 1 and draw(st.booleans())
        steps.append(
            StepPlan(
                kernel=kernel,
                children=draw(st.integers(1, 2)) if noisy else 1,
                side=side,
                side_kernel=(ODE if probe else DANCE) if side else None,
                completions=draw(st.sampled_from([(1,), (1, 2), (2, 0), (0,), (1, 3, 0)])) if skipping else (1,),
                trained=draw(st.booleans()) and not last and (noisy or (side > 0 and not probe)),
                solver="euler" if skipping else draw(st.sampled_from(["euler", "dpmpp_2m"])),
                spread=draw(st.sampled_from([None, 2.0])),
            )
        )
    sides = [i for i, planned in enumerate(steps) if planned.side]
    main_leaf = draw(st.booleans()) or not sides or any(planned.trained for planned in steps[sides[-1] + 1 :])
    taken = steps if main_leaf else steps[: sides[-1]]
    shared = any(planned.kernel.coefficients(sigmas, i).std > 0 for i, planned in enumerate(taken))
    samples = draw(st.integers(1, 3)) if shared else 1
    return Plan(
        sigmas, tuple(steps), roots=draw(st.integers(1, 2)), samples=samples, main_leaf=main_leaf,
        root_spread=draw(st.sampled_from([None, 0.5])),
    )  # fmt: skip


ENDS_AT_A_PROBE = Plan(
    FIVE,
    (
        StepPlan(FLOW, side=1, side_kernel=DANCE, trained=True),
        StepPlan(FLOW, side=1, side_kernel=ODE, trained=True),
        *(StepPlan(),) * 3,
    ),
    main_leaf=False,
)
"""Step 1 is to be trained, and the main line goes no further than its probe."""


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans(), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_every_leaf_is_the_end_of_its_own_chain(plan: Plan, batch: int, dtype: torch.dtype) -> None:
    keys = (5, 23)
    rollout, _ = run(plan, keys, batch=batch, dtype=dtype)

    assert rollout.x.dtype == dtype
    assert not rollout.x.requires_grad
    paths = leaf_paths(plan)
    for p, key in enumerate(keys):
        chains = [walk(plan, key, r, path, dtype) for r in range(plan.roots) for path in paths]
        assert in_order(list(rollout.x[rollout.leaf_prompt == p])) == in_order(chains)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(plans(), st.integers(1, 9))
@example(ENDS_AT_A_PROBE, 2)
def test_counts_are_what_is_evaluated_and_what_the_paths_have_in_common(plan: Plan, batch: int) -> None:
    keys, counts, paths = (1, 2, 3), plan.counts(), leaf_paths(plan)
    rollout, model = run(plan, keys, batch=batch)
    prefixes = {path[:k] for path in paths for k in range(len(path) + 1)}
    noisy = {p for p in prefixes if p and p[-1] is not None and p[-1][0] != 2}
    trained = {p for p in noisy if plan.steps[len(p) - 1].trained}

    assert counts.leaves == plan.roots * len(paths) == len(rollout.leaf) / 3
    assert counts.edges == plan.roots * (len(prefixes) - 1) == (rollout.parent >= 0).sum() / 3
    assert counts.evaluations == plan.roots * sum(level_of(plan, p) < plan.num_steps for p in prefixes)
    assert counts.evaluations * 3 == rollout.evaluations == sum(len(x) for _, x, _ in model.calls)
    assert counts.chain_evaluations == plan.roots * sum(len(path) for path in paths)
    assert counts.trained_edges == plan.roots * len(trained) == sum(len(t.node) for t in rollout.transitions) / 3
    assert counts.trained_states == plan.roots * len({p[:-1] for p in trained})
    assert counts.trained_steps == tuple(sorted({len(p) - 1 for p in trained}))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans())
def test_the_tree_is_well_formed(plan: Plan) -> None:
    keys = (4, 9)
    rollout, _ = run(plan, keys)
    parent, inner = rollout.parent, rollout.parent >= 0

    assert (parent[inner] < torch.arange(len(parent))[inner]).all()
    further = rollout.depth[inner] - rollout.depth[parent[inner]]
    assert (further >= 1).all()
    assert (further[rollout.stride[inner] == 1] == 1).all()
    assert (rollout.depth[~inner] == 0).all()
    for name in ("prompt", "root"):
        values = getattr(rollout, name)
        assert torch.equal(values[inner], values[parent[inner]])
    assert sorted(rollout.prompt[~inner].tolist()) == [0] * plan.roots + [1] * plan.roots
    childless = ~torch.isin(torch.arange(len(parent)), parent)
    assert torch.equal(rollout.leaf.sort().values, (childless & (rollout.depth == plan.num_steps)).nonzero()[:, 0])
    assert childless.sum() == len(rollout.leaf)
    assert rollout.leaf_prompt.tolist() == sorted(rollout.leaf_prompt.tolist())

    # The side step on the path to a leaf is at the depth where the leaf's branch begins.
    left = [next((i + 1 for i, c in enumerate(path) if c is not None and c[0]), 0) for path in leaf_paths(plan)]
    strides = [next((c[1] for c in path if c is not None and c[0] == 2), 1) for path in leaf_paths(plan)]
    assert sorted(rollout.stride[rollout.leaf].tolist()) == sorted(strides * plan.roots * 2)
    assert sorted(rollout.branch[rollout.leaf].tolist()) == sorted(left * plan.roots * 2)
    from_main = inner & (rollout.branch == 0)
    assert (rollout.branch[parent[from_main]] == 0).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans(), st.integers(1, 5), st.sampled_from([(), (1,), (2,), (1, 3), (0, 2)]))
@example(spine_plan(FIVE, (0, 1, 2), FLOW, branches=2), 3, ())
@example(spine_plan(FIVE, (0, 2), FLOW, branches=1, roots=3, main_leaf=True), 4, (1, 3))
def test_recorded_batches_are_calls_of_trained_states_alone(plan: Plan, batch: int, cuts: tuple[int, ...]) -> None:
    rollout, model = run(plan, (1, 2, 3, 4), batch=batch, cuts=cuts)

    assert all(len(x) <= batch for _, x, _ in model.calls)
    for t in rollout.transitions:
        calls = [(x, prompts) for i, x, prompts in model.calls if i == t.step]
        assert [rows.start for rows in t.batches] == [0, *(rows.stop for rows in t.batches)][:-1]
        assert t.batches[-1].stop == len(t.x) == len(t.prompt) == len(t.velocity)
        for rows, (x, prompts) in zip(t.batches, calls):
            assert torch.equal(t.x[rows], x)
            assert list(t.prompt[rows]) == prompts
            assert not any(prompts[0] < cut <= prompts[-1] for cut in cuts)
    assert list(batches_of(rollout)) == [(t, rows) for t in rollout.transitions for rows in t.batches]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans(), st.integers(1, 5))
def test_edges_belong_to_the_states_they_start_from(plan: Plan, batch: int) -> None:
    rollout, _ = run(plan, (1, 2, 3), batch=batch)

    for t in rollout.transitions:
        assert torch.equal(t.state, t.state.sort().values)
        assert torch.equal(t.state.unique(), torch.arange(len(t.x)))
        parent = rollout.parent[t.node]
        assert torch.equal((t.state[:, None] == t.state), (parent[:, None] == parent))
        assert (rollout.depth[t.node] == t.step + 1).all()
        assert rollout.prompt[t.node].tolist() == [t.prompt[s] for s in t.state.tolist()]
        edges = [t.edges_of(rows) for rows in t.batches]
        assert torch.equal(torch.cat([torch.arange(len(t.node))[e] for e in edges]), torch.arange(len(t.node)))
        for rows, e in zip(t.batches, edges):
            assert ((t.state[e] >= rows.start) & (t.state[e] < rows.stop)).all()
        scored = step(t.velocity[t.state], t.x[t.state], t.coefficients, x_next=t.x_next)
        assert torch.equal(scored.log_prob, t.log_prob)
        assert torch.equal(rollout.log_prob[t.node], t.log_prob)
        assert not t.velocity.requires_grad


def test_the_states_of_a_step_are_the_ends_of_the_step_before() -> None:
    rollout, _ = run(branch_plan(FIVE, (0, 2), DANCE, width=3), (1, 2))

    for before, after in itertools.pairwise(rollout.transitions):
        position = {node: k for k, node in enumerate(before.node.tolist())}
        start = [position[node] for node in rollout.parent[after.node].tolist()]
        assert torch.equal(before.x_next[start], after.x[after.state])
        assert after.step == before.step + 1


def memory(rollout: Rollout) -> int:
    """Number of float32 numbers in the memory that the states and velocities of a rollout hold, each place once."""
    held = [rollout.x, *(x for t in rollout.transitions for x in (t.x, t.velocity, t.x_next))]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    return sum(storages.values()) // 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans(), st.booleans())
@example(ENDS_AT_A_PROBE, True)
@example(ode_plan(FIVE, samples=3, trained=range(4)), True)
@example(branch_plan(FIVE, (0, 2), DANCE, width=2), True)
@example(spine_plan(FIVE, (0, 2), FLOW, branches=2, roots=2, main_leaf=True), False)
def test_each_state_is_stored_once(plan: Plan, elsewhere: bool) -> None:
    """On the device of the model, and where storing makes a copy."""
    copied: list[int] = []

    def store(x: Tensor) -> Tensor:
        copied.append(x.numel())
        return x.clone()

    keys, counts = (1, 2, 3), plan.counts()
    rollout = RolloutRunner(Model(keys), plan, SHAPE, batch=4, store=store if elsewhere else None).run(keys)
    plain, _ = run(plan, keys)

    wanted = 3 * 6 * (counts.stored_states + counts.trained_states)
    assert memory(rollout) == wanted
    assert not elsewhere or any(step.trained for step in plan.steps) or sum(copied) == wanted
    assert torch.equal(rollout.x, plain.x)
    for t, same in zip(rollout.transitions, plain.transitions, strict=True):
        for name in ("x", "velocity", "x_next"):
            assert torch.equal(getattr(t, name), getattr(same, name))


def test_the_stored_states_of_a_plan_by_hand() -> None:
    # Noise, and the ends of steps 0 to 3, of two samples; the leaves.
    assert window_plan(FIVE, range(4), FLOW, samples=2, shared_noise=False).counts().stored_states == 2 * 5 + 2
    # One start and three ends of step 1; steps 1 and 3 have no state in common.
    assert window_plan(FIVE, (1, 3), FLOW, samples=3).counts().stored_states == (1 + 3) + (3 + 3) + 3
    # Neighbours, from one noise each.
    assert ode_plan(FIVE, samples=3, trained=range(4)).counts().stored_states == 3 * 5 + 3
    # The main line moves without noise, so no end of a branch is a start: 1 + 2 of two steps, and five leaves.
    assert spine_plan(FIVE, (0, 1), FLOW, branches=2, main_leaf=True).counts().stored_states == 2 * (1 + 2) + 5


def test_samples_are_one_state_up_to_the_first_stochastic_step() -> None:
    plan = window_plan(FIVE, (2, 3), FLOW, samples=4, solver="dpmpp_2m")
    rollout, model = run(plan, (7, 8))

    assert [model.rows(i) for i in range(5)] == [2, 2, 2, 8, 8]
    first, second = rollout.transitions
    assert (len(first.x), len(second.x)) == (2, 8)
    assert torch.equal(first.state, torch.arange(2).repeat_interleave(4))
    assert len(in_order(list(first.x_next))) == len({tuple(row) for row in in_order(list(first.x_next))}) == 8
    single, _ = run(window_plan(FIVE, (2, 3), FLOW, samples=1, solver="dpmpp_2m"), (7, 8))
    assert torch.equal(rollout.x[[0, 4]], single.x)


@pytest.mark.parametrize("solver", ["euler", "dpmpp_2m"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_last_deterministic_step_lands_on_the_clean_prediction(solver: str, dtype: torch.dtype) -> None:
    plan = window_plan(FIVE, (1,), FLOW, samples=3, solver=solver)
    rollout, model = run(plan, (3,), dtype=dtype)
    _, x, prompts = model.calls[-1]

    clean = x.float() - plan.sigmas[-2] * model(x, plan.num_steps - 1, prompts)
    assert torch.equal(rollout.x, clean.detach().to(dtype))


def test_a_solver_with_memory_differs_from_one_without() -> None:
    """The history is really used, so the equality with the chains above means that it is carried along."""
    for make in (
        lambda solver: window_plan(FIVE, (1,), FLOW, samples=2, solver=solver),
        lambda solver: spine_plan(FIVE, (0, 1), FLOW, branches=2, solver=solver),
    ):
        euler, multistep = (run(make(solver))[0].x for solver in ("euler", "dpmpp_2m"))
        assert (euler - multistep).abs().amax(dim=(1, 2)).min() > 1e-3


PLANS = {
    "window": window_plan(FIVE, (1, 2), FLOW, samples=3),
    "separate": window_plan(FIVE, (0, 3), Kernel("cps", 0.6), samples=2, shared_noise=False),
    "branch": branch_plan(FIVE, (0, 2), DANCE, width=2, spread=3.0),
    "spine": spine_plan(FIVE, (0, 2), FLOW, branches=2, roots=2, solver="dpmpp_2m", main_leaf=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_prompt_does_not_depend_on_its_neighbours(name: str) -> None:
    plan, keys = PLANS[name], (101, 202, 303)
    together, _ = run(plan, keys, batch=4)
    alone = [run(plan, (key,), batch=1)[0] for key in keys]
    turned, _ = run(plan, (303, 101, 202), batch=64, cuts=(1,))

    for p, q in enumerate((1, 2, 0)):
        mine = together.x[together.leaf_prompt == p]
        assert torch.equal(mine, alone[p].x)
        assert torch.equal(mine, turned.x[turned.leaf_prompt == q])
        for t, own in zip(together.transitions, alone[p].transitions):
            edges = together.prompt[t.node] == p
            assert torch.equal(t.x_next[edges], own.x_next)
            torch.testing.assert_close(t.log_prob[edges], own.log_prob)


@pytest.mark.parametrize("name", PLANS)
def test_rollouts_repeat_and_differ_between_keys(name: str) -> None:
    state = torch.get_rng_state()
    first, again, other = (run(PLANS[name], (key,))[0].x for key in (1, 1, 2))

    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    assert not (first == other).any()
    # No two leaves of any of these prompts are alike.
    assert len({tuple(row) for row in in_order([*first, *other])}) == 2 * len(first)


def noises(t: Transitions) -> Tensor:
    """[E, D] the noise of each edge."""
    return step(t.velocity[t.state], t.x[t.state], t.coefficients, x_next=t.x_next).noise.flatten(1)


def correlations(rows: Tensor) -> Tensor:
    return rows @ rows.T / rows.shape[1]


@pytest.mark.parametrize("spread", [None, 0.5, 1.0, 4.0])
def test_sibling_noise_has_unit_variance_and_the_stated_correlation(spread: float | None) -> None:
    """`(shared + s own) / sqrt(1 + s²)`: variance 1, covariance of two siblings `1 / (1 + s²)`."""
    plan = branch_plan(FIVE, (0, 1), DANCE, width=3, spread=spread)
    rollout, _ = run(plan, (1, 2), shape=(128, 128))
    expected = 0.0 if spread is None else 1 / (1 + spread**2)

    for t in rollout.transitions[:2]:
        siblings = (t.state[:, None] == t.state).float()
        wanted = expected * siblings + (1 - expected) * torch.eye(len(t.state))
        assert (correlations(noises(t)) - wanted).abs().max() < 0.04  # five standard errors of 1/128
        assert noises(t).mean(dim=1).abs().max() < 0.04


def test_all_noises_of_a_rollout_are_independent() -> None:
    """Initial noises, main line and side branches, over steps, roots and prompts."""
    side = StepPlan(kernel=DANCE, children=2, side=2, side_kernel=FLOW, trained=True)
    plan = Plan(FIVE, (side, side, *[StepPlan()] * 3), roots=2)
    rollout, model = run(plan, (1, 2), shape=(128, 128))
    drawn = torch.cat([model.calls[0][1].flatten(1), *(noises(t) for t in rollout.transitions)])

    assert len(rollout.transitions) == 4
    assert len(drawn) == 4 + 2 * (2 + 2) * 2 + 8 * 4
    assert (correlations(drawn) - torch.eye(len(drawn))).abs().max() < 0.04


def test_addresses_are_distinct_seeds() -> None:
    places = [*itertools.product(range(12), repeat=3), *itertools.product(range(12), repeat=2), (-1,), (2**62,)]
    seeds = {address(*place) for place in places}

    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert address(1, 2) != address(2, 1)
    assert torch.equal(draw_noise((4,), [5, 6])[1], draw_noise((4,), [6])[0])
    assert draw_noise((4,), [5]).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STOCHASTIC)
def test_states_are_rounded_before_they_are_scored(name: str, dtype: torch.dtype) -> None:
    plan = window_plan(FIVE, range(4), Kernel(name), samples=3)
    rollout, model = run(plan, (1, 2), dtype=dtype, batch=4, shape=(4, 8))

    assert [t.step for t in rollout.transitions] == [0, 1, 2, 3]
    for t, rows in batches_of(rollout):
        assert t.x.dtype == t.x_next.dtype == dtype
        assert t.log_prob.dtype == torch.float32
        again = replay(model, t, rows)
        taken = step(
            again.velocity[again.rows()], t.x[rows][again.rows()], t.coefficients, x_next=t.x_next[again.edges]
        )
        assert torch.equal(again.velocity, again.old_velocity())
        assert torch.equal(taken.log_prob, t.log_prob[again.edges])
        assert again.velocity.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_predictions_of_16_bits_are_stored_in_16_bits(dtype: torch.dtype) -> None:
    """The numbers stay the same; a single number that needs more bits, or is not a number, keeps all in float32."""
    exact = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    assert narrowed(exact).dtype == dtype
    assert torch.equal(narrowed(exact).float(), exact)
    for wide in (1 + 2**-20, torch.nan):
        odd = exact.clone()
        odd[-1, -1] = wide
        assert narrowed(odd) is odd
    assert narrowed(exact.double()).dtype == torch.float64

    def velocity(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        return (0.6 * x.to(dtype) + i).float()

    rollout = RolloutRunner(velocity, window_plan(FIVE, range(4), FLOW, samples=3), SHAPE, dtype=dtype).run((1, 2))
    for t in rollout.transitions:
        assert t.velocity.dtype == dtype
        assert torch.equal(t.velocity.float(), velocity(t.x, t.step, ()))


def test_replay_evaluates_the_present_policy_at_the_recorded_states() -> None:
    rollout, model = run(branch_plan(FIVE, (0, 1), DANCE, width=2), (1, 2, 3), batch=4)
    with torch.no_grad():
        model.scale.add_(0.25)

    for t, rows in batches_of(rollout):
        again = replay(model, t, rows)
        slope = t.x[rows].float()
        torch.testing.assert_close(again.velocity.detach() - again.old_velocity(), 0.25 * slope)
        (gradient,) = torch.autograd.grad(again.velocity.sum(), model.scale)
        torch.testing.assert_close(gradient, slope.sum())
        assert torch.equal(again.rows() + rows.start, t.state[again.edges])
        assert again.rows().max() < len(again.velocity)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="batch is 0; use at least 1"):
        RolloutRunner(Model([1]), PLANS["window"], SHAPE, batch=0)


@pytest.mark.parametrize("spread", [None, 0.5])
@pytest.mark.parametrize("stochastic", [False, True])
def test_roots_of_some_numbers_are_those_of_a_rollout_of_all(spread: float | None, stochastic: bool) -> None:
    """To the bit: their first noises, and the noises of later steps."""

    def plan(samples: int) -> Plan:
        if stochastic:
            return window_plan(FIVE, [1, 2], FLOW, samples=samples, shared_noise=False)
        return ode_plan(FIVE, samples=samples, spread=spread, solver="dpmpp_2m")

    keys, numbers = (11, 5), [[1, 4], [0, 6]]
    some = RolloutRunner(Model(keys), plan(2), SHAPE).run(keys, numbers=numbers)
    every, _ = run(plan(7), keys)
    assert torch.equal(some.x, every.x[[1, 4, 7, 13]])
    assert some.root[some.leaf].tolist() == [1, 4, 0, 6]
    assert some.leaf_prompt.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("numbers", [[[1, 4]], [[1], [0]], [[1, 2, 3], [0, 1, 2]]])
def test_numbers_that_do_not_fit_the_plan_are_refused(numbers: list[list[int]]) -> None:
    runner = RolloutRunner(Model((11, 5)), ode_plan(FIVE, samples=2), SHAPE)
    with pytest.raises(ValueError, match="give 2 for each of 2 prompts"):
        runner.run((11, 5), numbers=numbers)
