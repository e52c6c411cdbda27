"""Credit by scores of the parts of completions, by hand: Rank-GRPO's returns, PURE's minimum, and what is left out."""

import math
from pathlib import Path

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.text.cutting import Parts
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.session import start
from flowgrpo.training.text.text_policy import Completions
from tests.training.judging import credited
from tests.training.test_credit import credit as image_credit
from tests.training.test_credit import probed

NAN = math.nan
FIRST, SECOND = [0, 0, 1, 1], [0, 1, 2]
"""Parts of the tokens of two completions of one prompt."""


def completions(**more: object) -> Completions:
    ids = [FIRST, SECOND]
    sampled = Sampled([[5] * len(row) for row in ids], [[-1.0] * len(row) for row in ids], [True, False])
    texts = [["x"] * (row[-1] + 1) for row in ids]
    return Completions([[1]], sampled, ["x"] * 2, [0, 0], parts=Parts(texts, ids), **more)


def found(
    parts: dict[str, list], values: dict[str, list[float]] | None = None, weights: list[float] | None = None,
    e: Completions | None = None, **settings: object,
) -> list[list[float]]:  # fmt: skip
    given = {**{name: [0.0, 0.0] for name in parts}, **(values or {})}
    batch = RewardBatch(
        torch.tensor(list(given.values())).T, tuple(given), torch.tensor(weights or [1.0] * len(given)), {}, {}, {},
        parts=parts,
    )  # fmt: skip
    made = credited(e or completions(), batch, {"scale": "none", "eps": 0.0, **settings})
    assert made.shape == (2, 4)
    assert made[1, 3] == 0
    return [made[0].tolist(), made[1, :3].tolist()]


def test_a_part_is_credited_with_what_follows_and_not_with_what_was_before() -> None:
    """Returns 1, 0 and 2.5, 1.5, 0.5: first parts are compared, then second parts; the third has no counterpart."""
    assert found({"r": [[1.0, 0.0], [1.0, 1.0, 0.5]]}, name="parts") == [[-0.75] * 4, [0.75, 0.75, 0.0]]
    # A first part that is worth 9 more leaves the second parts alone.
    assert found({"r": [[10.0, 0.0], [1.0, 1.0, 0.5]]}, name="parts") == [
        [3.75, 3.75, -0.75, -0.75], [-3.75, 0.75, 0.0],
    ]  # fmt: skip


def test_or_with_its_own_score_alone() -> None:
    made = found({"r": [[1.0, 0.0], [1.0, 1.0, 0.5]]}, name="parts", later=False)
    assert made == [[0.0, 0.0, -0.5, -0.5], [0.0, 0.5, 0.0]]


def test_places_have_their_own_scale() -> None:
    made = found({"r": [[1.0, 0.0], [1.0, 1.0, 0.5]]}, name="parts", scale="group", ddof=0)
    assert made == [[-1.0] * 4, [1.0, 1.0, 0.0]]


def test_the_least_score_from_a_part_on() -> None:
    """Returns 0, 0 and 0.5, 0.5, 1, of the mean 0.4 over all parts."""
    made = found({"r": [[1.0, 0.0], [2.0, 0.5, 1.0]]}, name="minimum")
    assert made == [pytest.approx([-0.4] * 4), pytest.approx([0.1, 0.1, 0.6])]


def test_a_soft_minimum() -> None:
    """At temperature 1 / log 2 the weights of 1 and 0 are 1/3 and 2/3, those of 0, 1 and 1 are 1/2, 1/4 and 1/4."""
    made = found({"r": [[1.0, 0.0], [0.0, 1.0, 1.0]]}, name="minimum", temperature=1 / math.log(2))
    returns = [[1 / 3] * 2 + [0.0] * 2, [0.5, 0.5, 0.25]]
    mean = (1 / 3 + 0.5 + 0.5 + 0.25) / 5
    assert made == [pytest.approx([value - mean for value in row], abs=1e-6) for row in returns]


def test_rewards_of_whole_completions_come_after_all_parts() -> None:
    """The minima 0, 0 and 0.5, 0.5, 0.5, and half of 1 and 0: all alike."""
    parts, values = {"r": [[1.0, 0.0], [2.0, 0.5, 1.0]]}, {"right": [1.0, 0.0]}
    assert found(parts, values, [1.0, 0.5], name="minimum")[1][:2] == pytest.approx([-0.1, -0.1])
    made = found({"r": [[1.0, 0.0], [0.5, 0.5, 0.5]]}, values, [1.0, 0.5], name="minimum")
    assert made == [pytest.approx([0.0] * 4, abs=1e-7), pytest.approx([0.0] * 3, abs=1e-7)]
    # One that does not apply to a completion counts there as its mean.
    assert found({"r": [[1.0, 0.0], [0.5] * 3]}, {"right": [1.0, NAN]}, name="minimum")[0] == pytest.approx([-0.3] * 4)


