"""The plan of each iteration from the sampler section of a recipe, and the cost of a run, without a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from ..configs.coefficient_schedules import recipe_at
from ..configs.image_recipe import SamplerConfig
from ..configs.schema import AnyRecipe, MaskedRecipe, Recipe, TextRecipe
from ..core.forward_process import levels_to_draw
from ..core.likelihoods import Passes
from ..core.offpolicy import rec
from ..core.pooled_ratios import dhpo, sspo
from ..core.surrogates import clip, clip_nats, gmpo
from ..parts.choice import Choice, choices, given_names, value_at
from ..parts.own_code import PartError
from ..parts.plugins import told
from ..parts.traits import (
    compares_all,
    compares_rewards,
    differentiates,
    noises_again,
    offered,
    offering,
    saying,
    trained,
)
from ..samplers.kernels import Kernel
from ..samplers.plan_parts import Setting
from ..samplers.plans import Plan, PlanCounts, ode_plan
from ..samplers.schedules import shifted_sigmas
from ..samplers.solvers import SOLVERS, Solver
from ..samplers.unmasking import check_within_block, mask_levels, unmask_kernel

Planned = Recipe | MaskedRecipe
"""Recipes whose rollouts are plans: trees of denoising steps."""


def kernel_of(sampler: SamplerConfig) -> Kernel:
    """The kernel of the stochastic steps."""
    chosen = sampler.kernel
    return Kernel(chosen.short, chosen.get("eta"), chosen.make())


def solver_of(sampler: SamplerConfig) -> str | Solver:
    """The solver of the deterministic steps; a solver of the package is given by its name."""
    return sampler.solver.name if sampler.solver.name in SOLVERS else sampler.solver.make()


def setting_of(recipe: Planned, sigmas: Sequence[float]) -> Setting:
    """The arguments of the plans of a recipe, for a table of noise levels."""
    if isinstance(recipe, MaskedRecipe):
        kernel = unmask_kernel(recipe.generation.temperature)
        return Setting(tuple(sigmas), kernel, group=recipe.rollout.group, seed=recipe.run.seed)
    sampler = recipe.sampler
    return Setting(
        tuple(sigmas), kernel_of(sampler), solver_of(sampler), group=recipe.rollout.group, seed=recipe.run.seed,
        compares=compares_rewards(recipe), to_end=trained(recipe) == "gradients",
    )  # fmt: skip


def steps_of(recipe: Planned, evaluation: bool = False) -> int:
    """Number of denoising steps of a rollout, or of an evaluation."""
    if isinstance(recipe, MaskedRecipe):
        return recipe.evaluate.steps or recipe.sampler.steps if evaluation else recipe.sampler.steps
    steps = recipe.sampler.rollout_steps
    return recipe.evaluate.steps or steps if evaluation else steps


def base_from(recipe: Recipe) -> int | None:
    """The first step of an evaluation that the model before training makes; None if the trained weights make all."""
    share = recipe.evaluate.trained_share
    return None if share == 1 else round(share * steps_of(recipe, evaluation=True))


def levels_of(recipe: Planned, own: Sequence[float] | None = None, evaluation: bool = False) -> tuple[float, ...]:
    """Noise levels of a rollout, or of an evaluation.

    Args:
        recipe: its `sampler.sigmas` or `sampler.shift` come first. An evaluation of another number of steps has no
            `sigmas`.
        own: the levels of the pipeline; without a model, an unshifted table is taken in their place.
        evaluation: whether the levels are of an evaluation.

    For a masked language model, the levels are the shares of masked positions.
    """
    if isinstance(recipe, MaskedRecipe):
        key = "evaluate.steps" if evaluation and recipe.evaluate.steps else "sampler.steps"
        steps, block = steps_of(recipe, evaluation), recipe.model.block
        return mask_levels(recipe.generation.tokens, steps, recipe.sampler.schedule, block, key)
    sampler = recipe.sampler
    if sampler.sigmas is not None and not (evaluation and recipe.evaluate.steps):
        return tuple(sampler.sigmas)
    return _table(sampler, steps_of(recipe, evaluation), own)


def _table(sampler: SamplerConfig, steps: int, own: Sequence[float] | None) -> tuple[float, ...]:
    """A table of noise levels without `sampler.sigmas`: of `sampler.shift`, else the pipeline's own table."""
    if own is None or sampler.shift is not None:
        return shifted_sigmas(steps, sampler.shift or 1.0)
    return tuple(own)


