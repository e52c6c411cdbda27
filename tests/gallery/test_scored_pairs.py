"""`flowgrpo pairs`: the best and the worst sample of each prompt, as a folder to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowgrpo.gallery.prompt_columns import FURTHER, PICTURES
from flowgrpo.gallery.scored_pairs import write_scored_pairs
from flowgrpo.pipelines import arguments
from flowgrpo.pipelines.pictures import ENDINGS, Picture
from flowgrpo.training.data import TARGET, PromptRow, read_prompts, with_given
from flowgrpo.training.folder.prompt_pictures import PromptPictures
from tests.gallery.folders import picture, record, write_run, written


def rows_of(folder: Path, name: str = "metadata.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def scored(prompt: int, scores: list[float | None], iteration: int = 0, **changes: Any) -> list[dict[str, Any]]:
    return [record(iteration, prompt, seed, score, sample=seed, **changes) for seed, score in enumerate(scores)]


def test_the_best_and_the_worst_of_each_prompt_are_a_pair(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "pairs"
    write_run(run, [*scored(0, [0.5, 1.0, 0.0, None]), *scored(1, [0.25, 0.25]), *scored(2, [0.0, 0.75])])

    path, notes = write_scored_pairs(run, out, None, 0.0)

    assert path == out
    assert notes == ["2 pairs of 3 prompts, by reward gold"]
    first, second = rows_of(out)
    assert (first["prompt"], first["chosen_score"], first["rejected_score"]) == ("prompt 0", 1.0, 0.0)
    assert (second["prompt"], second["chosen_score"], second["rejected_score"]) == ("prompt 2", 0.75, 0.0)
    assert first["column_skill"] == "counting"
    samples = run / "samples"
    copied = [
        (out / row[f"{word}_file_name"]).read_bytes() for row in (first, second) for word in ("chosen", "rejected")
    ]
    made = [record(0, prompt, seed, None, sample=seed)["image"] for prompt, seed in ((0, 1), (0, 2), (2, 1), (2, 0))]
    assert copied == [(samples / name).read_bytes() for name in made]
    # A recipe reads the folder's file as it is.
    rows = with_given(read_prompts(str(out / "metadata.jsonl")), str(out / "metadata.jsonl"), ["chosen", "rejected"])
    assert [len(row.given) for row in rows] == [2, 2]


def test_samples_are_compared_with_those_of_the_same_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, [*scored(0, [0.0, 0.1]), *scored(0, [1.0, 0.9], iteration=5)])
    write_scored_pairs(run, tmp_path / "pairs", "gold", 0.0)
    assert [(row["chosen_score"], row["rejected_score"]) for row in rows_of(tmp_path / "pairs")] == [
        (0.1, 0.0),
        (1.0, 0.9),
    ]


def test_a_pair_differs_by_more_than_the_gap(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [*scored(0, [0.0, 0.5]), *scored(1, [0.0, 0.75])])
    write_scored_pairs(tmp_path / "run", tmp_path / "pairs", None, 0.5)
    assert [row["prompt"] for row in rows_of(tmp_path / "pairs")] == ["prompt 1"]
    with pytest.raises(ValueError, match=r"no two samples of a prompt differ by more than 0\.8 in reward gold"):
        write_scored_pairs(tmp_path / "run", tmp_path / "more", None, 0.8)
    assert not (tmp_path / "more").exists()


def test_a_reward_is_named_if_there_are_several(tmp_path: Path) -> None:
    both = [record(0, 0, seed, None, sample=seed) | {"rewards": {"a": seed, "b": -seed}} for seed in range(2)]
    write_run(tmp_path / "run", both)
    with pytest.raises(ValueError, match="the samples have the rewards a, b; name one of them with --reward"):
        write_scored_pairs(tmp_path / "run", tmp_path / "pairs", None, 0.0)
    with pytest.raises(ValueError, match="the rewards a, b; and gold is not one of them"):
        write_scored_pairs(tmp_path / "run", tmp_path / "pairs", "gold", 0.0)
    write_scored_pairs(tmp_path / "run", tmp_path / "pairs", "b", 0.0)
    assert rows_of(tmp_path / "pairs")[0]["chosen_score"] == 0


def test_text_and_videos_are_written_too(tmp_path: Path) -> None:
    text = [written(0, 0, f"answer {k}", sample=k) | {"rewards": {"gold": k}} for k in range(2)]
    write_run(tmp_path / "text", text)
    write_scored_pairs(tmp_path / "text", tmp_path / "pairs", None, 0.0)
    (row,) = rows_of(tmp_path / "pairs", "data.jsonl")
    assert (row["chosen"], row["rejected"]) == ("answer 1", "answer 0")
    write_run(tmp_path / "film", scored(0, [0.0, 1.0], frames=3))
    write_scored_pairs(tmp_path / "film", tmp_path / "films", None, 0.0)
    (row,) = rows_of(tmp_path / "films")
    assert (row["chosen_frames"], row["rejected_frames"]) == (3, 3)


def test_what_is_left_out_is_told_and_nothing_is_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, scored(0, [0.0, 1.0, 2.0]))
    (run / "samples" / record(0, 0, 2, None, sample=2)["image"]).unlink()
    with (run / "samples/index.jsonl").open("a") as file:
        file.write('{"phase": "eval", "iter')
    _, notes = write_scored_pairs(run, tmp_path / "pairs", None, 0.0)
    assert notes[1] == "left out: 1 samples whose images are missing"
    assert "1 lines of" in notes[2]
    assert rows_of(tmp_path / "pairs")[0]["chosen_score"] == 1.0
    with pytest.raises(ValueError, match="exists; name a new file"):
        write_scored_pairs(run, tmp_path / "pairs", None, 0.0)


def test_of_a_run_only_training_samples_are_taken(tmp_path: Path) -> None:
    samples = [*scored(0, [0.0, 1.0]), *scored(1, [0.0, 1.0], iteration=5, phase="train")]
    write_run(tmp_path / "run", samples)
    _, notes = write_scored_pairs(tmp_path / "run", tmp_path / "pairs", None, 0.0)
    assert [row["prompt"] for row in rows_of(tmp_path / "pairs")] == ["prompt 1"]
    assert notes == [
        "1 pairs of 1 prompts, by reward gold",
        "left out: 2 held-out samples, because the run has training samples",
    ]


def test_equal_pairs_stand_once_and_prompts_are_counted_once(tmp_path: Path) -> None:
    rows = [
        written(iteration, 0, text, sample=k) | {"seed": k, "rewards": {"gold": float(k)}}
        for iteration in (0, 5)
        for k, text in enumerate(("no", "yes"))
    ]
    write_run(tmp_path / "run", rows)
    _, notes = write_scored_pairs(tmp_path / "run", tmp_path / "pairs", None, 0.0)
    assert len(rows_of(tmp_path / "pairs", "data.jsonl")) == 1
    assert notes == ["1 pairs of 1 prompts, by reward gold", "left out: 1 pairs that are there already"]


def test_completions_that_were_cut_off_are_in_no_pair(tmp_path: Path) -> None:
    rows = [
        written(0, 0, text, sample=k)
        | {"seed": k, "rewards": {"gold": float(k)}, **({"truncated": True} if k == 0 else {})}
        for k, text in enumerate(("cut of", "no", "yes"))
    ]
    write_run(tmp_path / "run", rows)
    _, notes = write_scored_pairs(tmp_path / "run", tmp_path / "pairs", None, 0.0)
    (row,) = rows_of(tmp_path / "pairs", "data.jsonl")
    assert (row["chosen"], row["rejected"]) == ("yes", "no")
    assert notes[1:] == ["left out: 1 completions that were cut at the longest length"]


def test_a_conversation_a_picture_and_a_size_stay_the_prompts_own(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "prompt 0"}]
    picture(tmp_path / "own/cup.png", (1, 2, 3))
    columns = {"image": "own/cup.png", "height": 32, "width": 64, "skill": "counting"}
    write_run(tmp_path / "run", scored(0, [0.0, 1.0], messages=talk, columns=columns))
    write_scored_pairs(tmp_path / "run", tmp_path / "pairs", None, 0.0)
    (row,) = rows_of(tmp_path / "pairs")
    assert row["prompt"] == talk
    assert (tmp_path / "pairs" / row["image"]).read_bytes() == (tmp_path / "own/cup.png").read_bytes()
    assert (row["height"], row["width"], row["column_skill"]) == (32, 64, "counting")
    (read,) = read_prompts(str(tmp_path / "pairs/metadata.jsonl"))
    assert read.messages == tuple(talk)
    (tmp_path / "own/cup.png").unlink()
    with pytest.raises(
        ValueError,
        match=r"the picture own/cup\.png of the prompt 'prompt 0' is missing; call the command from the fold",
    ):
        write_scored_pairs(tmp_path / "run", tmp_path / "more", None, 0.0)


def shown(home: Path, name: str) -> Path:
    """A run in `home` whose prompt is shown the picture `name`, with the copy that a run keeps."""
    row = PromptRow(0, "prompt 0", pictures=Picture(home / name))
    (home / "run/samples").mkdir(parents=True)
    copies = PromptPictures(home / "run/samples").of(row)
    folder = home / "run"
    (folder / "samples").rename(home / "kept")
    write_run(folder, scored(0, [0.0, 1.0], columns={"image": name}, pictures=copies))
    (home / "kept" / "prompts").rename(folder / "samples" / "prompts")
    return folder


@pytest.mark.parametrize("ending", ["png", "tif", "bmp"])
def test_the_picture_of_a_prompt_is_its_own_file_if_the_path_leads_there(
    tmp_path: Path, monkeypatch: Any, ending: str
) -> None:
    picture(tmp_path / f"own/cup.{ending}", (1, 2, 3), (600, 400))
    run = shown(tmp_path, f"own/cup.{ending}")
    monkeypatch.chdir(tmp_path)
    _, notes = write_scored_pairs(run, tmp_path / "pairs", None, 0.0)
    (row,) = rows_of(tmp_path / "pairs")
    assert (tmp_path / "pairs" / row["image"]).read_bytes() == (tmp_path / f"own/cup.{ending}").read_bytes()
    assert len(notes) == 1


def test_from_another_folder_no_other_picture_is_taken_and_a_small_copy_is_told(
    tmp_path: Path, monkeypatch: Any
) -> None:
    picture(tmp_path / "own/cup.png", (1, 2, 3), (600, 400))
    run = shown(tmp_path, "own/cup.png")
    for name, other in (("nothing", None), ("another", (200, 0, 0))):
        elsewhere = tmp_path / name
        elsewhere.mkdir()
        if other is not None:
            picture(elsewhere / "own/cup.png", other, (600, 400))
        monkeypatch.chdir(elsewhere)
        _, notes = write_scored_pairs(run, elsewhere / "pairs", None, 0.0)
        (row,) = rows_of(elsewhere / "pairs")
        with Image.open(elsewhere / "pairs" / row["image"]) as taken:
            assert taken.width == 512
            assert taken.convert("RGB").getpixel((3, 3)) == pytest.approx((1, 2, 3), abs=3)
        assert notes[1].startswith("1 pictures of prompts were taken from the copies of the run, of at most 512 pixels")


def test_a_picture_that_the_columns_do_not_name_is_taken_from_its_copy(tmp_path: Path) -> None:
    picture(tmp_path / "own/cup.png", (1, 2, 3))
    run = shown(tmp_path, "own/cup.png")
    index = run / "samples/index.jsonl"
    index.write_text(index.read_text().replace('"image": "own/cup.png"', '"other": "own/cup.png"'))
    _, notes = write_scored_pairs(run, tmp_path / "pairs", None, 0.0)
    assert rows_of(tmp_path / "pairs")[0]["image"].endswith(".webp")
    assert len(notes) == 2


def test_all_pictures_that_prompts_may_have_can_be_copied() -> None:
    assert set(ENDINGS) <= PICTURES
    assert (*arguments.FURTHER, TARGET) == FURTHER


@pytest.mark.parametrize(
    ("shows", "taken"),
    [(True, ["mask_image"]), (True, ["mask_image", "control_image"]), (False, ["control_image"]), (True, [])],
)
def test_a_mask_of_a_prompt_stays_the_mask(tmp_path: Path, monkeypatch: Any, shows: bool, taken: list[str]) -> None:
    """A column that the pipeline was not given is for rewards, and stays among the other columns."""
    monkeypatch.chdir(tmp_path)
    names = ["image", *(name for name in ("mask_image", "control_image") if name in taken or name == "mask_image")]
    for number, name in enumerate(names):
        picture(tmp_path / f"{name}.png", (number, 2, 3))
    columns = {name: f"{name}.png" for name in names if name != "image" or shows}
    given = {name: Picture(Path(f"{name}.png")) for name in taken}
    asked = PromptRow(0, "a cup", pictures=Picture(Path("image.png")) if shows else None, conditions=given)
    copies = PromptPictures(tmp_path).of(asked)
    write_run(tmp_path / "run", scored(0, [0.0, 1.0], columns=columns, pictures=copies))
    (tmp_path / "prompts").rename(tmp_path / "run/samples/prompts")
    _, notes = write_scored_pairs(tmp_path / "run", tmp_path / "pairs", None, 0.0)
    (row,) = rows_of(tmp_path / "pairs")
    wanted = [*(["image"] if shows else []), *taken]
    assert [name for name in names if name in row] == wanted
    for name in wanted:
        assert (tmp_path / "pairs" / row[name]).read_bytes() == (tmp_path / f"{name}.png").read_bytes()
    assert len(notes) == 1


@pytest.mark.slow
def test_the_command_reads_what_evaluate_writes_and_says_what_is_wrong(command, tmp_path: Path) -> None:
    write_run(tmp_path / "made", scored(0, [0.0, 1.0]))
    (tmp_path / "made/samples").rename(tmp_path / "samples")
    status, said, _ = command("pairs", "samples", "--out", "pairs")
    assert status == 0
    assert said.splitlines() == ["pairs", "1 pairs of 1 prompts, by reward gold"]
    status, _, told = command("pairs", "samples", "--out", "other", "--gap", "nan")
    assert status != 0
    assert "--gap is nan; give a number of 0 or more" in told
    (tmp_path / "empty").mkdir()
    status, _, told = command("pairs", "empty", "--out", "other")
    assert status != 0
    assert "empty has no index.jsonl of samples; name a run" in told


def test_the_embedded_pairs_are_what_gold_says() -> None:
    """The pairs were made by `flowgrpo evaluate` and `flowgrpo pairs`, and their scores can be made again."""
    from flowgrpo.rewards.runner import RewardSet, RewardSpec

    rows = with_given(read_prompts("scenes:pairs"), "scenes:pairs", ["chosen", "rejected"])
    assert len(rows) == 156
    import numpy as np
    import torch

    gold = RewardSet([RewardSpec("gold")])
    for row in rows[::12]:
        shown = [np.asarray(image.read()[0], dtype=np.float32) / 255 for image in row.given]
        images = torch.from_numpy(np.stack(shown)).permute(0, 3, 1, 2)
        columns = {"include": [row.columns["column_include"]] * 2, "tag": [row.columns["column_tag"]] * 2}
        scores = gold.score(images, [row.text] * 2, columns).values[:, 0].tolist()
        assert scores == [row.columns["chosen_score"], row.columns["rejected_score"]]
