"""Questions that a model answers from a sample alone: accuracy, rotated choices, and what is no answer."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowgrpo.rewards import RewardBatch, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge_answers import Unreadable
from flowgrpo.rewards.judges.judge_client import JudgeReply
from flowgrpo.rewards.judges.judge_quiz import Choosing, read_letter, read_questions, told
from tests.rewards.stub_server import StubServer, question_of, said

COLOUR = {"question": "What colour is the cat?", "choices": ["red", "black", "white"], "answer": "black"}
COUNT = {"question": "How many dogs?", "choices": [1, 2], "answer": 2}


def server_that(answer: Callable[[str], str]) -> StubServer:
    return StubServer(lambda request, number: said(answer(question_of(request))))


def reader(question: str) -> str:
    """Picks the choice whose text is in the caption; the last choice if there is none."""
    caption, asked = question.split("\n----\n")[1:3] if "----" in question else ("", question)
    choices = re.findall(r"^([A-H])\) (.*)$", asked, re.MULTILINE)
    return next((letter for letter, choice in choices if choice in caption.split()), choices[-1][0]) + "."


def score(server: StubServer, samples: Any, questions: list[Any], **options: Any) -> RewardBatch:
    given = {"server": {"url": server.url, "model": "m"}, **options}
    rewards = RewardSet([RewardSpec("quiz", options=given)])
    found = rewards.score(samples, ["describe the secret picture"] * len(samples), {"questions": questions})
    rewards.close()
    server.stop()
    return found


def test_a_caption_is_worth_the_questions_that_it_answers():
    """Of two questions: both told, one told, one told wrongly and one not at all, none told."""
    server = server_that(reader)
    captions = ["a black cat and 2 dogs", "a black cat", "a red cat", "animals"]
    batch = score(server, captions, [[COLOUR, COUNT]] * 4)
    assert batch.values[:, 0].tolist() == [1.0, 0.5, 0.0, 0.0]
    assert batch.sub_scores["quiz"]["told"] == [1.0, 0.5, 0.5, 0.0]
    assert batch.notes["quiz"][2] == ("What colour is the cat? red (wrong)\nHow many dogs? this cannot be told (wrong)")
    assert len(server.requests) == 8
    # The model that answers sees the caption and never the prompt.
    assert all("secret" not in str(body) for body in server.bodies)


def test_a_model_that_always_says_a_is_right_in_one_of_the_turns():
    """Three turns of three choices and two turns of two choices: 1 of 3 and 1 of 2 are right, so 2 of 5."""
    server = server_that(lambda question: "A")
    batch = score(server, ["x"], [[COLOUR, COUNT]], turns=3)
    assert batch.values[0, 0] == pytest.approx(2 / 5)
    assert len(server.requests) == 5


def test_turns_rotate_the_choices_and_keep_the_last_one():
    question = Choosing("Q", ("x", "y", "z"), 1)
    assert told(question.rotated(0)).startswith("Q\nA) x\nB) y\nC) z\nD) this cannot be told\n")
    assert told(question.rotated(2)).startswith("Q\nA) z\nB) x\nC) y\nD) this cannot be told\n")
    assert [question.rotated(turn).right for turn in range(3)] == [1, 0, 2]


def test_images_are_shown_and_questions_may_be_json():
    server = server_that(lambda question: "B) black")
    column = ['[{"question": "Colour?", "choices": ["red", "black"], "answer": "black"}]', None]
    batch = score(server, torch.zeros(2, 3, 2, 2), column)
    assert batch.values[0, 0] == 1.0
    assert math.isnan(batch.values[1, 0])
    (body,) = server.bodies
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "text"]


def test_a_sample_with_an_answer_that_cannot_be_read_has_no_score():
    server = server_that(lambda question: "B" if "dogs" in question else "It is black.")
    batch = score(server, ["a"], [[COUNT, COLOUR]])
    assert math.isnan(batch.values[0, 0])
    assert batch.notes["quiz"] == ["no score (no letter of a choice: 'It is black.'): It is black."]


@pytest.mark.parametrize(
    ("text", "place"),
    [("b", 1), ("(C) it is", 2), ("**A**", 0), ("Answer: B", 1), ("The answer is C.", 2), ("D\nNo dog.", 3)],
)
def test_letters(text: str, place: int):
    assert read_letter(JudgeReply(text), 3) == place


@pytest.mark.parametrize("text", ["", "E", "Black", "A cat's colour", "I'm not sure", "D'accord"])
def test_what_is_no_letter_of_three_choices(text: str):
    with pytest.raises(Unreadable):
        read_letter(JudgeReply(text), 3)


@pytest.mark.parametrize(
    "given",
    [
        5,
        "what?",
        [{}],
        [{**COLOUR, "answer": "blue"}],
        [{**COLOUR, "choices": ["black"]}],
        [{**COLOUR, "choices": ["black", "black "]}],
        [{**COLOUR, "question": " "}],
        [{**COLOUR, "hint": "dark"}],
        [{**COLOUR, "choices": [str(k) for k in range(8)], "answer": "1"}],
    ],
)
def test_wrong_questions_are_refused(given: Any):
    with pytest.raises(ValueError, match="quiz: here has"):
        read_questions(given, "quiz: here")
