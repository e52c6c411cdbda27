"""What a run prints: a table that fits the terminal, every reward named, and the time that is left."""

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from flowgrpo.configs.schema import Recipe
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.reporting import progress
from flowgrpo.training.reporting.pace import Pace, Recurring
from flowgrpo.training.reporting.progress import ConsoleReporter
from flowgrpo.training.reporting.progress_table import curve, duration, number, share, sparkline
from flowgrpo.training.reporting.reporter import Alarm


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock.now)
    return clock


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def trainer(
    total: int = 10,
    every: int = 4,
    quick: int | None = None,
    evaluated: tuple[str, ...] = ("gold",),
    resumed: int = 0,
    processes: int = 1,
    shared_out: str = "",
    noun: str = "images",
    samples: int = 96,
    lines: tuple[str, ...] = ("what will be done",),
    rewards: dict[str, float] | None = None,
    reports: dict[str, str] | None = None,
    past: list[dict[str, Any]] | None = None,
    alike_since: int = 0,
) -> Any:
    recipe = Recipe.model_validate(
        {
            "rewards": [{"name": "gold"}],
            "run": {"iterations": total},
            "evaluate": {"every": every, "quick": quick and {"every": quick, "prompts": 24}},
        }
    )
    task = SimpleNamespace(
        describe=lambda: lines, samples_per_iteration=lambda: samples, noun=noun, device=SimpleNamespace(type="cpu")
    )
    weights = rewards or {"gold": 1.0}
    return SimpleNamespace(
        rewards=SimpleNamespace(
            told=None, names=tuple(weights), weights=torch.tensor(list(weights.values())),
            rewards=[SimpleNamespace(name=name, report=(reports or {}).get(name, "")) for name in weights],
        ),
        run=SimpleNamespace(read_metrics=lambda: past or []),
        evaluation=SimpleNamespace(
            names=evaluated, told=None,
            rewards=[SimpleNamespace(name=name, report=(reports or {}).get(name, "")) for name in evaluated],
        ),
        recipe=recipe, task=task, next_iteration=resumed, processes=Processes(0, processes), clock=SimpleNamespace(),
        keeper=SimpleNamespace(alike_since=alike_since),
        data=SimpleNamespace(heldout=[None] * 48 if evaluated else []), shared_out=shared_out,
    )  # fmt: skip


def reporter(width: int = 80, **of: Any) -> tuple[ConsoleReporter, io.StringIO]:
    output = io.StringIO()
    shown = ConsoleReporter(Console(file=output, width=width))
    shown.started(trainer(**of))
    return shown, output


def iteration(number: int, seconds: float = 2.0, **more: Any) -> dict[str, Any]:
    return {
        "iteration": number, "reward/total": 0.5, "reward/gold": 0.5, "ratio/first_error": 0.0, "ratio/mean": 1.0,
        "clip_share": 0.0, "time/denoiser": seconds, **more,
    }  # fmt: skip


def left(output: io.StringIO) -> str:
    rows = [line for line in output.getvalue().splitlines() if "/" in line.split()[0]]
    return rows[-1].split()[-1]


def test_the_time_left_counts_iterations_and_evaluations_apart(clock: SimpleNamespace):
    shown, output = reporter()
    clock.now += 60
    shown.evaluation(0, {"eval/gold": 0.5})
    clock.now += 2
    shown.iteration(iteration(0))
    # Nine iterations of 2 s; evaluations before iterations 4 and 8 and at the end, 60 s each.
    first = next(line for line in output.getvalue().splitlines() if line.lstrip().startswith("1/10"))
    assert first.split()[-3:] == ["48.0", "2.00", "3:18"]
    for done in range(1, 4):
        clock.now += 2
        shown.iteration(iteration(done))
    assert left(output) == "3:12"
    clock.now += 20
    shown.evaluation(4, {"eval/gold": 0.5})
    clock.now += 2
    shown.iteration(iteration(4))
    # The line after an evaluation is that of an iteration: five of 2 s, two evaluations of (60 + 20) / 2 s.
    assert output.getvalue().splitlines()[-1].split()[-3:] == ["48.0", "2.00", "1:30"]


