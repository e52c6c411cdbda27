"""Checks of a plan: they refuse geometry that cannot run or cannot be trained, and say what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .solvers import named_solver

if TYPE_CHECKING:
    from .kernels import Coefficients
    from .plans import Plan, StepPlan


def check_shape(plan: Plan) -> None:
    """Refuse numbers of steps, roots and samples that cannot make a rollout; raise ValueError."""
    if len(plan.steps) != len(plan.sigmas) - 1:
        raise ValueError(f"{len(plan.steps)} step plans for {len(plan.sigmas) - 1} steps; give one for each")
    if plan.roots < 1 or plan.samples < 1:
        raise ValueError(f"roots is {plan.roots} and samples {plan.samples}; use at least 1 of each")
    if plan.neighbours and any(
        step.side or step.kernel.coefficients(plan.sigmas, i).std > 0.0 for i, step in enumerate(plan.steps)
    ):
        raise ValueError("neighbours are deterministic chains; leave out side branches and stochastic kernels")
    _check_spread("root_spread", plan.root_spread)
    if plan.given and (plan.samples > 1 or plan.root_spread or any(s.trained or s.side for s in plan.steps)):
        raise ValueError("given images have no steps and no noises; leave out samples, root_spread, side and trained")


def check_step(plan: Plan, i: int) -> tuple[Coefficients, Coefficients | None]:
    """The transition of step `i` on the main line, and of its side branches; raise ValueError for a wrong step."""
    step = plan.steps[i]
    try:
        named_solver(step.solver)
    except ValueError as error:
        raise ValueError(f"step {i}: {error}") from None
    if step.children < 1 or step.side < 0:
        raise ValueError(f"step {i}: children is {step.children} and side {step.side}; use at least 1 and 0")
    _check_spread(f"step {i}: spread", step.spread)
    _check_completions(i, step)
    if bool(step.side) != (step.side_kernel is not None):
        raise ValueError(f"step {i}: give side and side_kernel together")
    main = step.kernel.coefficients(plan.sigmas, i)
    side = step.side_kernel.coefficients(plan.sigmas, i) if step.side_kernel else None
    if step.children > 1 and main.std == 0.0:
        raise ValueError(
            f"step {i}: {step.children} children of a deterministic step ('{step.kernel.name}', std 0) are all "
            "equal; use a stochastic kernel or one child"
        )
    if side is not None and side.std == 0.0 and step.side > 1:
        raise ValueError(
            f"step {i}: {step.side} side branches of std 0 are all equal; use a stochastic kernel, or one branch"
        )
    stochastic = main.std > 0.0 or (side is not None and side.std > 0.0)
    if step.trained and not stochastic and not plan.neighbours:
        raise ValueError(
            f"step {i} is trained but deterministic ('{step.kernel.name}', std 0): it has no density; use a "
            "stochastic kernel or leave it out"
        )
    exact = step.kernel.exact or (step.side_kernel is not None and step.side_kernel.exact)
    if step.trained and stochastic and i == len(plan.steps) - 1 and not exact:
        raise ValueError(
            f"step {i} ends at sigma 0 and is trained; its std is so small that storage rounding dominates its "
            f"ratio; leave the last step out, and train at most step {i - 1}"
        )
    return main, side


def check_whole(plan: Plan) -> None:
    """Refuse steps that are each valid but cannot make a rollout together; raise ValueError."""
    if any(c != 1 for step in plan.steps if step.side for c in step.completions) and any(
        step.solver != "euler" for step in plan.steps
    ):
        raise ValueError("completions that skip levels are of first order; use solver euler on every step")
    if not plan.main_leaf and not any(step.side for step in plan.steps):
        raise ValueError("main_leaf is False and no step has side branches, so there is no image; set it True")
    if plan.samples > 1 and plan.first_stochastic is None:
        raise ValueError(
            f"{plan.samples} samples share each initial noise but no step of the main line is stochastic, so "
            "they would all be equal; make a step stochastic or use `roots` for different noises"
        )
    for i in plan.trained_steps:
        if plan.main_line_ends(i):
            raise ValueError(
                f"step {i} is trained but the main line ends before it, after its last side branches; leave it "
                "out or set main_leaf=True"
            )


def _check_spread(what: str, spread: float | None) -> None:
    if spread is not None and not spread > 0.0:
        raise ValueError(
            f"{what} is {spread}, so siblings share all their noise; use a number above 0, or None for independent "
            "noises"
        )


def _check_completions(i: int, step: StepPlan) -> None:
    if step.lead < 0:
        raise ValueError(f"step {i}: lead is {step.lead}; use the number of single steps before the strides, or 0")
    if not step.completions or min(step.completions) < 0 or len(set(step.completions)) < len(step.completions):
        raise ValueError(
            f"step {i}: completions is {list(step.completions)}; give different whole numbers, 1 for every level, 2 "
            "for every second one, 0 for one step to the clean prediction"
        )
