"""The tests that judge the papers' claims here, and their bounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .evidence import (
    SCORE,
    Evidence,
    Statement,
    compared,
    final,
    first_reach,
    gain,
    judged,
    lopsided,
    score_at,
    unevenness,
)
from .intervals import Interval
from .results import Result
from .timings import AGAIN, APART, shares_of_time
from .trainings import DENSE

# The bounds. They are set before anything is measured.
SLACK = 0.05
"""A share of time holds if its interval lies below the paper's share plus this."""
NO_LOWER = 0.8
"""A reward is no lower if a method has at least this share of its baseline's gain."""
MATTERS = 0.1
"""A higher reward is refuted if the method's gain is less than 1 plus this share of its baseline's gain."""
GOLD_MATTERS = 0.02
"""A difference of partial gold that is smaller than this does not matter."""
GUARDED = ("flow_grpo+proxy", "grpo_guard+proxy")
JUDGED = ("pref_grpo+proxy", "pref_grpo+pointwise")


def faster(
    evidence: Evidence, family: str, method: str, baseline: str, share: float, words: str, note: bool = False
) -> list[Statement]:
    """Whether an iteration takes at most the claimed share of a baseline's time, plus `SLACK`.

    The test is of the forms in which samples share nothing and activations are computed again, as in the papers' codes.
    A tree shares by its design.
    """
    timed, codes = evidence.times[family], family + AGAIN
    ours, theirs = (name + APART if name + APART in timed["seconds"] else name for name in (method, baseline))
    counts = " against ".join(_evaluations(timed, name) for name in (method, baseline))
    kept, shared = (statistics.fmean(shares_of_time(timed, *pair)) for pair in ((ours, theirs), (method, baseline)))
    said = f"An iteration of {method} takes {{}} of the time of {baseline}; the paper's share is {share:.2f}. "
    said += f"Evaluations for an image (old policy, θ): {counts}. "
    said += f"If activations are kept for the backward pass, the share is {kept:.2f}. If samples also share the "
    said += f"states that they have in common, it is {shared:.2f}."
    found = judged(
        said, words, shares_of_time(evidence.times[codes], method, baseline), share + SLACK, False, claimed=share,
        each="passes",
    )  # fmt: skip
    return [Statement(found.text, found.holds, note, None if note else found.measure)]


def _evaluations(timed: Result, name: str) -> str:
    found = timed["nfe"][name]
    return (
        f"({found['old']:.3g}, {found['theta']:.3g}), shared ({found['old_shared']:.3g}, {found['theta_shared']:.3g})"
    )


def gains(evidence: Evidence, method: str, baseline: str, words: str, bound: float = NO_LOWER) -> list[Statement]:
    """Whether a method has a share of its baseline's gain after equal iterations; above 1, an equal gain is too low."""
    ours, theirs = (evidence.each(label, gain) for label in (method, baseline))
    said = f"Gain of {SCORE} after equal iterations: {method} {Interval.of(ours).text()}, {baseline} "
    said += f"{Interval.of(theirs).text()}, share {{}}."
    return [
        compared(said, words, ours, theirs, bound, beyond=MATTERS if bound >= 1 else 0.0),
        _beside(evidence, method, baseline),
    ]


def _beside(evidence: Evidence, method: str, baseline: str) -> Statement:
    by = evidence.difference(method, baseline, lambda run: final(run, DENSE))
    return Statement(f"Partial gold at the end, {method} minus {baseline}: {by.text()}.", note=True)


def at_equal(evidence: Evidence, method: str, baseline: str, axis: str, words: str) -> list[Statement]:
    """Whether the gain is above a baseline's after equal spending: all that the run that spends less spends.

    While curves rise, this is the same as reaching a reward with less. And it works if no run reaches that reward.
    """
    pairs = [(run, evidence.runs[baseline][seed]) for seed, run in sorted(evidence.runs[method].items())]
    ends = [min(one["evaluation"][axis][-1], other["evaluation"][axis][-1]) for one, other in pairs]
    ours, theirs = (
        [score_at(run[k], axis, end) - score_at(run[k], axis, 0.0) for run, end in zip(pairs, ends)] for k in (0, 1)
    )
    end = f"{statistics.fmean(ends):.4g}"
    said = f"Gain of {SCORE} at equal {axis} ({end}): {method} {Interval.of(ours).text()}, {baseline} "
    said += f"{Interval.of(theirs).text()}, share {{}}."
    reached = []
    for one, other in pairs:
        place, own = first_reach(one, axis, final(other)), first_reach(other, axis, final(other))
        if place is not None and own:
            reached.append(place / own)
    note = f"{method} reached the final score of {baseline} on {len(reached)} of {len(pairs)} seeds"
    note += f", with {statistics.fmean(reached):.2f} times the {axis}" if reached else ""
    return [
        compared(said, words, ours, theirs, 1.0, claimed=None, beyond=MATTERS),
        Statement(f"{note}.", note=True),
    ]


