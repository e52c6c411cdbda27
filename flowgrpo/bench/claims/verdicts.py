"""The claims of the papers, by name, and the tests that judge each claim here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from .evidence import (
    SCORE,
    Claim,
    Evidence,
    Interval,
    Statement,
    final,
    first_reach,
    gain,
    kept_signal,
    lopsided,
    score_at,
    time_ratio,
    unevenness,
)
from .results import Result

# "No lower reward": the interval of the difference stays above minus this.
MARGIN = 0.02
# "p % less time": the interval of the ratio stays below 1 - p + this.
SLACK = 0.05
GUARDED = ("flow_grpo+proxy", "grpo_guard+proxy")
VALUED = ("vgpo", "vgpo+relative")


def faster(evidence: Evidence, method: str, baseline: str, claimed: float) -> Statement:
    """Whether an iteration takes at most the claimed share of a baseline's time, plus `SLACK`."""
    ratio = time_ratio(evidence, method, baseline)
    said = f"An iteration of {method} takes {ratio.text('.2f')} of the time of {baseline}; the claim is {claimed:.2f}."
    return Statement(said, ratio.at_most(claimed + SLACK))


def scores(evidence: Evidence, method: str, baseline: str, bound: float) -> Statement:
    """Whether the score after equal iterations is above a baseline's plus `bound`."""
    by = evidence.difference(method, baseline, final)
    ours, theirs = (statistics.fmean(evidence.each(label, final)) for label in (method, baseline))
    said = f"Held-out {SCORE} after equal iterations: {method} {ours:.3f}, {baseline} {theirs:.3f}, gap {by.text()}"
    said += f" ({100 * by.mean / theirs:+.0f} %)".replace("-", "−") if theirs else ""
    return Statement(f"{said}.", by.at_least(bound))


def at_equal(evidence: Evidence, method: str, baseline: str, axis: str) -> list[Statement]:
    """Whether the score is at least a baseline's after equal spending: all that the run that spends less spends.

    While curves rise, this is the same as reaching a reward with less. And it works if no run reaches that reward.
    """
    pairs = [(run, evidence.runs[baseline][seed]) for seed, run in sorted(evidence.runs[method].items())]
    ends = [min(one["evaluation"][axis][-1], other["evaluation"][axis][-1]) for one, other in pairs]
    by = Interval.of(score_at(a, axis, end) - score_at(b, axis, end) for (a, b), end in zip(pairs, ends))
    end = f"{statistics.fmean(ends):.4g}"
    said = f"Held-out {SCORE} of {method} minus {baseline} at equal {axis} ({end}): {by.text()}."
    reached = []
    learned = [(one, other) for one, other in pairs if gain(other) > 0]
    for one, other in learned:
        place, own = first_reach(one, axis, final(other)), first_reach(other, axis, final(other))
        if place is not None and own:
            reached.append(place / own)
    note = f"{baseline} gained on {len(learned)} of {len(pairs)} seeds; {method} reached {baseline}'s final score on "
    note += f"{len(reached)} of these seeds" + (
        f", with {statistics.fmean(reached):.2f} times the {axis}" if reached else ""
    )
    return [Statement(said, by.at_least(0.0)), Statement(f"{note}.", note=True)]


def guard_ratios(evidence: Evidence) -> list[Statement]:
    """GRPO-Guard: log-ratios are centred at every step, and their spread is alike at all steps."""
    plain, guard = GUARDED
    before, after = (Interval.of(evidence.each(label, lopsided)) for label in (plain, guard))
    by = evidence.difference(guard, plain, lopsided)
    said = f"|Mean| / deviation of the log-ratio, averaged over the steps: {before.text('.2f')} without and "
    found = [Statement(f"{said}{after.text('.2f')} with Guard, difference {by.text('+.2f')}.", by.at_most(0.0))]
    before, after = (Interval.of(evidence.each(label, unevenness)) for label in (plain, guard))
    by = evidence.difference(guard, plain, lambda run: math.log10(unevenness(run)))
    said = f"Largest / smallest deviation among the steps: {before.text('.1f')} without and {after.text('.1f')} with"
    return [*found, Statement(f"{said} Guard, difference {by.text('+.2f')} decades.", by.at_most(0.0))]


def over_optimised(evidence: Evidence) -> list[Statement]:
    """GRPO-Guard: the proxy rises and gold does not fall; without Guard, gold falls."""
    plain, guard = GUARDED
    proxy = Interval.of(evidence.each(guard, lambda run: gain(run, "proxy")))
    held, fall = (Interval.of(evidence.each(label, gain)) for label in (guard, plain))
    other = Interval.of(evidence.each(plain, lambda run: gain(run, "proxy")))
    by = evidence.difference(guard, plain, final)
    return [
        Statement(f"With Guard the held-out proxy changes by {proxy.text()}.", proxy.at_least(0.0)),
        Statement(f"With Guard held-out {SCORE} changes by {held.text()}.", held.at_least(-MARGIN)),
        Statement(f"Without Guard {SCORE} changes by {fall.text()}; the claim is a fall.", fall.at_most(0.0)),
        Statement(f"Without Guard the proxy changes by {other.text()}.", note=True),
        Statement(f"{SCORE} at the end, with Guard minus without: {by.text()}.", by.at_least(0.0)),
    ]


