"""Artifacts that a judge finds: labels, severities and the score, up to what the gallery shows of them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.gallery.pages import _details
from flowgrpo.rewards import RewardBatch, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge_answers import Unreadable
from flowgrpo.rewards.judges.judge_artifacts import LABELS, Artifacts, read_artifacts
from flowgrpo.rewards.judges.judge_client import JudgeReply
from flowgrpo.votes.samples import parse_sample
from tests.rewards.stub_server import StubServer, question_of, said

TWO = [
    {"label": "hands", "severity": "slight", "where": "left hand"},
    {"label": "Hands", "severity": "severe", "where": "six fingers"},
    {"label": "text", "severity": "clear", "where": "the sign"},
]


def score(answers: list[Any], **options: Any) -> RewardBatch:
    """Scores of images whose prompts are the places of their answers."""
    server = StubServer(
        lambda request, number: said(json.dumps(answers[int(question_of(request).split("----\n")[1].strip())]))
    )
    given = {"server": {"url": server.url, "model": "m"}, **options}
    rewards = RewardSet([RewardSpec("artifacts", options=given)])
    found = rewards.score(torch.rand(len(answers), 3, 2, 2), [str(k) for k in range(len(answers))])
    rewards.close()
    server.stop()
    return found


def test_the_worst_artifact_of_each_label_lowers_the_score():
    """No artifact: 1. Severe hands and clear text: 1 / (1 + 1 + 2/3). With weights 3 and 0: 1 / (1 + 3)."""
    batch = score([[], TWO, {"artifacts": TWO[2:]}])
    assert batch.values[:, 0].tolist() == pytest.approx([1.0, 3 / 8, 3 / 5])
    subs = batch.sub_scores["artifacts"]
    assert set(subs) == set(LABELS)
    assert subs["hands"] == [0.0, 1.0, 0.0]
    assert subs["text"] == pytest.approx([0.0, 2 / 3, 2 / 3])
    assert batch.answers["artifacts"] == ["no artifacts", "hands, text", "text"]
    assert (
        batch.notes["artifacts"][1] == "hands (slight): left hand\nhands (severe): six fingers\ntext (clear): the sign"
    )
    assert score([TWO], weights={"hands": 3, "text": 0}).values[0, 0] == pytest.approx(1 / 4)


def test_labels_of_another_assessor():
    batch = score([[{"label": "odd", "severity": "clear", "where": ""}]], labels={"odd": "odd things"})
    assert batch.values[0, 0] == pytest.approx(3 / 5)
    assert batch.sub_scores["artifacts"] == {"odd": [pytest.approx(2 / 3)]}


def test_the_gallery_shows_the_labels(tmp_path: Path):
    batch = score([TWO])
    record = {"phase": "eval", "iteration": 0, "prompt": "p", "prompt_id": 0, "seed": 0, "image": "a.png"}
    shown = _details(parse_sample({**record, **batch.record(0)}, tmp_path, "here"), ["artifacts"], {}, {})
    assert ["artifacts / hands", 1.0] in shown["parts"]
    assert shown["notes"] == [[0, batch.notes["artifacts"][0]]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "There is none.",
        "3",
        '[{"label": "tails", "severity": "clear"}]',
        '[{"label": "hands", "severity": "awful"}]',
        '[{"label": "hands"}]',
        '["hands"]',
        '{"hands": 1, "text": 2}',
    ],
)
def test_an_answer_with_anything_else_has_no_score(text: str):
    with pytest.raises(Unreadable):
        read_artifacts(JudgeReply(text), LABELS)
    batch = score([["hands"]])
    assert math.isnan(batch.values[0, 0])
    assert batch.answers["artifacts"] == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": {}}, "labels is {}"),
        ({"labels": {"a": "x", "A": "y"}}, "labels is"),
        ({"weights": {"hand": 1}}, "weights names 'hand'"),
        ({"weights": {"hands": -1}}, "the weight of hands is -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Artifacts({"url": "http://a", "model": "m"}, **options)
