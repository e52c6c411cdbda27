"""Guards: when a reward that nobody optimises has fallen."""

import json
import math
from typing import Any

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.extensions import Guard
from flowgrpo.training.extensions.extension import Evaluation, Rewards

MEASURED = ["quality", "best", "calm"]
RECIPE = load_recipe(
    "mixgrpo_flash_guard", ["rewards=[{name: gold, label: quality, weight: 0}, {name: proxy, label: ocr}]"]
)
REWARDS = Rewards(RECIPE.rewards, ["quality", "ocr"])


def guard(reward: str = "quality", fall: float = 0.1, **settings: Any) -> Guard:
    return Guard(
        reward=reward,
        fall=fall,
        recipe=RECIPE,
        rewards=REWARDS,
        evaluated=MEASURED,
        **settings,
    )


def heard(one: Guard, iteration: int, **means: float | None) -> list[str]:
    """What a guard has to say of a measurement."""
    evaluation = Evaluation(iteration, means)
    one.evaluation_done(evaluation)
    return [str(alarm).removeprefix("guard: ") for alarm in evaluation.alarms]


def alarms(values: list[float | None], **settings: Any) -> list[int]:
    """The measurements at which a guard gives an alarm."""
    one = guard(**settings)
    return [k for k, value in enumerate(values) if heard(one, k, quality=value, other=9.0)]


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
    one, calm = guard(action="stop"), guard("calm")
    assert heard(one, 0, quality=0.8, calm=0.5) == heard(calm, 0, quality=0.8, calm=0.5) == []
    evaluation = Evaluation(40, {"quality": 0.6, "calm": 0.5})
    for each in (one, calm):
        each.evaluation_done(evaluation)
    (alarm,) = evaluation.alarms
    assert (alarm.ends, alarm.metric) == (True, "guard/quality")
    assert str(alarm) == "guard: quality fell to 0.6 at iteration 40, from 0.8 at the start; that is more than 0.1"


@pytest.mark.parametrize("cut", range(8))
def test_a_resumed_run_is_watched_as_if_it_had_gone_on(cut: int):
    values = [1.0, 1.4, 0.9, 0.6, 0.5, 1.2, 0.3, 0.2]

    def make() -> list[Guard]:
        return [
            guard("quality", 0.3, settle=2, smooth=2, patience=2), guard("best", 0.3, reference="best", smooth=3),
        ]  # fmt: skip

    def watch(guards: list[Guard], start: int, stop: int) -> list[str]:
        return [
            said
            for k in range(start, stop)
            for one in guards
            for said in heard(one, k, quality=values[k], best=values[k])
        ]

    whole = watch(make(), 0, len(values))
    assert len(whole) >= 2
    first, second = make(), make()
    before = watch(first, 0, cut)
    for old, new in zip(first, second):
        new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert before + watch(second, cut, len(values)) == whole


def test_a_guard_begins_anew_when_evaluations_measure_something_else():
    old, alike, rarer, more = guard(), guard(), guard(), guard()
    assert heard(old, 0, quality=1.0) == []
    for one, changes in ((rarer, {"every": 7, "results": "best"}), (more, {"steps": 40})):
        evaluate = RECIPE.evaluate.model_copy(update=changes)
        one.__init__(  # type: ignore[misc]
            reward="quality", fall=0.1, recipe=RECIPE.model_copy(update={"evaluate": evaluate}), rewards=REWARDS,
            evaluated=MEASURED,
        )  # fmt: skip
    state = json.loads(json.dumps(old.state_dict()))
    for one in (alike, rarer, more):
        one.load_state_dict(state)
    assert heard(alike, 1, quality=0.5) == heard(rarer, 1, quality=0.5) != []
    assert heard(more, 1, quality=0.5) == []
    assert heard(more, 2, quality=0.3) != []
    # A state of an earlier version does not say what was measured.
    earlier = guard()
    earlier.load_state_dict({key: value for key, value in state.items() if key != "measured"})
    assert heard(earlier, 1, quality=0.5) != []
    # Nor has a state of an earlier version the settings that came later, which were then at their defaults.
    measured = {key: value for key, value in json.loads(state["measured"]).items() if key != "call"}
    for one, changes in ((guard(), {}), (guard(), {"call": {"guidance_scale": 3.0}})):
        evaluate = RECIPE.evaluate.model_copy(update=changes)
        one.__init__(  # type: ignore[misc]
            reward="quality", fall=0.1, recipe=RECIPE.model_copy(update={"evaluate": evaluate}), rewards=REWARDS,
            evaluated=MEASURED,
        )  # fmt: skip
        one.load_state_dict({**state, "measured": json.dumps(measured)})
        assert bool(heard(one, 1, quality=0.5)) == (not changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("fall: -1", "fall: .*greater than or equal to 0"),
        ("fall: .nan", "fall is nan; give a finite number"),
        ("fall: 1, reference: mean", "reference: .*'start' or 'best'"),
        ("fall: 1, action: cry", "action: .*'warn' or 'stop'"),
        ("fall: 1, patience: 0", "patience: .*greater than or equal to 1"),
        ("fall: 1, smooth: 1.5", "smooth: .*integer"),
        ("patience: 2", "fall: .*missing"),
    ],
)
def test_wrong_settings_are_refused(settings: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_recipe("mixgrpo_flash_guard", [f"extensions=[{{name: guard, reward: quality, {settings}}}]"])


def test_what_is_watched_is_measured_and_not_optimised():
    with pytest.raises(ValueError, match="not measured; name one of quality, best, calm"):
        guard("sharpness")
    with pytest.raises(ValueError, match="'ocr', which is optimised; set its weight to 0"):
        Guard(reward="ocr", fall=1, recipe=RECIPE, rewards=REWARDS, evaluated=["ocr"])
