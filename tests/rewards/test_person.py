"""The reward `person`: what the page shows and takes, and what becomes of the marks."""

from __future__ import annotations

import io
import json
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.rewards.base import Reward, RewardSpec
from flowgrpo.rewards.person.kept_marks import MarksFile, Medium, ShownGroup
from flowgrpo.rewards.person.person import Person, _given
from flowgrpo.rewards.runner import RewardSet
from flowgrpo.rewards.waiting import Unwanted, watched
from tests.gallery.browser import LivePage
from tests.gallery.folders import HOSTILE
from tests.gallery.test_browser import CHROMIUM, needs_chromium
from tests.rewards.marking import Judge, Marker, by_content

PROMPTS = ["a cup", "a star", "a cup", "a star", "a cup"]
GROUPS = [7, 3, 7, 3, 7]


def pictures(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """A function that makes a reward whose page a program marks; it returns both, the program when it is asked."""
    made: list[Person] = []

    def make(judge: Judge = by_content, **options: Any) -> tuple[Person, list[Marker]]:
        person, markers = Person(str(tmp_path / "marks.jsonl"), **options), []
        person.announce = lambda url: markers.append(Marker(url, judge))
        made.append(person)
        return person, markers

    yield make
    for person in made:
        person.close()


def png(picture: torch.Tensor) -> np.ndarray[Any, Any]:
    return (picture * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def test_each_group_is_shown_alone_and_its_marks_are_its_scores(opened: Any, tmp_path: Path) -> None:
    images, shown = pictures(5, 3, 8, 12), []

    def judge(samples: Any) -> list[int]:
        shown.append([np.asarray(Image.open(io.BytesIO(sample))) for sample in samples])
        return [1, 0, 1][: len(samples)]

    person, markers = opened(judge, question="Which is a drawing?")
    scores = RewardSet([Reward(person, "person")]).score(images, PROMPTS, groups=GROUPS).values[:, 0]
    assert scores.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert [asked["prompt"] for asked in markers[0].seen] == ["a cup", "a star"]
    for own, rows in zip(shown, ([0, 2, 4], [1, 3]), strict=True):
        assert all((one == png(images[row])).all() for one, row in zip(own, rows, strict=True))
    lines = [json.loads(line) for line in (tmp_path / "marks.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["marks"]) for line in lines] == [("a cup", [1, 0, 1]), ("a star", [1, 0])]
    assert markers[0].get("state")["question"] == "Which is a drawing?"


def test_equal_samples_are_asked_about_once_also_by_another_run(opened: Any) -> None:
    images = pictures(5, 3, 8, 12)
    person, markers = opened()
    first = person(PROMPTS, GROUPS, images).values
    again, unseen = opened()
    assert again(PROMPTS, GROUPS, images).values.tolist() == first.tolist()
    assert unseen == []  # no page was opened
    assert len(markers[0].seen) == 2
    question, asked = opened(question="Which are funny?")
    question(PROMPTS, GROUPS, images)
    assert len(asked[0].seen) == 2
    images[3, 0, 0, 0] = 1 - images[3, 0, 0, 0]
    other, new = opened(lambda samples: [0] * len(samples))
    found = other(PROMPTS, GROUPS, images).values
    assert [asked["prompt"] for asked in new[0].seen] == ["a star"]
    assert found.tolist() == [first[0], 0.0, first[2], 0.0, first[4]]


def test_a_prompt_that_is_skipped_has_no_scores(opened: Any) -> None:
    person, _ = opened(lambda samples: None if len(samples) == 2 else [1] * len(samples))
    values = person(PROMPTS, GROUPS, pictures(5, 3, 8, 8)).values
    assert values.isnan().tolist() == [False, True, False, True, False]


def test_videos_sounds_completions_and_the_pictures_of_prompts_are_shown(opened: Any, tmp_path: Path) -> None:
    Image.new("RGB", (2000, 40), "red").save(tmp_path / "cup.png")
    kinds = []

    def judge(samples: Any) -> list[int]:
        kinds.append({bytes(sample[:4]) for sample in samples})
        return [0] * len(samples)

    person, markers = opened(judge)
    columns = {"image": [str(tmp_path / "cup.png")] * 5, "target_image": ["absent.png"] * 5}
    person(PROMPTS, GROUPS, pictures(5, 4, 3, 8, 8), **columns)
    person(PROMPTS, GROUPS, sounds=2 * pictures(5, 2, 200) - 1, sampling_rate=8000)
    person(PROMPTS, GROUPS, completions=["one", "two", "three", "four", "five"])
    assert kinds == [{b"RIFF"}, {b"RIFF"}, {b"RIFF"}, {b"RIFF"}, {b"one", b"thre", b"five"}, {b"two", b"four"}]
    video, sound, text = (markers[0].seen[k]["samples"] for k in (0, 2, 4))
    assert {sample["kind"] for sample in video} == {"image/webp"}
    assert {sample["kind"] for sample in sound} == {"audio/wav"}
    assert text == [{"text": "one"}, {"text": "three"}, {"text": "five"}]
    assert len(markers[0].seen[0]["given"]) == 1


def test_a_mark_can_be_changed_until_the_last_prompt_is_marked(tmp_path: Path) -> None:
    person, urls, values = Person(str(tmp_path / "marks.jsonl")), [], []
    there = threading.Event()
    person.announce = lambda url: (urls.append(url), there.set())
    images = pictures(5, 3, 8, 8)
    call = threading.Thread(target=lambda: values.append(person(PROMPTS, GROUPS, images).values), daemon=True)
    call.start()
    there.wait(30)
    hand = Marker.__new__(Marker)
    hand.url = urls[0]
    while hand.get("state")["next"] is None:  # the page opens a moment before the call asks
        pass
    hand.post({"call": 1, "number": 0, "marks": [1, 1, 1]})
    assert hand.post({"call": 1, "number": 0, "marks": [0, 0, 1]})["next"] == 1
    assert hand.get("prompts/1/0")["marks"] == [0, 0, 1]
    for body, status in (
        ({"call": 1, "number": 1, "marks": [1]}, 400),
        ({"call": 1, "number": 1, "marks": [2, 0]}, 400),
        ({"call": 1, "number": 1, "marks": [True, False]}, 400),
        ({"call": 1, "number": 1}, 400),
        ({"call": 1, "number": 2, "marks": None}, 409),
        ({"call": 9, "number": 0, "marks": None}, 409),
        ([], 400),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            hand.post(body)
        assert refused.value.code == status
    hand.post({"call": 1, "number": 1, "marks": [1, 0]})
    call.join(30)
    assert values[0].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]
    with pytest.raises(urllib.error.HTTPError) as refused:
        hand.get("prompts/1/0")
    assert refused.value.code == 409
    for part in ("", "marking.css", "marking.js"):
        assert len(hand.read(part)) > 500
    person.close()


def test_a_run_that_is_to_end_does_not_wait_for_the_person(tmp_path: Path) -> None:
    person = Person(str(tmp_path / "marks.jsonl"))
    person.announce = lambda url: None

    def stop() -> None:
        raise Unwanted("the run is to end")

    with watched(stop), pytest.raises(Unwanted):
        person(PROMPTS, GROUPS, pictures(5, 3, 8, 8))
    person.close()


def test_what_could_not_work_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, words in (
        ({"answers": "marks.txt"}, r"`answers` is 'marks.txt'; name a file that ends in \.jsonl"),
        ({"answers": 3}, r"`answers` is 3; give the path of a file"),
        ({"port": 70000}, r"`port` is 70000; give a number from 0 to 65535"),
        ({"fps": 0}, r"`fps` is 0; give frames a second from"),
        ({"question": " "}, r"`question` is ' '; give a text"),
    ):
        with pytest.raises(ValueError, match=words):
            RewardSet([RewardSpec("person", options=options)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"each of the 2 processes would open a page of its own; serve the reward in"):
        Person(str(tmp_path / "marks.jsonl"))


def test_a_file_of_something_else_is_never_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a cup"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 1 holds no marks; name another file as `answers`"):
        Person(str(file))
    file.write_text('{"key": "k", "marks": [1, 2]}\n')
    with pytest.raises(ValueError, match="line 1 holds no marks"):
        Person(str(file))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"folder\.jsonl is not a file"):
        Person(str(tmp_path / "folder.jsonl"))
    file.write_text('{"key": "k", "marks": [1, 0]}\n{"key": "l", "ma')
    Person(str(file)).close()


def test_a_port_that_is_taken_is_named(opened: Any, tmp_path: Path) -> None:
    person, markers = opened()
    person(PROMPTS, GROUPS, pictures(5, 3, 8, 8))
    port = int(markers[0].url.split(":")[2].split("/")[0])
    other = Person(str(tmp_path / "other.jsonl"), port=port)
    with pytest.raises(ValueError, match=rf"the port {port} of 127\.0\.0\.1 cannot be used .*another `port`, or leave"):
        other(PROMPTS, GROUPS, pictures(5, 3, 8, 8))


@pytest.mark.slow
@needs_chromium
def test_keys_and_clicks_mark_in_a_browser_and_text_stays_text(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    person, urls, values = Person(str(tmp_path / "marks.jsonl")), [], []
    there = threading.Event()
    person.announce = lambda url: (urls.append(url), there.set())
    prompts, groups = [HOSTILE, "b", "c"] * 3, [0, 1, 2] * 3
    texts = [f"{number} {HOSTILE}" for number in range(9)]

    def wait_for_marks() -> None:
        values.append(person(prompts, groups, completions=texts).values)

    call = threading.Thread(target=wait_for_marks, daemon=True)
    call.start()
    there.wait(30)
    page = LivePage(CHROMIUM, tmp_path / "profile", urls[0])

    def press(key: str) -> None:
        page.value(f"document.dispatchEvent(new KeyboardEvent('keydown', {{ key: '{key}', bubbles: true }}))")

    def shows(prompt: str) -> None:
        page.wait(f"state.ready && document.getElementById('prompt').textContent === {json.dumps(prompt)}")

    try:
        shows(HOSTILE)
        assert page.value("[...document.querySelectorAll('pre')].map((one) => one.textContent)") == texts[0::3]
        assert page.value("document.querySelectorAll('img, iframe, script:not([src])').length") == 0
        press("1")
        page.value("document.querySelectorAll('.mark')[2].click()")
        press("Enter")
        shows("b")
        press("a")
        press("b")
        shows(HOSTILE)
        assert page.value("state.marks") == [1, 0, 1]
        press("1")
        press("Enter")
        shows("b")
        press("s")
        shows("c")
        press("a")
        press("2")
        press("Enter")
        page.wait("!document.getElementById('idle').hidden")
        assert page.value("document.getElementById('count').textContent") == "3 prompts are marked so far"
    finally:
        page.close()
    call.join(30)
    person.close()
    scores = [[values[0][3 * row + group] for row in range(3)] for group in range(3)]
    assert scores[0] == [0.0, 0.0, 1.0]
    assert all(score.isnan() for score in scores[1])
    assert scores[2] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("marks", [[1], [1, 0, 1, 0]])
def test_kept_marks_of_another_number_of_samples_are_refused(tmp_path: Path, marks: list[int]) -> None:
    file = MarksFile(tmp_path / "marks.jsonl")
    asked = ShownGroup("Good?", "a cup", ("one", "two", "three"))
    file.add(asked, marks)
    with pytest.raises(ValueError, match=f"has {len(marks)} marks for the 3 samples of the prompt 'a cup'"):
        MarksFile(file.path).of(asked)


def test_the_same_answers_about_another_picture_are_asked_anew(tmp_path: Path) -> None:
    file = MarksFile(tmp_path / "marks.jsonl")
    cat, dog = (Medium("image/png", content) for content in (b"cat", b"dog"))
    file.add(ShownGroup("Good?", "Is this a cat?", ("yes", "no"), (cat,)), [1, 0])
    assert not file.has(ShownGroup("Good?", "Is this a cat?", ("yes", "no"), (dog,)))
    assert not file.has(ShownGroup("Good?", "Is this a cat?", ("yes", "no")))
    assert file.has(ShownGroup("Good?", "Is this a cat?", ("yes", "no"), (cat,)))


def test_a_prompt_that_is_no_whole_unicode_has_a_key() -> None:
    assert ShownGroup("Good?", "a \ud800 cup", ("one",)).key != ShownGroup("Good?", "a cup", ("one",)).key


def test_pictures_of_a_prompt_are_shown_as_rewards_see_them(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    (shown,) = _given([str(tmp_path / "clear.png")])
    assert Image.open(io.BytesIO(shown.content)).getpixel((0, 0)) == (255, 255, 255)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as a picture"):
        _given([str(tmp_path / "broken.png")])
