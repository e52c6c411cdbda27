"""Steps judged one by one, the outcome apart, and failures that nobody could avoid."""

import json
import math
import re
from typing import Any

import pytest
import torch

from flowgrpo.rewards import RewardBatch, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge_answers import Unreadable
from flowgrpo.rewards.judges.judge_client import JudgeReply
from flowgrpo.rewards.judges.judge_rubric import Criterion
from flowgrpo.rewards.judges.judge_verifier import Verifier, joined, read_step
from flowgrpo.rewards.judges.served_judge import Reading, mean_reading
from tests.rewards.stub_server import StubServer, question_of, said

PROCESS = ["It follows from what was done before.", {"text": "It leads to the end.", "weight": 3}]
OUTCOME = ["The task is done.", "Nothing else was changed."]
DONE = ["open the shop;", "the network fails;", "buy two tickets."]


def verdicts(*met: bool) -> list[dict[str, Any]]:
    return [{"number": k, "met": value, "reason": f"r{k}"} for k, value in enumerate(met, start=1)]


def judge(request: dict[str, Any], number: int) -> Any:
    """Step 1 meets both criteria, step 2 none of them, step 3 the first; at the end the task is done."""
    question = question_of(request)
    if "Judge the outcome alone" in question:
        return said(json.dumps(verdicts(True, False)))
    step = int(re.search(r"Step (\d) of \d", question)[1])
    failure = "uncontrollable" if "network" in question.rpartition("Step")[2] else "none"
    met = {1: (True, True), 2: (False, False), 3: (True, False)}[step]
    return said(json.dumps({"shows": f"seen {step}", "failure": failure, "verdicts": verdicts(*met)}))


def score(samples: Any, columns: dict[str, Any] | None = None, **options: Any) -> tuple[RewardBatch, StubServer]:
    server = StubServer(options.pop("answer", judge))
    given = {"server": {"url": server.url, "model": "m", "frames": options.pop("frames", 8)}, **options}
    rewards = RewardSet([RewardSpec("verifier", options={"process": PROCESS, "outcome": OUTCOME, **given})])
    found = rewards.score(samples, ["buy {2}"] * len(samples), columns)
    rewards.close()
    server.stop()
    return found, server


def test_a_failure_that_nobody_could_avoid_does_not_count():
    """Steps 1, (0), 1/4: the process is 5/8 without step 2. The outcome is 1/2. Half of each is 9/16."""
    batch, server = score(["".join(DONE)], {"parts": [DONE]})
    assert batch.values[0, 0] == pytest.approx(9 / 16)
    subs = {name: column[0] for name, column in batch.sub_scores["verifier"].items()}
    assert subs == {"outcome": 0.5, "process": 0.625, "uncontrollable": pytest.approx(1 / 3)}
    scored = batch.parts["verifier"][0]
    assert [scored[0], scored[2]] == [1.0, 0.25]
    assert math.isnan(scored[1])
    assert "step 2: nan, uncontrollable: seen 2" in batch.notes["verifier"][0]
    assert batch.notes["verifier"][0].endswith(
        "\noutcome: 0.50, yes (1) The task is done.: r1\nno (1) Nothing else was changed.: r2"
    )
    assert len(server.requests) == 4


def test_each_question_has_one_step_and_the_outcome_has_what_the_judge_saw():
    _, server = score(["".join(DONE)], {"parts": [DONE]})
    questions = sorted(question_of(request) for request in server.requests)
    second = next(question for question in questions if "Step 2 of 3:" in question)
    assert "What was done before:\nopen the shop;\n" in second
    assert "buy two" not in second
    end = next(question for question in questions if "outcome alone" in question)
    assert "Step 1: seen 1\nStep 2: seen 2\nStep 3: seen 3\n" in end
    assert "The last step:\nbuy two tickets.\n" in end
    assert "open the shop" not in end
    assert not set(re.findall(r"It [a-z ]*\.", end)) & {"It leads to the end."}


def test_frames_of_a_video_are_judged_one_by_one():
    """Of 5 frames, the first, the middle and the last are judged: 1, 0, 1/4, and the outcome 1/2 counts alone."""
    batch, server = score(torch.rand(1, 5, 3, 2, 2), frames=3, share=1.0)
    assert batch.values[0, 0] == 0.5
    assert batch.sub_scores["verifier"]["process"][0] == pytest.approx(1.25 / 3)
    pictures = [sum(part["type"] == "image_url" for part in body["messages"][0]["content"]) for body in server.bodies]
    assert pictures == [1] * 4
    assert batch.parts == {}


def test_joined_by_hand():
    assert joined(mean_reading([Reading(0.5), Reading(1.0)]), Reading(0.0), 0.25).value == pytest.approx(0.75 * 0.75)
    # Without a step that counts, the outcome is all that is known.
    found = joined(mean_reading([Reading(judged=False)] * 2), Reading(0.5), 0.25)
    assert (found.value, found.subs["uncontrollable"]) == (0.5, 1.0)
    assert math.isnan(found.subs["process"])


def test_an_undecided_step_leaves_no_score_and_no_question_on_the_outcome():
    batch, server = score(["a"], answer=lambda request, number: said("It is fine."))
    assert math.isnan(batch.values[0, 0])
    assert batch.notes["verifier"][0].startswith("no score (step 1: no JSON")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"failure": "some", "verdicts": verdicts(True)},
        {"verdicts": verdicts(True)},
        {"failure": "none", "verdicts": verdicts(True, True)},
        {"failure": "none"},
        verdicts(True),
    ],
)
def test_what_is_no_verdict_on_a_step(answer: Any):
    with pytest.raises(Unreadable):
        read_step([Criterion("It is done.")], JudgeReply(json.dumps(answer)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outcome": ["It leads to the end."]}, "is in `process` and in `outcome`, and would count twice"),
        ({"outcome": []}, "outcome is empty"),
        ({"share": 0}, "share is 0"),
        ({"share": 2}, "share is 2; give the weight"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Verifier({"url": "http://a", "model": "m"}, **{"process": PROCESS, "outcome": OUTCOME, **options})
