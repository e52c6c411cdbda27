"""Prompts that are conversations: which samples are of one prompt, and what the pages show and write of them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowgrpo.gallery.build import build_gallery, read_runs
from flowgrpo.gallery.export_rows import rows_of
from flowgrpo.training.data import read_prompts
from tests.gallery.browser import LivePage
from tests.gallery.folders import HOSTILE, data_of, write_run, written
from tests.gallery.test_browser import CHROMIUM, needs_chromium
from tests.gallery.test_live_page import saved
from tests.gallery.voting import booth, serving

ANIMALS = ("cats", "dogs")


def talk(about: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"You know {about}."},
        {"role": "user", "content": f"Tell me about {about} \ufffc"},
        {"role": "assistant", "content": f"{about} are {'very ' * 2000}great {HOSTILE}"},
        {"role": "user", "content": "continue"},
    ]


def talking(folder: Path, animals: tuple[str, ...] = ANIMALS) -> Path:
    """A run whose conversations differ, and end with one message."""
    columns = {"height": 48, "large": 2**60 + 1, "word": "7"}
    rows = [
        written(at, n, f"{folder.name} on {animal} at {at}", prompt="continue", messages=talk(animal), columns=columns)
        for at in (0, 10) for n, animal in enumerate(animals)
    ]  # fmt: skip
    return write_run(folder, rows, name=folder.name)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return talking(tmp_path / "a")


@pytest.fixture
def show(tmp_path: Path) -> Iterator[Callable[[str], LivePage]]:
    pages = []

    def show(address: str) -> LivePage:
        assert CHROMIUM is not None
        pages.append(LivePage(CHROMIUM, tmp_path / "profile", address))
        return pages[-1]

    yield show
    for page in pages:
        page.close()


def test_only_answers_to_one_conversation_are_compared(run: Path, tmp_path: Path) -> None:
    runs = [run, talking(tmp_path / "b", ANIMALS[::-1])]
    one = booth(runs, tmp_path / "votes.jsonl", sets="last")
    assert len(one.ballots) == 2
    for ballot in one.ballots:
        assert ballot.left.shot.messages == ballot.right.shot.messages
    rows = rows_of(read_runs(runs))
    assert len(rows) == 2
    for row in rows:
        [about] = {shot.messages[0]["content"] for shot in row.shots if shot is not None}
        assert all(shot is not None and about[9:13] in str(shot.completion) for shot in row.shots)


def test_both_pages_get_all_messages(run: Path) -> None:
    one = booth([run], run / "votes.jsonl")
    said = [[[message["role"], message["content"]] for message in talk(animal)] for animal in ANIMALS]
    assert sorted(one.show(number)["messages"] for number in range(2)) == said
    pairs = data_of(build_gallery(run))["r0-pairs"]
    assert pairs["messages"] == said
    assert pairs["typed"] == [[0, 1], [0, 1]]  # the columns height and large


TURNS = "[...document.querySelectorAll('#turns .turn')].map(turn => turn.querySelector('.role').textContent)"


@pytest.mark.slow
@needs_chromium
def test_a_voter_sees_the_conversation(run: Path, show: Callable[[str], LivePage]) -> None:
    one = booth([run], run / "votes.jsonl")
    page = show(build_gallery(run).as_uri())
    with serving(one) as client:
        page.tell("Page.navigate", url=client.root)
        page.wait("document.querySelectorAll('#turns:not([hidden]) .turn').length === 4")
        assert page.value(TURNS) == ["system", "user", "assistant", "user"]
        words = page.value("document.getElementById('turns').innerText")
        about = one.ballots[0].left.shot.messages[0]["content"]
        assert about in words
        assert "<image>" in words
        assert "continue" in words
        # The long message is folded, and a click shows the rest.
        assert len(words) < 4000
        page.value("document.querySelector('#turns .fold').click()")
        assert len(page.value("document.getElementById('turns').innerText")) > 10_000
        assert page.value("document.activeElement.id") == "turns"
        assert page.value("document.getElementById('prompt').hidden")


@pytest.mark.slow
@needs_chromium
def test_the_gallery_shows_and_saves_the_conversation(
    run: Path, tmp_path: Path, show: Callable[[str], LivePage]
) -> None:
    page = show(build_gallery(run).as_uri())
    cards = page.value("[...document.querySelectorAll('#pairs .pair .turns')].map(turns => turns.innerText)")
    assert [animal in card for card, animal in zip(cards, ANIMALS, strict=True)] == [True, True]
    page.value("document.querySelector('#pairs .pick').click()")
    (tmp_path / "chosen.jsonl").write_text(saved(page, "Save as a prompt file"), encoding="utf-8")
    [row] = read_prompts(str(tmp_path / "chosen.jsonl"))
    assert row.messages == tuple(talk("cats"))
    assert {name: row.columns[name] for name in ("height", "large", "word")} == {
        "height": 48, "large": 2**60 + 1, "word": "7",
    }  # fmt: skip
    assert not page.value(
        "[...document.querySelectorAll('#chosen button')].some(b => b.textContent === 'Copy prompts')"
    )

    page.value("document.querySelector('#pairs .prompt').click()")
    page.wait("document.querySelectorAll('dialog .turn').length === 4")
    words = shlex.split(page.value("document.querySelector('pre.command').textContent"))
    assert words[-2:] == ["--file", "prompt.jsonl"]
    (tmp_path / "prompt.jsonl").write_text(saved(page, "Save the prompt"), encoding="utf-8")
    assert read_prompts(str(tmp_path / "prompt.jsonl")) == read_prompts(str(tmp_path / "chosen.jsonl"))


@pytest.mark.slow
@needs_chromium
def test_rows_of_several_runs_are_matched_by_the_conversation(
    run: Path, tmp_path: Path, show: Callable[[str], LivePage]
) -> None:
    other = talking(tmp_path / "b", ANIMALS[::-1])
    page = show(build_gallery([run, other], tmp_path / "site").as_uri())
    assert page.value("evaluationRows().map(row => row.where)") == [[0, 1], [1, 0]]


@pytest.mark.slow
@needs_chromium
def test_lines_of_a_prompt_stay_in_the_command_by_a_file(tmp_path: Path, show: Callable[[str], LivePage]) -> None:
    run = write_run(tmp_path / "run", [written(0, 0, "an answer", prompt="two\n\tlines")])
    page = show(f"{build_gallery(run).as_uri()}#pictures?open=0.0")
    assert page.value("document.querySelector('pre.command').textContent").endswith(" --file prompt.jsonl")
    (tmp_path / "prompt.jsonl").write_text(saved(page, "Save the prompt"), encoding="utf-8")
    [row] = read_prompts(str(tmp_path / "prompt.jsonl"))
    assert row.text == "two\n\tlines"


@pytest.mark.slow
@needs_chromium
def test_a_word_of_an_earlier_message_is_found(run: Path, show: Callable[[str], LivePage]) -> None:
    page = show(f"{build_gallery(run).as_uri()}#pictures?q=know+dogs")
    assert page.value("cards.shown.length") == 1
