"""`flowgrpo rewards check`: finds what can be known about a reward before a model is trained for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..rewards.base import RewardSpec
from ..rewards.registry import outline
from .contract import check_contract, check_full_call
from .drawn_sounds import drawn_sounds, sounds_of_folder
from .edge_inputs import check_edges, compare_with_ordinary
from .entries import YARDSTICKS
from .findings import NOTE, WARNING, Report
from .folder import LabelledPicture, chosen, materials, read_folder
from .material import Material, arithmetic_samples, scene_samples, written_completions
from .trial import SCORED, Trial
from .usefulness import check_agreement, check_distribution, check_range, check_signal

HAS_GRADIENT = (
    "has a gradient with respect to the {kind}, for the recipes draft, refl, drtune, direct_align and diffusion_opsd"
)


@dataclass(frozen=True)
class CheckPlan:
    """What a reward is tried on.

    Attributes:
        images: a folder of pictures, videos or WAV files.
        metadata: the file with the prompts of the pictures; by default a file in the folder, or else the file names.
        data: prompts for the samples of the embedded model or for drawn sounds, or rows with a column `completion`.
        prompts: number of prompts that the embedded model samples, or of drawn sounds; 0 for no samples.
        seeds: number of samples of each prompt.
        most: largest number of files that are taken from the folder.
        against: other rewards to compare with.
        declared: least and greatest score that the author declares.
        accepted: codes of findings that the author intends.
        task: "images", "sounds" or "text"; by default what the reward's signature says.
        frames: for a reward of videos, how many frames each picture becomes; see `panned`. Videos stay as they are.
    """

    images: Path | None = None
    metadata: Path | None = None
    data: str | None = None
    prompts: int = 6
    seeds: int = 8
    most: int = 64
    against: Sequence[RewardSpec] = ()
    declared: tuple[float, float] | None = None
    accepted: Collection[str] = ()
    task: str | None = None
    frames: int | None = None


def _say_nothing(text: str) -> None:
    """Drop a line of progress; the default of `tell`."""


def check_reward(spec: RewardSpec, plan: CheckPlan, tell: Callable[[str], object] = _say_nothing) -> Report:
    """Try a reward on pictures and samples.

    Args:
        spec: the reward.
        plan: what it is tried on.
        tell: is called with a line of text before each step.

    Returns:
        A report; see `Report.count` for the number of faults.

    Raises:
        ValueError: the reward, its samples or a reward to compare with cannot be made; two rewards to compare with have
            one name; a folder, file or option is wrong.
        MissingDependency: the reward needs a package that is not installed.
    """
    tell("making the reward")
    trial = Trial(spec, plan.task, plan.frames)
    try:
        report = Report(trial.name, trial.task, plan.accepted)
        tell("getting samples to try it on")
        sets = _materials(trial, plan, report)
        return check_on(trial, sets, plan, report, tell)
    finally:
        trial.close()


def check_on(
    trial: Trial,
    sets: dict[str, Material],
    plan: CheckPlan,
    report: Report,
    tell: Callable[[str], object] = _say_nothing,
) -> Report:
    """Run all checks on given material; checks that need only a few samples take them from the first set.

    Raises:
        ValueError: a column is missing, or a reward to compare with has a wrong name or the name of another one.
        MissingDependency: a reward needs a package that is not installed.
    """
    main = next(iter(sets.values()))
    trial.require_columns(main)
    for name, material in sets.items():
        _named_once(_others(trial, material, plan, name))
    rows = main.few_rows()
    few = main.take(rows)
    if trial.reward.report:
        report.lines.append(f"it says of itself: {trial.reward.report}")
    tell("repetition, order, other samples in the call, cost")
    first = check_contract(trial, few, report)
    if first.failed:
        return report
    tell("samples and prompts at the edge")
    check_edges(trial, few, first.values, report)
    for name, material in sets.items():
        tell(f"distribution over {material.source}")
        scored = trial.score(material)
        nothing = bool(scored.values.isnan().all())
        if material is main:
            check_full_call(trial, material, rows, first.values, scored, report)
            if nothing:
                report.skipped["distribution, noise"] = "it gives no number in the call with all samples"
        elif nothing:
            why = " ".join(scored.failure.split()) or "all scores are NaN"
            advice = "Leave them out with --prompts 0."
            if main.moving and trial.frames is None:
                advice = f"Make videos of them with --frames {main.images.shape[1]}, or l{advice[1:]}"
            report.add("samples", NOTE, f"it does not score {material.source}: {why:.300}", advice)
        if nothing:
            continue
        check_distribution(material, scored.values, report, name)
        if trial.task == "sounds" and name == "samples":
            report.lines.append(f"by prompt: {_by_prompt(material, scored.values)}")
        if material is main:
            compare_with_ordinary(scored.values, report)
        _agreement(trial, material, scored.values, plan, report, name)
    if report.has("random", "state"):
        report.skipped["noise"] = "its scores change from call to call; mend that first"
    elif "distribution, noise" not in report.skipped:
        tell("versions that look alike")
        check_signal(trial, main, trial.score(main).values, report)
        _check_prompt_use(trial, few, first.values, report)
    check_range(trial, plan.declared, report)
    report.lines.append(f"scored {trial.watch.samples} samples in {trial.watch.calls} calls")
    lack = trial.lacks_gradient(few)
    if lack is not None:
        # This is no fault: most recipes compare scores, and need no gradient.
        kind = SCORED[trial.task]
        without = f"has no gradient with respect to the {kind}: {lack}"
        report.lines.append(without if lack else HAS_GRADIENT.format(kind=kind))
    return report


def _materials(trial: Trial, plan: CheckPlan, report: Report) -> dict[str, Material]:
    if trial.task == "text":
        if plan.images is not None:
            raise ValueError(f"reward {trial.name!r} scores completions; give --data in place of --images")
        written = written_completions(plan.data) if plan.data else None
        return {"samples": written or arithmetic_samples(plan.data or "arithmetic:heldout", plan.prompts, plan.seeds)}
    if trial.task == "sounds":
        return _sounds(plan, report)
    sets = {}
    if plan.images is not None:
        pictures = chosen(read_folder(plan.images, plan.metadata), plan.most)
        sets["folder"] = next(materials(pictures, plan.most))
        _note_folder(pictures, sets["folder"], report)
    if plan.prompts:
        sets["samples"] = scene_samples(plan.data or "scenes:heldout", plan.prompts, plan.seeds)
    if not sets:
        raise ValueError("there is nothing to score: give --images, or --prompts above 0")
    return sets


def _by_prompt(material: Material, values: Tensor) -> str:
    """The mean scores of the prompts, the best one first."""
    members: dict[str, list[int]] = {}
    for row, prompt in enumerate(material.prompts):
        members.setdefault(prompt, []).append(row)
    means = {prompt: values[rows].nanmean().item() for prompt, rows in members.items()}
    known = sorted((mean, prompt) for prompt, mean in means.items() if mean == mean)
    return ", ".join(f"{prompt} {mean:.4g}" for mean, prompt in reversed(known[-8:]))


def _sounds(plan: CheckPlan, report: Report) -> dict[str, Material]:
    sets = {}
    if plan.images is not None:
        sets["folder"], there = sounds_of_folder(plan.images, plan.metadata, plan.most)
        if len(sets["folder"]) < min(there, plan.most):
            report.add(
                "sizes", WARNING, f"{len(sets['folder'])} of {there} sounds, all of the most frequent length, rate and "
                "number of channels, were used", "A call holds sounds of one form; sort the folder.",
            )  # fmt: skip
    if plan.prompts:
        sets["samples"] = drawn_sounds(plan.data, plan.prompts, plan.seeds)
    if not sets:
        raise ValueError("there is nothing to score: give --images, or --prompts above 0")
    return sets


def _note_folder(pictures: list[LabelledPicture], taken: Material, report: Report) -> None:
    transparent = sum(picture.transparent for picture in pictures)
    if transparent:
        report.add(
            "transparent", NOTE, f"{transparent} of {len(pictures)} pictures have transparent parts, which were laid "
            "over white", "A reward never sees transparency: pictures come as red, green and blue.",
        )  # fmt: skip
    if len(taken) < len(pictures):
        report.add(
            "sizes", WARNING, f"{len(taken)} of {len(pictures)} pictures, all of the most frequent size, were used",
            "A call holds pictures of one size; sort the folder by size.",
        )  # fmt: skip


def _others(trial: Trial, material: Material, plan: CheckPlan, name: str) -> list[RewardSpec]:
    """The rewards to compare with on a set: the yardsticks on samples of the embedded models, then the user's."""
    embedded = name == "samples" and (trial.task != "text" or "answer" in material.columns)
    made = [(spec.name, dict(spec.options)) for spec in (trial.spec, *plan.against)]
    yardsticks = [spec for spec in YARDSTICKS[trial.task] if embedded and (spec.name, dict(spec.options)) not in made]
    return [*yardsticks, *(spec for spec in plan.against if (spec.name, dict(spec.options)) != made[0])]