def even_gradients(evidence: Evidence) -> list[Statement]:
    """GRPO-Guard: gradients have a similar size at every step."""
    spread = evidence.probes["gradient_spread"]["by_step"]
    plain, guard = (Interval.of(max(v) / min(v) for v in spread[form]) for form in ("plain", "guard"))
    said = "Largest / smallest gradient among the steps,"
    return [
        Statement(f"{said} with Guard: {guard.text('.2f')}.", guard.at_most(2.5)),
        Statement(f"{said} without Guard: {plain.text('.2f')}.", plain.at_least(2.5)),
    ]


def preferred(evidence: Evidence) -> list[Statement]:
    """Pref-GRPO: with win rates of the proxy, gold ends higher than with its scores."""
    pair, point = "pref_grpo+proxy", "pref_grpo+pointwise"
    gold = evidence.difference(pair, point, final)
    proxy = evidence.difference(pair, point, lambda run: final(run, "proxy"))
    return [
        Statement(f"Held-out {SCORE}, win rates of the proxy minus its scores: {gold.text()}.", gold.at_least(0.0)),
        Statement(f"Held-out proxy, win rates minus scores: {proxy.text('+.4f')}.", note=True),
        Statement(
            f"{SCORE} gained {_gains(evidence, pair)} with win rates, {_gains(evidence, point)} with scores.", note=True
        ),
    ]


def _gains(evidence: Evidence, label: str) -> str:
    return Interval.of(evidence.each(label, gain)).text()


def signal_kept(evidence: Evidence) -> list[Statement]:
    """VGPO: the gradient stays where groups have lost their diversity."""
    by = evidence.difference(*VALUED, kept_signal)
    ours, theirs = (Interval.of(evidence.each(label, kept_signal)) for label in VALUED)
    said = f"Gradient norm where most groups are degenerate / norm where fewest are: vgpo {ours.text('.2f')}, relative "
    return [Statement(f"{said}advantages {theirs.text('.2f')}, difference {by.text('+.2f')}.", by.at_least(0.0))]


def at_equal_exploration(entries: Mapping[str, Sequence[Result]], one: str, other: str, seed: int) -> float | None:
    """Mean difference of two kernels' rollout scores over their common range of diversity; None without such range."""
    curves = []
    for kernel in (one, other):
        points = sorted((entry["diversity"][seed], entry[SCORE][seed]) for entry in entries[kernel])
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
    seeds = range(len(entries["sage"][0]["diversity"]))
    found = []
    for other in (kernel for kernel in entries if kernel != "sage"):
        by = [at_equal_exploration(entries, "sage", other, seed) for seed in seeds]
        known = [value for value in by if value is not None]
        if not known:
            found.append(Statement(f"sage and {other} have no common diversity.", note=other != "flow_sde"))
            continue
        interval = Interval.of(known)
        said = f"{SCORE} of rollouts at equal diversity, sage minus {other}: {interval.text()}."
        found.append(Statement(said, interval.at_least(0.0), note=other != "flow_sde"))
    return found


def less_variance(evidence: Evidence) -> list[Statement]:
    """LOOP: the leave-one-out baseline lowers the variance of the gradient."""
    squared = evidence.probes["gradient_variance"]["squared"]
    whole = statistics.fmean(squared["none"])
    left = Interval.of((a - b) / whole for a, b in zip(squared["none"], squared["loo"], strict=True))
    own = statistics.fmean(squared["loo"])
    said = f"Variance of a batch's gradient: {whole:.3g} without a baseline, {own:.3g} with the leave-one-out baseline;"
    return [Statement(f"{said} it falls by a share of {left.text('.2f')}.", left.at_least(0.0))]


def _mixgrpo(evidence: Evidence) -> list[Statement]:
    return [
        faster(evidence, "mixgrpo", "dance_grpo", 0.5),
        scores(evidence, "mixgrpo", "dance_grpo", -MARGIN),
    ]


def _flash(evidence: Evidence) -> list[Statement]:
    plain = time_ratio(evidence, "mixgrpo_flash", "dance_grpo")
    return [
        faster(evidence, "mixgrpo_flash_star", "dance_grpo", 0.29),
        scores(evidence, "mixgrpo_flash_star", "dance_grpo", -MARGIN),
        Statement(f"With a moving window (mixgrpo_flash) the share is {plain.text('.2f')}.", note=True),
    ]


