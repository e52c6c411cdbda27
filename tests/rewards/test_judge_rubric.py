"""Rubrics: verdicts, weights and what becomes of answers that leave a criterion open."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flowgrpo.rewards import RewardBatch, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge_client import JudgeReply
from flowgrpo.rewards.judges.judge_rubric import (
    Criterion,
    CriterionVerdict,
    Rubric,
    read_criteria,
    read_verdicts,
    weighted_share,
)
from tests.rewards.stub_server import Reply, StubServer, question_of, said

Stub = Callable[[Callable[[str], Any]], StubServer]
THREE = ["There is a cat.", {"text": "It is black.", "weight": 2, "name": "black"}, {"text": "It bites.", "weight": -1}]


@pytest.fixture
def stub() -> Iterator[Stub]:
    made: list[StubServer] = []

    def make(answer: Callable[[str], Any]) -> StubServer:
        def reply(request: dict, number: int) -> Reply:
            found = answer(question_of(request))
            return said(found if isinstance(found, str) else json.dumps(found))

        made.append(StubServer(reply))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def listed(*met: bool) -> list[dict[str, Any]]:
    return [{"number": k, "met": value, "reason": f"r{k}"} for k, value in enumerate(met, start=1)]


def score(server: StubServer, samples: Any, columns: dict[str, Any] | None = None, **options: Any) -> RewardBatch:
    given = {"server": {"url": server.url, "model": "m"}, **options}
    prompts = [f"p{k}" for k in range(len(samples))]
    return RewardSet([RewardSpec("rubric", options=given)]).score(samples, prompts, columns)


@pytest.mark.parametrize(
    ("met", "value"),
    [
        ((True, True, False), 1.0),
        ((True, True, True), 2 / 3),
        ((False, True, False), 2 / 3),
        ((True, False, False), 1 / 3),
        ((False, False, True), 0.0),
        ((False, False, False), 0.0),
    ],
)
def test_the_weighted_share_by_hand(met: tuple[bool, ...], value: float):
    criteria = read_criteria(THREE, "here")
    assert criteria == [Criterion("There is a cat."), Criterion("It is black.", 2, "black"), Criterion("It bites.", -1)]
    assert weighted_share(criteria, [CriterionVerdict(one, "") for one in met]) == pytest.approx(value)


def test_texts_are_asked_together_and_reasons_become_notes(stub: Stub):
    server = stub(
        lambda question: listed(True, False, True) if "{x}" in question else {"verdicts": listed(*[True] * 3)}
    )
    batch = score(server, ["uses {x}", "other"], criteria=THREE)
    assert batch.values[:, 0].tolist() == pytest.approx([0.0, 2 / 3])
    assert batch.sub_scores["rubric"] == {
        "met": [0.5, 1.0], "There is a cat.": [1.0, 1.0], "black": [0.0, 1.0], "It bites.": [1.0, 1.0],
    }  # fmt: skip
    assert batch.notes["rubric"][0] == "yes (1) There is a cat.: r1\nno (2) black: r2\nyes (-1) It bites.: r3"
    question = next(question_of(request) for request in server.requests if "{x}" in question_of(request))
    assert "\np0\n" in question
    assert "1. There is a cat.\n2. It is black.\n3. It bites." in question
    assert len(server.requests) == 2


def test_images_are_asked_one_criterion_at_a_time(stub: Stub):
    server = stub(lambda question: "Yes, it is there." if "cat" in question else "no - it is red.")
    batch = score(server, torch.zeros(1, 3, 2, 2), criteria=THREE[:2], ask="each")
    assert batch.values[0, 0] == pytest.approx(1 / 3)
    assert batch.notes["rubric"] == ["yes (1) There is a cat.: it is there\nno (2) black: it is red"]
    assert len(server.requests) == 2
    assert all(body["messages"][0]["content"][0]["type"] == "image_url" for body in server.bodies)


def test_criteria_come_from_a_column_and_some_samples_have_none(stub: Stub):
    server = stub(lambda question: listed(*["2." not in question] * (1 + ("2." in question))))
    column = [["one"], None, '["one", "two"]', "just this"]
    batch = score(server, ["a", "b", "c", "d"], {"criteria": column})
    assert batch.values[:, 0].tolist()[0::2] == [1.0, 0.0]
    assert math.isnan(batch.values[1, 0])
    assert batch.values[3, 0] == 1.0
    assert set(batch.sub_scores["rubric"]) == {"met"}
    assert len(server.requests) == 3
    with pytest.raises(ValueError, match="takes `criteria`, which the prompts do not have"):
        score(server, ["a"])


def test_criteria_of_the_option_stand_in_for_those_a_sample_lacks(stub: Stub):
    server = stub(lambda question: listed("own" in question))
    batch = score(server, ["a", "b"], {"criteria": [["own"], None]}, criteria=["general"])
    assert batch.values[:, 0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "All are met.",
        json.dumps(listed(True)),
        json.dumps(listed(True, True, True)),
        json.dumps([{"number": 2, "met": True}, {"number": 1, "met": True}]),
        json.dumps([{"met": "yes"}, {"met": "no"}]),
        json.dumps([{"met": True}, None]),
        json.dumps({"a": listed(True, True), "b": 1}),
        json.dumps(listed(True, True))[:-1],
        "[" * 10_000,
    ],
)
def test_an_answer_that_leaves_a_criterion_open_gives_no_score(text: str):
    found = read_verdicts([JudgeReply(text)], read_criteria(["a", "b"], "here"), "together")
    assert isinstance(found, str)
    assert found.startswith("no score (")


@pytest.mark.parametrize("text", ["", "Maybe", "Yesterday", "No" * 2, "It is so: yes"])
def test_neither_yes_nor_no_gives_no_score(text: str):
    found = read_verdicts([JudgeReply("Yes"), JudgeReply(text)], read_criteria(["a", "b"], "here"), "each")
    assert isinstance(found, str)


def test_one_verdict_may_come_without_its_list():
    criteria = read_criteria(["a"], "here")
    assert read_verdicts([JudgeReply('{"met": true, "reason": "so"}')], criteria, "together") == [
        CriterionVerdict(True, "so")
    ]


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        (5, "has 5"),
        ([""], "has ''"),
        ([{"text": "a", "weigth": 1}], "weigth"),
        ([{"text": "a", "weight": "2"}], "'2'"),
        ([{"text": "a", "weight": math.inf}], "inf"),
        ([{"text": "a", "weight": -1}], "no criterion with a weight above 0"),
        (["a", "a"], "two criteria of the same name"),
        (["met"], "called 'met'"),
        ([str(k) for k in range(51)], "at most 50 criteria"),
    ],
)
def test_wrong_criteria_are_refused(criteria: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Rubric({"url": "http://a", "model": "m"}, criteria)


def test_wrong_way_of_asking_is_refused():
    with pytest.raises(ValueError, match="ask is 'both'"):
        Rubric({"url": "http://a", "model": "m"}, ["a"], ask="both")
