"""Checks of what training takes for granted: each sample gets one number, always the same, from that sample alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from .findings import FAULT, NOTE, WARNING, Report
from .material import Material
from .spread import farthest
from .trial import SCORED, NewTensors, PeakMemory, Trial, TrialScores, generator_states, seeded

EXACT, SMALL = 1e-4, 0.05
"""Shares of the spread: a difference up to `EXACT` is rounding, and a difference up to `SMALL` is worth a note."""
ALONE = 6
COARSE = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_REPAIR = "A score may depend only on its own sample (declare `whole_group = True` to compare within groups)."
_COMPARED = "A reward that compares must not let rounding decide: take close scores as equal, by `margin` of win_rate."


def check_contract(trial: Trial, material: Material, report: Report) -> TrialScores:
    """Run all checks of this module.

    Args:
        trial: the reward.
        material: a few samples.
        report: gets the findings.

    Returns:
        The scores of the first call. If that call failed, nothing else was checked.
    """
    first = check_first_call(trial, material, report)
    if first.failed:
        return first
    values = first.values
    _check_repetition(trial, material, values, report)
    unsteady = report.has("random", "state")
    for code, check in (("order", _check_order), ("batch", _check_batch)):
        if unsteady or (code == "batch" and report.has("order")):
            cause = "its scores change from call to call" if unsteady else "its scores depend on the order"
            report.skipped[code] = f"{cause}; mend that first"
        else:
            check(trial, material, values, report)
    _check_costs(trial, material, report)
    return first


def check_first_call(trial: Trial, material: Material, report: Report) -> TrialScores:
    """Check a first call: whether it works, what it returns, and whether it changes its arguments.

    Returns:
        Its scores, or the failure: an exception, an unusable value, or no score at all.
    """
    trial.watch.close_look = True
    with NewTensors() as new:
        scored = trial.score(material)
        graphs = new.alive()[1]
    trial.watch.close_look = False
    if scored.failed:
        advice = "Return one number a sample." if scored.invalid else "Mend this first; nothing else was checked."
        if trial.task == "images" and trial.frames is None and not material.moving:
            advice += " A reward of videos is checked with --frames."
        code = "scores" if scored.invalid else "failure"
        report.add(code, FAULT, f"it fails on {material.source}: {scored.failure}", advice)
        return scored
    absent = int(scored.values.isnan().sum())
    if absent == len(material):
        report.add(
            "absent", FAULT, f"it applies to none of the samples: all {absent} scores are NaN",
            "Give samples, prompts or columns that it can score (--data, --images).", absent=absent,
        )  # fmt: skip
        return TrialScores(scored.values, "it applies to none of the samples")
    if absent:
        report.add(
            "absent", NOTE, f"it applies to {len(material) - absent} of {len(material)} samples; {absent} scores are "
            "NaN", "Samples with NaN get no advantage.", absent=absent,
        )  # fmt: skip
    _check_arguments(trial.watch.changed, report)
    if trial.watch.holds_graph or graphs:
        what = "returns scores that hold" if trial.watch.holds_graph else f"keeps {graphs} tensors that hold"
        report.add(
            "gradients", FAULT,
            f"it {what} the graph of a computation, although it is called without gradients",
            "Remove `torch.enable_grad()`, freeze its model with `requires_grad_(False)`, and `.detach()` what it "
            "keeps: every graph holds the memory of a forward pass.",
            tensors=graphs,
        )  # fmt: skip
    coarse = sorted(trial.watch.dtypes & set(COARSE))
    if coarse:
        report.add(
            "dtype", WARNING, f"it returns {', '.join(coarse)}, {len(scored.values.unique())} different values for "
            f"{len(material)} samples", "Compute the last step in float32: coarse scores make ties within a group.",
        )  # fmt: skip
    return scored


def graded(gap: float, values: Tensor) -> str | None:
    """The severity of a difference between scores that should be equal; None if it is rounding."""
    known = values[~values.isnan()]
    size = known.abs().max().item() if len(known) else 0.0
    spread = known.std().item() if len(known) > 1 else 0.0
    spread = spread or size or 1.0
    if gap <= EXACT * spread + 2e-6 * size:
        return None
    return NOTE if gap <= SMALL * spread else FAULT


def _check_arguments(changed: set[str], report: Report) -> None:
    columns = sorted(changed - {*SCORED.values(), "prompts", "groups"})
    if columns:
        report.add(
            "columns", FAULT, f"it writes into the values of the column{'s' * (len(columns) > 1)} "
            f"{', '.join(columns)}", "Copy them first: the reward gets the same objects again with the next samples.",
        )  # fmt: skip
    inputs = sorted(changed & {*SCORED.values(), "prompts", "groups"})
    if inputs:
        noun = "sounds" if "sounds" in inputs else "images"
        report.add(
            "mutation", WARNING, f"it writes into its {' and '.join(inputs)}",
            "Training hands it a copy, so nothing breaks there; any other caller loses its data. Write "
            f"`{noun} = {noun} * 2`, not `{noun}.mul_(2)`.",
        )  # fmt: skip


def _check_repetition(trial: Trial, material: Material, values: Tensor, report: Report) -> None:
    before = generator_states()
    again = trial.score(material)
    drawn = generator_states() != before
    gap = math.inf if again.failed else farthest(values, again.values)
    severity = graded(gap, values)
    if severity is None:
        if drawn:
            report.add("draws", NOTE, "it draws from the global random generators, without an effect on its scores")
        return
    code, why, advice = _cause_of_change(trial, material)
    seen = again.failure or f"scores of the same samples differ by up to {gap:.3g} ({_spread(gap, values)}): {why}"
    report.add(code, severity, seen, advice, gap=gap)


def _cause_of_change(trial: Trial, material: Material) -> tuple[str, str, str]:
    if _agree(lambda: trial.score(material).values):
        return (
            "random", "it draws from a global random generator",
            "Remove the randomness, or seed a generator of its own from the sample.",
        )  # fmt: skip

    def anew() -> Tensor:
        another = trial.another()
        values = another.score(material).values
        another.close()
        return values

    if _agree(anew):
        return (
            "state", "two new instances agree, so what it remembers of earlier calls changes its scores",
            "A resumed run starts with a new instance and would not repeat itself; keep nothing between calls.",
        )  # fmt: skip
    return (
        "random", "new instances differ as well, under equal seeds of the global generators",
        "Look for an unseeded generator, the clock, or a judge that samples (ask it with temperature 0).",
    )  # fmt: skip


def _agree(score: Callable[[], Tensor]) -> bool:
    """Whether two scorings agree if both start from the same state of the global generators."""
    with seeded(1):
        one = score()
    with seeded(1):
        return graded(farthest(one, score()), one) is None


def _check_order(trial: Trial, material: Material, values: Tensor, report: Report) -> None:
    count = len(material)
    if not trial.reward.whole_group and trial.reward.batch_size:
        count = min(count, trial.reward.batch_size)
    part = material.take(range(count))
    own = values[:count]
    if count < len(material):
        scored = trial.score(part)
        own = scored.values
    worst = 0.0
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    for order in (list(range(count))[::-1], shuffled):
        scored = trial.score(part.take(order))
        worst = max(worst, math.inf if scored.failed else farthest(own[order], scored.values))
    severity = graded(worst, values)
    if severity:
        report.add(
            "order", severity, f"scores change by up to {worst:.3g} ({_spread(worst, values)}) when the same samples "
            "come in another order", _COMPARED if trial.reward.whole_group else _REPAIR, gap=worst,
        )  # fmt: skip


def _check_batch(trial: Trial, material: Material, values: Tensor, report: Report) -> None:
    if trial.reward.whole_group:
        members: dict[int, list[int]] = {}
        for row, group in enumerate(material.groups):
            members.setdefault(group, []).append(row)
        parts, what = list(members.values()), "when a group comes alone, without other groups"
        if len(parts) == 1:
            report.skipped["batch"] = "there is only one group"
            return
    else:
        parts, what = [[row] for row in range(min(len(material), ALONE))], "when a sample comes alone"
    worst = 0.0
    for rows in parts:
        scored = trial.score(material.take(rows))
        if scored.failed:
            code = "scores" if scored.invalid else "batch"
            report.add(
                code, FAULT, f"it fails {what}: {scored.failure}",
                "A call holds 1 to `batch_size` samples; `squeeze()` without a dimension is a common cause.",
            )  # fmt: skip
            return
        worst = max(worst, farthest(values[rows], scored.values))
    severity = graded(worst, values)
    if severity:
        _add_batch(worst, severity, values, what, report)


def _add_batch(gap: float, severity: str, values: Tensor, what: str, report: Report, more: str = "") -> None:
    change = "changes between a number and NaN" if math.isinf(gap) else f"changes by up to {gap:.3g}"
    advice = _REPAIR + more if severity == FAULT else "Another batch size rounds in another way; compute in float32."
    report.add("batch", severity, f"a score {change} ({_spread(gap, values)}) {what}", advice, gap=gap)


def check_full_call(
    trial: Trial, material: Material, rows: list[int], values: Tensor, full: TrialScores, report: Report
) -> None:
    """Compare a call with all samples with the first call, which had few of them.

    Args:
        trial: the reward.
        material: B samples.
        rows: rows of the samples in the first call.
        values: their scores in that call; at least one is a number.
        full: what the call with all B samples gave.
        report: gets the findings.
    """
    if full.failed:
        report.add(
            "scores" if full.invalid else "failure", FAULT,
            f"it scores the first {len(rows)} samples, and fails on {material.source}: {full.failure}",
            "A call in training may have as many samples; set `batch_size` if it takes fewer.",
        )  # fmt: skip
    elif full.values.isnan().all():
        report.add(
            "absent", FAULT, f"it gives numbers in the first call, with {len(rows)} samples, and none in the call with "
            f"all {len(material)}",
            "NaN says that it does not apply. Raise an error if it cannot score, for example because a quota is spent.",
            absent=len(material),
        )  # fmt: skip
    elif not report.has("random", "state", "order", "batch"):
        _compare_calls(trial, material, rows, values, full.values, report)


def _compare_calls(
    trial: Trial, material: Material, rows: list[int], values: Tensor, full: Tensor, report: Report
) -> None:
    if trial.reward.whole_group:
        # The first call has parts of groups, and a part of a group may have other scores than the whole group.
        rows = [row for row, group in enumerate(material.groups) if group == material.groups[0]]
        if len(rows) == len(material):
            return
        values = trial.score(material.take(rows)).values
    gap = farthest(values, full[rows])
    severity = graded(gap, values)
    known = any(finding.code in ("random", "state", "order", "batch") for finding in report.findings)
    if severity is None or (severity == NOTE and known):
        return
    part = material.take(rows)
    # A reward that rarely draws a random number may have passed the repetition of the first call.
    repeated = max(farthest(values, trial.score(part).values), farthest(full, trial.score(material).values))
    if graded(repeated, values) in (severity, FAULT):
        code, why, advice = _cause_of_change(trial, part)
        seen = f"scores of the same samples differ by up to {repeated:.3g} ({_spread(repeated, values)}): {why}"
        report.add(code, severity, seen, advice, gap=repeated)
        return
    what = f"in the call with all {len(material)} samples, compared with a call with {len(rows)} of them"
    _add_batch(gap, severity, values, what, report, " If it splits a large call, look at where the parts go.")


def _check_costs(trial: Trial, material: Material, report: Report) -> None:
    sizes, seconds = [], 0.0
    with NewTensors() as new, PeakMemory() as memory:
        for _ in range(3):
            before = trial.watch.seconds
            trial.score(material)
            seconds = trial.watch.seconds - before
            sizes.append(new.alive()[0])
    each = seconds / len(material)
    numbers = {"seconds": each, "loaded_bytes": trial.loaded_bytes, "peak_bytes": memory.peak_bytes}
    parts = [f"{1000 * each:.3g} ms a {trial.noun} in calls of {_call_size(trial, material)}"]
    for words, size in (("memory to make it", trial.loaded_bytes), ("more while it scores", memory.peak_bytes)):
        if size is not None:
            parts.append(f"{size / 1e6:.0f} MB {words}")
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        parts.append(f"at most {torch.cuda.max_memory_allocated() / 1e6:.0f} MB of the accelerator's memory")
    report.add("cost", NOTE, "; ".join(parts), "", **numbers)
    growth = [later - earlier for earlier, later in pairwise(sizes)]
    if all(step > 0 for step in growth):
        report.add(
            "memory", WARNING, f"it holds {growth[-1] / 1e6:.3g} MB more of tensors after each call with the very same "
            "samples", "Keep no tensors between calls; a long run would run out of memory.", bytes=growth[-1],
        )  # fmt: skip


def _call_size(trial: Trial, material: Material) -> int:
    return min(trial.reward.batch_size or len(material), len(material))


def _spread(gap: float, values: Tensor) -> str:
    known = values[~values.isnan()]
    spread = known.std().item() if len(known) > 1 else 0.0
    return f"{gap / spread:.2g} of their spread" if spread and math.isfinite(gap) else "these have no spread"
