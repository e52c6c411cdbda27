"""Verdicts on the papers' claims by hand: intervals, shares of a gain, what would decide, and the order of runs."""

import dataclasses
import math

import pytest

from flowgrpo.bench.claims.evidence import (
    Claim,
    Evidence,
    Measure,
    Statement,
    compared,
    first_reach,
    judged,
    lopsided,
)
from flowgrpo.bench.claims.intervals import Interval, needed, shares
from flowgrpo.bench.claims.order import more_seeds, order
from flowgrpo.bench.claims.papers import CLAIMS
from flowgrpo.bench.claims.timings import APART
from flowgrpo.bench.claims.trainings import DENSE, jobs
from flowgrpo.bench.claims.verdicts import (
    GUARDED,
    JUDGED,
    at_equal,
    at_equal_exploration,
    over_optimised,
    preferred,
    signal_kept,
)
from tests.bench.made_results import evidence, made

# -- intervals ---------------------------------------------------------------------------------------------------------


def test_an_interval_by_hand() -> None:
    # Mean 2, deviation 1; Student's t at 0.975 with 2 degrees of freedom is 4.302653, over √3 is 2.484138.
    interval = Interval.of([1.0, 3.0, 2.0])
    assert interval.mean == 2.0
    assert interval.low == pytest.approx(2.0 - 2.484138, abs=1e-6)
    assert interval.high == pytest.approx(2.0 + 2.484138, abs=1e-6)
    assert interval.text(".2f") == "2.00 [−0.48, 4.48]"
    assert (interval.at_most(4.5), interval.at_most(2.0), interval.at_most(-0.5)) == (True, None, False)
    assert (interval.at_least(-0.5), interval.at_least(2.0), interval.at_least(4.5)) == (True, None, False)


def test_a_single_value_decides_nothing() -> None:
    interval = Interval.of([0.3])
    assert Interval.of([-0.0004]).text() == "+0.000 (one value)"
    assert Interval.of([-0.0004]).text(".1%") == "0.0% (one value)"
    assert (interval.at_most(100.0), interval.at_least(-100.0)) == (None, None)
    assert interval.text() == "+0.300 (one value)"


def test_numbers_that_are_not_there_decide_nothing() -> None:
    interval = Interval.of([math.nan, math.nan])
    assert (interval.at_most(0.0), interval.at_least(0.0)) == (None, None)
    assert interval.text() == "no number"


def test_a_share_of_a_gain_by_hand() -> None:
    # Ours is half of theirs on every seed: no doubt is left.
    exact = shares([0.10, 0.11, 0.12], [0.20, 0.22, 0.24])
    assert (exact.mean, exact.low, exact.high) == pytest.approx((0.5, 0.5, 0.5))
    # The ends are the shares for which Student's t of the differences is at its 97.5 % quantile.
    ours, theirs = [0.10, 0.13, 0.11, 0.12], [0.20, 0.21, 0.19, 0.22]
    found = shares(ours, theirs)
    for end in (found.low, found.high):
        interval = Interval.of(a - end * b for a, b in zip(ours, theirs))
        assert min(abs(interval.low), abs(interval.high)) == pytest.approx(0.0, abs=1e-9)
    # A baseline that may not have gained at all has no shares.
    assert shares([0.1, 0.1], [0.3, -0.1]).high == math.inf
    assert shares([0.1], [0.2]).low == -math.inf


def test_how_many_values_would_decide() -> None:
    # Mean 1, deviation 1. With 7 values, t = 2.447 and 2.447/√7 = 0.925; with 6, 2.571/√6 = 1.049.
    assert needed([0.0, 1.0, 2.0], 0.0) == 7
    assert needed([1.0, 1.0], 0.0) == 2
    assert needed([-1.0, 1.0], 0.0) is None
    assert needed([0.0, 0.0], 0.0) is None
    assert needed([1.0], 0.0) is None


# -- tests of one number -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "holds", "more"),
    [
        ([0.10, 0.11, 0.12], True, 0),
        # Below 0.02 for certain: an effect that does not matter.
        ([0.001, 0.002, -0.001], False, 0),
        ([-0.3, -0.31, -0.29], False, 0),
        # Mean 0.05, deviation 0.05; 7 values tell it from 0, and 13 from 0.02.
        ([0.0, 0.05, 0.1], None, 4),
        ([0.3], None, None),
    ],
)
def test_a_number_and_what_would_decide_it(values: list[float], holds: bool | None, more: int | None) -> None:
    found = judged("The change is {}.", "change", values, 0.0, True, beyond=0.02)
    assert found.measure is not None
    assert (found.holds, found.measure.more) == (holds, more)
    assert found.text.startswith("The change is ")


