"""What a run prints: the time left counts iterations and evaluations at what each took."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from flowgrpo.configs.schema import Recipe
from flowgrpo.training import progress
from flowgrpo.training.progress import ConsoleReporter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock.now)
    return clock


def test_a_slow_first_evaluation_does_not_swell_the_time_left(clock: SimpleNamespace) -> None:
    output = io.StringIO()
    shown = ConsoleReporter(Console(file=output, width=200))
    recipe = Recipe.model_validate(
        {"rewards": [{"name": "gold"}], "run": {"iterations": 10}, "evaluate": {"every": 4}, "sampler": {"steps": 10}}
    )
    task = SimpleNamespace(describe=lambda: ["what will be done"], samples_per_iteration=lambda: 96, noun="images")
    shown.started(SimpleNamespace(recipe=recipe, task=task, next_iteration=0))  # type: ignore[arg-type]
    assert output.getvalue() == "what will be done\n"
    clock.now += 60
    shown.evaluation(0, {"eval/gold": 0.5})
    clock.now += 2
    shown.iteration({"iteration": 0, "reward/total": 0.5, "ratio/first_error": 0.0, "time/denoiser": 2.0})
    # Nine iterations of 2 s; evaluations before iterations 4 and 8 and at the end, 60 s each.
    first = next(line for line in output.getvalue().splitlines() if line.lstrip().startswith("1/10"))
    assert first.split()[-1] == "3:18"
    assert first.split()[-3] == "48.0"
    assert "images/s" in output.getvalue()
    for number in range(1, 4):
        clock.now += 2
        shown.iteration({"iteration": number, "reward/total": 0.5, "time/denoiser": 2.0})
    assert output.getvalue().splitlines()[-1].split()[-1] == "3:12"
    clock.now += 20
    shown.evaluation(4, {"eval/gold": 0.5})
    clock.now += 2
    shown.iteration({"iteration": 4, "reward/total": 0.5, "time/denoiser": 2.0})
    # Five iterations, two evaluations of (60 + 20) / 2 s.
    assert output.getvalue().splitlines()[-1].split()[-1] == "1:30"
