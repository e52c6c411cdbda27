"""The plans that a recipe may choose. Each is a function of the setting of the run and of the iteration."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from ..parts.choice import Choice, Of, given_names
from ..parts.needs import asking, needs, one_round, unscored, unused
from ..parts.own_code import PartError
from ..parts.plugins import told
from ..parts.ranges import Fraction, Several, Spread, Whole
from ..parts.traits import noises_again, offering, offers, trained
from .kernels import Kernel
from .plans import Plan, branch_plan, given_plan, ode_plan, spine_plan, window_plan
from .schedules import compress_tail
from .solvers import Solver
from .windows import Window, progressive, whole


@dataclass(frozen=True)
class Setting:
    """The facts about a run from which a plan is made.

    Attributes:
        sigmas: ``T + 1`` noise levels, decreasing to exactly 0.
        kernel: kernel of the stochastic steps.
        solver: solver of the deterministic steps.
        group: number of images per prompt in the recipe (`rollout.group`).
        seed: seed of the run, for the random choices of a plan.
        compares: whether the images of a prompt are compared. If not, a prompt may have one image.
        to_end: whether the last step may be trained with every kernel, because no density of a step is needed.
    """

    sigmas: tuple[float, ...]
    kernel: Kernel
    solver: str | Solver = "euler"
    group: int = 2
    seed: int = 0
    compares: bool = True
    to_end: bool = False

    @property
    def num_steps(self) -> int:
        """Denoising steps ``T``."""
        return len(self.sigmas) - 1

    @property
    def trainable(self) -> int:
        """How many steps, from the first on, may be trained: all but the last, or all with an exact kernel."""
        return self.num_steps if self.kernel.exact or self.to_end else self.num_steps - 1

    def steps(self, window: Window, iteration: int, option: str = "window") -> list[int]:
        """The steps of a window in an iteration, in rising order.

        Args:
            window: a window with its options bound.
            iteration: counted from 0.
            option: name of the plan's option that holds the window, for messages.

        Raises:
            ValueError: if the window does not fit, or gives numbers that are not steps of the schedule, or gives the
                last step where it is never trained.
        """
        key, last = f"sampler.plan.{option}", self.trainable
        try:
            # A window leaves out the last step of a schedule. So it sees one step more if the last step is trained too.
            found = list(window(iteration, last + 1, self.seed))
        except PartError as error:
            raise ValueError(f"{key}: {error}") from error
        except ValueError as error:
            if last == self.num_steps:
                raise ValueError(
                    f"{key} does not fit in {last} steps; use a smaller size, an earlier start or stop, or more "
                    "sampler.steps"
                ) from error
            raise ValueError(f"{key}: {error}") from error
        except Exception as error:
            raise ValueError(f"{key}: {told(error)}") from error
        if any(type(step) is not int or not 0 <= step < last for step in found):
            why = "" if last == self.num_steps else f", because the last of {self.num_steps} steps is never trained"
            raise ValueError(
                f"{key} gives {found} in iteration {iteration}; give whole numbers from 0 to {last - 1}{why}"
            )
        return sorted(set(found))


PREVIEWED = ("turning", "value", "minimum")
"""Credits that need the image that each state would become without noise."""


def _previews_are_read(recipe: Any, choice: Choice) -> list[str]:
    if choice["probe"] is None or asking(recipe, "sampler.plan.probe"):
        return []
    return [
        f"sampler.plan.probe makes previews that only the credits {', '.join(PREVIEWED)} read, and this recipe has "
        "none of them; leave sampler.plan.probe out"
    ]


DRAWN = ("random", "subset", "spaced")
"""Windows that are drawn at random."""


def _draws_for_each(recipe: Any, choice: Choice) -> list[str]:
    """What cannot be trained where the prompts of an iteration have windows of their own."""
    if choice["each"] == "iteration":
        return []
    chosen, who = choice["window"], "sampler.plan.each prompt draws a window for each prompt"
    faults = [
        f"{who}, and {key} is for one window; leave {key} out"
        for key in ("pruned", "probe", "flash_ratio")
        if choice[key] is not None
    ]
    if chosen.name not in DRAWN or chosen.get("interval") != 1:
        faults.append(
            f"{who}, and window {chosen.short} stays for several iterations or is not drawn; use one of "
            f"{', '.join(DRAWN)}, with interval: 1"
        )
    if recipe.objective.name != "transition":
        faults.append(f"{who}, and objective {recipe.objective.short} trains one window; use objective transition")
    if recipe.credit.name != "leaf":
        faults.append(f"{who}, and credit {recipe.credit.short} reads one rollout of all prompts; use credit leaf")
    if recipe.critic is not None:
        faults.append(f"{who}, and a critic reads the states of one window; leave critic out")
    if recipe.optimizer.cut == "edges":
        faults.append(f"{who}, and optimizer.cut edges deals out batches of one rollout; use optimizer.cut prompts")
    return faults


@offers("tree", where="shared_noise")
@offers("branches", where="probe")
@needs(_previews_are_read, _draws_for_each)
def window(
    setting: Setting,
    iteration: int,
    *,
    window: Annotated[Window, Of("window", "progressive")] = progressive,
    stochastic: Literal["window", "all"] = "window",
    pruned: Annotated[Window, Of("window", "progressive")] | None = None,
    shared_noise: bool = True,
    probe: Whole | None = None,
    flash_ratio: Fraction | None = None,
    before: Annotated[Solver, Of("solver")] | None = None,
    each: Literal["iteration", "prompt"] = "iteration",
) -> Plan:
    """Chains that are stochastic and trained within a window of steps, and deterministic elsewhere (MixGRPO).

    Args:
        setting: setting of the run.
        iteration: counted from 0.
        window: The steps that are trained.
        stochastic: `window` makes only the steps of the window stochastic; `all` makes every step but the last
            stochastic.
        pruned: Steps of the window that are not trained; by default there are none.
        shared_noise: Whether the samples of a prompt start from one noise.
        probe: If given, each state from which a stochastic step starts is also finished without noise. The number is
            the stride of these steps; 0 takes one step to the end.
        flash_ratio: Share of the steps after the window that is kept (MixGRPO-Flash); by default all are kept.
        before: Solver of the deterministic steps before the window; by default `sampler.solver`. MixGRPO-Flash takes
            steps of Euler before the window, and second-order steps after it.
        each: What has a window of its own: an `iteration`, or each `prompt` of it (Flash-GRPO, 2605.15980). The prompts
            with one window are sampled together, so batches are smaller where there are several windows.

    Raises:
        ValueError: if the group has one image, or options exclude each other.
    """
    _compared(setting)
    if stochastic == "all":
        _require_unset("flash_ratio", flash_ratio, "shortens the deterministic steps after the window")
        _require_unset("before", before, "is the solver of the deterministic steps before the window")
    chosen, trained = _trained(setting, iteration, window, pruned)
    sigmas = setting.sigmas if flash_ratio is None else compress_tail(setting.sigmas, chosen[-1], flash_ratio)
    return window_plan(
        sigmas, trained, setting.kernel, samples=setting.group, shared_noise=shared_noise, solver=setting.solver,
        stochastic=range(setting.trainable) if stochastic == "all" else chosen, probe=probe, before=before,
    )  # fmt: skip


@offers("tree", "splits", "branches")
def branch(
    setting: Setting,
    iteration: int,
    *,
    splits: list[Whole],
    width: Several = 2,
    spread: Spread | None = None,
    window: Annotated[Window, Of("window", "progressive")] = whole,
    stochastic: Literal["window", "all"] = "all",
    pruned: Annotated[Window, Of("window", "progressive")] | None = None,
) -> Plan:
    """A tree that splits at some steps; its leaves are the images (BranchGRPO).

    Args:
        setting: setting of the run.
        iteration: counted from 0.
        splits: Steps at which every state splits.
        width: Children of a state at a split.
        spread: Weight of a sibling's own noise relative to the noise that siblings share; by default siblings share no
            noise.
        window: The steps that are trained.
        stochastic: `window` makes the splits and the steps of the window stochastic, and trains both; `all` makes every
            step stochastic.
        pruned: Steps that are not trained (depth pruning); by default there are none.

    Raises:
        ValueError: if a split is not a step of the schedule, or the tree has another number of images than
            `rollout.group`.
    """
    _within("splits", splits, setting)
    count = len(set(splits))
    if setting.group != width**count:
        raise ValueError(
            f"rollout.group is {setting.group}, and a tree with {count} split(s) of width {width} has {width**count} "
            f"images; write rollout.group: {width**count}, or other sampler.plan.splits or sampler.plan.width"
        )
    mixed = stochastic == "window"
    chosen, trained = _trained(setting, iteration, window, pruned, splits if mixed else ())
    return branch_plan(
        setting.sigmas, splits, setting.kernel, width=width, spread=spread, trained=trained,
        stochastic=chosen if mixed else None, solver=setting.solver,
    )  # fmt: skip


@offers("branches")
def spine(
    setting: Setting,
    iteration: int,
    *,
    splits: list[Whole],
    width: Several = 2,
    completions: tuple[Whole, ...] = (1,),
    lead: Whole | None = None,
) -> Plan:
    """A deterministic main line with stochastic, trained branches, each finished without noise (TempFlow-GRPO).

    Args:
        setting: setting of the run.
        iteration: counted from 0.
        splits: Steps at which branches leave the main line.
        width: Branches at a step.
        completions: Strides with which each branch is finished, once for each stride; 0 takes one step to the end.
        lead: Steps to the next level that a branch takes before its strides begin; by default none.

    Raises:
        ValueError: if a branch leaves at a number that is not a step, or a completion is not possible.
    """
    _within("splits", splits, setting)
    if lead and set(completions) == {1}:
        raise ValueError(
            f"sampler.plan.lead is {lead} and all strides in sampler.plan.completions are 1, so no strides begin; "
            "leave lead out, or add another stride"
        )
    return spine_plan(
        setting.sigmas, splits, setting.kernel, branches=width, roots=setting.group, solver=setting.solver,
        completions=completions, lead=lead or 0,
    )  # fmt: skip


def _trained_without_noise(recipe: Any, choice: Choice) -> list[str]:
    if choice["window"] is None or trained(recipe) in ("choices", "states", "velocities", "gradients", "targets"):
        return []
    return [
        f"plan {choice.short} trains the steps of its window without noise, and objective is {recipe.objective.name}; "
        "leave sampler.plan.window out, or use objective neighbour, directed, reward_gradient, reward_targets or "
        "visited"
    ]


def _ends_for_gradients(recipe: Any, choice: Choice) -> list[str]:
    if choice["earliest"] is None or trained(recipe) == "gradients":
        return []
    return [
        f"sampler.plan.earliest ends rollouts early for the gradients of rewards, and objective is "
        f"{recipe.objective.name}; leave earliest out, or use objective reward_gradient"
    ]


@offers("noiseless")
@offers("neighbours", where="window")
@needs(_trained_without_noise, _ends_for_gradients)
def ode(
    setting: Setting,
    iteration: int,
    *,
    window: Annotated[Window, Of("window", "progressive")] | None = None,
    spread: Spread | None = None,
    earliest: Whole | None = None,
) -> Plan:
    """Deterministic chains, each from its own noise, for losses without a stochastic step.

    Args:
        setting: setting of the run.
        iteration: counted from 0.
        window: The steps that are trained, as choices among neighbours (Neighbor GRPO), along directions (FDFO), by the
            gradients of rewards (DRaFT, ReFL) or by penalties alone (DiffusionOPD). By default there are none, for
            losses of the forward process.
        spread: Weight of each sample's own noise relative to the noise that the samples of a prompt share, in their
            first noises. By default these noises are independent.
        earliest: First step that may end a rollout (DRTune). In each iteration, a step from this one on is drawn, which
            goes to the clean image at once. The window is of the steps up to it. By default, a rollout has all steps.

    Raises:
        ValueError: if the group has one image, and images of a prompt are compared; or `earliest` is no step.
    """
    _compared(setting)
    if earliest is not None:
        _within("earliest", [earliest], setting)
        ends = random.Random(f"end/{setting.seed}/{iteration}").randrange(earliest, setting.num_steps)
        setting = replace(setting, sigmas=(*setting.sigmas[: ends + 1], 0.0))
    try:
        trained = () if window is None else _trained(setting, iteration, window, None)[1]
    except ValueError as error:
        if earliest is None:
            raise
        raise ValueError(
            f"sampler.plan.earliest is {earliest}, and in iteration {iteration} a rollout has {setting.num_steps} "
            "step(s), in which sampler.plan.window does not fit; use a later step, or a window of fewer steps"
        ) from error
    return ode_plan(setting.sigmas, samples=setting.group, solver=setting.solver, trained=trained, spread=spread)


def _noised_again(recipe: Any, choice: Choice) -> list[str]:
    faults, masked = [], recipe.task == "masked"
    if masked and recipe.objective.name != "answers":
        faults.append(
            f"plan {choice.short} gives completions that the policy did not draw, and objective is "
            f"{recipe.objective.name}; use objective answers"
        )
    if masked and recipe.generation.temperature != 1.0:
        faults.append(
            f"plan {choice.short} samples nothing, and generation.temperature is {recipe.generation.temperature:g}, by "
            "which logits are divided in scoring too; use generation.temperature 1.0"
        )
    likelihood = recipe.objective.get("likelihood") if masked else None
    if likelihood is not None and "steps" in given_names(likelihood.target):
        faults.append(
            f"likelihood {likelihood.short} takes its masks from the steps of the sampler, and plan {choice.short} "
            "samples nothing; use objective.likelihood elbo"
        )
    if not masked and not noises_again(recipe):
        faults.append(
            f"plan {choice.short} samples nothing, so there are no steps to train, and objective is "
            f"{recipe.objective.name}; use objective forward or direct_align"
        )
    if fault := unscored(recipe, choice["columns"]):
        faults.append(fault)
    solver = [] if masked else unused(recipe.sampler, ["solver"], f"plan {choice.short} takes no step")
    return faults + [f"sampler.{one}" for one in solver]


@offers("given")
@needs(_noised_again, one_round("trains on the samples of the data"))
def given(
    setting: Setting,
    iteration: int,
    *,
    columns: tuple[str, ...] = ("chosen", "rejected"),
) -> Plan:
    """No sampling: the data give the samples of each prompt (Diffusion-DPO; VRPO for masked language models).

    The rewards score the given samples. Reward `given` says how the data rank them. Images are for losses of the
    forward process: `sampler.steps` is the number of noise levels, and the objective draws some of them. Completions
    are for objective `answers`. Evaluations sample.

    Args:
        setting: setting of the run.
        iteration: counted from 0.
        columns: Columns of the training prompts that hold the samples of a prompt, the best sample first. For images,
            a column holds paths, or the pictures of a data set, and in the place of a column NAME there may be a column
            NAME_file_name with paths. For completions, it holds texts, or conversations that end with a message of the
            assistant.

    Raises:
        ValueError: if `rollout.group` is not the number of columns, or a column is named twice.
    """
    if len(set(columns)) < len(columns) or not columns:
        raise ValueError(f"sampler.plan.columns is {list(columns)}; name one column or more, each once")
    if setting.group != len(columns):
        raise ValueError(
            f"rollout.group is {setting.group}, and sampler.plan.columns names {len(columns)}: {', '.join(columns)}; "
            f"write rollout.group: {len(columns)}, or other columns"
        )
    return given_plan(setting.sigmas, samples=len(columns))


def _draws_noise(recipe: Any, choice: Choice) -> list[str]:
    plan = recipe.sampler.plan
    if not offering(plan, "noiseless") and not offering(plan, "given"):
        return []
    fault = unused(recipe.sampler, ["kernel"], f"no step of plan {plan.short} draws noise")
    return [f"sampler.{one}" for one in fault]


OF_KERNELS = (_draws_noise,)
"""The rules that every kernel has for a recipe."""

PLANS: dict[str, Callable[..., Plan]] = {"window": window, "branch": branch, "spine": spine, "ode": ode, "given": given}
"""Plans, by the names that recipes use."""


def _trained(
    setting: Setting, iteration: int, window: Window, pruned: Window | None, points: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """The window of an iteration, and the trained steps: the window and `points` without the pruned steps."""
    chosen = setting.steps(window, iteration)
    if not chosen:
        raise ValueError(f"sampler.plan.window gives no step in iteration {iteration}; give at least one")
    left_out = set(setting.steps(pruned, iteration, "pruned")) if pruned else set()
    return chosen, sorted({*chosen, *points} - left_out) or chosen[:1]


def _require_unset(option: str, value: object, does: str) -> None:
    if value is not None:
        raise ValueError(
            f"sampler.plan.{option} {does}, and with sampler.plan.stochastic all there are no such steps; use "
            f"stochastic window, or leave {option} out"
        )


def _compared(setting: Setting) -> None:
    if setting.group < 2 and setting.compares:
        raise ValueError(f"rollout.group is {setting.group}: a group of one has no baseline; use 2 or more")


def _within(option: str, steps: Sequence[int], setting: Setting) -> None:
    if not steps or max(steps) >= setting.num_steps:
        raise ValueError(f"sampler.plan.{option} is {list(steps)}; name steps between 0 and {setting.num_steps - 1}")