def scouting_plan(recipe: Recipe, plan: Plan, own: Sequence[float] | None = None) -> Plan:
    """The plan of the scouts of a rollout: deterministic chains of fewer steps, from the same noises.

    Args:
        recipe: has scouts.
        plan: of the rollout.
        own: the levels of the pipeline for the steps of scouts; without a model, an unshifted table.

    Raises:
        ValueError: the plan of the rollout does not make one image of each of `rollout.group` seeds.
    """
    scouts, group, images = recipe.rollout.scouts, recipe.rollout.group, plan.counts().leaves
    assert scouts is not None
    if (plan.roots, images) != (group, group) or plan.given:
        raise ValueError(
            f"rollout.scouts chooses {group} seeds of a prompt, one for each image, and sampler.plan "
            f"{recipe.sampler.plan.name} makes {images} images from {plan.roots} seeds; use sampler.plan ode"
        )
    return ode_plan(
        _table(recipe.sampler, scouts.steps, own), samples=scouts.group, solver=solver_of(recipe.sampler),
        spread=plan.root_spread,
    )  # fmt: skip


class PlanFor(Protocol):
    """The plan of an iteration."""

    def __call__(self, iteration: int, draw: int | None = None, /) -> Plan:
        """The plan; `draw` takes the place of the iteration in what is drawn, for a prompt with a plan of its own."""


def planner(recipe: Planned, sigmas: Sequence[float]) -> PlanFor:
    """A function from iterations to plans, for a table of noise levels."""
    chosen, steady = recipe.sampler.plan, setting_of(recipe, sigmas)
    make = chosen.make()

    def plan_for(iteration: int, draw: int | None = None, /) -> Plan:
        setting = setting_of(recipe_at(recipe, iteration), sigmas) if recipe.schedules else steady
        try:
            plan = make(setting, iteration if draw is None else draw)
        except PartError as error:
            raise PartError(f"in iteration {iteration}, {error}") from error
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"plan {chosen.name} fails in iteration {iteration}: {told(error)}") from error
        if not isinstance(plan, Plan):
            raise ValueError(
                f"plan {chosen.name} returned {type(plan).__name__}; return a flowgrpo.samplers.plans.Plan"
            )
        return plan

    return plan_for


@dataclass(frozen=True)
class Forecast:
    """What a run of a recipe costs.

    Attributes:
        counts: for one prompt, for each distinct plan in the order of first use.
        windows: how many iterations use each plan.
        images: per iteration.
        optimizer_steps: per iteration.
        on_policy_steps: how many of the optimizer steps are strictly on-policy.
        warnings: settings that may be mistakes, a sentence for each.
        pure_noise: whether the first noise level is 1, so that nothing of an image is left in it.
    """

    counts: list[PlanCounts]
    windows: list[int]
    images: int
    optimizer_steps: int
    on_policy_steps: int
    warnings: list[str]
    pure_noise: bool


def forecast(
    recipe: Planned, sigmas: Sequence[float] | None = None, elements: int | None = None, most: int | None = None
) -> Forecast:
    """Count everything that a recipe will do.

    Args:
        recipe: what to do.
        sigmas: the pipeline's noise levels; an unshifted table of the recipe's length if left out.
        elements: numbers in a latent, for the scale of the clip; None if there is no model.
        most: how many iterations are counted; all if left out.

    Raises:
        ValueError: the plan does not fit the levels, or a step of a rollout or of an evaluation does not stay within a
            block of a masked model that writes block after block.
    """
    levels = sigmas or levels_of(recipe)
    if isinstance(recipe, MaskedRecipe):
        levels_of(recipe, evaluation=True)
    plan_for = planner(recipe, levels)
    uses: dict[PlanCounts, tuple[PlanCounts, int]] = {}
    for iteration in range(min(recipe.run.iterations, most or recipe.run.iterations)):
        plan = plan_for(iteration)
        counts = plan.counts()
        if isinstance(recipe, MaskedRecipe) and recipe.model.block is not None and counts not in uses:
            for level, following in sorted(plan.jumps()):
                check_within_block(recipe.generation.tokens, recipe.model.block, levels[level], levels[following])
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
        pure_noise=levels[0] == 1.0,
    )


@dataclass(frozen=True)
class Nfe:
    """Evaluations of the denoiser for an image (NFE), on average over a run.

    Attributes:
        old: evaluations in the rollout, by the policy that samples, as the papers count them: no state is shared.
            The evaluations of scouts are among them.
        theta: evaluations with gradients, one for each trained edge (or noised image) of one pass over the rollout.
        old_shared, theta_shared: the evaluations that are made here, each distinct state once.
    """

    old: float
    theta: float
    old_shared: float
    theta_shared: float