def guard_ratios(evidence: Evidence) -> list[Statement]:
    """GRPO-Guard: log-ratios are centred at every step, and their spread is alike at all steps."""
    plain, guard = GUARDED
    before, after = (Interval.of(evidence.each(label, lopsided)) for label in (plain, guard))
    by = [a - b for a, b in zip(evidence.each(guard, lopsided), evidence.each(plain, lopsided), strict=True)]
    said = f"|Mean| / deviation of the log-ratio, averaged over the steps: {before.text('.2f')} without and "
    said += f"{after.text('.2f')} with Guard, difference {{}}."
    found = [judged(said, "log-ratio off centre, with minus without", by, 0.0, False, form="+.2f")]
    before, after = (Interval.of(evidence.each(label, unevenness)) for label in (plain, guard))
    decades = [[math.log10(v) for v in evidence.each(label, unevenness)] for label in (guard, plain)]
    said = f"Largest / smallest deviation among the steps: {before.text('.1f')} without and {after.text('.1f')} with"
    said += " Guard, difference {} decades."
    by = [a - b for a, b in zip(*decades, strict=True)]
    return [*found, judged(said, "uneven spread of steps, with minus without", by, 0.0, False, form="+.2f")]


def over_optimised(evidence: Evidence) -> list[Statement]:
    """GRPO-Guard: without Guard gold falls; with Guard gold ends higher, while the proxy rises as much.

    The fall is the premise. Where it does not happen, the other numbers are notes, and the claim stays undecided.
    """
    plain, guard = GUARDED
    fall = [gain(run, DENSE) for _, run in sorted(evidence.runs[plain].items())]
    proxies = [evidence.each(label, lambda run: gain(run, "proxy")) for label in (guard, plain)]
    by = [final(a, DENSE) - final(b, DENSE) for a, b in _pairs(evidence, guard, plain)]
    risen, other = (Interval.of(values).text() for values in proxies)
    said = "Without Guard, partial gold changes by {}; the claim is about a fall."
    first = judged(said, "partial gold without Guard", fall, 0.0, False, form="+.3f", beyond=GOLD_MATTERS)
    rest = [
        judged(
            "Partial gold at the end, with Guard minus without: {}.", "partial gold, with Guard minus without",
            by, 0.0, True, form="+.3f", beyond=GOLD_MATTERS,
        ),
        judged("With Guard the proxy rises by {}.", "proxy with Guard", proxies[0], 0.0, True, form="+.3f"),
    ]  # fmt: skip
    if first.holds is False and first.measure is not None:
        takes = "it takes runs in which gold falls"
        longer = replace(first.measure, more=None, each="iterations", takes=takes, beyond=0.0)
        first = replace(first, holds=None, measure=longer)
        rest = [Statement(finding.text, note=True) for finding in rest]
    return [first, *rest, Statement(f"The proxy changes by {risen} with Guard and by {other} without.", note=True)]


def _pairs(evidence: Evidence, one: str, other: str) -> list[tuple[Result, Result]]:
    """The runs of two labels, seed by seed."""
    return [(run, evidence.runs[other][seed]) for seed, run in sorted(evidence.runs[one].items())]


def even_gradients(evidence: Evidence) -> list[Statement]:
    """GRPO-Guard: gradients have a similar size at every step."""
    spread = evidence.probes["gradient_spread"]["by_step"]
    plain, guard = ([max(v) / min(v) for v in spread[form]] for form in ("plain", "guard"))
    said = "Largest / smallest gradient among the steps,"
    return [
        judged(f"{said} with Guard: {{}}.", "gradients with Guard, largest / smallest", guard, 2.5, False, claimed=2.5,
               each="draws"),
        judged(f"{said} without Guard: {{}}.", "gradients without Guard, largest / smallest", plain, 2.5, True,
               claimed=20.0, each="draws"),
    ]  # fmt: skip


