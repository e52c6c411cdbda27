"""The answers that rewards read in samples: equal if the reward takes samples as equal, and passed to the run."""

from typing import Any

import numpy as np
import pytest
import torch

from flowgrpo.rewards import RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.base import Scores
from flowgrpo.rewards.inputs import Inputs
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.rewards.score_batches import join_scores
from flowgrpo.rewards.serving import wire
from flowgrpo.worlds.scenes.draw import Thing, draw
from flowgrpo.worlds.scenes.gold import Gold
from tests.rewards.served import Served

GROUND = (0.5, 0.5, 0.5)


def read(name: str, completions: list[str], groups: list[int] | None = None, **more: Any) -> list[str | None]:
    options = more.pop("options", {})
    batch = RewardSet([RewardSpec(name, options=options)]).score(completions, ["p"] * len(completions), more, groups)
    return batch.answers[name]


def test_answers_are_written_as_they_are_compared() -> None:
    texts = ["0.5", "1/2", r"\boxed{50\%}", "<answer>Paris.</answer>", r"\text{paris}", "", r"\boxed{4"]
    assert read("answer", texts, answer=["x"] * 7) == ["1/2", "1/2", "1/2", "paris", "paris", None, None]
    # An answer counts without a reference as well.
    assert read("answer", ["007", "7.0"], answer=[None, None]) == ["7", "7"]
    assert read("majority", ["7", "7.0", "8", ""], [0, 0, 1, 1]) == ["7", "7", "8", None]
    options = {"limit": 10, "correct": "answer", "mode": "cosine"}
    assert read("length", ["0.5", "3"], answer=["0.5", "3"], options=options) == ["1/2", "3"]


def test_values_of_json_are_written_alike() -> None:
    texts = ['{"b": [1.0, true], "a": null}', 'so: {"a": null, "b": [1, true]}', '{"a": null, "b": [1, 1]}', "{"]
    one, other, third, none = read("json_output", texts)
    assert one == other == '{"a": null, "b": [1, true]}'
    assert third != one
    assert none is None


@pytest.mark.slow
def test_formulas_that_are_right_are_one_answer() -> None:
    pytest.importorskip("math_verify")
    texts = ["(x-1)(x+1)", "x^2-1", "x^2+1", "1+x^2", "1 + X^2", "$x^2 + 1$", ""]
    given = {"answer": ["x^2-1"] * 7, "options": {"seconds": 30.0}}
    assert read("math", texts, **given) == ["x^2-1", "x^2-1", "x^2+1", "1+x^2", "1 + x^2", "x^2 + 1", None]
    given["options"] |= {"among": True}
    merged = read("math", texts, **given)
    assert merged[:4] == ["x^2-1", "x^2-1", "x^2+1", "x^2+1"]
    assert merged[5:] == ["x^2+1", None]


@pytest.mark.slow
def test_answers_to_other_prompts_are_not_compared() -> None:
    pytest.importorskip("math_verify")
    rewards = RewardSet([RewardSpec("math", options={"seconds": 30.0, "among": True})])
    batch = rewards.score(["x+1", "1+x", "1+x"], ["p", "p", "q"], {"answer": ["0"] * 3})
    assert batch.answers["math"] == ["x+1", "x+1", "1+x"]
    rewards.close()


def picture(*things: Thing) -> torch.Tensor:
    return torch.from_numpy(np.asarray(draw(list(things), GROUND), dtype=np.float32)).permute(2, 0, 1)


