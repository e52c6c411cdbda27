"""`flowgrpo rewards score`: samples that exist already get the scores that a run would have given them."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.kit import given_samples as module
from flowgrpo.kit.folder import LabelledPicture
from flowgrpo.kit.given_samples import given_samples, score_samples
from flowgrpo.rewards.base import RewardError, RewardSpec
from flowgrpo.training.folder.run_folder import RunFolder, save_image
from flowgrpo.training.session import Session
from tests.kit.test_folder import paint


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def listed(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def text_run(random_language_folder: Path, tmp_path: Path) -> Path:
    """A run of two iterations with two evaluations, scored by digits."""
    words = [f"model.path={random_language_folder}", "rollout={prompts: 2, group: 4, batch: 8}", "data.heldout=null"]
    words += ["run={iterations: 2, sample_every: 1}", "rewards=[{name: digit_share}]", "generation.max_tokens=6"]
    recipe = load_recipe("text", words)
    folder = RunFolder.create(tmp_path / "run", dump_recipe(recipe))
    Session(recipe, folder).trainer(Silent()).train()
    return folder.path


@pytest.mark.slow
def test_samples_of_a_run_get_their_scores_again_and_further_ones(text_run: Path, tmp_path: Path) -> None:
    before = lines_of(text_run / "samples" / "index.jsonl")
    given, out = given_samples(text_run), tmp_path / "scores.jsonl"
    said: list[str] = []
    found = score_samples([RewardSpec("digit_share"), RewardSpec("answer")], given, out, said.append)
    after = lines_of(out)
    assert len(after) == len(before) == 16
    for old, new in zip(before, sorted(after, key=after.index)):
        assert new["rewards"].keys() == {"digit_share", "answer"}
        assert new["notes"]["answer"].startswith("answer: ")
        assert {k: v for k, v in new.items() if k not in ("rewards", "sub_scores", "notes")} == {
            k: v for k, v in old.items() if k not in ("rewards", "sub_scores", "notes")
        }
    assert [one["rewards"]["digit_share"] for one in after] == [one["rewards"]["digit_share"] for one in before]
    assert list(found) == ["train, after 0 iterations: ", "train, after 1 iterations: "]
    first = torch.tensor([one["rewards"]["digit_share"] for one in before[:8]])
    mean, error, count = found["train, after 0 iterations: "]["digit_share"]
    assert (mean, count) == (pytest.approx(float(first.mean())), 8)
    # Two prompts with four completions each.
    apart = first.view(2, 4).mean(1)
    assert error == pytest.approx(float(apart.std()) / 2**0.5)
    assert said[-1].startswith("16 of 16 samples")


def test_pictures_of_a_folder_are_scored_by_their_names(tmp_path: Path) -> None:
    for k, colour in enumerate(("red", "blue", "red")):
        paint(tmp_path / "shown" / f"a_{colour}_thing-{k}.png", colour, size=(8 + k, 4))
    out = tmp_path / "scores.jsonl"
    found = score_samples([RewardSpec("jpeg_compressibility")], given_samples(tmp_path / "shown"), out)
    assert list(found) == [""]
    assert found[""]["jpeg_compressibility"][2] == 3
    after = lines_of(out)
    assert [one["prompt"] for one in after] == ["a blue thing", "a red thing", "a red thing"]
    assert all((tmp_path / one["image"]).is_file() and one["rewards"]["jpeg_compressibility"] < 0 for one in after)
    assert [one.made.path.name for one in given_samples(out)] == [Path(one["image"]).name for one in after]


def test_a_video_is_scored_as_a_video(tmp_path: Path) -> None:
    video = torch.rand(3, 3, 4, 8, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    save_image(tmp_path / "v.png", video)
    listed(tmp_path / "index.jsonl", {"image": "v.png", "prompt": "p", "frames": 3, "columns": {"image": "other.png"}})
    (tmp_path / "reward.py").write_text(
        "def spread(images, prompts, image):\n"
        "    assert image == ['other.png'] and images.shape == (1, 3, 3, 4, 8)\n"
        "    return images.std(1).mean(dim=(1, 2, 3))\n"
        "spread.video = True\n"
    )
    (given,) = given_samples(tmp_path)
    assert given.columns == {"image": "other.png"}
    found = score_samples([RewardSpec(f"{tmp_path / 'reward.py'}:spread")], [given])
    assert found[""]["spread"][0] == pytest.approx(float(video.std(0).mean()), abs=1e-6)


def test_a_video_of_a_list_of_ones_own_is_scored_as_a_video(tmp_path: Path) -> None:
    paint(tmp_path / "strip.png", "red", size=(24, 4))
    (tmp_path / "reward.py").write_text("def length(images, prompts):\n    return [images.shape[1]] * len(images)\n")
    source = listed(tmp_path / "mine.jsonl", {"prompt": "p", "file_name": "strip.png", "frames": 12})
    out = tmp_path / "scores.jsonl"
    found = score_samples([RewardSpec(f"{tmp_path / 'reward.py'}:length")], given_samples(source), out)
    assert found[""]["length"][0] == 12
    assert [one.made.frames for one in given_samples(out)] == [12]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": "p", "file_name": "pictures/x.png", "tag": "a"}, "file_name"),
        (
            {"prompt": "p", "image": "./pictures/x.png", "columns": {"tag": "a"}, "phase": "eval", "iteration": 0,
             "pictures": ["pictures/y.png"]},
            "image",
        ),
    ],
)  # fmt: skip
def test_scores_in_another_folder_are_a_list_in_their_turn(
    row: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x", "y"):
        paint(tmp_path / "lists" / "pictures" / f"{name}.png", "red")
    source, spec = listed(tmp_path / "lists" / "list.jsonl", row), RewardSpec("jpeg_compressibility")
    beside, far = Path("lists/beside.jsonl"), Path("elsewhere/deep/far.jsonl")
    far.parent.mkdir(parents=True)
    score_samples([spec], given_samples(source), beside)
    assert {name: lines_of(beside)[0][name] for name in row} == row
    score_samples([spec], given_samples(Path("lists/list.jsonl")), far)
    (line,) = lines_of(far)
    assert line[key] == "../../lists/pictures/x.png"
    assert line.get("pictures") == (["../../lists/pictures/y.png"] if "pictures" in row else None)
    (again,) = given_samples(far)
    assert (again.made.path.resolve(), again.prompt, again.columns["tag"]) == (
        tmp_path / "lists" / "pictures" / "x.png", "p", "a",
    )  # fmt: skip
    absolute = listed(tmp_path / "lists" / "absolute.jsonl", {"prompt": "p", "file": str(again.made.path.resolve())})
    score_samples([spec], given_samples(absolute), far.with_name("second.jsonl"))
    assert lines_of(far.with_name("second.jsonl"))[0]["file"] == str(again.made.path.resolve())


def test_links_lead_to_the_pictures_also_from_scores_in_another_folder(tmp_path: Path) -> None:
    paint(tmp_path / "disk" / "deep" / "x.png", "red")
    (tmp_path / "disk" / "out").mkdir()
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "pictures").symlink_to(tmp_path / "disk" / "deep")
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    source = listed(tmp_path / "lists" / "list.jsonl", {"prompt": "p", "file_name": "pictures/x.png"})
    score_samples([RewardSpec("jpeg_compressibility")], given_samples(source), tmp_path / "out" / "scores.jsonl")
    assert lines_of(tmp_path / "out" / "scores.jsonl")[0]["file_name"] == "../deep/x.png"
    assert len(given_samples(tmp_path / "out" / "scores.jsonl")) == 1


def test_completions_of_another_program_are_scored_with_their_columns(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+2=", "completion": "3", "answer": "3", "model": "a"},
        {"prompt": "1+2=", "completion": "4", "answer": "3", "model": "a"},
        {"prompt": "2+2=", "completion": "4", "answer": "4", "model": "a"},
    ]
    given = given_samples(listed(tmp_path / "answers.jsonl", *rows))
    assert [one.columns for one in given] == [{"answer": row["answer"], "model": "a"} for row in rows]
    found = score_samples([RewardSpec("answer")], given, tmp_path / "scores.jsonl")
    assert found[""]["answer"][0] == pytest.approx(2 / 3)
    after = lines_of(tmp_path / "scores.jsonl")
    assert [one["rewards"]["answer"] for one in after] == [1.0, 0.0, 1.0]
    assert [{k: one[k] for k in rows[0]} for one in after] == rows


def test_groups_are_scored_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt's completions are compared with each other, whatever else is scored in the same call."""
    monkeypatch.setattr(module, "BATCH", 4)
    texts = ["7", "7", "8", "7", "8", "8", "7", "1", "1"]
    prompts = ["a", "b", "b", "a", "a", "b", "c", "c", "c"]
    rows = [{"prompt": p, "completion": t} for p, t in zip(prompts, texts)]
    given = given_samples(listed(tmp_path / "answers.jsonl", *rows))
    found = score_samples([RewardSpec("majority")], given, tmp_path / "scores.jsonl")
    after = {
        (one["prompt"], one["completion"]): one["rewards"]["majority"] for one in lines_of(tmp_path / "scores.jsonl")
    }
    winners = {("a", "7"), ("b", "8"), ("c", "1")}
    assert {key for key, score in after.items() if score == 1} == winners
    assert found[""]["majority"][0] == pytest.approx(6 / 9)


