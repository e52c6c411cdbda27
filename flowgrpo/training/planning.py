"""From a recipe's sampler section to the plan of each iteration, and what a run will cost, without a model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..configs.part_soundness import PART_CREDITS
from ..configs.schema import AnyRecipe, Recipe, TextRecipe, WindowConfig
from ..core.offpolicy import rec
from ..core.registry import PART_SURROGATES, SURROGATES
from ..core.surrogates import clip, gmpo
from ..core.units import dhpo, sspo
from ..samplers.kernels import Kernel
from ..samplers.plans import Plan, PlanCounts, branch_plan, ode_plan, spine_plan, window_plan
from ..samplers.schedules import WindowSchedule, compress_tail, shifted_sigmas


def window_schedule(recipe: Recipe, window: WindowConfig, num_steps: int) -> WindowSchedule:
    """The schedule of a window; `all` is a frozen window over every step but the last."""
    if window.kind == "all":
        return WindowSchedule("frozen", num_steps - 1, num_steps)
    return WindowSchedule(
        window.kind,
        window.size,
        num_steps,
        stride=window.stride,
        interval=window.interval,
        start=window.start,
        stop=window.stop,
        seed=recipe.run.seed,
    )


def planner(recipe: Recipe, sigmas: Sequence[float]) -> Callable[[int], Plan]:
    """The plan of each iteration, over a table of noise levels."""
    sampler, total = recipe.sampler, len(sigmas) - 1
    if sampler.plan == "spine":
        spine = spine_plan(
            sigmas, sampler.splits, Kernel(sampler.kernel, sampler.eta), branches=sampler.width,
            roots=recipe.rollout.group, solver=sampler.solver, completions=tuple(sampler.completions),
        )  # fmt: skip
        return lambda iteration: spine
    if sampler.plan == "ode" and recipe.objective.form != "neighbour":
        # A loss of the forward process trains no step of the rollout, so no window bears on it.
        chains = _deterministic(recipe, sigmas, (), ())
        return lambda iteration: chains
    schedule = window_schedule(recipe, sampler.window, total)
    pruning = window_schedule(recipe, sampler.pruned, total) if sampler.pruned else None
    make = {"branch": _branches, "ode": _deterministic, "window": _chains}[sampler.plan]

    def plan_for(iteration: int) -> Plan:
        window = schedule.window(iteration)
        left_out = set(pruning.window(iteration)) if pruning else set()
        points = sampler.splits if sampler.plan == "branch" and sampler.stochastic == "window" else []
        trained = sorted({*window, *points} - left_out)
        return make(recipe, sigmas, window, trained or [window[0]])

    return plan_for


def _chains(recipe: Recipe, sigmas: Sequence[float], window: Sequence[int], trained: Sequence[int]) -> Plan:
    sampler = recipe.sampler
    noisy = range(len(sigmas) - 2) if sampler.stochastic == "all" else window
    table = sigmas if sampler.flash_ratio is None else compress_tail(sigmas, window[-1], sampler.flash_ratio)
    return window_plan(
        table, trained, Kernel(sampler.kernel, sampler.eta), samples=recipe.rollout.group,
        shared_noise=sampler.shared_noise, solver=sampler.solver, stochastic=noisy, probe=sampler.probe,
    )  # fmt: skip


def _branches(recipe: Recipe, sigmas: Sequence[float], window: Sequence[int], trained: Sequence[int]) -> Plan:
    sampler = recipe.sampler
    mixed = sampler.stochastic == "window"
    return branch_plan(
        sigmas, sampler.splits, Kernel(sampler.kernel, sampler.eta), width=sampler.width, spread=sampler.spread,
        trained=trained, stochastic=window if mixed else None,
        solver=sampler.solver,
    )  # fmt: skip


def _deterministic(recipe: Recipe, sigmas: Sequence[float], window: Sequence[int], trained: Sequence[int]) -> Plan:
    sampler = recipe.sampler
    return ode_plan(sigmas, samples=recipe.rollout.group, solver=sampler.solver, trained=trained, spread=sampler.spread)


@dataclass(frozen=True)
class Forecast:
    """What a run of a recipe costs.

    Attributes:
        counts: of one prompt, for each distinct plan in the order of first use.
        windows: how many iterations use each.
        images: per iteration.
        optimizer_steps: per iteration.
        on_policy_steps: of those, how many are strictly on-policy.
        warnings: what is worth a second look.
    """

    counts: list[PlanCounts]
    windows: list[int]
    images: int
    optimizer_steps: int
    on_policy_steps: int
    warnings: list[str]


def forecast(
    recipe: Recipe, sigmas: Sequence[float] | None = None, elements: int | None = None, most: int | None = None
) -> Forecast:
    """Count everything a recipe will do.

    Args:
        recipe: what to do.
        sigmas: the pipeline's noise levels; without a model, an unshifted table of the recipe's length.
        elements: numbers in a latent, for the scale of the clip; unknown without a model.
        most: iterations that are counted; all if left out.
    """
    table = tuple(sigmas or recipe.sampler.sigmas or shifted_sigmas(recipe.sampler.steps))
    plan_for = planner(recipe, table)
    uses: dict[PlanCounts, tuple[PlanCounts, int]] = {}
    for iteration in range(min(recipe.run.iterations, most or recipe.run.iterations)):
        counts = plan_for(iteration).counts()
        uses[counts] = (counts, uses.get(counts, (counts, 0))[1] + 1)
    counted = [counts for counts, _ in uses.values()]
    steps = recipe.optimizer.updates * recipe.optimizer.epochs
    return Forecast(
        counts=counted,
        windows=[number for _, number in uses.values()],
        images=recipe.rollout.prompts * counted[0].leaves,
        optimizer_steps=steps,
        on_policy_steps=1,
        warnings=_warnings(recipe, elements),
    )


def step_ranges(steps: Sequence[int]) -> str:
    """Rising step numbers as text, neighbours drawn together: 0, 1, 2, 5 as `0–2, 5`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def surrogate_of(recipe: Recipe, elements: int) -> Callable[..., Tensor]:
    """The surrogate of a recipe with its hyper-parameters, for latents of `elements` numbers.

    Raises:
        ValueError: as `bound_surrogate`.
    """
    objective = recipe.objective
    options = dict(objective.options)
    if objective.clip_nats is not None:
        options = {"low": objective.clip_nats / elements, "high": objective.clip_nats / elements}
    return bound_surrogate(objective.surrogate, options)