@pytest.mark.parametrize(
    ("ours", "bound", "beyond", "holds"),
    [
        ([0.19, 0.20, 0.21], 0.8, 0.0, True),
        ([0.10, 0.11, 0.09], 0.8, 0.0, False),
        ([0.10, 0.26, 0.14], 0.8, 0.0, None),
        # Equal gains are no higher reward, because a gain a tenth higher is ruled out.
        ([0.201, 0.199, 0.2005], 1.0, 0.1, False),
        ([0.30, 0.31, 0.29], 1.0, 0.1, True),
    ],
)
def test_a_gain_against_a_baselines(ours: list[float], bound: float, beyond: float, holds: bool | None) -> None:
    found = compared("{}", "gain", ours, [0.20, 0.2001, 0.1999], bound, beyond=beyond)
    assert found.holds is holds
    assert found.measure is not None
    assert (found.measure.more == 0) == (holds is not None)


@pytest.mark.parametrize("ours", [[0.0, 0.0, 0.0], [0.10, 0.11, 0.12], [-0.10, -0.11, -0.12]])
def test_a_baseline_that_gains_exactly_nothing_decides_nothing(ours: list[float]) -> None:
    found = compared("{}", "gain", ours, [0.0, 0.0, 0.0], 0.8)
    assert found.measure is not None
    assert (found.holds, found.measure.more) == (None, None)


def test_the_ends_of_an_interval_have_the_digits_that_show_what_was_decided() -> None:
    # The high ends are 0.0199 and 0.0201; both are 0.020 in three digits, and only one is below 0.02.
    below, above = (Measure("x", Interval(0.001, -0.018, high, 9), 0.0, True, beyond=0.02) for high in (0.0199, 0.0201))
    assert below.text("+.3f") == "+0.0010 [−0.0180, +0.0199]"
    assert above.text("+.3f") == "+0.001 [−0.018, +0.020]"
    # The high end is a margin above the bound, so the interval does not hold.
    assert Measure("x", Interval(0.5, 0.4, 0.5604, 9), 0.56, False).text(".2f") == "0.5000 [0.4000, 0.5604]"
    assert Measure("x", Interval(0.5, 0.4, 0.5596, 9), 0.56, False).text(".2f") == "0.50 [0.40, 0.56]"
    assert Measure("x", Interval.of([0.3]), 0.3, True).text(".2f") == "0.30 (one value)"


def test_runs_that_are_exactly_equal_show_no_effect() -> None:
    nothing, gains = [0.0, 0.0, 0.0], [0.25, 0.25, 0.25]
    assert judged("{}", "difference", nothing, 0.0, True).holds is None
    assert judged("{}", "difference", nothing, 0.0, False).holds is None
    assert judged("{}", "difference", nothing, 0.0, True, beyond=0.02).holds is False
    assert compared("{}", "gain", gains, gains, 1.0, beyond=0.1).holds is False
    assert compared("{}", "gain", gains, gains, 0.8).holds is True


def test_a_baseline_that_does_not_gain_decides_nothing() -> None:
    found = compared("{}", "gain", [0.3, 0.31, 0.3], [0.0, 0.02, -0.02], 0.8)
    assert found.holds is None
    almost = compared("{}", "gain", [0.3, 0.31, 0.3], [0.01, 0.03, 0.00], 0.8)
    assert almost.holds is None
    assert almost.measure is not None
    assert almost.measure.more
    assert almost.measure.more > 1


# -- verdicts on claims ------------------------------------------------------------------------------------------------


def claim(name: str) -> Claim:
    return next(c for c in CLAIMS if c.name == name)


LEVEL = [[0.4, 0.5], [0.4, 0.501], [0.4, 0.499]]
HALF = {"mixgrpo": (0.50, 0.51, 0.49, 0.50, 0.50)}


@pytest.mark.parametrize(
    ("mix", "seconds", "verdict"),
    [
        (LEVEL, HALF, "reproduced"),
        ([[0.4, 0.44], [0.4, 0.441], [0.4, 0.439]], HALF, "not reproduced"),
        ([[0.4, 0.55], [0.4, 0.46], [0.4, 0.44]], HALF, "undecided"),
        (LEVEL, {"mixgrpo": (0.7, 0.71, 0.69, 0.7, 0.7)}, "not reproduced"),
        (LEVEL, {"mixgrpo": (0.3, 0.9, 0.4, 0.8, 0.5)}, "undecided"),
        (LEVEL[:1], HALF, "undecided"),
    ],
)
def test_verdicts_on_mixgrpo(mix: list[list[float]], seconds: dict[str, tuple[float, ...]], verdict: str) -> None:
    found = evidence({"mixgrpo": mix, "dance_grpo": LEVEL}, {"mixgrpo": seconds})
    assert claim("mixgrpo").answer(found)[0] == verdict


