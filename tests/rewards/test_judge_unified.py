"""UnifiedReward: the forms of its answers, pointwise and in pairs, of images and videos."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from flowgrpo.rewards import RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge_unified import UnifiedReward, about_one, about_two
from tests.rewards.stub_server import StubServer, question_of, said

AXES = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}"
Stub = Callable[..., StubServer]


@pytest.fixture
def stub() -> Iterator[Stub]:
    made: list[StubServer] = []

    def make(*answers: str) -> StubServer:
        texts = iter(answers)
        made.append(StubServer(lambda request, number: said(next(texts))))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def score(server: StubServer, count: int, video: bool = False, **more: object):
    given = {"server": {"url": server.url, "model": "m", "concurrency": 1, "frames": 2}, **more}
    # The pictures differ, because equal questions would be asked only once.
    images = torch.linspace(0, 1, count).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    if video:
        images = images.unsqueeze(1).expand(-1, 5, -1, -1, -1)
    return RewardSet([RewardSpec("unified_reward", options=given)]).score(images, [f"cat {k}" for k in range(count)])


def test_the_mean_of_the_axes_is_brought_to_the_unit_interval(stub: Stub):
    server = stub(
        AXES.format(5, 3, 4), AXES.format("1.0", 1, 1), 'Word-wise Scores: [["a", 3]]\n' + AXES.format(2, 3, 4)
    )
    batch = score(server, 3)
    assert batch.values[:, 0].tolist() == pytest.approx([0.75, 0.0, 0.5])
    assert batch.sub_scores["unified_reward"] == {
        "alignment": [1.0, 0.0, 0.25], "coherence": [0.5, 0.0, 0.5], "style": [0.75, 0.0, 0.75],
    }  # fmt: skip
    assert [question_of(request) for request in server.requests] == [
        about_one("image", "axes").replace("{prompt}", f"cat {k}") for k in range(3)
    ]


def test_raw_scores(stub: Stub):
    assert score(stub(AXES.format(5, 3, 4)), 1, scale=None).values.tolist() == [[4.0]]


def test_a_little_beyond_the_scale_is_its_end_and_more_is_no_score(stub: Stub):
    batch = score(stub(AXES.format(5.3, 0.6, 3), AXES.format(5.6, 3, 3)), 2)
    assert batch.values[0, 0] == 0.5
    assert math.isnan(batch.values[1, 0])
    assert batch.sub_scores["unified_reward"]["coherence"] == [0.0, 0.5]


def test_a_missing_axis_masks_the_sample(stub: Stub):
    batch = score(stub("Alignment Score (1-5): 3\nStyle Score (1-5): 3", AXES.format(3, 3, 3)), 2)
    assert batch.values[:, 0].isnan().tolist() == [True, False]
    assert batch.notes["unified_reward"][0].startswith("no score (Coherence: no score in the answer)")


def test_the_final_score_of_the_first_versions(stub: Stub):
    server = stub("cat (animal): 1\nFinal Score: 4", "cat (animal): 1", "Alignment Score: 5")
    batch = score(server, 3, form="final")
    assert batch.values[0, 0] == 0.75
    assert batch.values[1:, 0].isnan().all()
    assert "Final Score:" in question_of(server.requests[0])


def test_of_videos_the_axes_are_others_and_the_frames_are_sent(stub: Stub):
    server = stub("Alignment Score (1-5): 2.4\nPhysics Score (1-5): 3\nStyle Score (1-5): 3.6")
    batch = score(server, 1, video=True)
    assert batch.values[0, 0] == pytest.approx(0.5)
    assert set(batch.sub_scores["unified_reward"]) == {"alignment", "physics", "style"}
    parts = server.bodies[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]


def test_no_score_at_all_stops_the_run(stub: Stub):
    with pytest.raises(RewardError, match="none of 8 answers has a score"):
        score(stub(*["Hm."] * 8), 8)


@pytest.mark.parametrize("video", [False, True])
def test_pairs_become_win_rates(stub: Stub, video: bool):
    word = "Video" if video else "Image"
    server = stub(f"<think>Mmh</think><answer>{word} 2 is better</answer>", f"<answer>{word} 1 is better</answer>")
    given = {"server": {"url": server.url, "model": "m", "concurrency": 1, "frames": 2}}
    images = torch.tensor([0.0, 1.0]).view(2, *[1] * (4 if video else 3)).expand(2, *([3] if video else []), 3, 2, 2)
    spec = RewardSpec("win_rate", options={"judge": "unified_reward", "judge_options": given})
    batch = RewardSet([spec]).score(images, ["cat"] * 2, groups=[4, 4])
    assert batch.values[:, 0].tolist() == [0.0, 1.0]
    asked = about_two("video", 2) if video else about_two("image")
    assert [question_of(request) for request in server.requests] == [asked.replace("{prompt}", "cat")] * 2
    assert all(len(body["messages"][0]["content"]) == (5 if video else 3) for body in server.bodies)


def test_only_images_are_taken_and_the_form_is_checked(stub: Stub):
    server = stub()
    given = {"server": {"url": server.url, "model": "m"}}
    with pytest.raises(ValueError, match="scores `images`, but the samples here are completions"):
        RewardSet([RewardSpec("unified_reward", options=given)]).score(["text"], ["p"])
    with pytest.raises(ValueError, match="form is 'pairs'"):
        UnifiedReward(given["server"], form="pairs")