def nfe_of(recipe: Planned, expected: Forecast) -> Nfe:
    """Evaluations for an image, from the counts of a recipe."""

    def total(name: str) -> float:
        return sum(getattr(counts, name) * uses for counts, uses in zip(expected.counts, expected.windows))

    images = total("images")
    theta, shared = total("trained_edges") / images, total("trained_states") / images
    if isinstance(recipe, MaskedRecipe):
        if recipe.objective.get("likelihood") is not None:
            theta = shared = float(len(passes_of(recipe).masked))
    elif noises_again(recipe):
        times, kept = noised_levels(recipe)[0], kept_share(recipe)
        once = _noise_alone(recipe) if expected.pure_noise else 0.0
        theta, shared = times * kept, (times - once) * kept + once / recipe.rollout.group
    often = anchored_share(recipe) * renoised_states(recipe)
    theta, shared = theta * often, shared * often
    before = scouts_evaluations(recipe) * sum(expected.windows) / images
    return Nfe(total("walked") / images + before, theta, total("evaluations") / images + before, shared)


def scouts_evaluations(recipe: Planned) -> int:
    """How many states of a prompt's scouts are evaluated in an iteration."""
    scouts = recipe.rollout.scouts if isinstance(recipe, Recipe) else None
    return 0 if scouts is None else scouts.group * scouts.steps


def ends_early(recipe: AnyRecipe) -> bool:
    """Whether completions of a masked model may be finished before the last step."""
    if not isinstance(recipe, MaskedRecipe) or offering(recipe.sampler.plan, "given"):
        return False
    return recipe.generation.stop_at_end or recipe.sampler.order.get("threshold") is not None


def passes_of(recipe: MaskedRecipe, draw: int = 0) -> Passes:
    """The passes with which a recipe's likelihood scores a completion that is written from left to right.

    Args:
        recipe: of a masked model.
        draw: number of the draw, for passes that are random.
    """
    levels, length = levels_of(recipe), recipe.generation.tokens
    counts = torch.tensor([round((high - low) * length) for high, low in pairwise(levels)])
    steps = torch.arange(len(counts)).repeat_interleave(counts)
    written = torch.ones(length, dtype=torch.bool)
    made = recipe.objective["likelihood"].make(steps=steps, block=recipe.model.block, written=written)
    passes: Passes = made(length, torch.Generator().manual_seed(draw))
    return passes


def noised_levels(recipe: Recipe) -> tuple[int, int]:
    """At how many noise levels an image is trained by a loss of the forward process, and of how many they are drawn."""
    options = recipe.objective
    if differentiates(recipe):
        return (options["times"] * (1 + options["inversion"]),) * 2
    between = options.get("draw") == "between"
    levels = len(levels_to_draw(steps_of(recipe), options.get("levels"), options.get("skip") or 0, between=between))
    times = options.get("times") or levels
    return (times if between else min(times, levels)), levels


def kept_predictions(recipe: Recipe) -> float:
    """How many predictions of each image a loss of the forward process keeps until it trains them.

    If the policy with which the loss compares lags behind, or if there are several updates, its predictions are kept.
    If a part compares with the reference, the predictions of the reference are kept too, for one update at a time.
    """
    if not noises_again(recipe):
        return 0.0
    several = not differentiates(recipe) and recipe.optimizer.updates * recipe.optimizer.epochs > 1
    sampling = float(several or compares_with_past(recipe))
    reference = 1.0 / recipe.optimizer.updates if saying(recipe, "compares") else 0.0
    return (sampling + reference) * noised_levels(recipe)[0]


def steps_to_train(recipe: Recipe) -> range | None:
    """The steps of which any iteration may train some, if a window says which; None if there is no window."""
    window = recipe.sampler.plan.get("window")
    if not isinstance(window, Choice):
        return None
    last = steps_of(recipe) - 1
    first, stop = window.get("start") or 0, window.get("stop")
    size = window.get("size") if window.name == "frozen" else None
    return range(first, min(last if stop is None else stop, last) if size is None else first + size)


def compares_with_past(recipe: Planned) -> bool:
    """Whether the loss compares with a policy that lags behind, so that ratios are not 1 before an update."""
    return any(recipe.objective.get(name) is not None for name in ("old", "compared"))


