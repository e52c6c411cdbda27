"""The page in a browser that goes on living: videos play, favourites and notes stay."""

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.gallery.build import build_gallery
from flowgrpo.gallery.exports import write_single
from flowgrpo.media.video import can_encode
from flowgrpo.training.data import read_prompts
from tests.gallery.browser import LivePage
from tests.gallery.folders import HOSTILE, record, write_films, write_run
from tests.gallery.test_browser import CHROMIUM, needs_chromium

pytestmark = [pytest.mark.slow, needs_chromium]
needs_av = pytest.mark.skipif(not can_encode(), reason="the package av is not installed")
STARS = "[...document.querySelectorAll('#pairs .star')].map(star => star.getAttribute('aria-pressed'))"
FAULT = "document.getElementById('fault').hidden ? '' : document.getElementById('fault').textContent"
SAVED = """(() => {
  window.saved = [];
  URL.createObjectURL = (blob) => { window.saved.push(blob); return 'blob:none'; };
  HTMLAnchorElement.prototype.click = function () {};
})()"""
Show = Callable[..., LivePage]


@pytest.fixture
def show(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Show]:
    """Opens a page in a browser with a profile of its own."""
    pages: list[LivePage] = []

    def show(address: str, width: int = 1200) -> LivePage:
        assert CHROMIUM is not None
        pages.append(LivePage(CHROMIUM, tmp_path_factory.mktemp("profile"), address, width))
        return pages[-1]

    yield show
    for page in pages:
        page.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = [
        record(at, prompt, 0, at * prompt / 100, prompt=f"prompt {prompt} {HOSTILE}", columns={"skill": f"s{prompt}"})
        for at in (0, 10)
        for prompt in (1, 2, 3)
    ]
    return write_run(tmp_path / "run", records, name="marked")


def press(page: LivePage, selector: str, at: int = 0) -> None:
    page.value(f"document.querySelectorAll({json.dumps(selector)})[{at}].click()")


def press_named(page: LivePage, text: str) -> None:
    page.value(f"[...document.querySelectorAll('button')].find(one => one.textContent === {json.dumps(text)}).click()")


def write_note(page: LivePage, at: int, text: str) -> None:
    press(page, "#pairs .own-note", at)
    page.value(
        "(() => { const field = document.querySelector('#pairs textarea');"
        f"field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input')); field.blur(); }})()"
    )


def saved(page: LivePage, button: str) -> str:
    """The text of the file that a button saves."""
    page.value(SAVED)
    press_named(page, button)
    return str(page.value("window.saved[0].text()"))


@needs_av
@pytest.mark.parametrize("single", [False, True])
def test_a_video_plays(tmp_path: Path, show: Show, single: bool) -> None:
    run = write_films(tmp_path / "run")
    file = write_single([run], tmp_path / "one.html") if single else build_gallery(run)
    page = show(file.as_uri())
    found = page.value(
        "[...document.querySelectorAll('#pairs video')].map(v => [v.muted, v.loop, v.playsInline, v.controls])"
    )
    assert found == [[True, True, True, True]] * 4
    seconds = page.value(
        "new Promise((done, fail) => { const video = document.querySelector('#pairs video');"
        "video.addEventListener('error', () => fail(video.error.message));"
        "setTimeout(() => fail('the video stands still'), 20000);"
        "const see = () => (video.currentTime > 0.2 ? done(video.currentTime) : requestAnimationFrame(see)); see(); })"
    )
    assert 0.2 < seconds <= 12 / 16
    # 16 × 12 pixels, shown as large as the card allows and with sharp pixels.
    size = page.value(
        "(() => { const video = document.querySelector('#pairs video');"
        "return [video.videoWidth, video.getBoundingClientRect().width, getComputedStyle(video).imageRendering] })()"
    )
    assert size[0] == 256
    assert size[1] > 180
    assert size[2] == "pixelated"
    assert page.value("document.getElementById('facts').textContent").startswith("recipe flow_grpo4 videos") is True
    assert page.value(FAULT) == ""


