"""The page in a browser, where there is one: what its script makes of real data."""

import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.gallery.build import build_gallery
from flowgrpo.gallery.exports import write_single
from flowgrpo.training.folder.run_folder import RunFolder
from tests.gallery.folders import HOSTILE, Elements, add_records, record, write_run, written

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to open pages with")
pytestmark = [pytest.mark.slow, needs_chromium]


class Page(Elements):
    """The document after its script has run."""

    @property
    def cards(self) -> list[str]:
        """Prompts of the cards, from first to last."""
        found = zip(self.tags, self.texts)
        return [text for (tag, has), text in found if tag == "button" and has.get("class") == "prompt"]

    @property
    def pictures(self) -> list[str]:
        """Sources of the images."""
        return [str(has["src"]) for tag, has in self.tags if tag == "img"]

    @property
    def shown(self) -> dict[str, str]:
        """Text of the elements that have an id."""
        return {str(has["id"]): text for (_, has), text in zip(self.tags, self.texts) if "id" in has}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture
def see(profile: Path) -> Callable[..., Page]:
    def see(address: str, budget: int = 3000) -> Page:
        assert CHROMIUM is not None
        words = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
            f"--virtual-time-budget={budget}", "--window-size=1200,3000", "--dump-dom", address,
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
        page = Page(done.stdout)
        assert "hidden" in next(has for _, has in page.tags if has.get("id") == "fault"), page.shown["fault"]
        return page

    return see


