"""Results of claims made up for tests: runs with given held-out curves, and seconds of given ratios."""

from typing import Any

from flowgrpo.bench.claims.evidence import Evidence
from flowgrpo.bench.claims.timings import AGAIN, APART, FAMILIES
from flowgrpo.bench.claims.trainings import DENSE, PAINT
from flowgrpo.configs.load import dump_recipe, load_recipe

Result = dict[str, Any]
HARDWARE = {"cpu": "a cpu", "cores": 2, "threads": 1, "gpu": None, "torch": "2", "python": "3"}


def made(label: str, score: list[float], seed: int = 0, **changed: Any) -> Result:
    """A result of a run with `len(score)` evaluations, ten iterations apart."""
    places = [10 * k for k in range(len(score))]
    steps = {"0": {"count": 5.0, "mean": -1.0, "var": 4.0, "clipped": 0.0}}
    count = places[-1]
    marks: dict[str, Any] = {"iteration": places, "updates": places, "compute": [100 * k for k in places]}
    marks |= {PAINT: score, DENSE: score, "gold": score, "proxy": [s / 2 for s in score], "seconds": places}
    result: Result = {
        "kind": "run", "label": label, "method": label, "seed": seed, "key": "0", "file": f"{label}-{seed}",
        "recipes": [dump_recipe(load_recipe("mixgrpo_flash_guard"))], "trained_on": "paint",
        "version": "0", "code": "0", "data": "0", "hardware": HARDWARE,
        "iterations": count, "images": 96, "curves": {"grad_norm": [1.0]}, "evaluation": marks,
        "steps": steps, "totals": {"evaluations": 10 * count, "compute": 100 * count, "seconds": 2.0 * count},
    }  # fmt: skip
    return result | changed


def timing(family: str, shares: dict[str, tuple[float, ...]]) -> Result:
    """A timing in which some forms take a share of 1 s in each pass with nothing shared, and half of it with shared
    states.

    As in the papers' codes, there is only the form with nothing shared.
    """
    nfe = {"old": 25.0, "theta": 4.0, "old_shared": 19.0, "theta_shared": 3.0}
    count = len(next(iter(shares.values())))
    seconds: dict[str, list[float]] = {}
    for name in FAMILIES[family]:
        own = list(shares.get(name, (1.0,) * count))
        seconds |= {name: own} if family.endswith(AGAIN) else {name: [v / 2 for v in own], name + APART: own}
    head = made(family, [0.0, 0.0]) | {"kind": "time", "iterations": list(range(count))}
    head["passes"] = count if family.endswith(AGAIN) else 1
    return head | {"seconds": seconds, "nfe": dict.fromkeys(seconds, nfe)}


def evidence(
    runs: dict[str, list[list[float]]], times: dict[str, dict[str, tuple[float, ...]]] | None = None
) -> Evidence:
    """Evidence of held-out curves by label and seed, and of timed shares, the same as in the papers' codes."""
    found = {label: {k: made(label, curve, k) for k, curve in enumerate(curves)} for label, curves in runs.items()}
    timed = {
        family + end: timing(family + end, shares) for family, shares in (times or {}).items() for end in ("", AGAIN)
    }
    return Evidence(found, {}, timed, {})
