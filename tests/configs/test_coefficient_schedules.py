"""Coefficients with a schedule: their values by hand, and the keys and values that are refused."""

import math
from pathlib import Path

import pytest

from flowgrpo.configs.coefficient_schedules import recipe_at, schedule_lines, scheduled_value, values_at
from flowgrpo.configs.load import dump_recipe, load_recipe

KL = "penalties.kl.weight"
TWO = "rewards=[{name: answer}, {name: digit_share}]"


def moving(key: str, more: str) -> str:
    return f"schedules=[{{key: {key}, {more}}}]"


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        # From 0.5 to 0: shares of the way are 0, 1/4, 1/2, 3/4 and 1. For the cosine, the middle shares are
        # (1 - cos(pi/4)) / 2 = 0.1464, 1/2 and 0.8536.
        ("linear", [0.5, 0.375, 0.25, 0.125, 0.0]),
        ("cosine", [0.5, 0.4268, 0.25, 0.0732, 0.0]),
        ("steps", [0.5, 0.5, 0.25, 0.0, 0.0]),
    ],
)
def test_values_by_hand(shape: str, values: list[float]) -> None:
    found = [scheduled_value(0.5, 0.0, k / 4, shape=shape, levels=3) for k in range(5)]  # type: ignore[arg-type]
    assert found == pytest.approx(values, abs=5e-5)


def test_a_value_waits_moves_and_stays_at_exactly_its_end() -> None:
    recipe = load_recipe("flow_grpo", [f"{KL}=0.04", moving(KL, "end: 0.001, over: 3, after: 2")])
    found = [values_at(recipe, k)[KL] for k in (0, 1, 2, 3, 5, 6, 10**9)]
    assert found == [0.04, 0.04, 0.04, pytest.approx(0.027), 0.001, 0.001, 0.001]


def test_the_recipe_of_an_iteration_differs_in_nothing_else() -> None:
    words = [moving("objective.surrogate.nats", "start: 8, end: 2, over: 4"), "optimizer.updates=2"]
    then = recipe_at(load_recipe("flow_grpo", words), 2)
    assert dump_recipe(then) == dump_recipe(load_recipe("flow_grpo", [*words, "objective.surrogate.nats=5.0"]))
    plain = load_recipe("flow_grpo")
    assert recipe_at(plain, 7) is plain


def test_the_length_of_the_run_bears_on_no_value() -> None:
    one, other = (load_recipe("flow_grpo", [moving(KL, "end: 0, over: 9"), f"run.iterations={k}"]) for k in (4, 400))
    assert [values_at(one, k) for k in range(4)] == [values_at(other, k) for k in range(4)]
    assert next(schedule_lines(one)).endswith("over 9 iterations; the run ends before, at 0.00666667")
    assert next(schedule_lines(other)) == f"{KL} goes from 0.01 to 0, over 9 iterations"


def test_a_plain_value_of_the_recipe_stays_as_it_is_written(tmp_path: Path) -> None:
    recipe = load_recipe("flow_grpo", [moving(KL, "start: 0.0, end: 1, over: 9, shape: steps, levels: 4")])
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe
    assert next(schedule_lines(recipe)) == f"{KL} goes from 0 to 1 in 4 levels, over 9 iterations"


def test_rewards_may_change_places() -> None:
    """One reward falls to 0 while the other rises from 0, so one of them counts in every iteration."""
    both = "{key: rewards.answer.weight, start: 0, end: 1, over: 9}, {key: rewards.digit_share.weight, end: 0, over: 9}"
    recipe = load_recipe("text", [TWO, f"schedules=[{both}]"])
    assert [reward.weight for reward in recipe_at(recipe, 0).rewards] == [0.0, 1.0]
    assert [reward.weight for reward in recipe_at(recipe, 9).rewards] == [1.0, 0.0]
    with pytest.raises(ValueError, match="from iteration 9 on, every reward has weight 0, so nothing is optimised"):
        load_recipe("text", [TWO, f"schedules=[{both.replace('1, over: 9}', '1, over: 9, after: 10}')}]"])


