"""What does not go together in a recipe, said in words: geometry that cannot run, and combinations that are unsound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .part_soundness import PART_CREDITS
from .reading_soundness import reading_faults
from .reward_soundness import reward_faults

if TYPE_CHECKING:
    from .schema import AnyRecipe, ObjectiveConfig, Recipe, SamplerConfig, TextRecipe, WindowConfig

FORWARD_FORMS = ("diffusion_nft", "awm", "dgpo", "flow_dpo")
TOKEN_KEYS = ("options", "constant", "kl", "llds", "balance", "variance", "entropy", "conflict", "confident")
REMEMBERING = ("tracked", "cumulative")
PREVIEWED = ("turning", "value", "minimum")
"""Credits of images that read what each state would become without noise."""


def _window_faults(window: WindowConfig, steps: int, name: str) -> list[str]:
    """Why a window does not fit in a schedule; its last step is never trained, so windows end before it."""
    if window.kind == "all":
        return []
    if window.stop is not None and window.stop > steps - 1:
        return [
            f"{name}.stop is {window.stop} in a schedule of {steps} steps whose last step is never trained; "
            f"use at most {steps - 1} or more sampler.steps"
        ]
    room = (steps - 1 if window.stop is None else window.stop) - window.start
    if window.size <= room:
        return []
    where = f"before its stop, {window.stop}" if window.stop is not None else "before the last, which is never trained"
    mend = f"a size of at most {room}" if room > 0 else f"an earlier {name}.start"
    more = "more sampler.steps" if window.stop is None else f"a later {name}.stop"
    return [
        f"{name}: {window.size} step(s) from step {window.start} do not fit in a schedule of {steps} {where}; "
        f"use {mend}, or {more}"
    ]


def sampler_faults(recipe: Recipe) -> list[str]:
    """Of steps, windows and trees."""
    sampler, group = recipe.sampler, recipe.rollout.group
    steps = len(sampler.sigmas) - 1 if sampler.sigmas else sampler.steps
    faults = []
    if sampler.plan in ("window", "ode") and group < 2:
        faults.append(f"rollout.group is {group}: a group of one has no baseline; use 2 or more")
    if sampler.plan in ("branch", "spine") and not (
        sampler.splits and max(sampler.splits) < steps and min(sampler.splits) >= 0
    ):
        faults.append(f"sampler.splits is {sampler.splits}; name steps between 0 and {steps - 1}")
    unwindowed = sampler.plan == "spine" or (sampler.plan == "ode" and recipe.objective.form in FORWARD_FORMS)
    windows = [] if unwindowed else [("window", sampler.window)]
    windows += [("pruned", sampler.pruned)] if sampler.pruned else []
    faults += [fault for name, window in windows for fault in _window_faults(window, steps, f"sampler.{name}")]
    wrong = {
        "probe": sampler.probe is not None and sampler.plan != "window",
        "flash_ratio": sampler.flash_ratio is not None and sampler.plan != "window",
        "completions": sampler.completions != [1] and sampler.plan != "spine",
        "spread": sampler.spread is not None and sampler.plan not in ("branch", "ode"),
        "pruned": sampler.pruned is not None and sampler.plan not in ("window", "branch"),
        "stochastic": sampler.stochastic is not None and sampler.plan not in ("window", "branch"),
    }
    faults += [f"sampler.{name} has no meaning in plan {sampler.plan}; leave it out" for name in wrong if wrong[name]]
    if sampler.flash_ratio is not None and sampler.stochastic == "all":
        faults.append(
            "sampler.flash_ratio shortens the deterministic steps after the window; use sampler.stochastic window"
        )
    if sampler.probe is not None and recipe.advantage.credit not in PREVIEWED:
        faults.append(
            "sampler.probe makes previews that only advantage.credit turning, value and minimum read; leave it out"
        )
    if sampler.guide is not None and recipe.critic is None:
        faults.append("sampler.guide follows the gradient of a critic; add a `critic` section")
    if sampler.guide is not None and sampler.plan not in ("window", "branch"):
        faults.append(f"sampler.guide needs a stochastic main line, which plan {sampler.plan} does not have")
    return faults


def credit_faults(recipe: Recipe) -> list[str]:
    """Of advantages, selection and the critic."""
    advantage, sampler = recipe.advantage, recipe.sampler
    faults = []
    if advantage.credit == "prefix":
        faults.append("advantage.credit prefix reads the tokens of completions; use depth for a tree of images")
    if advantage.credit == "parts":
        faults.append(
            "advantage.credit parts takes the scores of the parts of completions; of images use value, turning or "
            "minimum, by the scores of their states"
        )
    if advantage.baseline == "length":
        faults.append("advantage.baseline length weights by the lengths of completions; images have none, use mean")
    if advantage.credit in PREVIEWED and (sampler.plan != "window" or sampler.probe is None):
        faults.append(
            f"advantage.credit {advantage.credit} compares states with what they become without noise; use "
            "sampler.plan window with sampler.probe 1 (every level) or 0 (one step)"
        )
    if (
        advantage.credit == "depth"
        and sampler.plan != "branch"
        and not (sampler.plan == "window" and sampler.shared_noise)
    ):
        faults.append(
            "advantage.credit depth compares the states of one tree, and here each image has a tree of its own; use "
            "sampler.plan branch, or plan window with shared_noise"
        )
    if advantage.credit in ("critic", "process") and recipe.critic is None:
        faults.append(f"advantage.credit {advantage.credit} asks a critic; add a `critic` section")
    if advantage.credit in (*PREVIEWED, "critic", "process") and recipe.objective.form != "transition":
        faults.append(f"advantage.credit {advantage.credit} needs trained transitions; use objective.form transition")
    if recipe.critic is not None and not (advantage.credit in ("critic", "process") or sampler.guide):
        faults.append("a critic that nothing asks; set advantage.credit to critic or process, or sampler.guide")
    if advantage.fusion == "path" and advantage.credit != "depth":
        faults.append("advantage.fusion weights the leaves of a tree; it belongs to advantage.credit depth")
    if advantage.select is not None and len(sampler.completions) > 1:
        faults.append("advantage.select chooses images, and a branch with several completions has several; use one")
    if advantage.select is not None and advantage.select.among == "split" and sampler.plan != "branch":
        faults.append("advantage.select.among split needs a tree; use sampler.plan branch, or among group")
    return faults


def objective_faults(recipe: Recipe) -> list[str]:
    """Of the form of the loss, its ratio and penalties."""
    objective, sampler, rollout = recipe.objective, recipe.sampler, recipe.rollout
    faults = []
    if objective.clip_nats is not None and objective.options:
        faults.append("objective.clip_nats and objective.options both set the clip; give one")
    if objective.clip_nats is not None and objective.surrogate not in ("clip", "gmpo"):
        faults.append(
            f"objective.clip_nats sets the bounds of a clip, which surrogate {objective.surrogate} does not "
            "have; leave it out or use surrogate clip"
        )
    if objective.surrogate == "sspo":
        faults.append(
            "surrogate sspo widens the clip of an uncertain sentence, and the steps of images have one entropy, that "
            "of their noise; use surrogate clip"
        )
    forward = objective.form in FORWARD_FORMS
    if sampler.plan == "ode" and objective.form == "transition":
        faults.append(
            "sampler.plan ode has no stochastic step, so no transition has a density; use objective.form neighbour or "
            f"one of {', '.join(FORWARD_FORMS)}, or another plan"
        )
    if sampler.plan != "ode" and objective.form == "neighbour":
        faults.append("objective.form neighbour chooses among deterministic trajectories; use sampler.plan ode")
    if forward and rollout.batch < rollout.group:
        faults.append(
            f"objective.form {objective.form} takes whole groups in a call: rollout.batch is {rollout.batch} for "
            f"groups of {rollout.group}; use at least {rollout.group}"
        )
    if objective.form == "transition":
        faults += _ratio_faults(objective, sampler)
    else:
        unused = [
            n
            for n in ("trust_nats", "w2", "stepwise", "distil", "llds", "balance", "variance")
            if getattr(objective, n)
        ]
        faults += [f"objective.{name} belongs to objective.form transition; leave it out" for name in unused]
    if objective.form == "neighbour" and (objective.kl or recipe.advantage.select is not None):
        faults.append("objective.form neighbour takes neither objective.kl nor advantage.select; leave them out")
    if objective.times is not None and not forward:
        faults.append("objective.times belongs to a forward-process form; leave it out")
    if objective.old is not None and not forward:
        faults.append(
            "objective.old belongs to a forward-process form, whose data may be of another policy; leave it out"
        )
    if objective.distil and sampler.guide is None:
        faults.append("objective.distil learns a guided step; add sampler.guide, or leave it out")
    if objective.anchor is not None and not (objective.kl or objective.w2 or objective.form in ("dgpo", "flow_dpo")):
        faults.append("objective.anchor moves a reference that nothing compares with; set objective.kl")
    return faults


def _ratio_faults(objective: ObjectiveConfig, sampler: SamplerConfig) -> list[str]:
    faults = []
    if objective.ratio == "guard" and sampler.kernel == "cps" and objective.weight == "none":
        faults.append("objective.ratio guard with kernel cps needs objective.weight guard: scales differ by step")
    if objective.ratio == "cps_released" and sampler.kernel != "cps":
        faults.append(f"objective.ratio cps_released belongs to kernel cps, not {sampler.kernel}; use gaussian")
    if objective.ratio == "cps_released" and objective.weight in ("guard", "equalise"):
        faults.append(
            f"objective.weight {objective.weight} evens the gradient of a density, and the released CPS log-prob is "
            "none: it lacks the division by 2 s²; use weight none, or ratio gaussian"
        )
    if objective.llds and objective.ratio != "gaussian":
        faults.append(
            f"objective.llds looks whether a step became less likely, and objective.ratio {objective.ratio} is not the "
            "ratio of its densities; use ratio gaussian"
        )
    if objective.ratio == "cps_released" and objective.trust_nats is not None:
        faults.append("objective.trust_nats is a divergence of densities; use ratio gaussian with it")
    return faults


def _prefix_faults(recipe: TextRecipe) -> list[str]:
    """Of advantages by token."""
    advantage = recipe.advantage
    faults = []
    plain = (advantage.estimator, advantage.how, advantage.baseline, advantage.scale)
    if plain != ("group", "sum", "mean", "group"):
        faults.append(
            "advantage.credit prefix has the group's mean and scale of its own; use advantage.estimator group, how "
            "sum, baseline mean and scale group"
        )
    if recipe.objective.conflict is not None:
        faults.append(
            "objective.conflict tells good answers from bad ones, and with advantage.credit prefix a token has an "
            "advantage of its own; leave one of them out"
        )
    if recipe.objective.form != "tokens":
        faults.append(f"advantage.credit prefix is of tokens; use objective.form tokens, not {recipe.objective.form}")
    return faults


def text_faults(recipe: TextRecipe) -> list[str]:
    """Of a run of text."""
    objective, advantage = recipe.objective, recipe.advantage
    faults = []
    if recipe.rollout.group < 2 and advantage.baseline != "none":
        faults.append(
            f"rollout.group is {recipe.rollout.group}: a group of one has no baseline; use 2 or more, or "
            "advantage.baseline none"
        )
    if advantage.credit not in ("leaf", "prefix", "anchor", *PART_CREDITS):
        faults.append(
            f"advantage.credit {advantage.credit} reads the states of a denoising tree; use leaf, prefix, anchor, "
            f"{' or '.join(PART_CREDITS)} with text"
        )
    if advantage.credit == "prefix":
        faults += _prefix_faults(recipe)
    if advantage.select is not None and advantage.select.among == "split":
        faults.append("advantage.select.among split needs a tree; use group")
    if objective.form != "tokens":
        unused = [n for n in TOKEN_KEYS if getattr(objective, n)]
        unused += ["correction"] if objective.correction not in ("auto", "none") else []
        faults += [
            f"objective.{name} belongs to objective.form tokens, not {objective.form}; leave it out" for name in unused
        ]
        if advantage.select is not None:
            faults.append(f"objective.form {objective.form} takes whole groups; leave advantage.select out")
    elif objective.form_options:
        faults.append(
            "objective.form_options belong to another form than tokens, whose settings are surrogate and options"
        )
    if objective.constant and objective.reduce != "sum":
        faults.append(f"objective.constant belongs to objective.reduce sum, not {objective.reduce}")
    if objective.level == "sequence" and objective.surrogate == "gmpo":
        faults.append("surrogate gmpo pools the row after its clip; use objective.level token")
    if objective.entropy is not None and objective.entropy.value > objective.entropy.high:
        faults.append(
            f"objective.entropy.value is {objective.entropy.value:g}, above its highest, {objective.entropy.high:g}"
        )
    if objective.correction_how == "truncate" and objective.correction_floor > 0:
        faults.append("objective.correction_floor belongs to objective.correction_how mask; leave it out")
    if objective.correction_floor >= objective.correction_cap:
        faults.append(
            f"objective.correction_floor {objective.correction_floor:g} is not below correction_cap "
            f"{objective.correction_cap:g}"
        )
    if recipe.generation.engine_options and recipe.generation.engine != "vllm":
        faults.append("generation.engine_options belong to generation.engine vllm; leave them out")
    if recipe.generation.top_k == 1:
        faults.append("generation.top_k 1 always takes the likeliest token, so a group has one completion; use more")
    return faults


def shared_faults(recipe: AnyRecipe) -> list[str]:
    """Of what images and text have in common: estimators with a memory, budgets, and rewards that refer to others."""
    advantage = recipe.advantage
    faults = reward_faults(recipe)
    if advantage.estimator in REMEMBERING and advantage.credit != "leaf":
        faults.append(
            f"advantage.estimator {advantage.estimator} remembers prompts, not steps; use advantage.credit leaf"
        )
    faults += [*_moved_faults(recipe), *reading_faults(recipe)]
    if advantage.how in ("worst", "agreement") and advantage.credit != "leaf":
        faults.append(f"advantage.how {advantage.how} is of samples; use advantage.credit leaf")
    budget = recipe.rollout.budget
    if budget is not None and budget.choice != "until" and budget.most is not None and budget.most < budget.rounds:
        faults.append(f"rollout.budget.most is {budget.most} with {budget.rounds} rounds a prompt on average; use more")
    if budget is not None or recipe.data.templates:
        faults += _round_faults(recipe, "rollout.budget" if budget is not None else "data.templates")
    return faults


def _moved_faults(recipe: AnyRecipe) -> list[str]:
    """Of what bears on the second optimizer step of a rollout and those after it."""
    objective = recipe.objective
    faults = []
    for name in ("llds", "balance", "variance"):
        if getattr(objective, name) and recipe.optimizer.updates * recipe.optimizer.epochs == 1:
            faults.append(
                f"objective.{name} compares with the policy that sampled, which one optimizer step per rollout never "
                "leaves; use optimizer.updates or epochs above 1, or leave it out"
            )
    if objective.llds_rows != "all" and not objective.llds:
        faults.append("objective.llds_rows says which rows objective.llds is of; set that, or leave it out")
    for name, surrogate in (("balance", "bapo"), ("variance", "r2vpo")):
        if getattr(objective, name) is None:
            continue
        if objective.surrogate != surrogate:
            faults.append(
                f"objective.{name} moves a setting of surrogate {surrogate}, not of {objective.surrogate}; use "
                f"{surrogate}, or leave it out"
            )
        elif objective.options:
            faults.append(
                f"objective.options give surrogate {surrogate} what objective.{name} moves; leave one of them out"
            )
        if recipe.task == "text" and recipe.objective.level != "token":
            faults.append(f"objective.{name} counts tokens; use objective.level token")
    return faults


def _round_faults(recipe: AnyRecipe, name: str) -> list[str]:
    """Of samples of a prompt in several rounds, which the key `name` asks for."""
    faults = []
    if recipe.optimizer.updates > 1:
        faults.append(f"{name} samples in rounds, which are one optimizer step; use optimizer.updates 1")
    if recipe.advantage.credit != "leaf":
        faults.append(f"{name} compares samples of several rounds; use advantage.credit leaf")
    if recipe.task == "text" and recipe.rollout.replay:
        faults.append(f"rollout.replay mends a group that is complete, and {name} makes it in rounds; leave one out")
    if recipe.task == "images":
        if recipe.sampler.plan not in ("window", "ode") or recipe.sampler.probe is not None:
            faults.append(f"{name} needs chains; use sampler.plan window or ode, without probe")
        if recipe.objective.form in ("neighbour", "dgpo", "flow_dpo"):
            faults.append(
                f"objective.form {recipe.objective.form} takes a whole group in a call, and {name} cuts it into "
                "rounds; leave one of them out"
            )
    return faults