def test_an_iteration_in_which_the_machine_stood_still_does_not_spoil_the_time_left(clock: SimpleNamespace):
    shown, output = reporter(total=100, every=50, evaluated=())
    for done in range(20):
        seconds = 1000.0 if done == 7 else 2.0
        clock.now += seconds
        shown.iteration(iteration(done, seconds))
    assert left(output) == "2:40"


def test_checkpoints_between_iterations_are_in_the_time_left(clock: SimpleNamespace):
    pace = Pace(100, None, None, 0.0)
    for done in range(1, 41):
        clock.now = 3.0 * done - (0 if done % 2 else 1)
        pace.iterated(3.0 * done, 2.0)
    assert pace.left(40) == pytest.approx(60 * 3.0)


def test_until_an_evaluation_was_seen_its_samples_say_how_long_it_takes(clock: SimpleNamespace):
    shown, output = reporter(resumed=5)
    clock.now += 2
    shown.iteration(iteration(5))
    # Four iterations, and two evaluations with half the samples of an iteration.
    assert left(output) == "0:10"


@given(st.integers(1, 40), st.integers(1, 12), st.one_of(st.none(), st.integers(1, 12)), st.integers(0, 39))
@settings(deadline=None, derandomize=True)
def test_the_time_left_is_what_a_run_of_even_steps_takes(total: int, every: int, few: int | None, resumed: int):
    assume(resumed < total)
    quick = None if few is None else Recurring(few, 2.0 / 3.0)
    now, pace, seen = 0.0, Pace(total, Recurring(every, 7.0 / 3.0), quick, 0.0), []
    for done in range(resumed, total):
        if done % every == 0 or (few is not None and done % few == 0):
            now += 7.0 if done % every == 0 else 2.0
            pace.evaluated(now, done)
        now += 3.0
        pace.iterated(now, 3.0)
        seen.append((now, pace.left(done + 1)))
    now += 7.0
    assert [at + still for at, still in seen] == pytest.approx([now] * len(seen))


def test_few_prompts_that_are_all_prompts_are_not_counted():
    shown, output = reporter(120, quick=2)
    shown.evaluation(0, {"eval/gold": 0.4, "quick/gold": 0.4})
    shown.evaluation(2, {"quick/gold": 0.5})
    assert [line.partition(":")[0] for line in output.getvalue().splitlines()[-2:]] == [
        "held-out after 0 iterations", "held-out after 2 iterations"
    ]  # fmt: skip


def test_quick_evaluations_show_their_gain_and_a_curve():
    shown, output = reporter(120, quick=2)
    shown.evaluation(0, {"eval/gold": 0.5, "eval_error/gold": 0.01, "quick/gold": 0.4, "quick_error/gold": 0.05})
    for done, mean in ((2, 0.45), (4, 0.5)):
        shown.evaluation(done, {"quick/gold": mean, "quick_gain/gold": mean - 0.4, "quick_gain_error/gold": 0.02})
    lines = output.getvalue().splitlines()
    assert lines[-4:] == [
        "held-out after 0 iterations: gold 0.5000",
        "24 of the held-out prompts after 0 iterations: gold 0.4000",
        "24 of the held-out prompts after 2 iterations: gold 0.4500 (+0.050 ± 0.020)",
        "24 of the held-out prompts after 4 iterations: gold 0.5000 (+0.100 ± 0.020)  ▁▅█",
    ]
    shown.iteration(iteration(4))
    assert "0.5000" in output.getvalue().splitlines()[-1]
    shown.evaluation(10, {"eval/gold": 0.5, "quick/gold": 0.5, "quick_gain/gold": 0.1, "quick_gain_error/gold": 0.02})
    assert output.getvalue().splitlines()[-1] == "held-out after 10 iterations: gold 0.5000 (+0.100 ± 0.020)  ▁▅██"