@needs_av
def test_a_video_that_is_missing_shows_its_first_frame(tmp_path: Path, show: Show) -> None:
    file = build_gallery(write_films(tmp_path / "run"))
    for video in file.parent.glob("videos/*/*.webm"):
        video.unlink()
    page = show(file.as_uri())
    page.value(
        "new Promise(done => { const see = () => (document.querySelectorAll('#pairs video').length"
        " ? requestAnimationFrame(see) : done(true)); see(); })"
    )
    assert page.value("document.querySelectorAll('#pairs img').length") == 4


def test_favourites_and_notes_stay_and_can_be_looked_for(run: Path, show: Show) -> None:
    address = build_gallery(run).as_uri()
    page = show(address)
    press(page, "#pairs .star", 1)
    write_note(page, 0, f"note {HOSTILE}")
    page.open(address)
    assert page.value(STARS) == ["false", "true", "false"]
    assert page.value("document.querySelector('#pairs .own-note').textContent") == f"note {HOSTILE}"
    shown = "[...document.querySelectorAll('#pairs .prompt')].map(one => one.textContent.slice(0, 8))"
    for query, cards in (("mine=starred", ["prompt 2"]), ("mine=noted", ["prompt 3"]), ("q=note+%3C", ["prompt 3"])):
        page.open(f"{address}#pictures?{query}")
        assert page.value(shown) == cards, (query, page.value("document.querySelector('main').innerText"))
    # The same run in another gallery, with another run beside it.
    rows = [record(at, prompt, 0, 0.5, prompt=f"prompt {prompt} {HOSTILE}") for at in (0, 10) for prompt in (1, 2)]
    other = write_run(run.parent / "other", rows, name="other")
    page.open(f"{build_gallery([run, other], run.parent / 'both').as_uri()}#pictures?mine=starred")
    assert page.value(shown) == ["prompt 2"]


def test_marks_go_to_a_file_and_back_and_nothing_is_lost(run: Path, show: Show) -> None:
    address = build_gallery(run).as_uri()
    page = show(address)
    press(page, "#pairs .star", 0)
    write_note(page, 0, "mine")
    file = saved(page, "Save to a file")
    (kept,) = json.loads(file)["runs"]
    assert kept["name"] == "marked"
    assert [(mark["prompt"][:8], mark["favourite"], mark["note"]) for mark in kept["marks"]] == [
        ("prompt 3", True, "mine")
    ]

    fresh = show(address)
    write_note(fresh, 0, "theirs")
    press(fresh, "#pairs .star", 1)
    assert fresh.value(f"addMarks({json.dumps(file)})") == "1 mark read"
    assert fresh.value(STARS) == ["true", "true", "false"]
    assert set(fresh.value("document.querySelector('#pairs .own-note').textContent").split("\n")) == {"mine", "theirs"}
    assert fresh.value(f"addMarks({json.dumps(file)})") == "1 mark read"
    assert len(fresh.value("document.querySelector('#pairs .own-note').textContent").split("\n")) == 2
    other = file.replace(kept["id"], "0" * 16).replace('"marked"', '"another"')
    assert fresh.value(f"addMarks({json.dumps(other)})").endswith("1 mark of other runs kept for their galleries")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"flowgrpo": "marks"}', '{"flowgrpo": "votes", "runs": []}'])
def test_another_file_is_refused(run: Path, show: Show, text: str) -> None:
    page = show(build_gallery(run).as_uri())
    call = f"(() => {{ try {{ return addMarks({json.dumps(text)}) }} catch (error) {{ return error.message }} }})()"
    assert page.value(call).startswith("This is no file of favourites and notes.")


