"""Rubrics: verdicts, weights and what becomes of answers that leave a criterion open."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flowgrpo.rewards import RewardBatch, RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge_answers import Unreadable
from flowgrpo.rewards.judges.judge_client import JudgeReply
from flowgrpo.rewards.judges.judge_rubric import (
    ASK,
    Criterion,
    CriterionVerdict,
    Rubric,
    read_criteria,
    read_verdict_list,
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


def test_without_a_verdict_the_note_has_the_reason_and_the_answers(stub: Stub):
    server = stub(lambda question: "Yes." if "cat" in question else "Maybe.")
    batch = score(server, ["x"], criteria=THREE[:2], ask="each")
    assert math.isnan(batch.values[0, 0])
    assert math.isnan(batch.sub_scores["rubric"]["black"][0])
    assert batch.notes["rubric"] == ["no score (neither yes nor no: 'Maybe.'): Yes. / Maybe."]


def test_samples_without_criteria_are_no_failures_of_the_judge(stub: Stub):
    server = stub(lambda question: "nothing")
    with pytest.raises(RewardError, match="none of 8 answers has a score"):
        score(server, ["a"] * 8, criteria=["one"])
    batch = score(server, ["a"] * 8, {"criteria": [["one"], *[None] * 7]})
    assert batch.values.isnan().all()
    assert batch.notes["rubric"][1] == "no criteria"


def test_each_step_is_judged_by_itself_and_has_a_score(stub: Stub):
    """Of the weights 1 and 2, the steps of the first completion meet 3 and 2: 1 and 2/3, and 5/6 on average."""

    def judge(question: str) -> Any:
        assert "What was done before:\n" in question
        step = question.partition("\nStep ")[2]
        return listed("cat" in step.partition("----")[0], True)

    server = stub(judge)
    parts = [["a cat\n", "a {dog}"], ["no animal"]]
    batch = score(server, ["".join(own) for own in parts], {"parts": parts}, criteria=THREE[:2], steps=True)
    assert batch.values[:, 0].tolist() == pytest.approx([5 / 6, 2 / 3])
    assert batch.parts["rubric"] == [pytest.approx([1, 2 / 3]), pytest.approx([2 / 3])]
    assert batch.sub_scores["rubric"] == {
        "met": [0.75, 0.5], "There is a cat.": [0.5, 0.0], "black": [1.0, 1.0],
    }  # fmt: skip
    assert batch.notes["rubric"][0] == (
        "step 1: 1.00, yes (1) There is a cat.: r1\nyes (2) black: r2\n"
        "step 2: 0.67, no (1) There is a cat.: r1\nyes (2) black: r2"
    )
    second = next(question_of(request) for request in server.requests if "Step 2 of 2" in question_of(request))
    assert "The task was:\n----\np0\n----\nWhat was done before:\na cat\n\n----\nStep 2 of 2:\na {dog}\n" in second


def test_frames_are_judged_one_by_one_and_one_undecided_frame_leaves_no_score(stub: Stub):
    server = stub(lambda question: "no" if "Step 2 of 3" in question else "yes")
    options = {"criteria": ["one"], "ask": "each", "steps": True}
    batch = score(server, torch.zeros(1, 3, 3, 2, 2), **options)
    assert batch.values[0, 0] == pytest.approx(2 / 3)
    assert batch.parts == {}
    assert [len(body["messages"][0]["content"]) for body in server.bodies] == [2] * 3
    undecided = stub(lambda question: "so so" if "Step 2 of 3" in question else "yes")
    batch = score(undecided, torch.zeros(1, 3, 3, 2, 2), **options)
    assert math.isnan(batch.values[0, 0])
    assert batch.notes["rubric"] == ["no score (step 2: neither yes nor no: 'so so'): so so"]


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
    with pytest.raises(Unreadable):
        ASK["together"].read(read_criteria(["a", "b"], "here"), JudgeReply(text))


@pytest.mark.parametrize("text", ["", "Maybe", "Yesterday", "No" * 2, "It is so: yes"])
def test_neither_yes_nor_no_gives_no_score(text: str):
    with pytest.raises(Unreadable):
        ASK["each"].read(read_criteria(["a", "b"], "here"), JudgeReply("Yes"), JudgeReply(text))


def test_one_verdict_may_come_without_its_list():
    assert read_verdict_list({"met": True, "reason": "so"}, 1) == [CriterionVerdict(True, "so")]
    assert ASK["together"].read([Criterion("a")], JudgeReply('{"met": true, "reason": "so"}')).value == 1.0


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