def test_what_was_scored_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    (tmp_path / "reward.py").write_text(
        "def picky(completions, prompts):\n"
        "    if 'bad' in completions:\n"
        "        raise RuntimeError('no such words')\n"
        "    return [1.0] * len(completions)\n"
    )
    rows = [{"prompt": f"p{k}", "completion": "bad" if k == 4 else "good"} for k in range(6)]
    given, said = given_samples(listed(tmp_path / "answers.jsonl", *rows)), list[str]()
    out = tmp_path / "scores.jsonl"
    with pytest.raises(RewardError, match=r"sample 4 \(prompt 'p4'\).*no such words"):
        score_samples([RewardSpec(f"{tmp_path / 'reward.py'}:picky")], given, out, said.append)
    assert len(lines_of(out)) == 4
    assert said[-1] == f"4 of 6 samples are scored in {out}"


def test_a_picture_that_cannot_be_scored_is_named_before_others_are(tmp_path: Path) -> None:
    for name, mode in (("a", "RGB"), ("b", "I;16")):
        paint(tmp_path / f"{name}.png", 70 if mode == "I;16" else "red", mode=mode)
    source = listed(tmp_path / "mine.jsonl", *({"prompt": name, "file_name": f"{name}.png"} for name in "ab"))
    with pytest.raises(ValueError, match=r"mine\.jsonl, line 2: .*b\.png has pixels of mode I(;16)?;"):
        given_samples(source)


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_was_scored_is_said_whatever_ends_it(
    interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    for k in range(3):
        paint(tmp_path / f"{k}.jpg", "red", (300, 300))
    # The header of a JPEG file that was cut short is whole.
    (tmp_path / "2.jpg").write_bytes((tmp_path / "2.jpg").read_bytes()[:-300])
    real = module.load

    def load(picture: LabelledPicture) -> Tensor:
        if interrupted and picture.prompt == "p2":
            raise KeyboardInterrupt
        return real(picture)

    monkeypatch.setattr(module, "load", load)
    source = listed(tmp_path / "mine.jsonl", *({"prompt": f"p{k}", "file_name": f"{k}.jpg"} for k in range(3)))
    said, out = list[str](), tmp_path / "scores.jsonl"
    with pytest.raises(KeyboardInterrupt if interrupted else ValueError):
        score_samples([RewardSpec("jpeg_compressibility")], given_samples(source), out, said.append)
    assert len(lines_of(out)) == 2
    assert said[-1] == f"2 of 3 samples are scored in {out}"


def test_the_command(tmp_path: Path, command: Any) -> None:
    listed(tmp_path / "answers.jsonl", {"prompt": "1+2=", "completion": "3", "answer": "3"})
    words = ("rewards", "score", "answer", "digit_share", "--samples", "answers.jsonl", "--out", "scores.jsonl")
    status, output, errors = command(*words)
    assert (status, errors) == (0, "")
    assert output.splitlines()[-3:] == [
        "answer: 1.0000 ± – (1 completion)", "digit_share: 1.0000 ± – (1 completion)", "written to scores.jsonl",
    ]  # fmt: skip
    status, _, errors = command(*words)
    assert (status, errors) == (1, "error: scores.jsonl exists; name another file with --out\n")


def test_options_of_the_command_reach_the_reward(tmp_path: Path, command: Any) -> None:
    listed(tmp_path / "answers.jsonl", {"prompt": "p", "completion": "x"})
    (tmp_path / "own.py").write_text("def own(completions, prompts, bonus=1.0):\n    return [bonus for _ in prompts]\n")
    for words in (("own.py:own", "--options", "bonus=7"), ("{name: 'own.py:own', options: {bonus: 7}}",)):
        status, output, _ = command("rewards", "score", *words, "--samples", "answers.jsonl")
        assert (status, output.splitlines()[-1]) == (0, "own: 7.0000 ± – (1 completion)")


def test_samples_that_are_not_there_are_said_with_what_they_may_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*answer\.jsonl; give a run folder, .* or a list of samples"):
        given_samples(tmp_path / "answer.jsonl")


def test_a_reward_that_applies_to_nothing_says_so(tmp_path: Path, command: Any) -> None:
    listed(tmp_path / "answers.jsonl", {"prompt": "p", "completion": "x"})
    (tmp_path / "never.py").write_text("def never(completions, prompts):\n    return [None] * len(completions)\n")
    status, output, _ = command("rewards", "score", "never.py:never", "--samples", "answers.jsonl")
    assert (status, output.splitlines()[-1]) == (0, "never: applies to no completion")


@pytest.mark.parametrize(
    ("rows", "reward", "said"),
    [
        ([{"prompt": "p", "text": "x"}], "answer", "has neither a text in a column `completion` nor a picture"),
        ([{"prompt": "p", "completion": "x"}], "answer", "takes `answer`, which the prompts do not have"),
        ([{"prompt": "p", "completion": "x"}], "gold", "but the samples here are completions; choose"),
        ([{"prompt": "p", "file_name": "no.png"}], "gold", "there is no file"),
        (
            [{"prompt": "p", "completion": "x"}, {"prompt": "p", "file_name": "x.png"}], "gold",
            "has completions and pictures; put them into lists of their own",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused(rows: list[dict[str, Any]], reward: str, said: str, tmp_path: Path) -> None:
    paint(tmp_path / "x.png", "red")
    source = listed(tmp_path / "given.jsonl", *rows)
    with pytest.raises(ValueError, match=said):
        score_samples([RewardSpec(reward)], given_samples(source))


@pytest.mark.parametrize(
    ("name", "said"),
    [("x.png", "is one picture; name its folder, or a list"), ("x.mp4", "is a video; save the frames of a video side")],
)
def test_one_picture_or_video_is_no_list(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"1")
    with pytest.raises(ValueError, match=rf"{name} {said}"):
        given_samples(tmp_path / name)


@pytest.mark.parametrize("ending", ["gif", "webp"])
def test_a_picture_that_moves_is_not_scored_by_its_first_frame(ending: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "pages.tiff", save_all=True, append_images=frames[1:])
    assert [sample.prompt for sample in given_samples(tmp_path)] == ["pages"]
    frames[0].save(tmp_path / f"film.{ending}", save_all=True, append_images=frames[1:])
    listed(tmp_path / "list.jsonl", {"prompt": "p", "file_name": f"film.{ending}"})
    for source in (tmp_path, tmp_path / "list.jsonl"):
        with pytest.raises(ValueError, match=rf"film.{ending} is a video of 2 frames; save the frames"):
            given_samples(source)


def test_a_line_that_a_run_has_not_finished_is_left_out(tmp_path: Path) -> None:
    listed(tmp_path / "index.jsonl", {"prompt": "1+2=", "completion": "3"}, {"prompt": "2+2=", "completion": "4"})
    whole = (tmp_path / "index.jsonl").read_text()
    (tmp_path / "index.jsonl").write_text(whole[:-5])
    assert [one.made for one in given_samples(tmp_path)] == ["3"]
    (tmp_path / "mine.jsonl").write_text(whole[:-5])
    with pytest.raises(ValueError, match="line 2: not JSON"):
        given_samples(tmp_path / "mine.jsonl")
    (tmp_path / "mine.jsonl").write_text(whole[:-1])  # a list of one's own may lack the last line end
    assert len(given_samples(tmp_path / "mine.jsonl")) == 2


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 2)
    rows = [{"prompt": str(k), "completion": "3" * 400} for k in range(8)]
    listed(tmp_path / "answers.jsonl", *rows)
    samples, told, out = given_samples(tmp_path / "answers.jsonl"), list[str](), tmp_path / "out.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def score_with(room: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                score_samples([RewardSpec("digit_share")], samples, out, told.append)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    score_with(100)
    assert not out.exists(), "an empty file would refuse the next call"
    score_with(2_500)
    assert [line["prompt"] for line in lines_of(out)] == ["0", "1", "2", "3"]
    assert told[-1] == f"4 of 8 samples are scored in {out}"


def test_a_file_name_that_no_list_can_hold_is_named_before_scoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "scores.jsonl"
    odd = os.fsdecode(b"latin\xe9.png")
    try:
        paint(tmp_path / "shown" / odd, "red")
    except OSError:
        pytest.skip("this file system has no such names")
    paint(tmp_path / "shown/plain.png", "blue")
    monkeypatch.setattr(module, "_scored", lambda *_: pytest.fail("a sample was scored"))
    with pytest.raises(ValueError, match=r"latin\\udce9\.png' is not UTF-8, .*; give the file another name"):
        score_samples([RewardSpec("jpeg_compressibility")], given_samples(tmp_path / "shown"), out)
    assert not out.exists()


def test_any_error_while_a_list_is_written_leaves_no_file_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(tmp_path / "shown/plain.png", "blue")
    out, given = tmp_path / "scores.jsonl", given_samples(tmp_path / "shown")
    monkeypatch.setattr(module, "writing", broken)
    with pytest.raises(UnicodeError):
        score_samples([RewardSpec("jpeg_compressibility")], given, out)
    assert not out.exists()


@contextmanager
def broken(path: Path) -> Iterator[None]:
    """Fails when the file has been opened."""
    yield
    raise UnicodeError(str(path))
