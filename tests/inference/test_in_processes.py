"""`sample` and `evaluate` with several processes: each makes the samples of its prompts, in one folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops

from tests.training import ranks

pytestmark = pytest.mark.slow

SMALL = ["evaluate.steps=3", "evaluate.seeds=2", "rollout.batch=2", "rollout.decode_batch=2"]


def printed(words: Sequence[str], folder: Path, count: int, statuses: Sequence[int] | None = None) -> list[str]:
    """What each of `count` processes prints; they write into `FOLDER/COUNT`. Older torch has lines of gloo besides."""
    log = folder / f"log-{count}"
    job = {"words": [*words, "--out", str(folder / str(count))], "count": count, "log": str(log)}
    ranks.run_all([job], patience=300)
    all_said = [log.with_name(f"{log.name}-{rank}.txt").read_text().splitlines(keepends=True) for rank in range(count)]
    said = ["".join(line for line in lines if not line.startswith("[Gloo]")) for lines in all_said]
    assert json.loads(Path(f"{log}.json").read_text()) == list(statuses or [0] * count), "\n".join(said)
    return said


def lines_of(folder: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / str(count) / "index.jsonl").read_text().splitlines()]


def files_of(folder: Path, count: int) -> list[str]:
    return sorted(path.name for path in (folder / str(count)).iterdir())


def assert_alike(folder: Path, one: int, other: int) -> None:
    """Equal files; the pictures are equal but for rounding, because other images were in their batches."""
    assert files_of(folder, one) == files_of(folder, other)
    for path in (folder / str(one)).glob("*.png"):
        with Image.open(path) as mine, Image.open(folder / str(other) / path.name) as theirs:
            assert max(high for _, high in ImageChops.difference(mine, theirs).getextrema()) <= 1


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts. Only the last one has a column that a reward takes."""
    (tmp_path / "reward.py").write_text(
        "def bright(images, prompts, extra, **columns):\n"
        "    return [float(image.mean()) + (e is not None) for image, e in zip(images, extra)]\n"
    )
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a star"}\n{"prompt": "a red circle"}\n{"prompt": "a square", "extra": 1}\n')
    return file


def test_an_evaluation_of_images_is_shared(prompts: Path, tmp_path: Path) -> None:
    told = [f"data.heldout={prompts}", f"rewards=[{{name: '{tmp_path}/reward.py:bright'}}]", "evaluate.rewards=null"]
    words = ["evaluate", "scenes", "flow_grpo", *told, *SMALL, "--trust"]
    [alone], [first, second] = printed(words, tmp_path, 1), printed(words, tmp_path, 2)
    assert "scenes, on 2 processes: 3 prompts of " in first
    assert "4 of 4 samples of process 0, " in first
    assert "(6 images)" in first
    assert first.splitlines()[-2] == alone.splitlines()[-2]
    assert second == ""
    mine, theirs = lines_of(tmp_path, 1), lines_of(tmp_path, 2)
    assert [line["image"] for line in theirs] == [f"eval-{number:04d}.png" for number in range(6)]
    for one, other in zip(mine, theirs, strict=True):
        assert other.pop("rewards") == pytest.approx(one.pop("rewards"), abs=1e-5)
        assert other.pop("total", None) == pytest.approx(one.pop("total", None), abs=1e-5)
        assert one == other
    assert_alike(tmp_path, 1, 2)


def test_more_processes_than_prompts_and_sampled_images(tmp_path: Path) -> None:
    words = ["sample", "a star", "a red circle", "--count", "2", "--steps", "3", "--seed", "5"]
    for count in (1, 2, 3):
        printed(words, tmp_path, count)
        listed = {line.pop("image"): line for line in lines_of(tmp_path, count)}
        assert sorted(listed) == ["000-5.png", "000-6.png", "001-5.png", "001-6.png"]
        assert listed["001-6.png"]["prompt"] == "a red circle"
        assert listed["001-6.png"]["seed"] == 6
    assert_alike(tmp_path, 1, 2)
    assert_alike(tmp_path, 1, 3)