def test_a_time_is_judged_as_in_the_papers_codes_and_says_the_others() -> None:
    found = evidence({"mixgrpo": LEVEL, "dance_grpo": LEVEL}, {"mixgrpo": HALF})
    # Here it is slower than half, with shared states and without.
    seconds = found.times["mixgrpo"]["seconds"]
    seconds["mixgrpo"] = [0.9 * value for value in seconds["dance_grpo"]]
    seconds["mixgrpo" + APART] = [0.7 * value for value in seconds["dance_grpo" + APART]]
    first = claim("mixgrpo").answer(found)[1][0]
    assert first.holds
    assert "takes 0.50 [0.49, 0.51] of the time of dance_grpo" in first.text
    assert "kept for the backward pass, the share is 0.70." in first.text
    assert "in common, it is 0.90." in first.text
    assert "(25, 4), shared (19, 3)" in first.text


def test_what_is_missing_is_said() -> None:
    verdict, (finding,) = claim("mixgrpo").answer(evidence({"mixgrpo": LEVEL}))
    assert verdict == "not measured"
    assert finding.text == "There is no result of dance_grpo, the timing mixgrpo, the timing mixgrpo-again."
    apart_ = evidence({"mixgrpo": LEVEL, "dance_grpo": LEVEL}, {"mixgrpo": HALF})
    seeds = {"mixgrpo": {7: made("mixgrpo", [0.4, 0.5])}, "dance_grpo": dict(apart_.runs["dance_grpo"])}
    verdict, _ = claim("mixgrpo").answer(dataclasses.replace(apart_, runs=seeds))
    assert verdict == "not measured"


def test_only_seeds_that_both_have_are_compared() -> None:
    found = evidence({"mixgrpo": LEVEL, "dance_grpo": LEVEL}, {"mixgrpo": HALF})
    more = {**found.runs, "mixgrpo": {**found.runs["mixgrpo"], 3: made("mixgrpo", [0.4, 0.0], 3)}}
    assert claim("mixgrpo").answer(dataclasses.replace(found, runs=more))[0] == "reproduced"


def test_a_method_that_ended_early_reproduces_nothing() -> None:
    found = evidence({"mixgrpo": LEVEL, "dance_grpo": LEVEL}, {"mixgrpo": HALF})
    verdict, findings = claim("mixgrpo").answer(dataclasses.replace(found, failed={"mixgrpo": [4, 5]}))
    assert verdict == "undecided"
    assert findings[-1].text == "mixgrpo ended early on seed 4, 5."


def test_a_note_tests_nothing() -> None:
    rests = [Statement("good", True), Statement("by the way", False, note=True)]
    found = Claim("x", "X", "says", lambda e: rests, runs=("mixgrpo",)).answer(evidence({"mixgrpo": LEVEL}))
    assert found[0] == "reproduced"


def test_gains_are_compared_where_both_have_spent_the_same() -> None:
    # The faster gains 0.1 in 10 iterations; the slower 0.02, and 0.04 in 20.
    found = evidence({"one": [[0.4, 0.5]] * 2, "other": [[0.4, 0.42, 0.44]] * 2})
    finding, note = at_equal(found, "one", "other", "updates", "gain")
    assert "at equal updates (10): one +0.100" in finding.text
    assert "share 5.00 [5.00, 5.00]" in finding.text
    assert finding.holds
    # 0.44 is four tenths of the way to 0.5: after 4 of the other's 20.
    assert "final score of other on 2 of 2 seeds, with 0.20 times the updates" in note.text
    back, _ = at_equal(found, "other", "one", "updates", "gain")
    assert back.holds is False


def test_the_first_place_where_a_target_is_reached() -> None:
    run = made("x", [0.4, 0.3, 0.5, 0.45])
    assert first_reach(run, "iteration", 0.45) == pytest.approx(17.5)
    assert first_reach(run, "compute", 0.4) == 0.0
    assert first_reach(run, "iteration", 0.6) is None


def test_over_optimisation_needs_a_fall_to_guard_against() -> None:
    plain, guard = GUARDED
    falls = evidence({plain: [[0.4, 0.30], [0.4, 0.301]], guard: [[0.4, 0.42], [0.4, 0.421]]})
    assert all(f.holds for f in over_optimised(falls) if not f.note)
    holds = evidence({plain: [[0.4, 0.41], [0.4, 0.411]], guard: [[0.4, 0.42], [0.4, 0.421]]})
    first, *rest = over_optimised(holds)
    # Without a fall, Guard has nothing to hold: the claim is neither reproduced nor refuted, and seeds change nothing.
    assert first.holds is None
    assert all(note.note for note in rest)
    assert more_seeds([first, *rest]) == 0
    assert claim("guard-reward").answer(holds)[0] == "undecided"
    unsure = evidence({plain: [[0.4, 0.35], [0.4, 0.41]], guard: [[0.4, 0.42], [0.4, 0.421]]})
    assert more_seeds(over_optimised(unsure)[:1]) > 0


