"""The claims of the papers, in their figures, each with the results that it needs and the tests that judge it."""

from __future__ import annotations

from .evidence import Claim, Evidence, Statement
from .timings import AGAIN
from .verdicts import (
    GUARDED,
    JUDGED,
    at_equal,
    better_rollouts,
    even_gradients,
    faster,
    gains,
    guard_ratios,
    less_variance,
    over_optimised,
    preferred,
    signal_kept,
)

ALL, SOME = "dance_grpo_19of20", "dance_grpo_12of20"
"""BranchGRPO's baselines, with all steps trained and with 60 % of them."""


def _mixgrpo(evidence: Evidence) -> list[Statement]:
    return [
        *faster(evidence, "mixgrpo", "mixgrpo", "dance_grpo", 0.51, "time, of DanceGRPO's"),
        *gains(evidence, "mixgrpo", "dance_grpo", "gain, of DanceGRPO's"),
        *faster(evidence, "mixgrpo", "dance_grpo_4of25", "dance_grpo", 0.515, "", note=True),
    ]


def _flash(evidence: Evidence) -> list[Statement]:
    return [
        *faster(evidence, "mixgrpo", "mixgrpo_flash_star", "dance_grpo", 0.29, "time of Flash*, of DanceGRPO's"),
        *faster(evidence, "mixgrpo", "mixgrpo_flash", "dance_grpo", 0.39, "time of Flash, of DanceGRPO's"),
        *gains(evidence, "mixgrpo_flash_star", "dance_grpo", "gain of Flash*, of DanceGRPO's"),
        *gains(evidence, "mixgrpo_flash", "dance_grpo", "gain of Flash, of DanceGRPO's"),
    ]


def _branch(evidence: Evidence) -> list[Statement]:
    return [
        *faster(evidence, "branchgrpo", "branchgrpo_depth", ALL, 0.45, "time pruned, of DanceGRPO's with all steps"),
        *faster(
            evidence, "branchgrpo", "branchgrpo_depth", SOME, 0.67, "time pruned, of DanceGRPO's with 60 % of steps"
        ),
        *gains(evidence, "branchgrpo_depth", ALL, "gain pruned, of DanceGRPO's", 1.0),
        *faster(evidence, "branchgrpo", "branchgrpo", SOME, 1.05, "", note=True),
    ]


def _branch_mix(evidence: Evidence) -> list[Statement]:
    return [
        *faster(evidence, "branchgrpo", "branchgrpo_mix", ALL, 0.21, "time of Mix, of DanceGRPO's with all steps"),
        *faster(evidence, "branchgrpo", "branchgrpo_mix", SOME, 0.32, "time of Mix, of DanceGRPO's with 60 % of steps"),
        *gains(evidence, "branchgrpo_mix", ALL, "gain of Mix, of DanceGRPO's"),
    ]


def _tempflow(evidence: Evidence) -> list[Statement]:
    return [
        *at_equal(evidence, "tempflow_grpo", "flow_grpo", "updates", "gain at equal updates, of Flow-GRPO's"),
        *at_equal(evidence, "tempflow_grpo", "flow_grpo", "compute", "gain at equal states evaluated, of Flow-GRPO's"),
    ]


_MIXED, _TREES = ("mixgrpo", "mixgrpo" + AGAIN), ("branchgrpo", "branchgrpo" + AGAIN)
_NOT, _YES, _OPEN = "not reproduced", "reproduced", "undecided"

CLAIMS = (
    Claim(
        "mixgrpo", "MixGRPO 2507.21802",
        "Nearly 50 % less training time than DanceGRPO (149 s against 291 s an iteration, a share of 0.51) at no "
        "lower reward.",
        _mixgrpo, runs=("mixgrpo", "dance_grpo"), times=_MIXED, before=_NOT,
    ),
    Claim(
        "mixgrpo-flash", "MixGRPO-Flash 2507.21802",
        "71 % less training time than DanceGRPO: 83 s (Flash*, 0.29) and 112 s (Flash, 0.39) against "
        "291 s, at no lower reward.",
        _flash, runs=("mixgrpo_flash_star", "mixgrpo_flash", "dance_grpo"), times=_MIXED, before=_NOT,
    ),
    Claim(
        "branchgrpo", "BranchGRPO 2509.06040",
        "With pruning, an iteration takes 55 % less time than DanceGRPO's with all steps (314 s against 698 s, 0.45; "
        "0.67 of DanceGRPO's 469 s with 60 % of the steps), at a score up to 16 % higher.",
        _branch, runs=("branchgrpo_depth", ALL), times=_TREES, before=_NOT,
    ),
    Claim(
        "branchgrpo-mix", "BranchGRPO-Mix 2509.06040",
        "4.7 times faster than DanceGRPO with all steps (148 s against 698 s, 0.21; 0.32 of 60 %) at no loss of score.",
        _branch_mix, runs=("branchgrpo_mix", ALL), times=_TREES, before=_NOT,
    ),
    Claim(
        "tempflow", "TempFlow-GRPO 2508.04324",
        "Reaches Flow-GRPO's reward in far fewer updates: a higher reward at equal updates, and at equal states "
        "evaluated.",
        _tempflow, runs=("tempflow_grpo", "flow_grpo"), before=_OPEN,
    ),
    Claim(
        "guard-ratio", "GRPO-Guard 2510.22319",
        "The plain ratio falls below 1 on average and spreads differently at every step; RatioNorm centres it and "
        "makes its spread alike.",
        guard_ratios, runs=GUARDED, before=_YES,
    ),
    Claim(
        "guard-reward", "GRPO-Guard 2510.22319",
        "Without Guard the gold score falls while a proxy is trained on; with Guard it ends higher, and the proxy "
        "still rises.",
        over_optimised, runs=GUARDED, before=_OPEN,
    ),
    Claim(
        "guard-gradient", "GRPO-Guard 2510.22319",
        "Gradients differ by a factor of about 20 among the steps without Guard, and of 2.5 with it.",
        even_gradients, probe="gradient_spread", before=_YES,
    ),
    Claim(
        "pref-grpo", "Pref-GRPO 2508.20751",
        "Win rates in place of a reward model's scores mitigate reward hacking: gold ends higher than with the scores "
        "of the same proxy.",
        preferred, runs=JUDGED, before=_OPEN,
    ),
    Claim(
        "vgpo", "VGPO 2512.12387",
        "The learning signal stays when the diversity of a group's rewards vanishes.",
        signal_kept, probe="vanishing", before=_OPEN,
    ),
    Claim(
        "diffusion-nft", "DiffusionNFT 2509.16117",
        "Up to 25 times more efficient than Flow-GRPO: a higher reward at equal compute.",
        lambda evidence: at_equal(
            evidence, "diffusion_nft", "flow_grpo", "compute", "gain at equal compute, of Flow-GRPO's"
        ),
        runs=("diffusion_nft", "flow_grpo"), before=_YES,
    ),
    Claim(
        "sage", "SAGE-GRPO 2603.21872",
        "Exploration stays near the data: rollouts of higher quality than Flow-GRPO's at equal exploration.",
        better_rollouts, probe="exploration", before=_OPEN,
    ),
    Claim(
        "loop", "LOOP 2503.00897",
        "The leave-one-out baseline lowers the variance of the gradient.",
        less_variance, probe="gradient_variance", before=_YES,
    ),
)  # fmt: skip