@pytest.mark.parametrize("count", [1, 2])
def test_what_an_interrupted_command_has_listed_is_not_lost(tmp_path: Path, count: int) -> None:
    left = tmp_path / str(count) / "index-process-1.jsonl"
    left.parent.mkdir()
    left.write_text('{"phase": "sample", "image": "000-9.png"}\n')
    printed(["sample", "a star", "a red circle", "--steps", "2"], tmp_path, count)
    assert [line["image"] for line in lines_of(tmp_path, count)] == ["000-9.png", "000-0.png", "001-0.png"]
    assert not left.exists()
    # An evaluation that was interrupted is not mixed with what is sampled.
    left.write_text('{"phase": "eval", "image": "eval-0002.png"}\n')
    told = printed(["sample", "a star", "--seed", "3"], tmp_path, count, [1] * count)
    assert f"{left} lists samples that `sample` has not written; name another folder with --out" in told[0]


def test_completions_are_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    words = ["sample", "1+2=", "12+30=", "7-3=", "--model", "arithmetic", "--count", "3", "--max-tokens", "5"]
    [alone], [first, second] = printed(words, tmp_path, 1), printed(words, tmp_path, 2)
    assert second == ""
    # The first process shows its own prompts, by their numbers.
    assert [line for line in first.splitlines() if line.startswith("prompt")] == ["prompt 1: 1+2=", "prompt 3: 7-3="]
    assert set(first.splitlines()[:-1]) < set(alone.splitlines())
    by_sample = {line["sample"]: line for line in lines_of(tmp_path, 2)}
    assert [by_sample[number] for number in range(9)] == lines_of(tmp_path, 1)
    assert files_of(tmp_path, 2) == ["index.jsonl"]


def test_an_evaluation_of_text_is_the_same_on_two_processes(tmp_path: Path) -> None:
    words = ["evaluate", "arithmetic", "text", "evaluate.prompts=5", "generation.max_tokens=4"]
    printed(words, tmp_path, 1)
    printed(words, tmp_path, 2)
    assert lines_of(tmp_path, 1) == lines_of(tmp_path, 2)


def test_a_reward_that_fails_in_one_process_leaves_all_samples(prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "def fails(images, prompts):\n"
        "    if 'a red circle' in prompts:\n"
        "        raise ValueError('no circles')\n"
        "    return images.mean(dim=(1, 2, 3))\n"
    )
    told = [f"data.heldout={prompts}", f"rewards=[{{name: '{tmp_path}/fails.py:fails'}}]", "evaluate.rewards=null"]
    first, second = printed(["evaluate", "scenes", "flow_grpo", *told, *SMALL, "--trust"], tmp_path, 2, [1, 1])
    assert "no circles" in second
    assert "process 1 of 2 failed" in first
    kept = list(map(json.loads, (tmp_path / "2" / "index-process-1.jsonl").read_text().splitlines()))
    assert [line["sample"] for line in kept] == [2, 3]
    # The other process may have been ended before it had made its own.
    index = tmp_path / "2" / "index.jsonl"
    kept += lines_of(tmp_path, 2) if index.exists() else []
    assert {line["image"] for line in kept} == {path.name for path in (tmp_path / "2").glob("eval-*.png")}
    # Nothing of it is lost to a second evaluation.
    index.unlink(missing_ok=True)
    both = printed(["evaluate", "scenes", "flow_grpo", *told, *SMALL, "--trust"], tmp_path, 2, [1, 1])
    assert all("exists; name another folder with --out" in said for said in both)


def test_of_a_killed_process_the_other_says_what_to_do(prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(
        "import os, signal\n"
        "def dies(images, prompts):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return images.mean(dim=(1, 2, 3))\n"
    )
    told = [f"data.heldout={prompts}", f"rewards=[{{name: '{tmp_path}/dies.py:dies'}}]", "evaluate.rewards=null"]
    first, _ = printed(["evaluate", "scenes", "flow_grpo", *told, *SMALL, "--trust"], tmp_path, 2, [1, -9])
    assert "error: another process is gone: it was killed, perhaps because memory ran out. Start the command " in first
    assert "flowgrpo resume" not in first
    listed = [lines_of(tmp_path, 2), map(json.loads, (tmp_path / "2" / "index-process-1.jsonl").open())]
    assert [line["sample"] for lines in listed for line in lines] == [0, 1, 4, 5, 2, 3]