def bound_surrogate(name: str, options: Mapping[str, float]) -> Callable[..., Any]:
    """A surrogate with its hyper-parameters; of those of `PART_SURROGATES`, what makes one for a micro-batch.

    Raises:
        ValueError: a hyper-parameter that the surrogate does not have.
    """
    function = {**SURROGATES, **PART_SURROGATES}[name]
    known = [n for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ValueError(
                f"objective.options has {option!r}, which surrogate {name} does not take; it takes "
                f"{', '.join(known) or 'none'}"
            )
    return partial(function, **options)


def clip_of(surrogate: Callable[..., Tensor]) -> tuple[float, float]:
    """Lower and upper clip of the ratio, for what a run says of itself; infinite where there is no such constant."""
    parameters = inspect.signature(surrogate).parameters
    # Of other surrogates `low` and `high` bound a weight (cispo), or depend on the token (dcpo).
    if getattr(surrogate, "func", surrogate) not in (clip, dhpo, gmpo, rec, sspo):
        return math.inf, math.inf
    return parameters["low"].default, parameters["high"].default


def clip_bounds(recipe: Recipe, elements: int | None) -> tuple[float | None, float | None]:
    """The upper clip as (mean-reduced number, nats of the whole latent); None where it is not known."""
    nats = recipe.objective.clip_nats
    if nats is not None:
        return (nats / elements if elements else None), nats
    high = clip_of(surrogate_of(recipe, 1))[1]
    if not math.isfinite(high):
        return None, None
    return high, (high * elements if elements else None)


def _warnings(recipe: Recipe, elements: int | None) -> list[str]:
    found = []
    steps = recipe.optimizer.updates * recipe.optimizer.epochs
    clips = recipe.objective.surrogate == "clip" and recipe.objective.form not in ("diffusion_nft", "flow_dpo")
    if steps == 1 and clips and recipe.objective.old is None:
        found.append("one optimizer step per rollout is strictly on-policy: the ratio is 1 and the clip never binds")
    high, nats = clip_bounds(recipe, elements)
    if high is not None and high < 2e-8:
        found.append(f"the clip {high:.1e} is below the resolution of float32 log-ratios (2e-8)")
    if nats is not None and nats > 5 and clips and steps > 1:
        found.append(f"a clip of ±{nats:.1f} nats per latent hardly binds; objective.clip_nats sets it by scale")
    if recipe.objective.form != "transition":
        return found
    if recipe.objective.ratio == "guard" and recipe.sampler.kernel == "cps":
        found.append("guard with cps uses the true density of the CPS transition, not the released log-prob")
    return found


def search_passes(recipe: AnyRecipe) -> float:
    """Passes over a rollout, without gradients, by which `objective.balance` finds its bounds.

    Before the weights move every ratio is 1; each later optimizer step takes one over its part of the rollout.
    """
    steps = recipe.optimizer.updates * recipe.optimizer.epochs
    return 0.0 if recipe.objective.balance is None else (steps - 1) / recipe.optimizer.updates


def search_line(recipe: AnyRecipe) -> str | None:
    """What the search for bounds costs, in words; None without one."""
    passes = search_passes(recipe)
    return f"objective.balance scores them {passes:g} more time(s), without gradients" if passes else None


def parts_line(recipe: TextRecipe) -> str | None:
    """How completions are cut and what is done by part, in words; None where they are not."""
    if recipe.parts is None:
        return None
    objective, credit = recipe.objective, recipe.advantage.credit
    done = {
        "a ratio each": objective.level == "part",
        "a clip by their entropy": objective.surrogate in PART_SURROGATES,
        "an equal share of the loss": objective.reduce == "part",
        f"advantages by their scores ({credit})": credit in PART_CREDITS,
    }
    named = ", ".join(name for name, asked in done.items() if asked) or "for the rewards alone"
    where = f"where {recipe.parts.pattern!r} matches" if recipe.parts.cut == "pattern" else f"into {recipe.parts.cut}"
    return f"completions are cut {where}: {named}"


def budget_line(recipe: AnyRecipe) -> str | None:
    """What rounds make of the number of samples, in words; None without any."""
    budget, rollout, templates = recipe.rollout.budget, recipe.rollout, len(recipe.data.templates)
    round_size, first = rollout.prompts * rollout.group, max(templates, 1)
    named = f"in rounds of {rollout.group} a prompt"
    if templates:
        named += f", {templates} of them with a template each"
    if budget is None:
        return f"{named}: {round_size * first} samples an iteration" if templates else None
    if budget.choice == "until":
        most = max(min(budget.rounds, budget.most or budget.rounds), first)
        return f"{named}, at most {most}: {round_size * first} to {round_size * most} samples an iteration"
    mean = max(budget.rounds, first)
    return f"{named}, {mean} on average: {round_size * mean} samples an iteration"