def _noise_alone(recipe: Recipe) -> float:
    """Share of the iterations in which the images of a prompt get pure noise, the same for all of them."""
    options = recipe.objective
    if (
        differentiates(recipe)
        or options.get("noise") == "image"
        or options.get("skip")
        or options.get("draw") == "between"
    ):
        return 0.0
    times, levels = noised_levels(recipe)
    return 1.0 / (levels // times) if options.get("draw") == "ranges" else times / levels


def images_line(recipe: Recipe) -> str:
    """How many images of a prompt a loss of the forward process trains, and at how many noise levels."""
    times, levels = noised_levels(recipe)
    group, share = recipe.rollout.group, kept_share(recipe)
    images = f"all {group}" if share == 1.0 else f"at most {round(share * group)} of {group}"
    drawn = f"all {levels} noise levels" if times == levels else f"{times} of {levels} noise levels"
    if recipe.objective.get("draw") == "between" or differentiates(recipe):
        drawn = f"{times} noise level{'s' * (times != 1)} between the levels of the sampler"
    return f"{images}, each at {drawn}"


def kept_share(recipe: Recipe) -> float:
    """Share of the images that a loss of the forward process evaluates, at most; see `ForwardObjective.batches`."""
    comparing = any(compares_all(part.target) for part in saying(recipe, "whole_groups"))
    if comparing or recipe.optimizer.updates * recipe.optimizer.epochs > 1:
        return 1.0
    kept = [choice.get("keep") for choice in recipe.select if choice.get("among") != "split"]
    return min([1.0, *(keep / recipe.rollout.group for keep in kept if keep)])


def anchored_share(recipe: Planned) -> float:
    """Share of the trained states that are evaluated with gradients; below 1 if an objective draws anchors of them."""
    anchors: int | None = recipe.objective.get("anchors")
    return 1.0 if anchors is None else min(anchors / recipe.rollout.group, 1.0)


def renoised_states(recipe: Planned) -> int:
    """From how many states of an image an objective trains a step: its own one, and those noised again."""
    return 1 + int(recipe.objective.get("renoised") or 0)


def step_ranges(steps: Sequence[int]) -> str:
    """Rising step numbers as text, with ranges of neighbours: 0, 1, 2, 5 is `0–2, 5`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def surrogate_of(recipe: Planned) -> Choice | None:
    """The surrogate of a recipe's ratio; None for an objective without one."""
    return next((choice for _, choice in choices(recipe.objective) if choice.kind == "surrogate"), None)


def clip_of(surrogate: Callable[..., Any]) -> tuple[float, float]:
    """Lower and upper clip of the ratio, for the lines that a run prints; infinite if the clip is not a constant.

    Args:
        surrogate: with its options bound.
    """
    options: dict[str, Any] = getattr(surrogate, "keywords", {})
    target = getattr(surrogate, "func", surrogate)
    if target is clip_nats:
        return (options["nats"] / options["elements"],) * 2
    # Of other surrogates `low` and `high` bound a weight (cispo), or depend on the token (dcpo).
    return (options["low"], options["high"]) if target in (clip, dhpo, gmpo, rec, sspo) else (math.inf, math.inf)


def clip_bounds(recipe: Planned, elements: int | None) -> tuple[float | None, float | None]:
    """The upper clip as (mean-reduced number, nats of the whole latent); None where the value is not known."""
    surrogate = surrogate_of(recipe)
    if surrogate is None:
        return None, None
    nats = surrogate.get("nats")
    if nats is not None:
        return (nats / elements if elements else None), nats
    high = clip_of(surrogate.make(elements=1))[1]
    if not math.isfinite(high):
        return None, None
    return high, (high * elements if elements else None)


def _warnings(recipe: Planned, elements: int | None) -> list[str]:
    found = []
    steps = recipe.optimizer.updates * recipe.optimizer.epochs
    surrogate = surrogate_of(recipe)
    kind = None if surrogate is None else surrogate.name
    clips = kind in ("clip", "clip_nats")
    if steps == 1 and clips and not compares_with_past(recipe):
        found.append("one optimizer step per rollout is strictly on-policy: the ratio is 1 and the clip never binds")
    high, nats = clip_bounds(recipe, elements)
    if high is not None and high < 2e-8:
        found.append(f"the clip {high:.1e} is below the resolution of float32 log-ratios (2e-8)")
    if nats is not None and nats > 5 and clips and steps > 1:
        way = "lower objective.surrogate.nats" if kind == "clip_nats" else "surrogate clip_nats sets the clip in nats"
        found.append(f"a clip of ±{nats:.1f} nats per latent hardly binds; {way}")
    if isinstance(recipe, Recipe) and recipe.model.reference_call and not saying(recipe, "compares"):
        found.append(
            "model.reference_call has no effect, because no part compares with the reference, as penalty kl does"
        )
    if isinstance(recipe, Recipe) and recipe.objective.get("ratio") == "guard" and recipe.sampler.kernel.name == "cps":
        found.append("guard with cps uses the true density of the CPS transition, not the released log-prob")
    return found + _scouts_warnings(recipe)


def _scouts_warnings(recipe: Planned) -> list[str]:
    """Settings with which scouts say little, or save nothing."""
    scouts = recipe.rollout.scouts if isinstance(recipe, Recipe) else None
    if scouts is None:
        return []
    found, steps, plan = [], steps_of(recipe), recipe.sampler.plan
    if not offering(plan, "noiseless"):
        found.append(
            f"steps of sampler.plan {plan.short} draw noise, so a seed does not decide its image, and scouts say less; "
            "see the metric scouts/rank, and use sampler.plan ode where the objective allows it"
        )
    if scouts_evaluations(recipe) + recipe.rollout.group * steps >= scouts.group * steps:
        found.append(
            f"scouts save nothing: with the images of their seeds they take as many evaluations as {scouts.group} "
            "images with all steps; use fewer rollout.scouts.steps or more scouts, or choose among all images with "
            "select"
        )
    return found


def search_passes(recipe: AnyRecipe) -> float:
    """How many passes over a rollout, without gradients, `objective.balance` needs to find its bounds.

    The first optimizer step needs none, because every ratio is 1 until the weights move. Each later step needs one pass
    over its part of the rollout.
    """
    steps = recipe.optimizer.updates * recipe.optimizer.epochs
    return 0.0 if value_at(recipe, "objective.balance") is None else (steps - 1) / recipe.optimizer.updates


def teachers_line(recipe: TextRecipe) -> str | None:
    """A line on the cost of other models that teach; None if there are none."""
    if not recipe.model.teachers:
        return None
    paths = ", ".join(dict.fromkeys(teacher.path for teacher in recipe.model.teachers))
    which = "each of them that has a context" if offered(recipe, "teachers") else "each of them"
    return f"a teacher reads {which} {recipe.optimizer.epochs} time(s), without gradients: {paths}"


def search_line(recipe: AnyRecipe) -> str | None:
    """A line on the cost of the search for bounds; None if there is no search."""
    passes = search_passes(recipe)
    return f"objective.balance scores them {passes:g} more time(s), without gradients" if passes else None


def parts_line(recipe: TextRecipe) -> str | None:
    """A line on how completions are cut and what is done by part; None if completions are not cut."""
    if recipe.parts is None:
        return None
    objective, credit = recipe.objective, recipe.credit.short
    surrogate = objective.get("surrogate")
    done = {
        "a ratio each": objective.get("level") == "part",
        "a clip by their entropy": surrogate is not None and {"units", "entropy"} <= set(given_names(surrogate.target)),
        "an equal share of the loss": objective.get("reduce") == "part",
        f"advantages by their scores ({credit})": credit in ("parts", "minimum"),
    }
    named = ", ".join(name for name, asked in done.items() if asked) or "for the rewards alone"
    where = f"where {recipe.parts.pattern!r} matches" if recipe.parts.cut == "pattern" else f"into {recipe.parts.cut}"
    return f"completions are cut {where}: {named}"


def scouts_line(recipe: Planned) -> str | None:
    """A line on the scouts of a prompt; None if there are none."""
    scouts = recipe.rollout.scouts if isinstance(recipe, Recipe) else None
    if scouts is None:
        return None
    return (
        f"scouts: {scouts.group} a prompt, of {scouts.steps} step{'' if scouts.steps == 1 else 's'} each; the seeds of "
        f"{recipe.rollout.group} of them, {scouts.keep}, are sampled with all {steps_of(recipe)} steps"
    )


def budget_line(recipe: AnyRecipe) -> str | None:
    """A line on the number of samples if prompts are sampled in rounds; None if there are no rounds."""
    budget, rollout, templates = recipe.rollout.budget, recipe.rollout, len(recipe.data.templates)
    round_size, first = rollout.prompts * rollout.group, max(templates, 1)
    named = f"in rounds of {rollout.group} a prompt"
    if templates:
        named += f", {templates} of them with a template each"
    if budget is None:
        return f"{named}: {round_size * first} samples an iteration" if templates else None
    if budget.choice == "until":
        most = max(budget.rounds, first)
        return f"{named}, at most {most}: {round_size * first} to {round_size * most} samples an iteration"
    mean = max(budget.rounds, first)
    return f"{named}, {mean} on average: {round_size * mean} samples an iteration"