def test_hostile_marks_do_nothing(run: Path, show: Show) -> None:
    page = show(build_gallery(run).as_uri())
    mark = {"prompt": f"prompt 1 {HOSTILE}", "seed": "0", "phase": "eval", "favourite": "yes", "note": {"toString": 1}}
    odd = [None, 3, {"id": 3}, {"id": "a", "marks": [None, {"prompt": 3}, mark, {**mark, "__proto__": {"star": True}}]}]
    file = json.dumps({"flowgrpo": "marks", "runs": [*odd, {"id": "__proto__", "name": "marked", "marks": [mark]}]})
    assert page.value(f"addMarks({json.dumps(file)})").startswith("1 mark read")
    page.open(page.value("location.href"))
    assert page.value(STARS) == ["false"] * 3
    page.value("localStorage.setItem('flowgrpo-marks ' + store.site.runs[0].id, '{broken')")
    page.open(page.value("location.href"))
    assert page.value(FAULT) == ""


def test_several_cards_are_chosen_at_once(run: Path, show: Show) -> None:
    page = show(build_gallery(run).as_uri())
    for at in (0, 2):
        press(page, "#pairs .pick", at)
    assert page.value("document.querySelector('#chosen strong').textContent") == "2 chosen"
    press_named(page, "Make favourites")
    assert page.value(STARS) == ["true", "false", "true"]
    (run / "chosen.jsonl").write_text(saved(page, "Save as a prompt file"), encoding="utf-8")
    rows = read_prompts(str(run / "chosen.jsonl"))
    assert [row.text for row in rows] == [f"prompt {number} {HOSTILE}" for number in (3, 1)]
    assert [(row.columns["skill"], row.columns["favourite"]) for row in rows] == [("s3", True), ("s1", True)]
    page.value("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    press_named(page, "Copy prompts")
    assert len(page.value("window.copied").split("\n")) == 2
    press_named(page, "Choose all")
    assert page.value("document.querySelector('#chosen strong').textContent") == "3 chosen"
    press_named(page, "Choose none")
    assert page.value("document.getElementById('chosen').hidden")


def test_the_bounds_say_which_score_they_bound(run: Path, show: Show) -> None:
    page = show(build_gallery(run).as_uri())
    labels = "[...document.querySelectorAll('#controls label > span')].map(one => one.textContent)"
    assert page.value(labels)[-2:] == ["gold from", "gold to"]
    assert "" not in page.value(labels)


def test_charts_that_are_flat_are_words(tmp_path: Path, show: Show) -> None:
    records = [record(at, 1, 0, 0.5) for at in (0, 10)]
    on_policy = {"ratio_mean": 1.0, "clip_share": 0.0, "log_ratio_mean": 0.0, "log_ratio_var": 0.0, "approx_kl": 0.0}
    metrics: list[dict[str, Any]] = [
        {"iteration": at, "ratio/mean": 1.0, "clip_share": 0.0, "grad_norm": 0.1 * at, "reward/gold": 0.1 * at,
         "reward/total": 0.1 * at, "eval/gold": 0.5, "steps": {"0": on_policy, "1": on_policy}}
        for at in range(11)
    ]  # fmt: skip
    page = show(f"{build_gallery(write_run(tmp_path / 'run', records, metrics)).as_uri()}#results")
    drawn = page.value("[...document.querySelectorAll('#view-results .chart strong')].map(one => one.textContent)")
    assert "grad_norm" in drawn
    assert "gold" in drawn  # a reward that does not move is a result, not a matter of course
    assert not {"total", "ratio/mean − 1", "clip_share", "mean ratio − 1", "clip share", "mean log-ratio"} & set(drawn)
    words = page.value("[...document.querySelectorAll('.still span')].map(one => one.textContent)")
    assert {"ratio/mean − 1 0.000", "clip_share 0.000", "clip share 0.000", "mean log-ratio 0.000"} <= set(words)


@pytest.mark.parametrize("relative", [False, True])
def test_the_command_to_make_a_picture_again_names_the_right_folders(
    run: Path, show: Show, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    start = run.parent / "it's here"
    (start / "model").mkdir(parents=True)
    monkeypatch.chdir(start)
    model = "model" if relative else "scenes"
    (run / "config.yaml").write_text(json.dumps({"name": "marked", "model": {"path": model}}))
    for out in (None, run.parent / "a site"):
        page = show(f"{build_gallery(run, out).as_uri()}#pictures?open=0.0")
        words = shlex.split(page.value("document.querySelector('.command').textContent"))
        assert words[: 3 if relative else 0] == (["cd", str(start), "&&"] if relative else [])
        assert words[words.index("--model") + 1] == str(run)
        assert words[-2:] == ["--", f"prompt 1 {HOSTILE}"]
    assert str(run.parent) not in "".join(file.read_text() for file in (run / "gallery" / "data").iterdir())


def test_a_narrow_page_does_not_scroll_sideways(run: Path, show: Show) -> None:
    page = show(build_gallery(run).as_uri(), width=400)
    press(page, "#pairs .pick")
    assert page.value("document.documentElement.scrollWidth <= innerWidth")


def keys(page: LivePage, *names: str) -> None:
    """Press keys, one after another."""
    for name in names:
        code = {"Escape": 27, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, " ": 32}.get(name, ord(name[0].upper()))
        text = {"Enter": "\r"}.get(name, name if len(name) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            page.tell(
                "Input.dispatchKeyEvent",
                type=kind,
                key=name,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )


FOCUS = "document.activeElement.textContent"
HASH = "location.hash"


def test_the_focus_stays_where_a_person_works(run: Path, show: Show) -> None:
    page = show(build_gallery(run).as_uri())
    before, length = page.value(HASH), page.value("history.length")
    titles = page.value("[...document.querySelectorAll('#pairs .prompt')].map(one => one.textContent)")
    press(page, "#pairs .prompt")
    page.wait("document.getElementById('picture').open")
    page.value("[...document.querySelectorAll('#picture button')].find(one => one.textContent === 'Next').focus()")
    keys(page, "Enter")
    page.wait(f"document.getElementById('picture-title').textContent === {json.dumps(titles[1])}")
    assert page.value(FOCUS) == "Next"
    keys(page, "Enter")
    page.wait(f"document.getElementById('picture-title').textContent === {json.dumps(titles[2])}")
    assert page.value(FOCUS) == "Previous"  # there is no next picture
    keys(page, "Escape")
    page.wait("!document.getElementById('picture').open")
    page.wait(f"{HASH} === {json.dumps(before)}")
    assert page.value(FOCUS) == titles[2]
    # The pictures of a group have places of their own in the history, and closing takes all of them back.
    for _ in range(2):
        page.value("openPicture(cards.shown[0][0].key); openPicture(cards.shown[1][0].key)")
        page.wait(f"document.getElementById('picture-title')?.textContent === {json.dumps(titles[1])}")
        keys(page, "Escape")
        page.wait(f"{HASH} === {json.dumps(before)} && history.state === null")
    assert page.value("history.length") == length + 2  # what is ahead of the place, as after going back


def test_a_card_with_the_focus_is_not_behind_a_bar(tmp_path: Path, show: Show) -> None:
    records = [
        record(at, prompt, 0, at * prompt / 100, prompt=f"prompt {prompt}") for at in (0, 10) for prompt in range(40)
    ]
    page = show(build_gallery(write_run(tmp_path / "run", records)).as_uri())
    seen = (
        "(() => { const box = document.activeElement.getBoundingClientRect();"
        "return document.elementFromPoint(box.x + 5, box.y + box.height / 2) === document.activeElement; })()"
    )
    press(page, "#pairs .pick")
    for name in [*"j" * 30, *"k" * 25]:
        keys(page, name)
        assert page.value(f"document.activeElement.className === 'prompt' && {seen}"), name


def test_the_strip_of_samples_is_closed_and_has_the_scores_of_its_chart(tmp_path: Path, show: Show) -> None:
    records = [record(at, 1, 0, 0.5, rewards={"gold": at / 10, "proxy": 0.25}) for at in (0, 10)]
    metrics = [{"iteration": at, "eval/gold": at / 10, "eval/proxy": 0.1 * at} for at in (0, 10)]
    page = show(f"{build_gallery(write_run(tmp_path / 'run', records, metrics)).as_uri()}#results")
    page.value(
        "[...document.querySelectorAll('.chart svg')]"
        ".find(one => one.getAttribute('aria-label').startsWith('proxy.')).focus()"
    )
    keys(page, "ArrowRight")
    page.wait("!document.getElementById('peek').hidden")
    assert page.value("document.querySelector('#peek figcaption').textContent") == "0.250"
    keys(page, "Escape")
    assert page.value("document.getElementById('peek').hidden")
    keys(page, "ArrowRight")
    page.wait("!document.getElementById('peek').hidden")
    press_named(page, "Close")
    assert page.value("document.getElementById('peek').hidden")


def test_lone_values_are_seen_and_few_values_have_bins_of_their_own(tmp_path: Path, show: Show) -> None:
    records = [record(at, prompt, 0, prompt % 2, prompt=f"prompt {prompt}") for at in (0, 10) for prompt in range(4)]
    records += [record(0, 1, seed, 1.0, phase="train") for seed in range(2)]
    norms = {0: 0.3, 1: 0.4, 5: 0.8}
    metrics = [
        {"iteration": at, "reward/gold": 0.5} | ({"grad_norm": norms[at]} if at in norms else {}) for at in range(8)
    ]
    run = write_run(tmp_path / "run", records, metrics, run={"iterations": 12})
    page = show(f"{build_gallery(run).as_uri()}#results")
    chart = "[...document.querySelectorAll('.chart')].find(one => one.textContent.startsWith({}))"
    assert page.value(f"{chart.format(json.dumps('grad_norm'))}.querySelectorAll('circle').length") == 1
    bins = (
        f"[...{chart.format(json.dumps('gold, share'))}.querySelectorAll('.bin')]"
        ".map(one => one.getAttribute('aria-label'))"
    )
    assert [label.split(":")[0] for label in page.value(bins)] == ["0.000", "1.000"]
    labels = (
        f"[...{chart.format(json.dumps('gold, share'))}.querySelectorAll('.axes text')].map(one => one.textContent)"
    )
    assert page.value(labels)[-2:] == ["0.000", "1.000"]
    assert "One value so far: " in page.value("document.getElementById('view-results').textContent")
    assert "8 of 12 iterations done" in page.value("document.getElementById('facts').textContent")
    page.value(f"{chart.format(json.dumps('gold, share'))}.querySelectorAll('.bin')[1].focus()")
    keys(page, " ")
    page.wait("location.hash.startsWith('#pictures')")
    assert page.value("cards.shown.map(([row]) => row.prompt)") == ["prompt 1", "prompt 3"]


def test_the_weights_that_a_run_left_are_named(tmp_path: Path, show: Show) -> None:
    records = [record(at, 1, 0, at / 10) for at in (0, 5, 10)]
    run = write_run(tmp_path / "run", records, evaluate={"results": "best"})
    (run / "best.json").write_text('{"iteration": 5, "score": 0.5, "measure": {}}')
    page = show(f"{build_gallery(run).as_uri()}#results")
    assert "The weights that the run left are those of iteration 5" in page.value("document.body.textContent")
    page.open(f"{build_gallery(run).as_uri()}#pictures?open=0.0")
    words = page.value("document.querySelector('.command').parentElement.textContent")
    assert "with the weights that the run left, of iteration 5, not the weights of this evaluation" in words


@pytest.mark.parametrize(("given", "shown"), [("0,25", 1), ("0.25", 1), ("", 3)])
def test_a_comma_is_a_point(run: Path, show: Show, given: str, shown: int) -> None:
    page = show(f"{build_gallery(run).as_uri()}#pictures?min={given}")
    assert page.value("cards.shown.length") == shown


def test_an_empty_prompt_has_a_name(tmp_path: Path, show: Show) -> None:
    page = show(build_gallery(write_run(tmp_path / "run", [record(0, 1, 0, 0.5, prompt=" ")])).as_uri())
    assert page.value("document.querySelector('#pairs .prompt').textContent") == "(empty prompt)"