def test_gold_says_what_it_found_wherever_it_is() -> None:
    left = [Thing("circle", "red", 16, 32, 8), Thing("square", "blue", 48, 32, 8)]
    right = [Thing("circle", "red", 48, 32, 8), Thing("square", "blue", 16, 32, 8)]
    images = torch.stack([picture(*left), picture(*right), picture(), picture(left[0]), picture(*left)])
    plain = [{"class": "circle", "count": 1}, {"class": "square", "count": 1}]
    related = [plain[0], {**plain[1], "position": ["right of", 0]}]
    found = Gold()(images, ["p"] * 5, [plain, plain, plain, plain, None]).answers
    assert found == ["blue square, red circle"] * 2 + ["nothing", "red circle", None]
    found = Gold()(images[:2], ["p"] * 2, [related, related]).answers
    assert found == ["blue square, red circle", "blue square, red circle; the relation does not hold"]
    assert Gold(dense=True)(images[:1], ["p"], [plain]).answers == ["blue square, red circle"]


def said(prompts: list[str]) -> Scores:
    return Scores([1.0] * len(prompts), answers=[None if prompt == "b" else f"read {prompt}" for prompt in prompts])


def silent(prompts: list[str]) -> list[float]:
    return [0.0] * len(prompts)


def set_of(*functions: Any) -> RewardSet:
    from flowgrpo.rewards import Reward

    return RewardSet([Reward(function, function.__name__) for function in functions])


def test_answers_reach_their_rows() -> None:
    said.batch_size = 2  # type: ignore[attr-defined]
    batch = set_of(said, silent).score(["x"] * 3, ["a", "b", "c"])
    assert batch.answers == {"said": ["read a", None, "read c"]}


@pytest.mark.parametrize(
    ("answers", "message", "index"),
    [
        (["a"], "1 answers for 2 samples", None),
        ("ab", "answers of type str for 2 samples", None),
        (["a", 0.5], r"the answer 0.5 \(float\) in row 1 of the call; write it as a text", 1),
    ],
)
def test_answers_that_are_no_texts_stop_the_run(answers: Any, message: str, index: int | None) -> None:
    def odd(prompts: list[str]) -> Scores:
        return Scores([1.0] * len(prompts), answers=answers)

    with pytest.raises(RewardError, match=message) as caught:
        set_of(odd).score(["x"] * 2, ["a", "b"])
    assert caught.value.index == index


def test_answers_travel() -> None:
    scores = Scores(torch.ones(3), {}, [], answers=["1/2", None, "\ud83d"])
    assert wire.unpack_scores(wire.pack_scores(scores)).answers == ["1/2", None, "\ud83d"]
    assert not wire.unpack_scores(b'{"values": [1], "sub_scores": {}, "notes": []}').answers


def test_a_served_reward_gives_its_answers() -> None:
    server = Served("majority")
    try:
        away = RewardSet([RewardSpec("remote", options={"url": server.url})])
        texts, groups = ["7", "7.0", "", "8"], [0, 0, 1, 1]
        assert away.score(texts, ["p"] * 4, groups=groups).answers == {"majority": ["7", "7", None, "8"]}
        served = away.rewards[0].function
        served.limits = wire.WireLimits(most_samples=2)
        assert away.score(texts, ["p"] * 4, groups=groups).answers == {"majority": ["7", "7", None, "8"]}
        assert served(completions=["1"], prompts=["p"], groups=[0]).answers == ["1"]
    finally:
        server.close()


def test_answers_of_several_rounds_follow_each_other() -> None:
    def batch(**answers: list[str | None]) -> RewardBatch:
        return RewardBatch(torch.zeros(2, 1), ("r",), torch.ones(1), {}, {}, {}, answers=answers)

    joined = join_scores([batch(r=["a", None]), batch(), batch(r=["b", "c"])])
    assert joined.answers == {"r": ["a", None, None, None, "b", "c"]}


def test_the_judge_of_win_rates_says_what_it_read() -> None:
    inputs = Inputs(["1", "2.0"], ["p"] * 2, {"answer": ["1", "1"]}, [0, 0])
    rewards = RewardSet([RewardSpec("win_rate", options={"judge": "answer"})])
    assert rewards.score(inputs.samples, inputs.prompts, inputs.columns, [0, 0]).answers == {"win_rate": ["1", "2"]}