def test_evaluations_of_all_prompts_show_a_curve_if_there_are_no_quick_ones():
    shown, output = reporter(120, evaluated=("gold", "proxy"))
    for done, mean in ((0, 0.4), (4, 0.5), (8, 0.6)):
        shown.evaluation(done, {"eval/gold": mean, "eval/proxy": 1.0})
    assert output.getvalue().splitlines()[-2:] == [
        "held-out after 4 iterations: gold 0.5000, proxy 1.0000",
        "held-out after 8 iterations: gold 0.6000, proxy 1.0000  gold ▁▅█",
    ]


def test_a_curve_begins_anew_when_an_evaluation_has_another_reward():
    shown, output = reporter(120, evaluated=("gold",))
    for done in (0, 4, 8):
        shown.evaluation(done, {"eval/gold": 0.4})
    for done, mean in ((12, 1.0), (16, 2.0), (20, 3.0)):
        shown.evaluation(done, {"eval/other": mean})
    assert output.getvalue().splitlines()[-1] == "held-out after 20 iterations: other 3.0000  ▁▅█"


def test_a_resumed_run_goes_on_with_its_trend_its_held_out_score_and_its_curve():
    past = [{"iteration": k, "reward/total": 0.1 * k} for k in range(12)]
    past[0] |= {"eval/gold": 0.2, "quick/gold": 0.1}
    past[6] |= {"quick/gold": 0.2}
    shown, output = reporter(120, total=20, quick=6, resumed=12, past=past)
    shown.iteration(iteration(12, **{"reward/total": 1.2}))
    assert output.getvalue().splitlines()[-2].split()[2:4] == ["↑0.650", "0.2000"]
    shown.evaluation(18, {"quick/gold": 0.3})
    assert output.getvalue().splitlines()[-1].endswith("gold 0.3000  ▁▅█")


def test_the_curve_of_a_resumed_run_leaves_out_evaluations_that_measured_something_else():
    past = [{"iteration": k, "eval/gold": 0.9} for k in range(5)] + [{"iteration": 6, "eval/gold": 0.1}]
    shown, output = reporter(120, total=20, resumed=7, past=past, alike_since=6)
    shown.evaluation(8, {"eval/gold": 0.2})
    assert output.getvalue().splitlines()[-1].endswith("gold 0.2000")
    shown.evaluation(12, {"eval/gold": 0.3})
    assert output.getvalue().splitlines()[-1].endswith("gold 0.3000  ▁▅█")


def test_the_curve_of_a_long_run_is_no_wider_than_the_curve_of_a_short_one():
    assert curve([0.0, 1.0], 24) == "▁█"
    assert curve([0.0, 0.0, None, 1.0, 2.0, 2.0], 3) == "▁▅█"
    assert curve([None, None, 1.0, 2.0], 2) == " ▁"
    assert len(curve([k / 7 for k in range(1000)], 24)) == 24
    shown, output = reporter(quick=1)
    for done in range(200):
        shown.evaluation(done, {"quick/gold": 0.001 * done})
    assert len(output.getvalue().splitlines()[-1].split()[-1]) == 24


def test_the_rewards_are_named_with_their_weights_before_the_first_iteration():
    assert reporter()[1].getvalue().splitlines()[2] == "reward gold"
    several = reporter(rewards={"clip_score": 1.0, "pixels.py:warmth": 0.1, "size": -2.0})[1]
    assert several.getvalue().splitlines()[2] == "rewards clip_score, 0.1 × pixels.py:warmth, -2 × size"


def test_what_rewards_say_of_themselves_is_printed_once_before_the_first_iteration():
    reports = {"choices": "82% of 111 held-out pairs predicted", "guard": "fitted on nothing"}
    shown = reporter(rewards={"gold": 1.0, "choices": 1.0}, evaluated=("choices", "guard"), reports=reports)[1]
    assert shown.getvalue().splitlines()[2:] == [
        "rewards gold, choices", "choices: 82% of 111 held-out pairs predicted", "guard: fitted on nothing",
    ]  # fmt: skip


