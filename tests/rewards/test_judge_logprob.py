"""Scores from token probabilities: by hand, in both APIs, and when the judge says something else."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flowgrpo.rewards import RewardBatch, RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge_logprob import JudgeLogprob
from tests.rewards.stub_server import StubServer, question_of, said

QUALITY = {"excellent": 5, "good": 4, "fair": 3, "poor": 2, "bad": 1}
Stub = Callable[..., StubServer]


def tokens(*found: tuple[str, float]) -> dict[str, Any]:
    """What the chat API says of the first token, given the probabilities."""
    listed = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in found]
    return {"content": [{"token": found[0][0], "logprob": math.log(found[0][1]), "top_logprobs": listed}]}


@pytest.fixture
def stub() -> Iterator[Stub]:
    made: list[StubServer] = []

    def make(*logprobs: Any) -> StubServer:
        given = iter(logprobs)
        made.append(StubServer(lambda request, number: said("x", finish_reason="length", logprobs=next(given))))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def score(server: StubServer, count: int = 1, **options: Any) -> RewardBatch:
    given = {"server": {"url": server.url, "model": "m", "concurrency": 1}, **options}
    images = torch.linspace(0, 1, count).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    rewards = RewardSet([RewardSpec("judge_logprob", options=given)], sleep=lambda seconds: None)
    return rewards.score(images, ["a cat"] * count)


def test_the_probability_of_yes_among_yes_and_no(stub: Stub):
    server = stub(tokens(("Yes", 0.5), (" yes", 0.1), ("No", 0.2), ("▁NO", 0.1), ("Maybe", 0.05)))
    batch = score(server)
    assert batch.values[0, 0] == pytest.approx(0.6 / 0.9)
    assert batch.sub_scores["judge_logprob"]["mass"] == pytest.approx([0.9])
    assert batch.notes["judge_logprob"] == ["'Yes' 0.500, 'No' 0.200, ' yes' 0.100, '▁NO' 0.100, 'Maybe' 0.050"]
    assert question_of(server.requests[0]) == 'Does this figure show "a cat"? Please answer yes or no.'
    body = server.bodies[0]
    assert (body["logprobs"], body["top_logprobs"], body["max_tokens"], body["temperature"]) == (True, 20, 1, 0)


def test_not_normalised_it_is_the_probability_itself(stub: Stub):
    assert score(stub(tokens(("Yes", 0.5), ("No", 0.2))), normalise=False).values[0, 0] == pytest.approx(0.5)


def test_levels_of_quality(stub: Stub):
    server = stub(tokens(("good", 0.5), ("excellent", 0.25), ("fair", 0.15), ("bad", 0.1)))
    begun = "The quality of the image is"
    batch = score(server, prompt="How is the quality of this image?", answers=QUALITY, begun=begun)
    assert batch.values[0, 0] == pytest.approx(0.25 * 5 + 0.5 * 4 + 0.15 * 3 + 0.1 * 1)
    assert server.bodies[0]["messages"][-1] == {"role": "assistant", "content": begun}


def test_a_judge_that_says_something_else_has_no_score(stub: Stub):
    batch = score(stub(tokens(("<think>", 0.95), ("Yes", 0.04)), tokens(("Yes", 0.4)), None), 3)
    assert batch.values[:, 0].isnan().tolist() == [True, False, True]
    assert batch.sub_scores["judge_logprob"]["mass"] == pytest.approx([0.04, 0.4, 0.0])


@pytest.mark.parametrize("logprob", [math.inf, math.nan, 0.5, 1e9])
def test_a_log_probability_that_is_none_makes_no_score(stub: Stub, logprob: float):
    """The other answer must not have all of the probability then."""
    wrong, certain = tokens(("No", 0.2), ("Yes", 0.5)), tokens(("No", 1e-9), ("Yes", 0.5))
    wrong["content"][0]["top_logprobs"][1]["logprob"] = logprob
    certain["content"][0]["top_logprobs"][1]["logprob"] = 1e-7
    batch = score(stub(wrong, certain), 2)
    assert batch.values[:, 0].isnan().tolist() == [True, False]
    assert batch.values[1, 0] == pytest.approx(1.0)


def test_a_server_without_log_probabilities_is_told_of(stub: Stub):
    with pytest.raises(RewardError, match="returns no log-probs of tokens; use a server that does"):
        score(stub(None, None), 2)


def test_the_completions_api_gives_them_in_another_form():
    first = {" good": math.log(0.5), " bad": math.log(0.25)}
    body = {"choices": [{"text": " good", "logprobs": {"top_logprobs": [first]}, "finish_reason": "length"}]}
    server = StubServer(lambda request, number: (200, {}, json.dumps(body).encode()))
    given = {
        "server": {"url": server.url, "model": "m", "api": "completions"}, "prompt": "{completion}", "answers": QUALITY,
    }  # fmt: skip
    batch = RewardSet([RewardSpec("judge_logprob", options=given)]).score(["text"], ["p"])
    server.stop()
    assert batch.values[0, 0] == pytest.approx((0.5 * 4 + 0.25 * 1) / 0.75)
    assert server.bodies == [{"model": "m", "prompt": "text", "temperature": 0, "max_tokens": 1, "logprobs": 20}]


@pytest.mark.parametrize(
    "logprobs", ["none", {"content": [{"top_logprobs": 5}]}, {"content": [{"top_logprobs": [{}]}]}, {"tokens": []}]
)
def test_log_probabilities_of_another_form_are_an_error(stub: Stub, logprobs: Any):
    with pytest.raises(RewardError, match="a reply that is not an answer"):
        score(stub(*[logprobs] * 4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"answers": {"Yes": 1}}, "give two or more words with a number each"),
        ({"answers": {True: 1, False: 0}}, "YAML reads Yes as true"),
        ({"answers": {"yes": 1, "Yes": 0}}, "differ only in case"),
        ({"answers": {"a": math.nan, "b": 0}}, "answers has 'a': nan"),
        ({"least_mass": 1}, "least_mass is 1"),
        ({"normalise": "no"}, "normalise is 'no'"),
        ({"begun": None}, "begun is None"),
    ],
)
def test_wrong_options_are_refused(given: dict, message: str):
    with pytest.raises(ValueError, match=message):
        JudgeLogprob({"url": "http://a", "model": "m"}, **given)
