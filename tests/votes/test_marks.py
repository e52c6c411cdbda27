"""Files of marks: which pictures were loved, which were only seen, and which say nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowgrpo.votes.marks import read_reactions
from flowgrpo.votes.samples import by_place, pair_samples, read_samples


def sample(run: Path, phase: str, iteration: int, number_of: int, seed: int, number: int = 0, **more: Any) -> str:
    """Add a sample to a run; its picture has a name that says what it is."""
    name = f"{phase}-{iteration}-{number_of}-{seed}-{number}.png"
    (run / "samples").mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (2, 2)).save(run / "samples" / name)
    record = {
        "phase": phase, "iteration": iteration, "prompt": f"p{number_of}", "prompt_id": number_of, "seed": seed,
        "sample": number, "image": name, **more,
    }  # fmt: skip
    with (run / "samples" / "index.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    return name


def mark(prompt: int, seed: int, favourite: bool = True, **more: Any) -> dict[str, Any]:
    place = {"phase": "eval", "prompt": f"p{prompt}", "seed": str(seed), "sample": 0, "iteration": None}
    return {**place, "favourite": favourite, "note": "" if favourite else "odd", "time": "", **more}


def marked(folder: Path, *marks: dict[str, Any], run: str = "run") -> Path:
    file = folder / "marks.json"
    runs = [{"id": "x", "name": "n", "folder": run, "marks": list(marks)}]
    file.write_text(json.dumps({"flowgrpo": "marks", "version": 1, "runs": runs}))
    return file


def found(file: Path, run: Path) -> dict[str, bool]:
    return {str(one.sample.image): one.loved for one in read_reactions(file, [run])}


def test_the_rest_of_a_marked_prompt_was_seen_and_not_loved(tmp_path: Path):
    """Three prompts with two seeds, at two evaluations: prompt 0 has a favourite, prompt 1 a note, prompt 2 nothing."""
    run = tmp_path / "run"
    for iteration in (0, 10):
        for prompt in range(3):
            for seed in range(2):
                sample(run, "eval", iteration, prompt, seed)
    file = marked(tmp_path, mark(0, 1), mark(1, 0, favourite=False))
    assert found(file, run) == {
        "eval-10-0-0-0.png": False, "eval-10-0-1-0.png": True, "eval-10-1-0-0.png": False, "eval-10-1-1-0.png": False,
    }  # fmt: skip


def test_a_mark_on_a_training_sample_belongs_to_its_iteration_and_place(tmp_path: Path):
    run = tmp_path / "run"
    for iteration in (3, 4):
        for number in (5, 2):
            sample(run, "train", iteration, 0, 7, number)
    file = marked(tmp_path, mark(0, 7, phase="train", sample=1, iteration=3))
    # The second of the samples 2 and 5 is 5; iteration 4 was not looked at.
    assert found(file, run) == {"train-3-0-7-2.png": False, "train-3-0-7-5.png": True}


def test_a_prompt_that_stands_twice_in_the_file_has_places_after_each_other(tmp_path: Path):
    run = tmp_path / "run"
    sample(run, "eval", 0, 4, 1)
    sample(run, "eval", 0, 9, 1, prompt="p4")
    places = by_place(pair_samples(read_samples(run / "samples" / "index.jsonl")[0]))
    assert {place[3]: pair.shots[0].prompt_id for place, pair in places.items()} == {0: "4", 1: "9"}


def test_a_sample_that_was_recorded_twice_counts_as_it_was_last(tmp_path: Path):
    run = tmp_path / "run"
    sample(run, "eval", 0, 0, 0)
    sample(run, "eval", 0, 0, 0, frames=2)
    (one,) = read_reactions(marked(tmp_path, mark(0, 0)), [run])
    assert one.sample.frames == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as a file of marks"),
        ('{"flowgrpo": "votes"}', "is no file of marks"),
        ('{"flowgrpo": "marks", "runs": []}', "has no marks of the run .*it has marks of the folders none"),
    ],
)
def test_what_is_no_file_of_marks(tmp_path: Path, content: str, message: str):
    (tmp_path / "marks.json").write_text(content)
    sample(tmp_path / "run", "eval", 0, 0, 0)
    with pytest.raises(ValueError, match=message):
        read_reactions(tmp_path / "marks.json", [tmp_path / "run"])


def test_marks_without_their_pictures_are_refused(tmp_path: Path):
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="name the folder of a run that has samples"):
        read_reactions(marked(tmp_path), [run])
    name = sample(run, "eval", 0, 0, 0)
    with pytest.raises(ValueError, match="the mark on seed 5 of 'p0' has no sample"):
        read_reactions(marked(tmp_path, mark(0, 5)), [run])
    for odd in ({"sample": [1]}, {"iteration": [1]}):
        with pytest.raises(ValueError, match="the mark on seed 0 of 'p0' has no sample"):
            read_reactions(marked(tmp_path, mark(0, 0, **odd)), [run])
    (run / "samples" / name).unlink()
    with pytest.raises(ValueError, match="is gone; put it back"):
        read_reactions(marked(tmp_path, mark(0, 0)), [run])
    with pytest.raises(ValueError, match="it has marks of the folders other"):
        read_reactions(marked(tmp_path, mark(0, 0), run="other"), [run])
    with (run / "samples" / "index.jsonl").open("w") as file:
        record = {"phase": "eval", "iteration": 0, "prompt": "p0", "prompt_id": 0, "seed": 0, "image": "../../x.png"}
        file.write(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="leads outside"):
        read_reactions(marked(tmp_path, mark(0, 0)), [run])


def test_runs_whose_folders_have_the_same_name_cannot_be_told_apart(tmp_path: Path):
    runs = [tmp_path / place / "run" for place in ("a", "b")]
    for run in runs:
        sample(run, "eval", 0, 0, 0)
    file = marked(tmp_path, mark(0, 0))
    assert len(read_reactions(file, [runs[0], runs[0]])) == 1
    with pytest.raises(ValueError, match=r"the runs .*a/run and .*b/run have the same folder name run"):
        read_reactions(file, runs)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "runs": content["runs"] * 2}))
    with pytest.raises(ValueError, match="has marks of two runs with the same folder name run, so their marks cannot"):
        read_reactions(file, runs[:1])
