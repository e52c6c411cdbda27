"""Checks of scores: how they are spread, how much of the spread is signal, and how they agree with other rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .drawn_sounds import NEAR_SOUNDS, OTHER_SOUNDS
from .findings import FAULT, NOTE, WARNING, Report, finite
from .material import Material
from .spread import correlations, describe, noise_share, order_kept
from .trial import Trial
from .versions import NEAR, NEAR_TEXT, OTHER

NOISY, ONE_NOISY = 0.3, 0.5
"""Shares of noise above which there is a warning: over all near versions together, and in the worst version alone."""
DISTURBED = 0.75
"""A version disturbs the order if less than this share of the pairs keep their order; chance is 1/2."""
SATURATED = 0.9
_RESOLUTION = 1e-3


def check_distribution(material: Material, values: Tensor, report: Report, name: str) -> None:
    """What the scores of the material look like, and whether they tell samples apart.

    Args:
        material: B samples.
        values: [B] their scores.
        report: gets the findings, and the figures as table `distribution/NAME`.
        name: of the material in the report.
    """
    found = describe(values, material.groups)
    report.tables[f"distribution/{name}"] = {key: finite(value) for key, value in asdict(found).items()}
    report.lines.append(
        f"{material.source}: mean {found.mean:.4g}, std {found.std:.3g}, within groups {found.within:.3g}; "
        f"least {found.low:.4g}, 5% {found.q05:.4g}, median {found.median:.4g}, 95% {found.q95:.4g}, "
        f"most {found.high:.4g}; {found.distinct} different values, {found.absent} NaN"
    )
    if found.distinct == 1:
        report.add(
            "constant", WARNING, f"every one of {found.count} scores is {found.mean:.4g} ({material.source})",
            "Nothing can be learned where no score differs; try samples of the model that is to be trained.",
        )  # fmt: skip
        return
    if found.commonest >= SATURATED:
        report.add(
            "saturated", WARNING, f"{found.commonest:.0%} of the scores are equal ({material.source})",
            "Few groups teach anything; give partial credit, or change what it asks for.", share=found.commonest,
        )  # fmt: skip
    elif found.flat_groups > 0:
        report.add(
            "flat-groups", NOTE, f"{found.flat_groups:.0%} of the groups have no spread and teach nothing "
            f"({material.source})", "", share=found.flat_groups,
        )  # fmt: skip
    step = torch.finfo(torch.float32).eps * max(abs(found.low), abs(found.high))
    # If no group has a spread, the spread between groups gives the scale.
    spread, where = (found.within, " within groups") if found.within else (found.std, "")
    if step > _RESOLUTION * spread:
        report.add(
            "range", WARNING, f"scores near {found.median:.6g} with a spread of {spread:.2g}{where}: "
            f"float32 has steps of {step:.2g} there", "Subtract a constant, so that scores lie around 0.", step=step,
        )  # fmt: skip


def check_range(trial: Trial, declared: tuple[float, float] | None, report: Report) -> None:
    """Whether all scores so far lie in the range that the author declares."""
    if declared is not None and not (declared[0] <= trial.low and trial.high <= declared[1]):
        report.add(
            "range", FAULT, f"scores from {trial.low:.6g} to {trial.high:.6g}, declared {declared[0]:g} to "
            f"{declared[1]:g}", "Mend the reward, or declare another range.", low=trial.low, high=trial.high,
        )  # fmt: skip


def check_signal(trial: Trial, material: Material, values: Tensor, report: Report) -> None:
    """How much of the spread within groups is noise, and which versions of a sample disturb the order of a group.

    Args:
        trial: the reward.
        material: B samples.
        values: [B] their scores.
        report: gets the findings, and the figures as table `versions`.
    """
    near: Mapping[str, tuple[str, Callable[..., Any]]]
    near, other = {"images": (NEAR, OTHER), "sounds": (NEAR_SOUNDS, OTHER_SOUNDS)}.get(trial.task, (NEAR_TEXT, {}))
    versions = {**near, **other}
    scores: dict[str, Tensor] = {}
    for name, (_, change) in versions.items():
        scored = trial.score(material.changed(change(material.samples)))
        if scored.failed:
            report.skipped[name] = f"it fails on this version: {' '.join(scored.failure.split()):.200}"
        else:
            scores[name] = scored.values
    table = {}
    for name, found in scores.items():
        kept = order_kept(values, found, material.groups)
        noise = noise_share(torch.stack([values, found], 1), material.groups)
        shift = (found - values).nanmean().item()
        table[name] = {"order_kept": finite(kept), "noise": finite(noise), "mean_change": finite(shift)}
        report.lines.append(f"  {name:<22} order kept {_percent(kept)}, noise {_percent(noise)}, mean {shift:+.3g}")
    report.tables["versions"] = table
    _judge_noise({name: scores[name] for name in near if name in scores}, material, values, report)
    _judge_versions(table, {name: code for name, (code, _) in versions.items()}, report)


def check_agreement(
    material: Material, values: Tensor, others: Mapping[str, Tensor], report: Report, name: str
) -> None:
    """Correlation with other rewards, over all samples and within groups.

    Args:
        material: B samples.
        values: [B] scores.
        others: reward -> its scores [B].
        report: gets the findings, and the figures as table `agreement/NAME`.
        name: of the material in the report.
    """
    table = {}
    for other, theirs in others.items():
        pearson, spearman = correlations(values, theirs)
        kept = order_kept(theirs, values, material.groups)
        table[other] = {"pearson": finite(pearson), "spearman": finite(spearman), "order_within": finite(kept)}
        report.add(
            "agreement", NOTE, f"with {other} on {material.source}: Pearson {_number(pearson)}, Spearman "
            f"{_number(spearman)}, "
            f"within groups {_percent(kept)} of its pairs in the same order (50% is chance)",
            pearson=pearson, spearman=spearman, order_within=kept,
        )  # fmt: skip
    report.tables[f"agreement/{name}"] = table


def _judge_noise(near: Mapping[str, Tensor], material: Material, values: Tensor, report: Report) -> None:
    if not near:
        return
    share = noise_share(torch.stack([values, *near.values()], 1), material.groups)
    if math.isnan(share):
        report.skipped["noise"] = "no group has any spread"
        return
    each = {name: noise_share(torch.stack([values, found], 1), material.groups) for name, found in near.items()}
    worst = max(each, key=lambda name: -1.0 if math.isnan(each[name]) else each[name])
    kept = order_kept(values, near[worst], material.groups)
    loud = share > NOISY or each[worst] > ONE_NOISY
    report.add(
        "noise", WARNING if loud else NOTE,
        f"{share:.0%} of the spread within groups is noise: versions that look alike differ by that much. The worst "
        f"version is “{worst}” with {each[worst]:.0%}; it keeps the order of {_percent(kept)} of the pairs",
        "Advantages of such groups are illusory: make the reward blind to such changes, average it over them, use "
        "`win_rate` with a margin, or scale advantages by the batch." if loud else "",
        share=share, worst=each[worst], order_kept=kept,
    )  # fmt: skip


def _judge_versions(table: Mapping[str, Mapping[str, float | None]], codes: Mapping[str, str], report: Report) -> None:
    advice = {
        "format": "Training scores floats, and files hold pictures in 8 bits and sounds in 16: their scores would not "
        "agree.",
        "dtype": "Pipelines that decode in bfloat16 would give other winners; average over more of the sample.",
        "resize": "Train and evaluate at one size, or resize within the reward to a size that suits it.",
        "whitespace": "Strip the completion before it is scored.",
    }
    for name, figures in table.items():
        code, kept = codes[name], figures["order_kept"]
        if code and kept is not None and kept < DISTURBED:
            seen = f"“{name}” keeps the order of only {kept:.0%} of the pairs of a group (50% is chance)"
            report.add(code, WARNING, seen, advice[code], order_kept=kept)


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:.0%}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