def test_win_rates_are_compared_with_scores_of_one_recipe() -> None:
    pair, point = JUDGED
    gold = {pair: [[0.4, 0.5], [0.4, 0.501]], point: [[0.4, 0.42], [0.4, 0.421]]}
    first, *notes = preferred(evidence(gold))
    assert first.holds
    assert all(note.note for note in notes)


def test_the_signal_that_stays_is_compared_where_rewards_are_almost_equal() -> None:
    norms = {"value": [[2.0, 2.0, 1.8, 1.6, 1.6]] * 2, "relative": [[2.0, 1.9, 1.0, 0.4, 0.0]] * 2}
    probe = made("probe", [0.0, 0.0]) | {"shrunk": [1.0, 0.1, 0.01, 0.001, 0.0], **norms}
    first, note = signal_kept(Evidence({}, {}, {}, {"vanishing": probe}))
    assert "VGPO 0.80 [0.80, 0.80], advantages of the group alone 0.20 [0.20, 0.20]" in first.text
    assert first.holds
    assert "VGPO keeps 0.80" in note.text


def test_log_ratios_to_one_side() -> None:
    steps = {"0": {"mean": -1.0, "var": 4.0}, "1": {"mean": 3.0, "var": 1.0}, "2": {"mean": 0.0, "var": 0.0}}
    assert lopsided({"steps": steps}) == pytest.approx((0.5 + 3.0) / 2)
    assert math.isnan(lopsided({"steps": {}}))


def test_equal_exploration_is_compared_where_both_kernels_are() -> None:
    entries = {
        "sage": [{"diversity": [0.1], DENSE: [0.5]}, {"diversity": [0.3], DENSE: [0.3]}],
        "flow_sde": [{"diversity": [0.4], DENSE: [0.1]}, {"diversity": [0.2], DENSE: [0.3]}],
        "cps": [{"diversity": [0.5], DENSE: [0.1]}, {"diversity": [0.6], DENSE: [0.0]}],
    }
    # Between 0.2 and 0.3 sage goes from 0.4 to 0.3, flow_sde from 0.3 to 0.2.
    assert at_equal_exploration(entries, "sage", "flow_sde", 0) == pytest.approx(0.1)
    assert at_equal_exploration(entries, "sage", "cps", 0) is None


# -- the order of work -------------------------------------------------------------------------------------------------


def open_claim(name: str, runs: tuple[str, ...], more: int | None) -> tuple[Claim, str, list[Statement]]:
    measure = Measure("x", Interval(0.0, -1.0, 1.0, 3), 0.0, True, None, more)
    return Claim(name, name, "", lambda e: [], runs=runs), "undecided", [Statement("?", None, measure=measure)]


def decided(name: str, runs: tuple[str, ...]) -> tuple[Claim, str, list[Statement]]:
    return Claim(name, name, "", lambda e: [], runs=runs), "reproduced", [Statement("!", True)]


def test_every_claim_gets_its_first_seeds_first() -> None:
    answers = [open_claim("far", ("a", "b"), 9), decided("done", ("c", "b"))]
    assert order(answers, {"a": {0}}, (0, 1), 12)[:5] == [("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]


def test_the_claim_that_is_nearest_to_a_decision_gets_the_next_seed() -> None:
    made_ = {label: {0, 1} for label in "abcde"}
    answers = [open_claim("far", ("a", "b"), 9), decided("done", ("c",)), open_claim("near", ("d", "b"), 2)]
    answers += [open_claim("unknown", ("e",), None)]
    assert order(answers, made_, (0, 1), 12) == [("d", 2), ("b", 2), ("a", 2), ("e", 2)]
    # A run that two claims share is made once; a seed that is half made is completed.
    assert order(answers[:1], made_ | {"b": {0, 1, 2}}, (0, 1), 12) == [("a", 2)]
    assert order(answers, made_, (0, 1), 2) == []


def test_passes_of_a_timing_and_draws_of_a_probe_are_not_seeds() -> None:
    measure = Measure("time", Interval(0.5, 0.4, 0.7, 5), 0.6, False, 0.5, 3, "passes")
    time = Statement("time", None, measure=measure)
    assert more_seeds([time]) == 0
    seeds = dataclasses.replace(measure, each="seeds", more=None)
    assert more_seeds([time, Statement("gain", None, measure=seeds)]) == math.inf
    answer = (Claim("t", "T", "", lambda e: [], runs=("a",)), "undecided", [time])
    assert order([answer], {"a": {0}}, (0,), 12) == []


def test_every_run_of_a_claim_can_be_made() -> None:
    assert {label for c in CLAIMS for label in c.runs} == set(jobs())
    assert all(c.before in ("reproduced", "not reproduced", "undecided") for c in CLAIMS)
