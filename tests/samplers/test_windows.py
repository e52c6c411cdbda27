"""Windows of trained steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.samplers.windows import WINDOWS, decay, drawn, exp_decay, frozen, progressive, spaced, subset, whole

SLIDING = ("progressive", "decay", "exp_decay")
DRAWN = [3, 1, 3, 2, 3, 2, 2, 3, 0, 0, 2, 3]
SUBSETS = [[3, 4, 5, 6], [1, 3, 4, 5], [0, 3, 4, 6]]
Chosen = tuple[str, int, dict[str, Any]]


@st.composite
def windows(draw: Any, names: Sequence[str] = tuple(WINDOWS)) -> Chosen:
    """A window by its name and the number of steps, with the given options that the window has."""
    name, num_steps = draw(st.sampled_from(names)), draw(st.integers(2, 30))
    if name == "all":
        return name, num_steps, {}
    stop = draw(st.one_of(st.none(), st.integers(1, num_steps - 1))) if name != "frozen" else None
    end = num_steps - 1 if stop is None else stop
    size = draw(st.integers(1, end))
    if name == "last":
        return name, num_steps, {"size": draw(st.integers(1, num_steps - 1))}
    options: dict[str, Any] = {"size": size, "start": draw(st.integers(0, end - size))}
    if name != "frozen":
        options |= {"stop": stop, "interval": draw(st.integers(1, 30))}
    if name in SLIDING:
        options["stride"] = draw(st.integers(0, 5))
    if name == "exp_decay":
        options |= {"rate": draw(st.floats(0.0, 2.0)), "after": draw(st.integers(0, 20))}
    return name, num_steps, options


@given(chosen=windows(), iteration=st.integers(0, 10**6), seed=st.integers(0, 2**31))
def test_windows_are_full_and_never_hold_the_last_step(chosen: Chosen, iteration: int, seed: int) -> None:
    name, num_steps, options = chosen
    window = WINDOWS[name](iteration, num_steps, seed, **options)
    assert len(window) == options.get("size", num_steps - 1)
    gaps = {b - a for a, b in pairwise(window)}
    assert all(gap > 0 for gap in gaps) if name == "subset" else len(gaps) <= 1 if name == "spaced" else gaps <= {1}
    assert window[0] >= options.get("start", 0)
    assert window[-1] <= num_steps - 2
    if options.get("stop") is not None:
        assert window[-1] < options["stop"]
    assert name != "last" or window[-1] == num_steps - 2
    assert WINDOWS[name](iteration, num_steps, seed, **options) == window


def visits(window: Callable[[int], Sequence[int]], count: int) -> list[tuple[int, int]]:
    """Positions in the order in which they are visited, each with its iterations, but for the last, which is cut."""
    runs = [(first, len(list(same))) for first, same in groupby(window(k)[0] for k in range(count))]
    return runs[:-1]


@settings(max_examples=50)
@given(chosen=windows(names=SLIDING))
def test_sliding_windows_move_by_the_stride_and_begin_again(chosen: Chosen) -> None:
    name, num_steps, options = chosen
    start, size, stride = options["start"], options["size"], options["stride"]
    stop = num_steps - 1 if options["stop"] is None else options["stop"]
    found = visits(lambda k: WINDOWS[name](k, num_steps, 0, **options), 2 * 30 * 30)
    if stride == 0 or start + size == stop:
        assert found == []
        return
    cycle = [position for position, _ in found]
    cycle = cycle[: cycle.index(start, 1)]
    assert cycle == sorted(cycle)
    assert (cycle[0], cycle[-1]) == (start, stop - size)
    gaps = [b - a for a, b in pairwise(cycle)]
    assert all(gap == stride for gap in gaps[:-1])
    assert all(0 < gap <= stride for gap in gaps[-1:])
    assert found[: len(cycle)] == found[len(cycle) : 2 * len(cycle)]
    if stride <= size:
        assert {i for position in cycle for i in range(position, position + size)} == set(range(start, stop))


def test_published_progressive_schedule() -> None:
    """MixGRPO: 25 steps, window 4, stride 1, 25 iterations each; 300 iterations reach position 11."""
    window = partial(progressive, num_steps=25, seed=0, size=4, stride=1, interval=25)
    assert [window(k) for k in (0, 24, 25, 299)] == [range(4), range(4), range(1, 5), range(11, 15)]
    assert visits(window, 30 * 25)[:21] == [(position, 25) for position in range(21)]
    assert window(20 * 25) == range(20, 24)
    assert window(21 * 25) == range(4)


def test_windows_without_overlap_end_flush() -> None:
    assert [progressive(k, 12, 0, size=4, stride=4, interval=1).start for k in range(4)] == [0, 4, 7, 0]


def test_frozen_windows_stay() -> None:
    still = partial(progressive, size=4, stride=0, interval=2, start=2)
    stays = {window(k, 25, 0) for window in (partial(frozen, size=4, start=2), still) for k in range(100)}
    assert stays == {range(2, 6)}


def test_decay_shortens_the_stay_linearly_with_the_position() -> None:
    """At position p of 24, 24 (1 - p / 24) + 6 p / 24: 24, 16.5 and 9, rounded down."""
    stays = [stay for _, stay in visits(partial(decay, num_steps=25, seed=0, size=4, interval=24), 1000)[:21]]
    assert (stays[0], stays[10], stays[-1]) == (24, 16, 9)
    assert stays == sorted(stays, reverse=True)
    short = visits(partial(decay, num_steps=9, seed=0, size=1, interval=3), 100)[:8]
    assert {stay for _, stay in short} == {3, 2, 1}


def test_exponential_decay_is_the_published_formula() -> None:
    stays = dict(visits(partial(exp_decay, num_steps=25, seed=0, size=4, interval=25, rate=0.1, after=13), 600)[:21])
    assert [stays[position] for position in (0, 13, 14, 20)] == [25, 25, 23, 13]
    steep = dict(visits(partial(exp_decay, num_steps=25, seed=0, size=1, interval=25, rate=10.0, after=0), 600)[:24])
    assert steep[20] == 1


def test_random_windows_are_addressed_uniform_and_held() -> None:
    window = partial(drawn, num_steps=10, size=3, stop=5)
    starts = [window(k, seed=1, interval=1).start for k in range(3000)]
    counts = [starts.count(position) for position in range(3)]
    assert sum(counts) == 3000
    assert min(counts) > 900
    assert starts[1234] == window(1234, seed=1, interval=1).start
    assert [window(k, seed=2, interval=1).start for k in range(50)] != starts[:50]
    assert [window(k, seed=1, interval=7).start for k in range(70)] == [s for s in starts[:10] for _ in range(7)]


def test_what_is_drawn_for_a_seed_does_not_change_between_releases() -> None:
    assert [drawn(k, 10, 0, size=2, interval=1, stop=5).start for k in range(12)] == DRAWN
    assert [subset(k, 8, 0, size=4, interval=1) for k in range(3)] == SUBSETS


def test_spaced_steps_are_each_equally_often_trained() -> None:
    """Of 12 steps, 4 are 3 apart, so there are three sets; of 13, there is one more first step."""
    found = [tuple(spaced(k, 13, 0, size=4, interval=1)) for k in range(600)]
    counts = Counter(found)
    assert set(counts) == {(0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11)}
    assert min(counts.values()) > 160
    assert {tuple(spaced(k, 14, 0, size=4, interval=1)) for k in range(200)} - set(counts) == {(3, 6, 9, 12)}
    assert {tuple(spaced(k, 13, 0, size=2, interval=1, start=4, stop=8)) for k in range(99)} == {(4, 6), (5, 7)}
    held = [tuple(spaced(k, 13, 1, size=4, interval=5)) for k in range(50)]
    assert all(len(set(held[k : k + 5])) == 1 for k in range(0, 50, 5))
    assert len(set(held)) == 3
    assert found != [tuple(spaced(k, 13, 1, size=4, interval=1)) for k in range(600)]


def test_all_is_every_step_but_the_last() -> None:
    assert whole(7, 10, 3) == range(9)


@pytest.mark.parametrize(
    ("window", "steps", "reason"),
    [
        (partial(progressive, size=10), 10, r"10 step\(s\) from step 0 do not fit in a schedule of 10 before the last"),
        (partial(frozen, size=12), 10, "use a size of at most 9, or more sampler.steps"),
        (partial(subset, size=2, start=8), 10, r"from step 8 .* use a size of at most 1"),
        (partial(decay, size=2, start=9), 10, "use an earlier start, or more sampler.steps"),
        (partial(drawn, size=4, stop=3), 10, "before its stop, 3; use a size of at most 3, or a later stop"),
        (partial(exp_decay, size=2, stop=10), 10, "stop is 10 in a schedule of 10 steps .* use at most 9"),
        (partial(frozen, size=1), 1, "an earlier start"),
        (partial(frozen, size=0), 10, "size is 0 and start 0; use at least 1 and 0"),
    ],
)
def test_windows_that_do_not_fit_are_refused_with_the_reason(
    window: Callable[..., Sequence[int]], steps: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        window(0, steps, 0)


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        ("{name: sliding}", "there is no window 'sliding'"),
        ("{name: progressive, size: 0}", "sampler.plan.window.size: .* greater than or equal to 1"),
        ("{name: progressive, stride: -1}", "sampler.plan.window.stride: .* greater than or equal to 0"),
        ("{name: random, interval: 0}", "sampler.plan.window.interval"),
        ("{name: exp_decay, rate: -0.5}", "sampler.plan.window.rate"),
        ("{name: random, stride: 2}", "window random has no option 'stride'"),
        ("{name: frozen, interval: 3}", "window frozen has no option 'interval'"),
        ("{name: all, size: 3}", "window all has no option 'size'; it has none"),
    ],
)
def test_options_out_of_range_and_of_other_windows_are_refused(window: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        load_recipe("mixgrpo_flash_guard", [f"sampler.plan.window={window}"])