def test_a_curve_has_its_greatest_value_at_the_top_and_leaves_out_what_is_missing():
    assert sparkline([1.0, None, 3.0, float("nan"), 2.0]) == "▁ █ ▅"
    assert sparkline([0.5, 0.5]) == "▁▁"
    # A change that is small beside the noise looks small.
    assert sparkline([0.483, 0.4831, 0.4832], 0.1) == "▄▄▅"
    assert sparkline([0.4, 0.5], 0.2) == "▃▆"
    assert sparkline([0.4, 0.5], 0.05) == "▁█"
    assert sparkline([]) == ""


numbers = st.one_of(st.none(), st.floats(-1e12, 1e12), st.floats(-1e-3, 1e-3), st.floats())
names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z", "M"]), min_size=1, max_size=90)


@pytest.mark.slow
@given(
    rewards=st.dictionaries(names, numbers, min_size=1, max_size=7), total=st.integers(1, 10**7),
    noun=st.sampled_from(["images", "texts"]), ratio=numbers, kl=numbers, seconds=st.floats(1e-6, 1e7),
    clip=st.one_of(st.none(), st.floats(0, 1)), samples=st.integers(1, 10**6), heldout=numbers,
    evaluated=st.integers(0, 3), every=st.integers(1, 1000), width=st.sampled_from([80, 100, 132]),
)  # fmt: skip
@settings(deadline=None, derandomize=True, max_examples=300)
def test_no_line_of_the_table_is_wider_than_the_terminal(
    rewards: dict[str, float | None], total: int, noun: str, ratio: float | None, kl: float | None, seconds: float,
    clip: float | None, samples: int, heldout: float | None, evaluated: int, every: int, width: int,
):  # fmt: skip
    held = tuple(f"r{k}" for k in range(evaluated))
    shown, output = reporter(
        width, total=total, every=every, evaluated=held, noun=noun, samples=samples, resumed=total - 1
    )
    if held:
        shown.evaluation(total - 1, {f"eval/{name}": heldout for name in held})
    begin = len(output.getvalue().splitlines())
    values = {f"reward/{name}": value for name, value in rewards.items() if name != "total"}
    for _ in range(12):
        more = {"reward/total": next(iter(rewards.values())), "ratio/mean": ratio, "clip_share": clip, "kl": kl}
        shown.iteration({"iteration": total - 1, "ratio/first_error": 0.1, "time/rest": seconds, **more, **values})
    lines = output.getvalue().splitlines()[begin:]
    assert lines[0].split()[:2] == ["iteration", "reward"]
    assert max(map(cell_len, lines)) < width
    if len(values) > 1:
        printed = " ".join(output.getvalue().split())
        assert all(name in printed for name in rewards if name != "total" and cell_len(name) <= 50)


def test_several_rewards_are_all_named_under_their_iteration_or_beside_it_where_there_is_room():
    record = iteration(0, **{"reward/clip_score": 0.25, "reward/pixels.py:warmth": -3.5, "reward/total": 1.0})
    expected = ["gold 0.5000", "clip_score 0.2500", "pixels.py:warmth -3.5000"]
    shown, output = reporter(evaluated=("gold", "clip_score"))
    shown.iteration(record)
    head, line, below, *_ = output.getvalue().splitlines()[3:]
    assert "held-out" not in head
    assert line.split()[1] == "1.0000"
    assert below.split("  ") == ["", "", "", "", "", " " + expected[0], *expected[1:]]
    shown, output = reporter(width=160)
    shown.iteration(record)
    assert output.getvalue().splitlines()[4].split("  ")[-3:] == expected


