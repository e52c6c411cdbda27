"""Win rates: by hand, whatever the order of samples and calls, with judges that compare and judges that score."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.rewards import InvalidScores, MissingDependency, RewardBatch, RewardError, RewardSet, RewardSpec, resolve
from flowgrpo.rewards.win_rate import WinRate, win_rates

JUDGES = '''
import torch
from flowgrpo.rewards import Scores

CALLS = []


def level(images):
    return images.flatten(1).mean(1)


def better(first, second, prompts):
    """Certain of the brighter one."""
    CALLS.append(len(prompts))
    return [0.5 if a == b else float(a > b) for a, b in zip(level(first).tolist(), level(second).tolist())]


def bradley_terry(first, second, scale=1.0):
    return torch.sigmoid(scale * (level(first) - level(second)))


def first_one(first, second, liking=1.0):
    """Looks at nothing but the position."""
    return [liking] * len(first)


def answers(first, second, reply):
    return {"short": [1.0], "beyond": [1.5] * len(first), "word": ["first"] * len(first)}[reply]


def longer(first, second, prompts):
    return [float(len(a) > len(b)) for a, b in zip(first, second)]


def by_column(first, second, prompts, taste):
    """The brighter one, or where the column says so the darker one."""
    return [
        None if t is None else float((a > b) == (t == "bright"))
        for a, b, t in zip(level(first).tolist(), level(second).tolist(), taste)
    ]


def spoils(first, second):
    result = (level(first) > level(second)).float()
    first.zero_(), second.zero_()
    return result


spoils.batch_size = 1


class Judge:
    """Compares and scores, with the attributes of a reward."""

    name = "arbiter"
    batch_size = 5

    def __init__(self, device=None, remote=False, failures=0):
        self.device, self.remote, self.failures, self.seen, self.closed = device, remote, failures, [], False

    def compare(self, first, second, prompts, **columns):
        assert not torch.is_grad_enabled()
        self.seen.append({"first": first, "second": second, "prompts": prompts, **columns})
        if len(self.seen) <= self.failures:
            raise ConnectionError("refused")
        return torch.full((len(prompts),), 0.5)

    def __call__(self, images, prompts):
        raise AssertionError("a judge that compares is not asked for scores")

    def close(self):
        self.closed = True


class Brightness:
    """Scores; black images do not apply."""

    batch_size = 2

    def __init__(self):
        self.calls = []

    def __call__(self, images, prompts):
        self.calls.append(len(prompts))
        return [value or None for value in level(images).tolist()]


def wants(images, prompts, taste, power=1.0):
    return [(1 if t == "bright" else -1) * value**power for value, t in zip(level(images).tolist(), taste)]


def broken(images, prompts):
    if "b" in prompts:
        raise ZeroDivisionError("no edges")
    return level(images)


def worded(images, prompts):
    return ["good" if prompt == "b" else 1.0 for prompt in prompts]


def noted(images, prompts):
    return Scores(level(images), {"peak": images.amax((1, 2, 3))}, [f"saw {prompt}" for prompt in prompts])


class Flaky:
    remote = True

    def __init__(self, failures):
        self.failures, self.calls = failures, []

    def __call__(self, images, prompts):
        self.calls.append(prompts)
        if len(self.calls) <= self.failures:
            raise ConnectionError("refused")
        return level(images)


class Mute:
    pass


class Backwards:
    def compare(self, images, prompts):
        return [1.0]


class Missing:
    def __init__(self):
        import surely_not_installed_pkg

    def compare(self, first, second):
        return [1.0]
'''
LEVELS = [0.5, 0.25, 0.75, 0.25, 1.0, 0.125]
PROMPTS = ["a", "b", "a", "b", "a", "a"]
GROUPS = [7, 2, 7, 2, 7, 7]
# Brightness decides: of the group 7 the levels 0.5, 0.75, 1 and 0.125 win 1, 2, 3 and 0 of 3; group 2 is a tie.
EXPECTED = [1 / 3, 0.5, 2 / 3, 0.5, 1.0, 0.0]


@pytest.fixture
def judges(tmp_path: Path) -> str:
    path = tmp_path / "judges.py"
    path.write_text(JUDGES)
    return str(path)


def images(levels: Sequence[float] = LEVELS) -> torch.Tensor:
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous()


def score(
    judge: str,
    levels: Sequence[float] = LEVELS,
    prompts: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
    columns: dict[str, Any] | None = None,
    **options: Any,
) -> RewardBatch:
    if groups is None:
        groups = GROUPS if len(levels) == len(GROUPS) else [0] * len(levels)
    texts = prompts or (PROMPTS if len(levels) == len(PROMPTS) else ["a"] * len(levels))
    rewards = RewardSet([RewardSpec("win_rate", options={"judge": judge, **options})])
    return rewards.score(images(levels), texts, columns, groups)


def plugin(rewards: RewardSet) -> Any:
    """The object that judges for the one reward of a set."""
    function = rewards.rewards[0].function.judge.function  # type: ignore[attr-defined]
    return getattr(function, "__self__", function)


def rates(*args: Any, **options: Any) -> list[float]:
    return score(*args, **options).values[:, 0].tolist()


def test_win_rates_by_hand() -> None:
    # 0 beats 1 surely, 2 beats 1 by 0.75, 0 and 2 are even when asked both ways; 3 is in no pair.
    found = win_rates(4, [(0, 1), (1, 2), (0, 2), (2, 0)], [1.0, 0.25, 1.0, 1.0])
    assert found[:3] == [pytest.approx(2 / 3), 0.125, pytest.approx(1.75 / 3)]
    assert math.isnan(found[3])


def test_win_rates_do_not_depend_on_the_order_of_the_pairs_to_the_last_bit() -> None:
    pairs = [(i, j) for i in range(9) for j in range(9) if i != j]
    preferences = torch.rand(len(pairs), generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(1)).tolist()
    assert win_rates(9, pairs, preferences) == win_rates(9, [pairs[k] for k in order], [preferences[k] for k in order])


@pytest.mark.parametrize("both", [True, False])
def test_a_judge_that_compares_by_hand(judges: str, both: bool) -> None:
    assert rates(f"{judges}:better", both_orders=both) == pytest.approx(EXPECTED)


def test_a_judge_that_scores_by_hand_with_its_score_beside(judges: str) -> None:
    result = score(f"{judges}:Brightness")
    assert result.names == ("win_rate",)
    assert result.values[:, 0].tolist() == pytest.approx(EXPECTED)
    assert result.sub_scores["win_rate"] == {"score": LEVELS}


def test_a_probability_is_a_share_of_a_win(judges: str) -> None:
    found = rates(f"{judges}:bradley_terry", [1.0, 0.5, 0.0], judge_options={"scale": 2.0})
    near, far = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert found == pytest.approx([(near + far) / 2, 0.5, 1 - (near + far) / 2])


@pytest.mark.parametrize("liking", [1.0, 0.7, 0.0])
def test_a_liking_for_a_position_cancels_exactly_in_both_orders(judges: str, liking: float) -> None:
    options = {"judge_options": {"liking": liking}}
    assert rates(f"{judges}:first_one", [0.1, 0.2, 0.3], **options) == [0.5] * 3
    single = rates(f"{judges}:first_one", [0.1, 0.2, 0.3], both_orders=False, **options)
    assert single == pytest.approx([liking, 0.5, 1 - liking])


@pytest.mark.parametrize("judge", ["better", "bradley_terry", "Brightness"], ids=["compares", "probability", "scores"])
def test_permuting_the_samples_permutes_the_win_rates(judges: str, judge: str) -> None:
    levels = torch.rand(12, generator=torch.Generator().manual_seed(3)).tolist()
    groups = [0, 1, 0, 2, 1, 0, 2, 2, 1, 0, 0, 2]
    prompts = [f"p{group}" for group in groups]
    plain = score(f"{judges}:{judge}", levels, prompts, groups).values
    order = torch.randperm(12, generator=torch.Generator().manual_seed(4)).tolist()
    mixed = score(f"{judges}:{judge}", *([row[k] for k in order] for row in (levels, prompts, groups))).values
    assert torch.equal(mixed, plain[order])


@pytest.mark.parametrize("judge", ["better", "bradley_terry", "first_one", "Brightness"])
def test_the_mean_over_a_group_is_one_half_and_brighter_is_never_worse(judges: str, judge: str) -> None:
    levels = sorted(torch.rand(7, generator=torch.Generator().manual_seed(5)).tolist())
    found = rates(f"{judges}:{judge}", levels)
    assert sum(found) == pytest.approx(3.5)
    assert all(low <= high for low, high in pairwise(found))


def test_gaps_up_to_the_margin_are_ties(judges: str) -> None:
    # Gaps: 0.125 between the first two, 0.25 from the second to the third.
    levels = [0.5, 0.375, 0.125]
    assert rates(f"{judges}:Brightness", levels) == [1.0, 0.5, 0.0]
    assert rates(f"{judges}:Brightness", levels, margin=0.125) == [0.75, 0.75, 0.0]
    assert rates(f"{judges}:Brightness", levels, margin=0.25) == [0.75, 0.5, 0.25]
    assert rates(f"{judges}:Brightness", levels, margin=1) == [0.5] * 3


def test_images_without_a_score_take_no_part(judges: str) -> None:
    result = score(f"{judges}:Brightness", [0.5, 0.0, 0.25, 0.0, 0.75], groups=[0, 0, 0, 1, 1])
    found = result.values[:, 0].tolist()
    assert [found[0], found[2]] == [1.0, 0.0]
    # Black ones, and the image that was left without another in its group.
    assert all(math.isnan(found[k]) for k in (1, 3, 4))
    assert result.record(1)["sub_scores"] == {"win_rate": {"score": None}}
    assert result.record(4)["sub_scores"] == {"win_rate": {"score": 0.75}}
    # The built-in verifier applies to no prompt without an `include` column.
    assert all(math.isnan(value) for value in rates("gold"))


@pytest.mark.parametrize("judge", ["better", "Brightness"])
def test_a_group_of_one_has_no_win_rate(judges: str, judge: str) -> None:
    result = score(f"{judges}:{judge}", [0.5, 0.25, 0.75], groups=[0, 1, 0])
    assert result.values[[0, 2], 0].tolist() == [0.0, 1.0]
    assert math.isnan(result.values[1, 0])
    assert math.isnan(score(f"{judges}:{judge}", [0.5]).values.item())


@pytest.mark.parametrize("both", [True, False])
def test_columns_reach_a_judge_and_undecided_is_one_half(judges: str, both: bool) -> None:
    columns = {"taste": ["dark", None, "dark", None, "dark", "dark"], "other": [0] * 6}
    result = score(f"{judges}:by_column", columns=columns, both_orders=both)
    assert result.values[:, 0].tolist() == pytest.approx([2 / 3, 0.5, 1 / 3, 0.5, 0.0, 1.0])
    assert result.sub_scores["win_rate"] == {"undecided": [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]}


def test_columns_and_options_reach_a_judge_that_scores(judges: str) -> None:
    columns = {"taste": ["dark", "bright", "dark", "bright", "dark", "dark"]}
    scored = rates(f"{judges}:wants", columns=columns)
    assert scored == pytest.approx([2 / 3, 0.5, 1 / 3, 0.5, 0.0, 1.0])
    # -1/x puts the brightest first again.
    assert rates(f"{judges}:wants", columns=columns, judge_options={"power": -1}) == pytest.approx(EXPECTED)


@pytest.mark.parametrize("judge", ["by_column", "wants"])
def test_a_column_that_the_judge_needs_is_asked_for_before_any_scoring(judges: str, judge: str) -> None:
    # A failure while scoring would be a RewardError, which is no ValueError.
    with pytest.raises(ValueError, match=r"'win_rate' takes `taste`, which the prompts do not have.*'tast'"):
        score(f"{judges}:{judge}", columns={"tast": ["dark"] * 6})
    with pytest.raises(ValueError, match=r"pass `groups`"):
        RewardSet([RewardSpec("win_rate", options={"judge": f"{judges}:better"})]).score(images(), PROMPTS)


def test_pairs_come_in_batches_with_the_judges_attributes(judges: str) -> None:
    options = {"judge": f"{judges}:Judge", "judge_options": {"device": "meta"}}
    rewards = RewardSet([RewardSpec("win_rate", options=options)])
    judge = plugin(rewards)
    # Groups of up to 5 images would share a call, 4 and 2 do not; they make 12 and 2 ordered pairs.
    result = rewards.score(images().requires_grad_(), PROMPTS, {"taste": list("uvwxyz")}, GROUPS)
    assert [call["prompts"] for call in judge.seen] == [["a"] * 5, ["a"] * 5, ["a"] * 2, ["b"] * 2]
    assert set(judge.seen[0]) == {"first", "second", "prompts", "taste"}
    assert judge.seen[0]["taste"] == ["u", "w", "u", "y", "u"]
    assert judge.seen[0]["first"].device.type == "meta"
    assert judge.seen[0]["second"].shape == (5, 3, 4, 4)
    assert result.values[:, 0].tolist() == [0.5] * 6
    rewards.close()
    assert judge.closed


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_size_of_a_call_changes_no_win_rate(judges: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowgrpo.rewards.win_rate.PAIRS_PER_CALL", size)
    calls: Any = resolve(f"{judges}:better").__globals__["CALLS"]
    assert rates(f"{judges}:better") == pytest.approx(EXPECTED)
    assert sum(calls) == 14
    assert max(calls) == min(size, 14)
    calls.clear()
    assert rates(f"{judges}:better", both_orders=False) == pytest.approx(EXPECTED)
    assert sum(calls) == 7


def test_a_judge_that_scores_is_asked_once_an_image_and_keeps_its_notes(judges: str) -> None:
    rewards = RewardSet([RewardSpec("win_rate", options={"judge": f"{judges}:Brightness"})])
    rewards.score(images(), PROMPTS, groups=GROUPS)
    assert plugin(rewards).calls == [2, 2, 2]
    result = score(f"{judges}:noted")
    assert result.sub_scores["win_rate"] == {"peak": LEVELS, "score": LEVELS}
    assert result.notes == {"win_rate": [f"saw {prompt}" for prompt in PROMPTS]}


def test_a_judge_may_write_into_its_images(judges: str) -> None:
    levels = [0.5, 0.25, 0.75]
    assert rates(f"{judges}:spoils", levels) == [0.5, 0.0, 1.0]


def test_videos_and_completions_are_compared_too(judges: str) -> None:
    rewards = RewardSet([RewardSpec("win_rate", options={"judge": f"{judges}:better"})])
    videos = images()[:, None].expand(-1, 2, -1, -1, -1)
    assert rewards.score(videos, PROMPTS, groups=GROUPS).values[:, 0].tolist() == pytest.approx(EXPECTED)
    rewards = RewardSet([RewardSpec("win_rate", options={"judge": f"{judges}:longer"})])
    texts = ["long", "a", "longest"]
    assert rewards.score(texts, ["q"] * 3, groups=[0] * 3).values[:, 0].tolist() == [0.5, 0.0, 1.0]
    with pytest.raises(ValueError, match="'win_rate' scores `images`, but the samples here are completions"):
        RewardSet([RewardSpec("win_rate", options={"judge": f"{judges}:noted"})]).score(texts, ["q"] * 3, None, [0] * 3)


def test_a_remote_judge_is_asked_again_one_group_a_call(judges: str) -> None:
    pauses: list[float] = []
    options = {"judge": f"{judges}:Judge", "judge_options": {"remote": True, "failures": 1}}
    rewards = RewardSet([RewardSpec("win_rate", options=options)], sleep=pauses.append)
    rewards.score(images(), PROMPTS, groups=GROUPS)
    assert [len(call["prompts"]) for call in plugin(rewards).seen] == [5, 5, 5, 2, 2]
    options = {"judge": f"{judges}:Flaky", "judge_options": {"failures": 2}}
    rewards = RewardSet([RewardSpec("win_rate", options=options)], sleep=pauses.append)
    assert rewards.score(images(), PROMPTS, groups=GROUPS).values[:, 0].tolist() == pytest.approx(EXPECTED)
    assert plugin(rewards).calls == [["a"] * 4] * 3 + [["b"] * 2]
    assert pauses == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("short", "was given 14 pairs to compare: .*'answers' returned 1 values"),
        ("word", r"was given 14 pairs to compare: .*returned 'first' \(str\)"),
        ("beyond", r"'answers' answered 1\.5 to images 0 and 1 of the call \(prompt 'a'\).*in \[0, 1\]"),
    ],
)
def test_answers_that_are_no_preference_stop_the_run(judges: str, reply: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        score(f"{judges}:answers", judge_options={"reply": reply})
    assert isinstance(caught.value.__cause__, InvalidScores)
    # A pair is at fault and no single sample, so none may be named.
    assert caught.value.index is None


def test_a_wrong_score_of_a_judge_is_traced_to_its_sample(judges: str) -> None:
    with pytest.raises(RewardError, match=r"'worded' returned 'good'") as caught:
        score(f"{judges}:worded")
    assert (caught.value.reward, caught.value.index, caught.value.prompt) == ("win_rate", 1, "b")
    with pytest.raises(RewardError, match=r"judge 'broken' failed on prompt 'b': ZeroDivisionError: no edges"):
        score(f"{judges}:broken")
    with pytest.raises(RewardError, match=r"column 'first', which a judge receives anyway; rename it"):
        score(f"{judges}:better", columns={"first": [0] * 6})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option judge"),
        ({"judge": "glod"}, r"judge 'glod' cannot be made: there is no reward 'glod'; did you mean 'gold'"),
        ({"judge": "gold", "judge_options": {"dens": True}}, r"judge 'gold' cannot be made: .*did you mean 'dense'"),
        ({"judge": "gold", "judge_option": {}}, r"no option 'judge_option'; did you mean 'judge_options'"),
        ({"judge": ""}, "needs a `name`"),
        ({"judge": 5}, r"judge is 5.*give the name of a reward"),
        ({"judge": "gold", "judge_options": ["dense"]}, "mapping of its options"),
        ({"judge": "{judges}:best"}, r"does not define 'best'"),
        ({"judge": "{judges}:Mute"}, r"is a Mute that can neither compare nor score; give it `compare"),
        (
            {"judge": "{judges}:Backwards"},
            r"compares with the arguments \(images, prompts\).*write `compare\(self, first, second",
        ),
        ({"judge": "{judges}:better", "margin": 0.5}, r"margin is 0\.5, but the judge .* compares pairs.*leave margin"),
        *(({"judge": "gold", "margin": bad}, "give a number of 0 or more") for bad in (-1, "1e-3", math.nan, True)),
        ({"judge": "gold", "both_orders": "no"}, r"both_orders is 'no'; give true or false"),
    ],
)
def test_wrong_options_say_what_to_write(judges: str, options: dict[str, Any], message: str) -> None:
    given = {
        key: value.format(judges=judges) if key == "judge" and value != 5 else value for key, value in options.items()
    }
    with pytest.raises(ValueError, match=message):
        RewardSet([RewardSpec("win_rate", options=given)])


def test_a_judge_that_lacks_a_package_says_which(judges: str) -> None:
    with pytest.raises(MissingDependency, match="pip install surely_not_installed_pkg"):
        WinRate(f"{judges}:Missing")
