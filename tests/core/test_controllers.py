"""Controllers: single steps by hand, that they find their target, limits, and that they resume."""

import io
import math

import pytest
import torch

from flowgrpo.core.controllers import SetPoint, entropy_bonus, variance_dual


def test_single_steps_by_hand():
    assert SetPoint(1.0, 0.5, 0.2).update(1.5) == pytest.approx(1.2)
    assert SetPoint(1.0, 0.5, 0.2, sign=-1).update(1.5) == pytest.approx(0.8)
    assert SetPoint(2.0, 0.5, 0.2, low=0.1, geometric=True).update(1.5) == pytest.approx(2 * math.exp(0.2))
    assert SetPoint(2.0, 0.5, 0.2, sign=-1, low=0.1, geometric=True).update(1.5) == pytest.approx(2 * math.exp(-0.2))


def test_steps_add_up_and_at_the_target_nothing_moves():
    controller = SetPoint(1.0, 0.5, 0.1)
    for measured in (0.7, 0.4, 0.5):
        controller.update(measured)
    assert controller.value == pytest.approx(1.0 + 0.1 * (0.2 - 0.1))


@pytest.mark.parametrize("options", [{}, {"low": 0.5, "geometric": True}])
def test_the_value_stays_within_its_limits(options):
    controller = SetPoint(1.0, 0.0, 10.0, high=3.0, **options)
    assert controller.update(1e6) == 3.0
    assert controller.update(-1e6) == options.get("low", 0.0)
    assert controller.update(0.01) > options.get("low", 0.0)  # and comes back


@pytest.mark.parametrize("measured", [math.nan, math.inf, -math.inf])
def test_a_step_without_a_measurement_moves_nothing(measured):
    assert SetPoint(1.0, 0.5, 0.2).update(measured) == 1.0


def test_the_entropy_bonus_grows_while_entropy_is_too_low_and_holds_it():
    controller = entropy_bonus(0.6, rate=0.01, high=0.1)
    assert controller.value == 0.0
    assert controller.update(0.5) == pytest.approx(0.001)
    assert controller.update(0.7) == pytest.approx(0.0)
    entropy = 0.2
    for _ in range(400):  # entropy that sinks by itself and rises with the bonus
        entropy += 5 * controller.value - 0.1 * entropy
        controller.update(entropy)
    assert entropy == pytest.approx(0.6, abs=1e-3)
    assert entropy_bonus(1.0, value=0.05, rate=1.0, high=0.1).update(0.0) == 0.1
    assert entropy_bonus(0.6).update(0.5) == pytest.approx(0.001)
    assert entropy_bonus(100.0).update(0.0) == 0.1


def test_the_price_of_variance_rises_above_the_target_and_never_below_zero():
    dual = variance_dual(0.01, value=1.0, rate=10.0)
    assert dual.update(0.03) == pytest.approx(1.2)
    assert dual.update(0.0) == pytest.approx(1.1)
    assert variance_dual(0.5, value=0.1, rate=1.0).update(0.0) == 0.0
    assert variance_dual(0.01).update(0.03) == pytest.approx(1.02)
    assert variance_dual(0.01, value=1.0, rate=100.0, high=2.0).update(1.0) == 2.0


def test_it_goes_on_where_it_was():
    first = SetPoint(1.0, 0.5, 0.2)
    first.update(0.9)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = SetPoint(1.0, 0.5, 0.2)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.value == first.value == pytest.approx(1.08)
    assert second.update(0.1) == first.update(0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 0.0}, "rate=0.0"),
        ({"sign": 0}, "sign=0"),
        ({"value": -1.0}, "value=-1.0"),
        ({"high": 0.5}, "high=0.5"),
        ({"target": math.nan}, "target=nan"),
        ({"geometric": True}, "`low` is 0.0; a geometric controller"),
    ],
)
def test_numbers_out_of_range_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        SetPoint(**{"value": 1.0, "target": 0.5, "rate": 0.1, **options})
