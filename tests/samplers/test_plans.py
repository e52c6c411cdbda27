"""The arithmetic of plans: counts against published numbers, and what cannot run is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from flowgrpo.samplers.kernels import KERNELS, Kernel
from flowgrpo.samplers.plans import ODE, Plan, StepPlan, branch_plan, ode_plan, spine_plan, window_plan
from flowgrpo.samplers.schedules import shifted_sigmas

FLOW, DANCE, CPS = Kernel("flow_sde", 0.7), Kernel("dance_sde", 0.3), Kernel("cps", 0.5)
FIVE = shifted_sigmas(5, 3.0)


def test_branch_counts_are_those_of_branchgrpo() -> None:
    """20 steps split at 0, 3, 6 and 9: 1, then 3 x 2, 3 x 4, 3 x 8 and 11 x 16 nodes, of which 16 are leaves."""
    counts = branch_plan(shifted_sigmas(20), (0, 3, 6, 9), DANCE, width=2).counts()

    assert counts.edges == 3 * 2 + 3 * 4 + 3 * 8 + 11 * 16 == 218
    assert counts.evaluations == 1 + 218 - 16 == 203
    assert counts.leaves == 16
    assert counts.chain_evaluations == 16 * 20
    assert counts.trained_steps == tuple(range(19))
    assert counts.trained_edges == 218 - 16
    assert counts.trained_states == 203 - 16


def test_spine_counts_are_those_of_tempflow() -> None:
    """9 states of the main line, and six branches of step i that each have 9 - i evaluations to go."""
    counts = spine_plan(shifted_sigmas(10, 3.0), range(9), FLOW, branches=6).counts()

    assert counts.evaluations == 9 + 6 * sum(range(1, 10)) == 279
    assert counts.leaves == counts.trained_edges == 54
    assert counts.trained_states == 9
    assert counts.chain_evaluations == 540
    with_main = spine_plan(shifted_sigmas(10, 3.0), range(9), FLOW, branches=6, main_leaf=True).counts()
    assert (with_main.evaluations, with_main.leaves) == (280, 55)
    assert spine_plan(shifted_sigmas(10), range(9), FLOW, branches=6, roots=4).counts().evaluations == 4 * 279


def test_each_completion_of_a_branch_walks_the_levels_it_names() -> None:
    """One branch at step 0 of 5: level 1 is evaluated once, then 4 levels, every second one (3) and none."""
    counts = spine_plan(FIVE, [0], FLOW, branches=1, completions=(1, 2, 0)).counts()
    assert counts.evaluations == 1 + 1 + 3 + 1 + 0
    assert counts.chain_evaluations == 5 + 3 + 2
    assert (counts.leaves, counts.trained_edges, counts.trained_states) == (3, 1, 1)


def test_probes_cost_the_square_of_the_steps_they_follow() -> None:
    """Three chains of T = 5: a probe from each of the states before steps 0 to 3, which shares that evaluation."""
    counts = window_plan(FIVE, range(4), FLOW, samples=3, probe=1).counts()
    assert counts.evaluations == (1 + 4 * 3) + (4 + 3 * (3 + 2 + 1))
    assert counts.leaves == 3 + 1 + 3 * 3
    jumps = window_plan(FIVE, range(4), FLOW, samples=3, probe=0).counts()
    assert jumps.evaluations == 1 + 4 * 3
    assert jumps.trained_edges == counts.trained_edges == 12


def test_a_mixed_tree_is_deterministic_but_for_its_splits_and_its_window() -> None:
    plan = branch_plan(FIVE, [0, 2], DANCE, stochastic=[1], spread=4.0)
    assert [step.kernel.name for step in plan.steps] == ["dance_sde", "dance_sde", "dance_sde", "ode", "ode"]
    assert plan.trained_steps == (0, 1, 2)
    assert branch_plan(FIVE, [0, 2], DANCE, stochastic=[1], trained=[1, 3]).trained_steps == (1,)


def test_a_spine_ends_with_its_last_branches() -> None:
    """Branches at steps 1 and 2 of 5: the main line is needed at steps 0, 1 and 2."""
    counts = spine_plan(FIVE, (1, 2), FLOW, branches=2).counts()

    assert counts.evaluations == 3 + 2 * 3 + 2 * 2
    assert counts.edges == 2 + 2 * 4 + 2 * 3
    assert counts.leaves == 4


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("size", [1, 2])
def test_samples_share_the_prefix_up_to_the_first_stochastic_step(first: int, size: int) -> None:
    window, total, group = range(first, min(first + size, 4)), 5, 6
    shared = window_plan(FIVE, window, FLOW, samples=group).counts()
    separate = window_plan(FIVE, window, FLOW, samples=group, shared_noise=False).counts()

    assert shared.evaluations == (first + 1) + group * (total - first - 1)
    assert separate.evaluations == separate.chain_evaluations == shared.chain_evaluations == group * total
    assert shared.leaves == separate.leaves == group
    assert shared.trained_edges == separate.trained_edges == group * len(window)
    assert shared.trained_states == 1 + group * (len(window) - 1)
    assert separate.trained_states == group * len(window)
    assert shared.trained_steps == tuple(window)


def test_stochastic_steps_outside_the_window_are_sampled_but_not_trained() -> None:
    plan = window_plan(FIVE, [2], FLOW, samples=3, stochastic=range(4))

    assert [main.std > 0 for main, _ in (plan.coefficients(i) for i in range(5))] == [True] * 4 + [False]
    assert plan.trained_steps == (2,)
    assert plan.first_stochastic == 0
    assert plan.counts().evaluations == 1 + 3 * 4
    assert window_plan(FIVE, [2], FLOW, samples=3, stochastic=[]).first_stochastic == 2


def test_windows_are_sets_of_steps() -> None:
    assert window_plan(FIVE, [3, 1, 3], FLOW, samples=2) == window_plan(FIVE, (1, 3), FLOW, samples=2)


def test_the_deferred_copies_are_children_of_the_first_stochastic_step() -> None:
    steps = (StepPlan(), StepPlan(kernel=FLOW, children=2), StepPlan(kernel=FLOW, children=3), StepPlan(), StepPlan())
    plan = Plan(FIVE, steps, roots=2, samples=5)

    assert [plan.main_children(i) for i in range(5)] == [1, 10, 3, 1, 1]
    assert plan.counts().leaves == 2 * 5 * 2 * 3


def test_coefficients_are_those_of_the_kernels_on_the_plans_own_table() -> None:
    plan = spine_plan(FIVE, (0, 2), CPS, branches=2)

    for i in range(5):
        main, side = plan.coefficients(i)
        assert main == ODE.coefficients(FIVE, i)
        assert side == (CPS.coefficients(FIVE, i) if i in (0, 2) else None)


def test_builders_give_what_they_say() -> None:
    tree = branch_plan(FIVE, [1], DANCE, width=3, roots=2, spread=4.0, trained=[0, 2])
    spine = spine_plan(FIVE, [1], DANCE, branches=2, solver="dpmpp_2m", roots=3)
    window = window_plan(FIVE, [1], DANCE, samples=2, solver="dpmpp_2m")

    assert [step.children for step in tree.steps] == [1, 3, 1, 1, 1]
    assert [step.spread for step in tree.steps] == [None, 4.0, None, None, None]
    assert [step.trained for step in tree.steps] == [True, False, True, False, False]
    assert {step.kernel for step in tree.steps} == {DANCE}
    assert (tree.roots, tree.samples, tree.main_leaf) == (2, 1, True)
    assert [step.side for step in spine.steps] == [0, 2, 0, 0, 0]
    assert {step.kernel for step in spine.steps} == {ODE}
    assert (spine.roots, spine.main_leaf) == (3, False)
    assert {step.solver for step in (*spine.steps, *window.steps)} == {"dpmpp_2m"}
    assert (window.roots, window.samples) == (1, 2)


def plan_of(*steps: StepPlan, **options: Any) -> Plan:
    return Plan(FIVE, (*steps, *(StepPlan() for _ in range(5 - len(steps)))), **options)


PLAIN, SIDE = StepPlan(), StepPlan(side=2, side_kernel=FLOW)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan((1.0, 0.5), (PLAIN,)), r"ends at 0\.5; append 0\.0"),
        (lambda: Plan(FIVE, (PLAIN,) * 4), "4 step plans for 5 steps"),
        (lambda: plan_of(roots=0), "roots is 0 and samples 1"),
        (lambda: plan_of(samples=0), "roots is 1 and samples 0"),
        (lambda: plan_of(StepPlan(solver="heun")), "step 0: unknown solver 'heun'; use one of euler, dpmpp_2m"),
        (lambda: plan_of(PLAIN, StepPlan(children=0)), "step 1: children is 0 and side 0"),
        (lambda: plan_of(PLAIN, StepPlan(side=-1)), "step 1: children is 1 and side -1"),
        (lambda: plan_of(PLAIN, StepPlan(side=2)), "step 1: give side and side_kernel together"),
        (lambda: plan_of(StepPlan(side_kernel=FLOW)), "step 0: give side and side_kernel together"),
        (lambda: plan_of(PLAIN, StepPlan(children=2)), r"step 1: 2 children of a deterministic step \('ode', std 0\)"),
        (lambda: plan_of(*[PLAIN] * 4, StepPlan(kernel=CPS, children=2)), r"step 4: 2 children .* \('cps', std 0\)"),
        (lambda: plan_of(StepPlan(kernel=Kernel("cps", 0.0), children=2)), "step 0: 2 children of a deterministic"),
        (lambda: plan_of(StepPlan(side=2, side_kernel=ODE)), "step 0: 2 side branches of std 0"),
        (lambda: plan_of(StepPlan(kernel=FLOW, children=2, spread=0.0)), r"step 0: spread is 0\.0.*above 0, or None"),
        (lambda: plan_of(PLAIN, StepPlan(trained=True)), r"step 1 is trained but deterministic \('ode', std 0\)"),
        (lambda: plan_of(*[PLAIN] * 4, StepPlan(kernel=FLOW, trained=True)), "step 4 ends at sigma 0.*at most step 3"),
        (lambda: plan_of(samples=2), "2 samples share each initial noise but no step"),
        (
            lambda: plan_of(SIDE, StepPlan(kernel=FLOW), samples=2, main_leaf=False),
            "2 samples share each initial noise",
        ),
        (lambda: plan_of(main_leaf=False), "main_leaf is False and no step has side branches"),
        (
            lambda: plan_of(SIDE, StepPlan(kernel=FLOW, trained=True), main_leaf=False),
            "step 1 is trained but the main line ends before it",
        ),
        (lambda: window_plan(FIVE, [], FLOW, samples=2), "the window is empty; train at least one step"),
        (lambda: window_plan(FIVE, [3, 5], FLOW, samples=2), r"the window \[3, 5\] must be within 0 to 4"),
        (lambda: window_plan(FIVE, [-1], FLOW, samples=2), r"the window \[-1\] must be within"),
        (lambda: window_plan(FIVE, [4], FLOW, samples=2), "step 4 ends at sigma 0"),
        (
            lambda: window_plan(FIVE, [1], FLOW, samples=2, stochastic=[5]),
            r"stochastic steps \[5\] must be within",
        ),
        (lambda: window_plan(FIVE, [1], ODE, samples=2), "step 1 is trained but deterministic"),
        (lambda: branch_plan(FIVE, [], DANCE), "no split points; name at least one step from 0 to 4"),
        (lambda: branch_plan(FIVE, [0, 5], DANCE), r"split points \[0, 5\] must be within 0 to 4"),
        (lambda: branch_plan(FIVE, [0], DANCE, trained=[1, 7]), r"trained steps \[1, 7\] must be within 0 to 4"),
        (lambda: branch_plan(FIVE, [4], CPS), r"step 4: 2 children of a deterministic step \('cps', std 0\)"),
        (lambda: branch_plan(FIVE, [0], DANCE, width=0), "step 0: children is 0"),
        (lambda: spine_plan(FIVE, [], FLOW, branches=2), "no branch steps; name at least one from 0 to 4"),
        (lambda: spine_plan(FIVE, [5], FLOW, branches=2), r"branch steps \[5\] must be within 0 to 4"),
        (lambda: spine_plan(FIVE, [0], FLOW, branches=0), "step 0: give side and side_kernel together"),
        (lambda: spine_plan(FIVE, [0], ODE, branches=2), "step 0: 2 side branches of std 0"),
        (lambda: spine_plan(FIVE, [0], FLOW, branches=2, completions=()), r"step 0: completions is \[\]; give"),
        (
            lambda: spine_plan(FIVE, [0], FLOW, branches=2, completions=(1, 1)),
            r"completions is \[1, 1\]; give",
        ),
        (lambda: spine_plan(FIVE, [0], FLOW, branches=2, completions=(2,), solver="dpmpp_2m"), "use solver euler"),
        (lambda: ode_plan(FIVE, samples=2, trained=[5]), r"trained steps \[5\] must be within 0 to 4"),
        (lambda: ode_plan(FIVE, samples=2, spread=0.0), "root_spread is 0.0, so siblings share"),
        (lambda: spine_plan(FIVE, range(5), FLOW, branches=2), "step 4 ends at sigma 0 and is trained"),
    ],
)
def test_what_cannot_run_or_be_trained_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "ode"])
def test_every_kernel_can_be_trained_on_all_steps_but_the_last(name: str) -> None:
    for table in (FIVE, shifted_sigmas(10, 3.0), (0.98, 0.8, 0.4, 0.1, 0.0)):
        plan = window_plan(table, range(len(table) - 2), Kernel(name), samples=2)
        assert plan.counts().trained_steps == tuple(range(len(table) - 2))