@pytest.mark.parametrize(
    ("base", "words", "said"),
    [
        ("flow_grpo", [moving(KL, "end: -1, over: 9")], f"end is -1, and {KL} should be greater than 0"),
        ("flow_grpo", [moving("sampler.kernel.eta", "end: 0, over: 9")], "a step without noise has no density"),
        ("flow_grpo", [moving("optimizer.learning_rate", "end: 0, over: 9")], "optimizer.warmup and optimizer.sched"),
        ("flow_grpo", [moving("rollout.group", "end: 4, over: 9")], "all iterations of a run have one size. These ke"),
        ("flow_grpo", [moving("clamp", "end: 4, over: 9")], "clamp cannot change over a run: it is read once, when"),
        ("flow_grpo", [moving("rewards.gold_dense.at_least", "end: 4, over: 9")], "it is read once, when the run beg"),
        ("flow_grpo", [moving("objective.ratio", "end: 4, over: 9")], "ratio is gaussian, and only a finite number"),
        ("flow_grpo", [moving("objective.trust_nats", "end: 4, over: 9")], "is left out, so nothing uses it; write it"),
        ("flow_grpo", [moving("objective.surrogate.low", "end: 4, over: 9")], "surrogate has no 'low'; there are nats"),
        ("flow_grpo", [moving(f"{KL}.x", "end: 4, over: 9")], "penalties.0.weight has no 'x'; it has no keys"),
        ("flow_grpo", [moving(KL, "end: 4, over: 9, levels: 3")], "levels is 3, and only shape steps has levels"),
        ("flow_grpo", [moving(KL, "end: 4")], "schedules.0.over: is missing"),
        ("flow_grpo", [f"schedules=[{{key: {KL}, end: 0, over: 9}}, {{key: {KL}, end: 1, over: 9}}]"], "has two sch"),
        ("diffusion_nft", [moving("objective.old.decay", "end: 0.5, over: 9")], "it is read once, when the run begins"),
        (
            "text", ["objective.surrogate={name: bapo}", "objective.balance={}", "optimizer.updates=2",
                     moving("objective.surrogate.lower", "end: 0.5, over: 9")],
            "objective.surrogate.lower is found by objective.balance; leave one of them out",
        ),
        (
            "direct_align", [moving("objective.lowest", "end: 0.98, over: 9")],
            "schedules: from iteration 9 on, objective",
        ),
        ("text", ["objective.entropy={target: 0.6}", moving("objective.entropy.value", "end: 0, over: 9")], "moves by"),
        ("text", ["objective.entropy={target: 0.6}", moving("objective.entropy.rate", "end: 1, over: 9")], "read once"),
        ("text", ["objective.entropy={}"], "neither a target nor a value"),
        ("text", ["objective.entropy={value: 0.1, rate: 1.0}"], "without a target nothing moves"),
        ("text", [moving("generation.temperature", "end: 0.5, over: 9")], "sampled and scored with one temperature"),
        ("text", [moving("rewards.answer.weight", "end: 0, over: 9")], "every reward has weight 0"),
        ("text", [TWO, moving("rewards.answer.weight", "end: -1, over: 9")], "changes its sign"),
        (
            "text", ["rewards=[{name: answer}, {name: digit_share, weight: 0}]",
                     moving("rewards.digit_share.weight", "end: 1, over: 9")],
            "is 0, so the reward is only recorded; write another weight there, and `start: 0` in the schedule",
        ),
        (
            "text", ["rewards=[{name: answer}, {name: digit_share, at_least: 0.5}]", "extensions=[multipliers]",
                     moving("rewards.digit_share.weight", "end: 0.5, over: 9")],
            "has `at_least`, which extension multipliers finds|with `at_least`, which extension multipliers finds",
        ),
        (
            "text", ["rewards=[{name: answer}, {name: digit_share, at_least: 0.5}]", "extensions=[multipliers]",
                     moving("rewards.answer.weight", "end: 0.0, over: 9")],
            "reward digit_share has `at_least` or `gate.apart`, which counts the rewards",
        ),
        ("masked", [moving("sampler.kernel.eta", "end: 0.5, over: 9")], "sampler has no 'kernel'; there are steps"),
    ],
)  # fmt: skip
def test_faults_are_named(base: str, words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_recipe(base, words)


def test_the_value_of_a_steady_entropy_bonus_may_move() -> None:
    recipe = load_recipe(
        "text", ["objective.entropy={value: 0.02}", moving("objective.entropy.value", "end: 0, over: 4")]
    )
    assert recipe_at(recipe, 1).objective["entropy"].value == pytest.approx(0.015)
    assert math.isclose(recipe.objective["entropy"].value, 0.02)
