"""`flowgrpo rewards check`: finds what can be known about a reward before a model is trained for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..rewards.base import RewardSpec
from .contract import check_contract
from .edge_inputs import check_edges, compare_with_ordinary
from .entries import YARDSTICKS
from .findings import NOTE, WARNING, Report
from .folder import LabelledPicture, chosen, materials, read_folder
from .material import Material, arithmetic_samples, scene_samples, written_completions
from .trial import Trial
from .usefulness import check_agreement, check_distribution, check_range, check_signal


@dataclass(frozen=True)
class CheckPlan:
    """What a reward is tried on.

    Attributes:
        images: a folder of pictures.
        metadata: the file with the prompts of the pictures; by default a file in the folder, or else the file names.
        data: prompts for the samples of the embedded model, or rows with a column `completion`.
        prompts: number of prompts that the embedded model samples; 0 for no samples.
        seeds: number of samples of each prompt.
        most: largest number of pictures that are taken from the folder.
        against: other rewards to compare with.
        declared: least and greatest score that the author declares.
        accepted: codes of findings that the author intends.
        task: "images" or "text"; by default what the reward's signature says.
        frames: for a reward of videos, how many frames each picture becomes; see `panned`.
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
        ValueError: the reward or its samples cannot be made; a folder, file or option is wrong.
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
    """Run all checks on given material; checks that need only a few samples take them from the first set."""
    name, material = next(iter(sets.items()))
    trial.require_columns(material)
    few = material.few()
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
        if scored.failed:
            report.add(
                "samples", NOTE, f"it does not score {material.source}: {' '.join(scored.failure.split()):.300}",
                "Leave them out with --prompts 0.",
            )  # fmt: skip
            continue
        check_distribution(material, scored.values, report, name)
        if material is next(iter(sets.values())):
            compare_with_ordinary(scored.values, report)
        _agreement(trial, material, scored.values, plan, report, name)
    if report.has("random", "state"):
        report.skipped["noise"] = "its scores change from call to call; mend that first"
    else:
        tell("versions that look alike")
        material = next(iter(sets.values()))
        check_signal(trial, material, trial.score(material).values, report)
        _check_prompt_use(trial, few, first.values, report)
    check_range(trial, plan.declared, report)
    report.lines.append(f"scored {trial.watch.samples} samples in {trial.watch.calls} calls")
    return report


def _materials(trial: Trial, plan: CheckPlan, report: Report) -> dict[str, Material]:
    if trial.task == "text":
        if plan.images is not None:
            raise ValueError(f"reward {trial.name!r} scores completions; give --data in place of --images")
        written = written_completions(plan.data) if plan.data else None
        return {"samples": written or arithmetic_samples(plan.data or "arithmetic:heldout", plan.prompts, plan.seeds)}
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


def _agreement(trial: Trial, material: Material, values: Tensor, plan: CheckPlan, report: Report, name: str) -> None:
    embedded = name == "samples" and (trial.task == "images" or "answer" in material.columns)
    others = [*(YARDSTICKS[trial.task] if embedded else ()), *plan.against]
    found: dict[str, Tensor] = {}
    for spec in others:
        if (spec.name, dict(spec.options)) == (trial.spec.name, dict(trial.spec.options)):
            continue
        other = Trial(spec, trial.task)
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
    turned = trial.score(few.asked(few.prompts[::-1]))
    if turned.failed:
        return
    if torch.equal(turned.values.nan_to_num(), values.nan_to_num()):
        report.add("prompt", NOTE, "its scores do not depend on the words of the prompts (tried with equal columns)")
        return
    beginning = " ".join([few.prompts[0]] * (400 // max(len(few.prompts[0].split()), 1)))
    ends = [trial.score(few.asked([f"{beginning} {end}"] * len(few))) for end in few.prompts[:: len(few) - 1]]
    if not any(scored.failed for scored in ends) and torch.equal(*(scored.values.nan_to_num() for scored in ends)):
        report.add("prompt", NOTE, "the end of a 400-word prompt does not change its scores: it may cut long prompts")
