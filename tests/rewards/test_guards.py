"""Guards: when a reward that nobody optimises has fallen."""

import json
import math
from typing import Any

import pytest

from flowgrpo.rewards.guards import Guard, Guards


def alarms(values: list[float | None], **settings: Any) -> list[int]:
    """The measurements at which a guard gives an alarm."""
    guards = Guards([Guard("quality", **settings)], ["quality"])
    return [k for k, value in enumerate(values) if guards.observe(k, {"quality": value, "other": 9.0})]


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([1.0, 0.9, 0.75, 0.5], {"fall": 0.25}, [3]),
        ([1.0, 0.5, 0.4, 0.9, 0.5], {"fall": 0.25}, [1, 4]),
        ([1.0, 0.5, 0.5, 0.9, 0.5, 0.5, 0.5], {"fall": 0.25, "patience": 3}, [6]),
        ([1.0, 0.5, None, math.nan, 0.5], {"fall": 0.25, "patience": 2}, [4]),
        ([1.0, 2.0, 1.5], {"fall": 0.25}, []),
        ([1.0, 2.0, 1.5], {"fall": 0.25, "reference": "best"}, [2]),
        ([1.0, 0.0, 0.2, 0.3], {"fall": 0.25, "settle": 2}, [2]),
        ([1.0, 1.0, 0.0, 1.0], {"fall": 0.5, "smooth": 2}, []),
        ([1.0, 1.0, 0.0, 0.5], {"fall": 0.5, "smooth": 2}, [3]),
        ([1.0, 1.0, 0.999], {"fall": 0.0}, [2]),
        ([-1.0, -1.2, -1.3], {"fall": 0.25}, [2]),
    ],
)
def test_alarms_by_hand(values: list[float | None], settings: dict[str, Any], expected: list[int]):
    assert alarms(values, **settings) == expected


def test_an_alarm_says_what_fell_and_from_where():
    guards = Guards([Guard("quality", 0.1, action="stop"), Guard("calm", 0.1)], ["calm", "quality"])
    assert guards.observe(0, {"quality": 0.8, "calm": 0.5}) == []
    (alarm,) = guards.observe(40, {"quality": 0.6, "calm": 0.5})
    assert alarm.guard.action == "stop"
    assert str(alarm) == "quality fell to 0.6 at iteration 40, from 0.8 at the start; that is more than 0.1"


@pytest.mark.parametrize("cut", range(8))
def test_a_resumed_run_is_watched_as_if_it_had_gone_on(cut: int):
    values = [1.0, 1.4, 0.9, 0.6, 0.5, 1.2, 0.3, 0.2]
    settings = [
        Guard("quality", 0.3, settle=2, smooth=2, patience=2),
        Guard("best", 0.3, reference="best", smooth=3),
    ]

    def watch(guards: Guards, start: int, stop: int) -> list[str]:
        found = []
        for k in range(start, stop):
            found += map(str, guards.observe(k, {"quality": values[k], "best": values[k]}))
        return found

    def make() -> Guards:
        return Guards(settings, ["quality", "best"])

    whole = watch(make(), 0, len(values))
    assert len(whole) >= 2
    first, second = make(), make()
    before = watch(first, 0, cut)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + watch(second, cut, len(values)) == whole


def test_a_guard_that_is_new_after_a_resume_begins_anew():
    old, new = Guards([], []), Guards([Guard("quality", 0.1)], ["quality"])
    new.load_state_dict(old.state_dict())
    assert new.observe(5, {"quality": 0.2}) == []
    assert new.observe(6, {"quality": 0.0}) != []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fall": -1}, "fall is -1"),
        ({"fall": math.nan}, "fall is nan"),
        ({"fall": 1, "reference": "mean"}, "reference is 'mean'"),
        ({"fall": 1, "action": "cry"}, "action is 'cry'"),
        ({"fall": 1, "patience": 0}, "patience is 0"),
        ({"fall": 1, "smooth": 1.5}, "smooth is 1.5"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Guard("quality", **settings)


def test_what_is_watched_is_measured_and_not_optimised():
    guard = Guard("quality", 1)
    with pytest.raises(ValueError, match="not measured; measured: ocr"):
        Guards([guard], ["ocr"])
    with pytest.raises(ValueError, match="is optimised; set its weight to 0"):
        Guards([guard], ["quality"], {"quality": 0.1})
    with pytest.raises(ValueError, match="two guards watch 'quality'"):
        Guards([guard, guard], ["quality"])
    Guards([guard], ["quality"], {"quality": 0.0, "ocr": 1.0})