def test_rewards_of_parts_add_up_by_their_weights() -> None:
    """Twice the first and the second: returns of the first completion 2, 3, of the other 2, 2, 2."""
    parts = {"a": [[1.0, 1.0], [1.0] * 3], "b": [[0.0, 1.0], [0.0] * 3], "c": [[9.0] * 2, None]}
    made = found(parts, weights=[2.0, 1.0, 0.0], name="minimum")
    assert made == [pytest.approx([-0.2] * 2 + [0.8] * 2), pytest.approx([-0.2] * 3)]


def test_what_is_not_scored_is_left_out() -> None:
    """A part without a score has the return of the later parts; without later scores it is 0."""
    made = found({"r": [[NAN, 1.0], [3.0, 2.0, NAN]]}, name="minimum")
    assert made == [pytest.approx([-0.5] * 4), pytest.approx([0.5, 0.5, 0.0])]
    assert found({"r": [[0.0, 1.0], None]}, name="minimum") == [[-0.5, -0.5, 0.5, 0.5], [0.0] * 3]
    dropped = completions(drop_truncated=True)
    assert found({"r": [[0.0, 1.0], [5.0] * 3]}, e=dropped, name="minimum") == [[-0.5, -0.5, 0.5, 0.5], [0.0] * 3]


def test_without_scores_of_parts_there_is_no_credit() -> None:
    with pytest.raises(ValueError, match=r"credit parts takes scores of the parts.*\(right\) gave none"):
        found({}, {"right": [1.0, 0.0]}, name="parts")
    with pytest.raises(ValueError, match=r"\(r\) gave none"):
        found({"r": [[1.0, 0.0], [0.0] * 3]}, weights=[0.0], name="minimum")


def test_options_are_checked_before_a_run() -> None:
    for option, said in (("temperature: -1.0", "should be greater than or equal to 0"), ("later: true", "no option")):
        with pytest.raises(ValueError, match=said):
            load_recipe("text", [f"credit={{name: minimum, {option}}}"])


def test_of_images_the_least_reward_of_the_states_to_come() -> None:
    """Previews of 1, 5 and 3 and an image of 4 in one chain, 2 more in the other but for its image, 4 as well.

    The states after steps 0, 1 and 2 are worth 3, 3 and 4 there, and 4 each here.
    """
    e, values = probed({1: 1.0, 2: 5.0, 3: 3.0, 0: 4.0})
    second = (e.rollout.root[e.rollout.leaf] == 1) & ~e.outcomes
    made = image_credit(e, values + 2.0 * second, {"name": "minimum", "scale": "none"})
    by_step = [made[t.node].tolist() for t in e.rollout.transitions]
    assert by_step == [[-0.5, 0.5], [-0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize("options", ["", ", temperature: 0.1"])
def test_a_run_of_images_with_the_minimum(small: list[str], tmp_path: Path, options: str) -> None:
    lines = [
        "sampler.plan.probe=0",
        "sampler.solver=euler",
        "advantage=null",
        f"credit={{name: minimum, scale: none{options}}}",
    ]
    record = start(load_recipe("mixgrpo_flash_guard", [*small, *lines]), tmp_path / "run").trainer(Silent()).iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0


PARTS = ["parts={cut: lines}"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["credit=parts"], "nothing says how they are cut; add a section such as"),
        (["credit=minimum"], "credit minimum works on the parts of completions, and nothing says"),
        ([*PARTS, "credit={name: parts, scale: batch}"], "credit.scale: Input should be 'group' or 'none'"),
        ([*PARTS, "credit={name: minimum, scale: batch}"], "compares parts within a group"),
        (
            [*PARTS, "credit=parts", "advantage=gdpo"],
            "and advantage is gdpo; write advantage: null",
        ),
        ([*PARTS, "credit=parts", "advantage=null", "combine=worst"], "combine worst works on whole completions"),
        ([*PARTS, "credit=minimum", "select=[varied]"], "the parts of their completions may still differ"),
        ([*PARTS, "credit=minimum", "extensions=[replay]"], "remembers no scores of parts"),
        ([*PARTS, "credit=parts", "objective.conflict=2"], "a token has an advantage of its own"),
        ([*PARTS, "credit=parts", "objective=answers"], "works on tokens; use objective tokens"),
        ([*PARTS, "credit=parts", "rewards=[{name: answer, unlikely: 0.2}]"], "has `unlikely`"),
        ([*PARTS, "credit=parts", "rollout.budget={}"], "use credit leaf"),
        ([*PARTS, "credit=parts", "advantage=tracked"], "use credit leaf"),
        (["parts={cut: pattern}"], "give `pattern` with cut pattern, and only then"),
        (["parts={pattern: x}"], "give `pattern` with cut pattern, and only then"),
        (["parts={cut: pattern, pattern: '('}"], "not a regular expression"),
    ],
)
def test_what_does_not_go_together(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (PARTS, "`parts` cuts completions, and this recipe makes images"),
        (["credit=parts"], "for images use value, turning or minimum"),
        (["credit=minimum"], "use sampler.plan window with sampler.plan.probe 1"),
    ],
)
def test_images_have_steps_in_place_of_parts(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("mixgrpo_flash_guard", lines)
