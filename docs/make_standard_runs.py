"""Writes docs/standard_runs.md: what the field's standard runs do and should need, by the estimates of `flowgrpo plan`.

Run it from anywhere: `python docs/make_standard_runs.py`. It loads no model.
"""

from __future__ import annotations

from pathlib import Path

from flowgrpo.configs.layers import machine_of, parts
from flowgrpo.configs.load import load_image_recipe
from flowgrpo.estimate import UTILISATION
from flowgrpo.estimate.estimates import GIB, Estimate, duration, estimate
from flowgrpo.training.planning import forecast

PAGE = Path(__file__).resolve().with_name("standard_runs.md")
METHODS = ("flow_grpo", "flow_grpo_fast", "grpo_guard", "mixgrpo", "mixgrpo_flash", "branchgrpo")
RUNS = (
    ("sd35_medium", "geneval"),
    ("sd35_medium", "ocr"),
    ("sd35_medium", "pickscore"),
    ("flux_dev", "geneval"),
    ("flux_dev", "ocr"),
    ("flux_dev", "pickscore"),
    ("flux2_klein_4b", "pickscore"),
    ("flux2_klein_9b", "pickscore"),
    ("z_image", "pickscore"),
    ("qwen_image", "ocr"),
    ("wan21_1_3b", "videoalign"),
    ("wan21_14b", "videoalign"),
    ("ltx2", "videoalign"),
)
SIZES = ("gpus1", "gpus8", "gpus32")
SMALL = (("sd35_medium", "ocr"),)
HEAD = (
    "method", "groups", "evaluations", "trained", "optimizer steps", "GiB", "iteration", "run",
)  # fmt: skip

INTRODUCTION = f"""\
# Standard runs

<!-- Written by docs/make_standard_runs.py. Change that, or the parts in flowgrpo/configs/parts, not this page. -->

A standard run is a method with a part for the model, the task and the hardware:

```sh
flowgrpo train flow_grpo+sd35_medium+ocr+gpus8
```

`flowgrpo recipes` lists methods and parts, and [estimates.md](estimates.md#parts) says how they are put together. Each
part names the source of its settings, and `flowgrpo plan` prints them. You have to provide the prompt files. If a file
is missing, the message says which file of the field is meant.

Counts are exact. **Memory and time are estimates** from shapes alone, made as [estimates.md](estimates.md) says. Time
is for H100 cards at an assumed {UTILISATION:.0%} of their peak, without the rewards. [Real sizes on a
GPU](benchmarks/gpu.md) compares estimates with measurements.

- *groups*: prompts × images of an iteration. With `gpus32` BranchGRPO has 32 prompts, one for each card.
- *evaluations*: states that the denoiser evaluates while an iteration samples. *trained*: how many of these states are
  evaluated again with a gradient. If the window of a method moves, both numbers are means over the run.
- *optimizer steps*: number of optimizer steps in the whole run.
- *GiB*: peak memory of each GPU. *iteration*, *run*: time. Each cell has the numbers for
  {", ".join(f"`{size}`" for size in SIZES)}.
"""


def page() -> str:
    """The whole page."""
    known, lines = parts(), [INTRODUCTION]
    for model, task in RUNS:
        title = f"{known[model].line.split(',')[0]}: {known[task].line.split(':')[0]}"
        lines += [f"## {title}", "", f"`METHOD+{model}+{task}+gpus8`", ""]
        lines += [_line(HEAD), _line(["---"] * len(HEAD))]
        lines += [row(method, f"{method}+{model}+{task}", SIZES) for method in METHODS]
        lines.append("")
    lines += [
        "## One card of 24 GB",
        "",
        "With `gpus1_24gb`. The time is for an RTX 4090, without copies to and from host memory.",
        "",
    ]
    lines += [_line(["recipe", *HEAD[1:]]), _line(["---"] * len(HEAD))]
    for model, task in SMALL:
        for method in METHODS:
            name = f"{method}+{model}+{task}"
            lines.append(row(f"{name}+gpus1_24gb", name, ("gpus1_24gb",)))
    return "\n".join(lines).rstrip() + "\n"


def counts(name: str) -> list[str]:
    """The cells that need no estimate: groups, evaluations, trained states, optimizer steps."""
    recipe = load_image_recipe(name)
    expected, prompts = forecast(recipe), recipe.rollout.prompts
    uses = sum(expected.windows)
    evaluations, trained = (
        prompts * sum(getattr(c, field) * n for c, n in zip(expected.counts, expected.windows)) / uses
        for field in ("evaluations", "trained_states")
    )
    steps = recipe.run.iterations * expected.optimizer_steps
    return [f"{prompts} × {expected.images // prompts}", f"{evaluations:,.0f}", f"{trained:,.0f}", f"{steps:,}"]


def row(title: str, name: str, sizes: tuple[str, ...]) -> str:
    """A line of a table: the counts of a recipe without hardware, and its estimates with each size of hardware."""
    found = [estimated(f"{name}+{size}") for size in sizes]
    cells = [
        f"`{title}`",
        *counts(name),
        " / ".join(f"{one.peak / GIB:.0f}" for one in found),
        " / ".join(duration(one.iteration_seconds) for one in found),
        " / ".join(duration(one.run_seconds) for one in found),
    ]
    return _line(cells)


def estimated(name: str) -> Estimate:
    """The estimate of a composed recipe on its own hardware, with the number of prompts of the published file."""
    machine = machine_of(name)
    return estimate(load_image_recipe(name), machine["gpu"], machine["gpus"], prompts=machine.get("prompts"))


def _line(cells: object) -> str:
    return "| " + " | ".join(cells) + " |"  # type: ignore[arg-type]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