def preferred(evidence: Evidence) -> list[Statement]:
    """Pref-GRPO: with win rates of the proxy, gold ends higher than with its scores."""
    pairs = _pairs(evidence, *JUDGED)
    gold = [final(a, DENSE) - final(b, DENSE) for a, b in pairs]
    proxy = Interval.of(final(a, "proxy") - final(b, "proxy") for a, b in pairs)
    own, other = (Interval.of(evidence.each(label, lambda run: gain(run, DENSE))).text() for label in JUDGED)
    said = "Partial gold at the end, win rates of the proxy minus its scores: {}."
    return [
        judged(said, "partial gold, win rates minus scores", gold, 0.0, True, form="+.3f", beyond=GOLD_MATTERS),
        Statement(f"The proxy at the end, win rates minus scores: {proxy.text('+.4f')}.", note=True),
        Statement(f"Partial gold changes by {own} with win rates and by {other} with scores.", note=True),
    ]


def signal_kept(evidence: Evidence) -> list[Statement]:
    """VGPO: the gradient stays where groups have lost their diversity."""
    probe = evidence.probes["vanishing"]
    place = probe["shrunk"].index(0.001)
    value, relative = ([norms[place] / norms[0] for norms in probe[name]] for name in ("value", "relative"))
    by = [a - b for a, b in zip(value, relative, strict=True)]
    said = (
        "With the differences of rewards within a group a thousandth of theirs, the gradient keeps this share of its "
    )
    said += f"norm: VGPO {Interval.of(value).text('.2f')}, advantages of the group alone "
    said += f"{Interval.of(relative).text('.2f')}, difference {{}}."
    rest = Interval.of(norms[-1] / norms[0] for norms in probe["value"])
    return [
        judged(said, "gradient kept, VGPO minus group alone", by, 0.0, True, each="draws", form="+.2f"),
        Statement(f"Without any difference, VGPO keeps {rest.text('.2f')} and the group alone keeps 0.", note=True),
    ]


def at_equal_exploration(entries: Mapping[str, Sequence[Result]], one: str, other: str, draw: int) -> float | None:
    """Mean difference of two kernels' rollout scores over their common range of diversity; None without such range."""
    curves = []
    for kernel in (one, other):
        points = sorted((entry["diversity"][draw], entry[DENSE][draw]) for entry in entries[kernel])
        curves.append(([d for d, _ in points], [s for _, s in points]))
    low, high = max(d[0] for d, _ in curves), min(d[-1] for d, _ in curves)
    if low > high:
        return None
    places = np.linspace(low, high, 33)
    ours, theirs = (np.interp(places, *curve) for curve in curves)
    return float((ours - theirs).mean())


def better_rollouts(evidence: Evidence) -> list[Statement]:
    """SAGE: rollouts are better at equal exploration."""
    entries = evidence.probes["exploration"]["kernels"]
    draws = range(len(entries["sage"][0]["diversity"]))
    by = [at_equal_exploration(entries, "sage", "flow_sde", draw) for draw in draws]
    known = [value for value in by if value is not None]
    if not known:
        return [Statement("sage and flow_sde have no common diversity.")]
    said = "Partial gold of rollouts at equal distance between the images of a group, SAGE minus Flow-GRPO: {}."
    words = "partial gold of rollouts, SAGE minus Flow-GRPO"
    return [judged(said, words, known, 0.0, True, each="draws", form="+.3f", beyond=GOLD_MATTERS)]


def less_variance(evidence: Evidence) -> list[Statement]:
    """LOOP: the leave-one-out baseline lowers the variance of the gradient."""
    squared = evidence.probes["gradient_variance"]["squared"]
    whole = statistics.fmean(squared["none"])
    left = [(a - b) / whole for a, b in zip(squared["none"], squared["loo"], strict=True)]
    own = statistics.fmean(squared["loo"])
    said = f"Variance of a batch's gradient: {whole:.3g} without a baseline, {own:.3g} with the leave-one-out baseline;"
    return [
        judged(f"{said} it falls by a share of {{}}.", "fall of the variance, share", left, 0.0, True, each="draws")
    ]