def test_what_a_recipe_does_not_measure_has_no_column():
    shown, output = reporter(evaluated=())
    shown.iteration({"iteration": 0, "reward/total": 0.5, "reward/gold": 0.5, "ratio/first_error": 0.0})
    head = output.getvalue().splitlines()[3].split()
    assert head == ["iteration", "reward", "trend", "images/s", "s/iter", "left"]


def test_the_number_of_processes_is_in_the_header():
    assert reporter()[1].getvalue().splitlines()[0].endswith(", 1 process on cpu")
    assert reporter(processes=8)[1].getvalue().splitlines()[0].endswith(", 8 processes on cpu")
    sharded = reporter(processes=8, shared_out="full weights in shards by FSDP2", width=120)[1].getvalue()
    assert sharded.splitlines()[0].endswith(", 8 processes on cpu, full weights in shards by FSDP2")


@pytest.mark.parametrize(
    ("value", "width", "digits", "text"),
    [
        (0.5, 7, 4, "0.5000"), (-12.3456, 7, 4, "-12.346"), (123456.7, 7, 4, "123457"), (1234567890.0, 7, 4, "1.235e9"),
        (-1e100, 7, 4, "-1e100"), (0.0, 7, 4, "0.0000"), (4e-6, 6, 4, "4.0e-6"), (-0.00001, 5, 3, "-1e-5"),
        (None, 7, 4, "–"), (float("nan"), 7, 4, "–"), (999.96, 5, 1, "1000"),
    ],
)  # fmt: skip
def test_a_number_takes_the_room_it_has(value: float | None, width: int, digits: int, text: str):
    assert number(value, width, digits) == text


@given(st.floats(-1e300, 1e300), st.integers(7, 12), st.integers(0, 6))
@settings(derandomize=True)
def test_a_number_is_close_to_what_it_says(value: float, width: int, digits: int):
    text = number(value, width, digits)
    assert len(text) <= width
    assert float(text) == pytest.approx(value, rel=0.5, abs=0.5 * 10.0**-digits)
    assert (float(text) == 0) == (value == 0)


def test_shares_and_stretches_of_time():
    assert [share(value) for value in (0.0, 0.0312, 1.0, None)] == ["0.0%", "3.1%", "100.0%", "–"]
    seconds = (0, 59.6, 3599, 3600, 86399, 86400, 100 * 86400, 1e12)
    written = ["0:00", "1:00", "59:59", "1h00m", "23h59m", "1d00h", "100d", "99999d"]
    assert [duration(value) for value in seconds] == written


def alarm(action: str) -> Alarm:
    said = "guard: gold fell to 0.4 at iteration 50, from 0.6 at the start; that is more than 0.1"
    return Alarm(said, "guard/gold", action == "stop")


def test_colours_are_for_terminals_and_not_where_they_are_unwanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def said(file: io.StringIO) -> str:
        shown = ConsoleReporter(Console(file=file, width=120))
        shown.activity.shown = False
        shown.alarm(alarm("stop"))
        return file.getvalue()

    plain = "guard: gold fell to 0.4 at iteration 50, from 0.6 at the start; that is more than 0.1; the run ends here"
    assert said(io.StringIO()).startswith(plain)
    assert said(Terminal()).startswith("\x1b[1;31m")
    monkeypatch.setenv("FORCE_COLOR", "1")
    forced = said(io.StringIO())
    assert forced.startswith("\x1b[1;31m")
    # Colours alone: no line is folded, and nothing moves.
    assert forced.splitlines()[0].endswith("its weights are saved\x1b[0m")
    assert re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", forced) == ["m", "m"]
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in said(Terminal())


def test_a_terminal_gets_long_lines_folded_between_words_and_a_file_as_they_are():
    text = "note: " + "one optimizer step per rollout is strictly on-policy, and " * 3 + "/a/path/" + 90 * "x"
    terminal, file = Terminal(), io.StringIO()
    ConsoleReporter(Console(file=terminal, width=80)).say(text)
    ConsoleReporter(Console(file=file, width=80)).say(text)
    assert file.getvalue() == text + "\n"
    *lines, path = terminal.getvalue().splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) < 80
    assert path == "  /a/path/" + 90 * "x"


