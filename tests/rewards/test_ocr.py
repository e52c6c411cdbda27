"""The text reward: its rule by hand, and a real reader on rendered words."""

import doctest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.models import ocr
from flowgrpo.rewards.models.ocr import Ocr, edit_distance, plain, quoted, text_score

words = st.text("abc", max_size=6)


def page(*lines: str, size: tuple[int, int] = (512, 256), colour: str = "black") -> Tensor:
    """Lines of text on white, [3, H, W]."""
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    for row, line in enumerate(lines):
        draw.text((24, 24 + 80 * row), line, fill=colour, font=ImageFont.load_default(48))
    return torch.tensor(list(picture.tobytes()), dtype=torch.float32).view(size[1], size[0], 3).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def reader() -> Iterator[Ocr]:
    reward = Ocr()
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("text", "target", "score"),
    [
        ("Open", "open", 1.0),
        ("we are OPEN late", "openlate", 1.0),
        ("", "open", 0.0),
        ("opan", "open", 0.75),
        ("pen", "open", 0.75),
        ("a completely other sentence", "open", 0.0),
        ("opan opan", "openopen", 1 - 2 / 8),
        ("ＯＰＥＮ！", "open!", 1.0),
    ],
)
def test_scores_by_hand(text: str, target: str, score: float) -> None:
    assert text_score(text, target) == score


def test_text_beside_the_target_costs_where_it_is_asked_to() -> None:
    assert text_score("open open", "open") == 1
    assert text_score("open!", "open", substring=False) == 0.75
    assert text_score("open open", "open", substring=False) == 0


@given(words, words, words)
def test_edit_distance_is_a_metric(one: str, two: str, three: str) -> None:
    assert edit_distance(one, two) == edit_distance(two, one)
    assert (edit_distance(one, two) == 0) == (one == two)
    assert edit_distance(one, three) <= edit_distance(one, two) + edit_distance(two, three)
    assert abs(len(one) - len(two)) <= edit_distance(one, two) <= max(len(one), len(two))


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('a sign "Open Late" beside "Closed"', "Open Late"),
        ("a sign “Open” and more", "Open"),
        ("no words, but it's here", ""),
        ('one quote " only', ""),
        ('an empty ""', ""),
    ],
)
def test_target_is_between_the_first_pair_of_double_quotes(prompt: str, target: str) -> None:
    assert quoted(prompt) == target


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(ocr) == (0, 4)


@pytest.mark.slow
def test_rendered_words_are_read(reader: Ocr) -> None:
    images = torch.stack([page("Hello World", colour="blue"), page("FLOW", "Matching"), page("Hello Word"), page()])
    prompts = ['says "Hello World"', 'says "Flow Matching"', 'says "Hello World"', 'says "Hello World"']
    scores = reader(images=images, prompts=prompts)
    assert scores.values == pytest.approx([1, 1, 0.9, 0])
    assert scores.sub_scores["exact"] == [1, 1, 0, 0]
    assert [plain(note) for note in scores.notes] == ["read:helloworld", "read:flowmatching", "read:helloword", "read:"]


def test_what_has_no_target_does_not_apply(reader: Ocr) -> None:
    batch = RewardSet([RewardSpec("ocr")]).score(torch.stack([page("Open"), page("Open")]), ["a cat", 'a cat says ""'])
    assert batch.values.isnan().all()
    assert batch.record(0)["notes"] == {}
    empty = reader(images=torch.zeros(0, 3, 64, 64), prompts=[])
    assert list(empty.values) == []


def test_a_column_names_the_words(reader: Ocr) -> None:
    reward = Ocr(column="words")
    images = torch.stack([page("Open"), page("Open")])
    scores = reward(images=images, prompts=['a "sign"', "a sign"], words=["open", None])
    assert scores.values[0] == 1
    assert scores.values[1] != scores.values[1]
    with pytest.raises(ValueError, match="no column 'words'"):
        reward(images=images, prompts=["a", "b"])
    with pytest.raises(ValueError, match="holds 3; give texts"):
        reward(images=images, prompts=["a", "b"], words=["open", 3])
    reward.close()


def test_videos_are_the_mean_over_a_few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = Ocr(frames=2, workers=2)
    seen: list[Any] = []
    read = reward._read
    monkeypatch.setattr(reward, "_read", lambda picture: (seen.append(picture.shape), read(picture))[1])
    video = torch.stack([page("Open", size=(256, 128)), *[page("Opan", size=(256, 128))] * 3])[None]
    scores = reward(images=video, prompts=['"open"'])
    assert scores.values == pytest.approx([(1 + 0.75) / 2])
    assert seen == [(128, 256, 3)] * 2
    reward.close()


def test_options_that_cannot_be_used() -> None:
    for options, message in [
        ({"frames": 0}, "frames is 0"),
        ({"substring": "no"}, "substring is 'no'; give true or false"),
        ({"confidence": 1}, "confidence is 1; give a number from 0"),
        ({"engine": {"Det.limit": 3, "nonsense": 1}}, "RapidOCR does not start"),
    ]:
        with pytest.raises(ValueError, match=message):
            Ocr(**options)