def _named_once(others: Sequence[RewardSpec]) -> None:
    names = [outline(spec).name for spec in others]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two rewards are called {twice[0]!r}; give one of them a `label`")


def _agreement(trial: Trial, material: Material, values: Tensor, plan: CheckPlan, report: Report, name: str) -> None:
    found: dict[str, Tensor] = {}
    for spec in _others(trial, material, plan, name):
        if trial.frames is not None and spec in YARDSTICKS[trial.task] and spec not in plan.against:
            report.skipped[f"agreement with {spec.label or spec.name}"] = "it scores pictures, and no videos"
            continue
        other = Trial(spec, trial.task, trial.frames)
        try:
            other.require_columns(material)
            scored = other.score(material)
        finally:
            other.close()
        if scored.failed:
            report.skipped[f"agreement with {other.name}"] = " ".join(scored.failure.split())[:200]
        elif not scored.values.isnan().all():
            found[other.name] = scored.values
    check_agreement(material, values, found, report, name)


def _check_prompt_use(trial: Trial, few: Material, values: Tensor, report: Report) -> None:
    """Check whether the words of a prompt change the scores, and whether the last words of a long prompt still do."""
    if len(set(few.prompts)) < 2:
        return
    distinct = list(dict.fromkeys(few.prompts))
    following = dict(zip(distinct, [*distinct[1:], distinct[0]], strict=True))
    turned = trial.score(few.asked([following[prompt] for prompt in few.prompts]))
    if turned.failed:
        return
    if torch.equal(turned.values.nan_to_num(), values.nan_to_num()):
        report.add("prompt", NOTE, "its scores do not depend on the words of the prompts (tried with equal columns)")
        return
    beginning = " ".join([distinct[0]] * (400 // max(len(distinct[0].split()), 1)))
    ends = [trial.score(few.asked([f"{beginning} {end}"] * len(few))) for end in (distinct[0], distinct[-1])]
    if not any(scored.failed for scored in ends) and torch.equal(*(scored.values.nan_to_num() for scored in ends)):
        report.add("prompt", NOTE, "the end of a 400-word prompt does not change its scores: it may cut long prompts")
