"""Checklists of what an image must keep from its references: what the judge sees, and who writes the list."""

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.rewards import RewardBatch, RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge_checklist import Checklist, read_draft
from flowgrpo.rewards.judges.judge_client import JudgeReply
from tests.rewards.stub_server import StubServer, question_of, said

RED, BLUE, GREY = (255, 0, 0), (0, 0, 255), (128, 128, 128)


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    found = {}
    for name, colour in (("red", RED), ("blue", BLUE)):
        Image.new("RGB", (4, 2), colour).save(tmp_path / f"{name}.png")
        found[name] = str(tmp_path / f"{name}.png")
    return found


def seen(request: dict[str, Any]) -> list[tuple[int, int, int]]:
    """The colour of the first pixel of each picture that the judge sees, in order."""
    content = request["body"]["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [
        tuple(np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))[0, 0].tolist())
        for url in urls
    ]


def keeps_the_colour(request: dict[str, Any], number: int) -> Any:
    """Writes a list of two, and says of "colour" whether the last picture has the colour of the first."""
    question, colours = question_of(request), seen(request)
    if "A new picture will be made" in question:
        return said('["It has the colour.", "It has the shape.", "One too many."]')
    return said("Yes." if "shape" in question or colours[-1] == colours[0] else "No, it has another colour.")


def images(*colours: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor(colours).view(-1, 3, 1, 1).expand(-1, 3, 2, 2) / 255


def score(server: StubServer, samples: torch.Tensor, columns: dict[str, Any], **options: Any) -> RewardBatch:
    given = {"server": {"url": server.url, "model": "m"}, **options}
    rewards = RewardSet([RewardSpec("checklist", options=given)])
    found = rewards.score(samples, ["a {thing}"] * len(samples), columns)
    rewards.close()
    server.stop()
    return found


def test_the_judge_writes_one_list_a_prompt_and_checks_each_sample_beside_the_references(paths: dict[str, str]):
    server = StubServer(keeps_the_colour)
    column = [paths["red"], paths["red"], [paths["blue"], paths["red"]]]
    batch = score(server, images(RED, BLUE, BLUE), {"image": column}, most=2)
    assert batch.values[:, 0].tolist() == [1.0, 0.5, 1.0]
    assert batch.notes["checklist"][1] == (
        "no (1) It has the colour.: it has another colour\nyes (1) It has the shape."
    )
    drafts = [request for request in server.requests if "will be made" in question_of(request)]
    # The list is written from the references alone, once for the two samples of one prompt.
    assert sorted(seen(request) for request in drafts) == [[BLUE, RED], [RED]]
    checks = [seen(request) for request in server.requests if "was made" in question_of(request)]
    assert sorted(checks) == sorted([[RED, RED]] * 2 + [[RED, BLUE]] * 2 + [[BLUE, RED, BLUE]] * 2)
    question = next(question_of(request) for request in server.requests if len(seen(request)) == 3)
    assert question.startswith("The last picture was made from the 2 before it and from this text:\n----\na {thing}\n")


def test_lists_of_the_column_come_before_the_option(paths: dict[str, str]):
    server = StubServer(lambda request, number: said("yes" if "own" in question_of(request) else "no"))
    columns = {"image": [paths["red"]] * 2, "criteria": [["own one", {"text": "other", "weight": 3}], None]}
    batch = score(server, images(RED, RED), columns, criteria=["general"])
    assert batch.values[:, 0].tolist() == [0.25, 0.0]
    assert not any("will be made" in question_of(request) for request in server.requests)


def test_without_a_list_there_is_no_score(paths: dict[str, str]):
    server = StubServer(lambda request, number: said("I see a red picture."))
    batch = score(server, images(RED), {"image": [paths["red"]]})
    assert math.isnan(batch.values[0, 0])
    assert batch.notes["checklist"][0].startswith("no score (no checklist: no JSON")
    assert len(server.requests) == 1


def test_a_judge_that_never_writes_a_list_ends_the_run(paths: dict[str, str]):
    server = StubServer(lambda request, number: said("I see a red picture."))
    with pytest.raises(RewardError, match="none of 8 answers has a score"):
        score(server, images(*[RED] * 8), {"image": [paths["red"]] * 8})


@pytest.mark.parametrize("text", ["[]", "[1]", '["a", ""]', '{"a": 1}', ""])
def test_what_is_no_list(text: str):
    found, why = read_draft(JudgeReply(text), 3)
    assert found == []
    assert why.startswith("no score (no checklist: ")


def test_equal_sentences_count_once():
    assert [one.text for one in read_draft(JudgeReply(json.dumps(["a", "a ", "b", "c"])), 3)[0]] == ["a", "b"]


def test_references_are_needed(paths: dict[str, str], tmp_path: Path):
    server = StubServer(keeps_the_colour)
    with pytest.raises(ValueError, match=r"takes `image`, which the prompts do not have.*write FILE\?image=NAME"):
        score(server, images(RED), {})
    reward = Checklist({"url": "http://127.0.0.1:9", "model": "m"})
    with pytest.raises(ValueError, match="row 1, has None; give a path"):
        reward(images(RED, RED), ["a", "b"], [paths["red"], None])
    with pytest.raises(ValueError, match="cannot be read as a picture"):
        reward(images(RED), ["a"], [str(tmp_path / "none.png")])
    reward.close()
    with pytest.raises(ValueError, match="ask is 'both'"):
        Checklist({"url": "http://a", "model": "m"}, ask="both")