def test_the_moving_line_is_for_terminals_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    file = io.StringIO()
    piped = ConsoleReporter(Console(file=file, width=80, force_terminal=True))
    piped.doing("loading")
    assert not piped.activity.shown
    assert file.getvalue() == ""
    assert not ConsoleReporter(Console(file=Terminal(), width=80), main=False).activity._live
    terminal = Terminal()
    with ConsoleReporter(Console(file=terminal, width=80)) as shown:
        shown.doing("loading")
        shown.say("a line")
    written = terminal.getvalue()
    assert "loading" in written
    assert "a line" in written
    # Its last words: back to the line's beginning, and erase it.
    assert written.rstrip("\n").endswith("\x1b[1A\x1b[2K")


def moving(text: str, part: str, counted: tuple[int, int] | None, expected: float | None, width: int) -> str:
    """The moving line, 65 seconds after its activity began."""
    console = Console(file=io.StringIO(), width=width)
    shown = ConsoleReporter(console).activity
    shown.begin(text, expected)
    shown._began -= 65.0
    shown.part(part)
    if counted is not None:
        shown.count(*counted)
    console.print(shown.line(width))
    written: str = console.file.getvalue()  # type: ignore[attr-defined]
    return written.rstrip("\n")


@given(
    st.text(max_size=200), st.sampled_from(["denoiser", "rest", "update 12/16, batch"]), st.integers(20, 200),
    st.one_of(st.none(), st.floats(0, 1e7)), st.one_of(st.none(), st.tuples(st.integers(0, 10**7), st.just(10**7))),
)  # fmt: skip
@settings(deadline=None, derandomize=True)
def test_the_moving_line_is_one_line(
    text: str, part: str, width: int, expected: float | None, counted: tuple[int, int] | None
):
    line = moving(" ".join(text.split()), part, counted, expected, width)
    assert "\n" not in line
    assert cell_len(line) <= width


def test_the_moving_line_says_what_is_done_of_which_part():
    label = "iteration 100/300: update 1/2, batch 17/120"
    at_80 = moving("iteration 100/300", "update 1/2, batch", (17, 120), 754.0, 80)
    assert at_80.split(maxsplit=1)[1] == f"1:05 of about 12:34 {label}"
    assert moving("iteration 100/300", "update 1/2, batch", (17, 120), 754.0, 60) == f"1:05 {label}"
    assert moving("iteration 100/300", "denoiser", (17, 9600), None, 47) == "1:05 iteration 100/300: sampling 17/9,600"
    assert moving("evaluation", "rest", None, None, 40) == "1:05 evaluation"


def test_the_bar_is_of_the_time_if_it_is_known_and_else_of_what_is_counted():
    def part_done(counted: tuple[int, int] | None, expected: float | None) -> str:
        return moving("iteration 1/3", "denoiser", counted, expected, 80).split()[0]

    # 65 s of 130 s are half of twelve columns; 3 of 12 states are a quarter.
    assert part_done((3, 12), 130.0) == part_done(None, 130.0) == part_done((6, 12), None) == "━" * 6
    assert part_done((3, 12), None) == "━" * 3


def test_a_count_is_of_its_part_alone():
    console = Console(file=io.StringIO(), width=80)
    shown = ConsoleReporter(console).activity
    shown.begin("iteration 1/3")
    for part, expected in (("denoiser", "sampling 5/8"), ("rest", "iteration 1/3"), ("denoiser", "sampling 5/8")):
        shown.part(part)
        if part == "denoiser":
            shown.count(5, 8)
        console.print(shown.line(80))
        assert console.file.getvalue().rstrip().endswith(expected)  # type: ignore[attr-defined]
    shown.part("decode")
    console.print(shown.line(80))
    assert console.file.getvalue().rstrip().endswith("decoding")  # type: ignore[attr-defined]
