"""Critiques of the steps of completions: votes, the quorum, and what becomes of critiques that cannot be read."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.rewards import RewardBatch, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge_answers import Unreadable
from flowgrpo.rewards.judges.judge_client import JudgeReply
from flowgrpo.rewards.judges.judge_critique import Critique, read_critique
from tests.rewards.stub_server import StubServer, question_of, said
from tests.training.text_runs import trainer_of

STEPS = ["2 + 3 = 5\n", "5 * 2 = 11\n", "So 11."]


def critics(*answers: Any) -> StubServer:
    """A server whose answer depends on the seed of the request alone."""
    return StubServer(lambda request, number: said(json.dumps(answers[request["body"].get("seed", 0)])))


def score(server: StubServer, parts: list[list[str]], **options: Any) -> RewardBatch:
    given = {"server": {"url": server.url, "model": "m", "extra": options.pop("extra", {})}, **options}
    texts = ["".join(own) for own in parts]
    rewards = RewardSet([RewardSpec("critique", options=given)])
    found = rewards.score(texts, ["p {0}"] * len(parts), {"parts": parts})
    rewards.close()
    server.stop()
    return found


def test_one_critique_reads_all_steps_at_temperature_0():
    server = critics({"reason": "2 is false", "wrong": [2]})
    batch = score(server, [STEPS])
    assert batch.parts["critique"] == [[1.0, 0.0, 1.0]]
    assert batch.values[0, 0] == pytest.approx(2 / 3)
    assert batch.notes["critique"] == ["step 2: wrong in 100%\n2 is false"]
    (request,) = server.requests
    assert request["body"]["temperature"] == 0
    assert "seed" not in request["body"]
    assert "\np {0}\n" in question_of(request)
    assert "Step 1: 2 + 3 = 5\nStep 2: 5 * 2 = 11\nStep 3: So 11.\n" in question_of(request)


@pytest.mark.parametrize(
    ("quorum", "scores"),
    [
        (0.5, [1.0, 0.0, 0.0]),  # the majority
        (0.75, [1.0, 0.0, 1.0]),
        (1.0, [1.0, 1.0, 1.0]),  # the intersection: one critique sees no mistake
        (0.25, [0.0, 0.0, 0.0]),  # the union
    ],
)
def test_critiques_vote_on_each_step(quorum: float, scores: list[float]):
    """Step 1 is named by 1 of 4 critiques, step 2 by 3, step 3 by 2."""
    answers = [{"wrong": own} for own in ([2, 3], [2], [], [1, 2, 3])]
    server = critics(*answers)
    batch = score(server, [STEPS], votes=4, quorum=quorum)
    assert batch.parts["critique"] == [scores]
    assert batch.sub_scores["critique"]["votes"] == [4.0]
    assert sorted(body.get("seed", 0) for body in server.bodies) == [0, 1, 2, 3]
    assert {body["temperature"] for body in server.bodies} == {0.7}


def test_a_seed_of_the_recipe_moves_the_seeds_of_all_votes():
    server = StubServer(lambda request, number: said('{"wrong": []}'))
    score(server, [STEPS], votes=3, extra={"seed": 40})
    assert sorted(body["seed"] for body in server.bodies) == [40, 41, 42]


def test_an_unreadable_critique_has_no_vote_and_several_leave_no_score():
    server = critics({"wrong": [1]}, {"wrong": [4]}, {"wrong": [1, 3]})
    batch = score(server, [STEPS], votes=3, quorum=0.6)
    # Steps 1 and 3 are named by 2 and by 1 of the 2 critiques that can be read; step 4 does not exist.
    assert batch.parts["critique"] == [[0.0, 1.0, 1.0]]
    assert batch.sub_scores["critique"]["votes"] == [2.0]
    lost = score(critics("wrong"), [STEPS])
    assert math.isnan(lost.values[0, 0])
    assert lost.parts["critique"] == [None]
    assert lost.notes["critique"][0].startswith("no score (the JSON of the answer has no list `wrong`)")


@pytest.mark.parametrize(
    "text", ["", "Step 2 is wrong.", "[2]", '{"wrong": 2}', '{"wrong": [0]}', '{"wrong": [true]}', '{"wrong": ["2"]}']
)
def test_what_is_no_critique(text: str):
    with pytest.raises(Unreadable):
        read_critique(JudgeReply(text), 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"votes": 0}, "votes is 0"), ({"quorum": 0}, "quorum is 0"), ({"quorum": 1.5}, "quorum is 1.5; give a share")],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Critique({"url": "http://a", "model": "m"}, **options)


def test_the_recipe_trains_on_the_scores_of_steps(small_text: list[str], tmp_path: Path):
    """A critique that finds the second line of every completion wrong; the ratio is exactly 1 before the update."""

    def answer(request: dict[str, Any], number: int) -> Any:
        return said(json.dumps({"wrong": [2] if "Step 2:" in question_of(request) else []}))

    server = StubServer(answer)
    entry = f"{{name: critique, options: {{server: {{url: '{server.url}', model: m}}}}}}"
    trainer = trainer_of(
        [line for line in small_text if not line.startswith("rewards")], tmp_path / "run",
        f"rewards=[{{name: digit_share}}, {entry}]", "parts={cut: pattern, pattern: '[0-4]'}", "advantage=null",
        "credit={name: parts, later: false}",
    )  # fmt: skip
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert 0 < record["reward/critique"] < 1
    assert record["advantage/largest"] > 0
    trainer.rewards.close()
    server.stop()