def scored(iteration: int, prompt: int, gold: float, proxy: float, **changes: Any) -> dict[str, Any]:
    rewards = {"gold": gold, "proxy": proxy}
    return record(iteration, prompt, 0, gold, rewards=rewards, prompt=f"prompt {prompt} {HOSTILE}", **changes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Gains by prompt: gold -0.1, 0.3, -0.4; proxy 0.4, 0.5, 0.3."""
    gains = {1: (-0.1, 0.4), 2: (0.3, 0.5), 3: (-0.4, 0.3)}
    skills = {1: "colour", 2: "count", 3: "count"}
    records = [
        scored(at, prompt, 0.5 + at / 10 * gold, 0.4 + at / 10 * proxy, columns={"skill": skills[prompt]},
               notes={"gold": f"note {prompt} {HOSTILE}"})
        for at in (0, 5, 10)
        for prompt, (gold, proxy) in gains.items()
    ]  # fmt: skip
    records += [record(0, 1, seed, seed / 4, phase="train", path=[[2, seed // 2], [4, seed % 2]]) for seed in range(4)]
    steps = {"2": {"log_ratio_mean": 0.0, "log_ratio_var": 0.1, "clip_share": 0.2}}
    metrics = [
        {"iteration": at, "reward/gold": 0.1 * at, "time/denoiser": 2.0, "eval/gold": 0.2, "steps": steps}
        for at in range(11)
    ]
    return write_run(tmp_path / "run", records, metrics, name=f"run {HOSTILE}")


def numbers(cards: list[str]) -> list[str]:
    return [card.split()[1] for card in cards]


def test_base_and_tuned_stand_side_by_side_and_nothing_runs(run: Path, see: Callable[..., Page]) -> None:
    page = see(build_gallery(run).as_uri())
    assert page.cards == [f"prompt {number} {HOSTILE}" for number in (2, 1, 3)]
    assert len(page.pictures) == 6
    assert all(re.fullmatch(r"thumbs/[0-9a-f]{2}/[0-9a-f]{22}\.webp", source) for source in page.pictures)
    assert page.shown["count"] == "3 pairs"
    assert page.shown["name"] == f"run {HOSTILE}"
    assert f"note 2 {HOSTILE}" in page.written
    assert [tag for tag, _ in page.tags].count("script") == 1  # our own; neither data nor prompts left any
    assert not [key for _, has in page.tags for key in has if key.startswith("on")]


@pytest.mark.parametrize(
    ("view", "cards"),
    [
        ("reward=proxy&sort=cheating", "312"),
        ("reward=proxy&show=cheating&sort=file", "13"),
        ("c.skill=count", "23"),
        ("q=NOTE+3", "3"),
        ("min=0.45&sort=low", "2"),
        ("b=0.5&show=lost", "13"),
    ],
)
def test_a_link_is_a_view(run: Path, see: Callable[..., Page], view: str, cards: str) -> None:
    page = see(f"{build_gallery(run).as_uri()}#pictures?{view}")
    assert numbers(page.cards) == list(cards)


@pytest.mark.parametrize(
    ("view", "found"), [("slider", ("range", 3)), ("blink", ("blink", 3)), ("training", ("many", 3))]
)
def test_ways_to_compare(run: Path, see: Callable[..., Page], view: str, found: tuple[str, int]) -> None:
    page = see(f"{build_gallery(run).as_uri()}#pictures?view={view}")
    marks = [f"{has.get('class', '')} {has.get('type', '')}".split() for _, has in page.tags]
    assert sum(found[0] in words for words in marks) == found[1]
    assert len(page.pictures) == (9 if view == "training" else 6)


def test_a_picture_has_all_that_is_known_of_it(run: Path, see: Callable[..., Page]) -> None:
    page = see(f"{build_gallery(run).as_uri()}#pictures?open=0.1")
    assert "open" in next(has for _, has in page.tags if has.get("id") == "picture")
    assert page.shown["picture-title"] == f"prompt 2 {HOSTILE}"
    text = page.written
    for part in ("gold / dense", f"note 2 {HOSTILE}", "Through training", "Make it again", "-- 'prompt 2"):
        assert part in text
    # An evaluation after training: the trained weights, called as the run calls them.
    assert f"flowgrpo sample --model '{run}'" in text
    assert "the final weights of the run" in text
    assert not {"--base", "--steps"} & set(text.split())
    assert "../samples/iter-000010/eval-2-0-0.png" in page.pictures


def test_a_training_sample_has_its_group_and_tree(run: Path, see: Callable[..., Page]) -> None:
    page = see(f"{build_gallery(run).as_uri()}#pictures?phase=train&open=0.5.0")
    assert len(page.cards) == 4
    text = page.written
    assert "The 4 samples of this prompt" in text
    # Rewards 0, 1/4 below one branch and 2/4, 3/4 below the other.
    for part in ("from the start: mean 0.375 of 4", "from step 2: mean 0.125 of 2", "from step 2: mean 0.625 of 2"):
        assert part in text


def test_results_show_gains_curves_and_times(run: Path, see: Callable[..., Page]) -> None:
    page = see(f"{build_gallery(run).as_uri()}#results?axis=time")
    text = page.written
    for part in ("Held-out rewards", "clip share", "how far images differ", "Where time went", "denoiser 100 %"):
        assert part in text
    labels = [str(has.get("aria-label")) for tag, has in page.tags if tag == "svg"]
    assert (
        "gold. training: 0.000 to 1.000 over 11 values; held-out: 0.200 to 0.200 over 11 values. Arrow keys read "
        in ("\n".join(labels).replace("single values.", ""))
    )


def test_runs_stand_against_each_other(run: Path, tmp_path: Path, see: Callable[..., Page]) -> None:
    records = [scored(at, prompt, 0.9, 0.1) | {"prompt_id": prompt + 40} for at in (0, 10) for prompt in (1, 2)]
    other = write_run(tmp_path / "other", records, name="other")
    page = see(f"{build_gallery([run, other], tmp_path / 'site').as_uri()}#pictures?view=runs&sort=file")
    assert numbers(page.cards) == ["1", "2"]
    assert len(page.pictures) == 6  # base, and the last of both runs
    assert "other, iteration 10" in page.written


def test_single_file_needs_nothing_beside_it(run: Path, tmp_path: Path, see: Callable[..., Page]) -> None:
    single = write_single([run], tmp_path / "alone" / "one.html")
    page = see(single.as_uri())
    assert numbers(page.cards) == ["2", "1", "3"]
    assert len(page.pictures) == 6
    assert all(source.startswith("data:image/webp;base64,UklGR") for source in page.pictures)


def test_a_single_file_plays_its_sounds(tmp_path: Path, see: Callable[..., Page]) -> None:
    folder = RunFolder.create(tmp_path / "run", "name: heard\n")
    for iteration in (0, 4):
        record = {"prompt": "a hum", "prompt_id": 0, "seed": 0, "sample": 0, "sampling_rate": 8000, "rewards": {},
                  "sub_scores": {}, "notes": {}, "columns": {}}  # fmt: skip
        folder.save_samples("eval", iteration, torch.rand(1, 1, 800), [record])
    page = see(write_single([tmp_path / "run"], tmp_path / "alone" / "one.html").as_uri())
    players = [str(attributes["src"]) for tag, attributes in page.tags if tag == "audio"]
    assert len(players) == 2
    assert all(source.startswith("data:audio/wav;base64,UklGR") for source in players)
    assert page.shown["to-pictures"] == "Sounds"


def test_completions_are_compared_word_by_word(tmp_path: Path, see: Callable[..., Page]) -> None:
    texts = {0: f"one two three {HOSTILE}", 5: f"one two four {HOSTILE}"}
    run = write_run(tmp_path / "run", [written(at, 1, text) for at, text in texts.items()])
    page = see(build_gallery(run).as_uri())
    marked = [text for (tag, _), text in zip(page.tags, page.texts) if tag == "mark"]
    assert marked == ["three", "four"]
    assert "img" not in [tag for tag, _ in page.tags]
    assert [tag for tag, _ in page.tags].count("script") == 1


def test_the_steps_of_unmasking_are_listed(tmp_path: Path, see: Callable[..., Page]) -> None:
    steps = ["__", f"{HOSTILE}_", f"{HOSTILE}7"]
    run = write_run(tmp_path / "run", [written(at, 1, steps[-1], steps=steps) for at in (0, 5)])
    page = see(build_gallery(run).as_uri())
    listed = [text for (tag, _), text in zip(page.tags, page.texts) if tag == "bdi" and text in steps]
    assert listed == steps * 2
    assert [text for (tag, _), text in zip(page.tags, page.texts) if tag == "summary"].count("Unmasked in 3 steps") == 2
    assert [tag for tag, _ in page.tags].count("script") == 1


def test_a_spoiled_folder_says_what_to_do(run: Path, see: Callable[..., Page]) -> None:
    page = build_gallery(run)
    (page.parent / "data" / "r0-pairs.js").unlink()
    with pytest.raises(AssertionError, match=r"r0-pairs\.js cannot be read"):
        see(page.as_uri())


@pytest.fixture
def serve() -> Iterator[Callable[[Path, Callable[[], None]], str]]:
    """Serves a folder on this machine; calls a function before the list of files is read the second time."""
    servers: list[ThreadingHTTPServer] = []

    def serve(folder: Path, between: Callable[[], None]) -> str:
        asked: list[str] = []

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                if "/data/site.js" in self.path:
                    asked.append(self.path)
                    if len(asked) == 2:
                        between()
                super().do_GET()

            def log_message(self, *words: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/gallery/index.html"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_page_of_a_live_run_follows_it(run: Path, see: Callable[..., Page], serve: Callable[..., str]) -> None:
    build_gallery(run, live=True)

    def go_on() -> None:
        add_records(run, [scored(20, 3, 0.99, 0.99), scored(0, 4, 0.5, 0.5), scored(20, 4, 0.1, 0.5)])
        build_gallery(run)

    page = see(serve(run, go_on), budget=12_000)
    assert numbers(page.cards) == ["3", "4"]  # those of the newest evaluation
    assert "iteration 20" in page.written
    assert "hidden" in next(has for _, has in page.tags if has.get("id") == "live")