def _branch(evidence: Evidence) -> list[Statement]:
    others = [(name, time_ratio(evidence, name, "dance_grpo")) for name in ("branchgrpo", "branchgrpo_width")]
    listed = ", ".join(f"{name} {ratio.text('.2f')}" for name, ratio in others)
    return [
        faster(evidence, "branchgrpo_depth", "dance_grpo", 0.45),
        scores(evidence, "branchgrpo_depth", "dance_grpo", 0.0),
        Statement(f"The share without pruning, and with pruning of width: {listed}.", note=True),
    ]


def _branch_mix(evidence: Evidence) -> list[Statement]:
    return [
        faster(evidence, "branchgrpo_mix", "dance_grpo", 1 / 4.7),
        scores(evidence, "branchgrpo_mix", "dance_grpo", -MARGIN),
    ]


CLAIMS = (
    Claim(
        "mixgrpo", "MixGRPO 2507.21802",
        f"Nearly 50 % less training time than DanceGRPO (here: at most {0.5 + SLACK:.2f} of its time for an iteration) "
        f"at no lower reward (here: within {MARGIN}).",
        _mixgrpo, runs=("mixgrpo", "dance_grpo"), times=("mixgrpo",),
    ),
    Claim(
        "mixgrpo-flash", "MixGRPO-Flash 2507.21802",
        f"71 % less training time than DanceGRPO (here: at most {0.29 + SLACK:.2f} of its time) at no lower reward "
        f"(here: within {MARGIN}). The abstract does not say for which form; Flash*, with a fixed window, is fastest.",
        _flash, runs=("mixgrpo_flash_star", "dance_grpo"),
        times=("mixgrpo_flash_star", "mixgrpo_flash"),
    ),
    Claim(
        "branchgrpo", "BranchGRPO 2509.06040",
        f"Time per iteration 55 % less than DanceGRPO's (here: at most {0.45 + SLACK:.2f} of it) at a score up to 16 % "
        "higher (here: higher at all), with pruning.",
        _branch, runs=("branchgrpo_depth", "dance_grpo"),
        times=("branchgrpo_depth", "branchgrpo", "branchgrpo_width"),
    ),
    Claim(
        "branchgrpo-mix", "BranchGRPO-Mix 2509.06040",
        f"4.7 times faster than DanceGRPO (here: at most {1 / 4.7 + SLACK:.2f} of its time) without loss of score "
        f"(here: within {MARGIN}).",
        _branch_mix, runs=("branchgrpo_mix", "dance_grpo"), times=("branchgrpo_mix",),
    ),
    Claim(
        "tempflow", "TempFlow-GRPO 2508.04324",
        "Fewer updates to the same reward than Flow-GRPO (here: a reward at least as high at equal updates).",
        lambda evidence: at_equal(evidence, "tempflow_grpo", "flow_grpo", "updates"),
        runs=("tempflow_grpo", "flow_grpo"),
    ),
    Claim(
        "guard-ratio", "GRPO-Guard 2510.22319",
        "The plain ratio falls below 1 on average and spreads differently at every step; RatioNorm centres it and "
        "makes its spread alike.",
        guard_ratios, runs=GUARDED,
    ),
    Claim(
        "guard-reward", "GRPO-Guard 2510.22319",
        f"The proxy keeps rising while gold holds (falls by less than {MARGIN}), against a fall without Guard.",
        over_optimised, runs=GUARDED,
    ),
    Claim(
        "guard-gradient", "GRPO-Guard 2510.22319",
        "Gradients differ by a factor of 20 among the steps without Guard and 2.5 with it (here: at most 2.5 with it, "
        "more without).",
        even_gradients, probe="gradient_spread",
    ),
    Claim(
        "pref-grpo", "Pref-GRPO 2508.20751",
        "Where the scores of a group differ little, win rates in their place keep the gain real: gold ends higher than "
        "with the same proxy's scores.",
        preferred, runs=("pref_grpo+proxy", "pref_grpo+pointwise"),
    ),
    Claim(
        "vgpo", "VGPO 2512.12387",
        "The learning signal stays when the diversity of a group's rewards vanishes (here: where groups are degenerate "
        "the gradient keeps at least the share that it keeps with advantages of the group alone).",
        signal_kept, runs=VALUED,
    ),
    Claim(
        "diffusion-nft", "DiffusionNFT 2509.16117",
        "Less compute to equal reward than Flow-GRPO (here: a reward at least as high at equal compute).",
        lambda evidence: at_equal(evidence, "diffusion_nft", "flow_grpo", "compute"),
        runs=("diffusion_nft", "flow_grpo"),
    ),
    Claim(
        "sage", "SAGE-GRPO 2603.21872",
        "Rollouts of higher quality at equal exploration than Flow-GRPO's (here: the score of the untrained model's "
        "rollouts at equal distance between the images of a group).",
        better_rollouts, probe="exploration",
    ),
    Claim(
        "loop", "LOOP 2503.00897",
        "The leave-one-out baseline lowers the variance of the gradient.",
        less_variance, probe="gradient_variance",
    ),
)  # fmt: skip
