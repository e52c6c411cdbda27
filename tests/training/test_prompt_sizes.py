"""Sizes of prompts: what a file may give, the rounding to buckets, and the parts of prompts of several sizes."""

import inspect
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.experience import part_bounds
from flowgrpo.rewards.base import Reward, RewardError, Scores
from flowgrpo.rewards.runner import RewardSet
from flowgrpo.training.checking import check
from flowgrpo.training.data import read_prompts
from flowgrpo.training.images.prompt_sizes import largest, nearest, size_counts, sized
from flowgrpo.training.images.sized_rollout import SizedRollout, by_size, own_cuts
from flowgrpo.training.model_paths import embedded_pipeline
from flowgrpo.training.reporting.tracked_samples import give_samples, shown_samples
from tests.conftest import Command


def taking(*names: str) -> dict[str, inspect.Parameter]:
    """The parameters of a call."""
    return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names}


SIDES = taking("height", "width", "prompt")
CALL = {"height": 64, "width": 64}


def image_recipe(*overrides: str) -> Recipe:
    recipe = load_recipe("default", overrides)
    assert isinstance(recipe, Recipe)
    return recipe


def written(folder: Path, *rows: dict[str, Any]) -> str:
    file = folder / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a", **row}) + "\n" for row in rows))
    return str(file)


def frame_notes(*words: str) -> list[str]:
    small = ["rewards=[{name: jpeg_compressibility}]", "rollout.prompts=2", "data.heldout=null", *words]
    return [note for note in check(image_recipe(*small)).texts("note") if "number of frames" in note]


def sizes(source: str, *overrides: str, parameters: dict[str, inspect.Parameter] = SIDES) -> list[Any]:
    rows = sized(read_prompts(source), image_recipe(*overrides), str(embedded_pipeline()), CALL, parameters)
    return [row.size for row in rows]


def test_prompts_have_the_sizes_of_their_columns(tmp_path: Path):
    rows = [{"height": 32, "width": 48}, {}, {"height": None, "width": None}, {"height": 64, "width": 64}]
    source = written(tmp_path, *rows)
    # The size of the call needs no denoiser of its own.
    assert sizes(source) == [(32, 48), None, None, None]
    anything = {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}
    assert sizes(source, parameters=anything) == [None] * 4
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a", **row} for row in rows]), tmp_path / "p.parquet")
    assert sizes(str(tmp_path / "p.parquet")) == [(32, 48), None, None, None]
    (tmp_path / "p.csv").write_text("prompt,height,width\na,32,48\nb,,\n")
    assert sizes(str(tmp_path / "p.csv")) == [(32, 48), None]


def test_a_pipeline_without_a_size_in_its_call_refuses_the_columns(tmp_path: Path):
    source = written(tmp_path, {"height": None}, {"height": 32, "width": 48})
    for names in (("prompt",), ("prompt", "height")):
        with pytest.raises(ValueError, match=r"line 2: .*`height` and `width`.*takes no height and width; leave"):
            sizes(source, parameters=taking(*names))
    assert sizes(written(tmp_path, {"height": None}, {"width": ""}), parameters=taking("prompt")) == [None, None]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"height": 50, "width": 64}, "height is 50, but this pipeline makes only multiples of 8; write 48 or 56"),
        ({"height": 0, "width": 64}, "`height` is 0; give a number of pixels"),
        ({"height": 64, "width": -16}, "`width` is -16"),
        ({"height": "tall", "width": 64}, "`height` is 'tall'"),
        ({"height": 64.0, "width": 64}, "`height` is 64.0"),
        ({"height": True, "width": 64}, "`height` is True"),
        ({"height": 10**400, "width": 64}, "give a number of pixels, a whole number from 1 to 65536"),
        ({"height": "9" * 5000, "width": 64}, "`height` is '999"),
        ({"height": "-64", "width": 64}, "`height` is '-64'"),
        ({"height": 64}, "it has a height and no width; give both, or none of them"),
        ({"width": 64}, "it has a width and no height"),
    ],
)
def test_a_size_that_is_none_is_named_with_its_line(tmp_path: Path, row: dict[str, Any], said: str, command: Command):
    source = written(tmp_path, {}, row)
    with pytest.raises(ValueError, match="line 2") as caught:
        sizes(source)
    assert said in str(caught.value)
    status, _, errors = command("plan", "default", f"data.train={source}", "rollout.prompts=2")
    assert status == 1
    assert f"{source}, line 2: " in errors


def test_of_many_faults_the_first_few_are_named(tmp_path: Path):
    source = written(tmp_path, *({"height": k, "width": 64} for k in range(1, 11)))
    with pytest.raises(ValueError, match="4 more prompts have sizes that cannot be used") as caught:
        sizes(source)
    assert str(caught.value).count(", line ") == 5


def test_a_bucket_has_the_nearest_aspect_ratio(tmp_path: Path):
    buckets = [(64, 64), (32, 64), (64, 32), (32, 32)]
    # 2:3 lies between 1:1 and 1:2. In logarithms its distances are 0.405 and 0.288.
    assert nearest((20, 30), [(64, 64), (32, 64)]) == (32, 64)
    assert nearest((24, 33), [(64, 64), (32, 64)]) == (64, 64)
    # Of equal aspect ratios the nearest area.
    assert nearest((40, 40), buckets) == (32, 32)
    assert nearest((50, 50), buckets) == (64, 64)
    assert nearest((1000, 400), buckets) == (64, 32)
    for bucket in buckets:
        assert nearest(bucket, buckets) == bucket
    source = written(tmp_path, {"height": 1080, "width": 1920}, {"height": 100, "width": 99}, {})
    assert sizes(source, f"data.buckets={[list(bucket) for bucket in buckets]}") == [(32, 64), None, None]


def test_buckets_are_checked_before_a_model_loads(tmp_path: Path, command: Command):
    source = written(tmp_path, {"height": 1080, "width": 1920}, {"height": 10, "width": 10})
    words = ["plan", "default", f"data.train={source}", "rollout.prompts=2"]
    status, _, errors = command(*words, "data.buckets=[[64, 64], [44, 64]]")
    assert status == 1
    assert "data.buckets.1, height is 44, but this pipeline makes only multiples of 8" in errors
    found = check(load_recipe("default", ["data.buckets=[[64, 64]]"]))
    assert any("no prompt has columns height and width" in note for note in found.texts("note"))
    for wrong in ("[[64]]", "[[64, 0]]", "[64, 64]", "[[64, 'x']]"):
        with pytest.raises(RecipeError, match=r"data\.buckets"):
            load_recipe("default", [f"data.buckets={wrong}"])
    with pytest.raises(RecipeError, match="this is a recipe of task text"):
        load_recipe("text", ["data.buckets=[[64, 64]]"])


def test_plan_counts_sizes_and_estimates_the_largest(tmp_path: Path, command: Command):
    source = written(tmp_path, *[{"height": 32, "width": 64}] * 3, *[{"height": 64, "width": 48}] * 2, {})
    words = [f"data.train={source}", "data.heldout=null", "rollout.prompts=2", "rewards=[{name: jpeg_compressibility}]"]
    status, output, errors = command("plan", "mixgrpo_guard", *words, "--gpu", "h100")
    assert status == 0, errors
    assert "training prompts by size (height × width): 32 × 64: 3, 64 × 48: 2, the size of the call: 1" in output
    assert "the estimate is for the largest size of a prompt, 64 × 48" in output
    status, rounded, _ = command("plan", "mixgrpo_guard", *words, "data.buckets=[[32, 64]]")
    assert "32 × 64: 5, the size of the call: 1" in rounded
    status, plain, _ = command("plan", "mixgrpo_guard", *words[1:])
    assert "by size" not in plain


def test_the_largest_size_and_the_counts(tmp_path: Path):
    rows = sized(
        read_prompts(written(tmp_path, {"height": 48, "width": 64}, {"height": 40, "width": 40}, {}, {})),
        image_recipe(), str(embedded_pipeline()), CALL, SIDES,
    )  # fmt: skip
    assert largest(rows) == (48, 64)
    assert largest(rows[2:]) is None
    assert size_counts(rows) == {None: 2, (48, 64): 1, (40, 40): 1}


@pytest.mark.parametrize(
    ("recipe", "override", "said"),
    [
        ("ac_flow", "run.iterations=2", "a critic reads latents of one size"),
        ("branchgrpo", "optimizer.cut=edges", "optimizer.cut edges deals out batches of all sizes"),
        ("branchgrpo", "optimizer.cut=prompts", "credit depth"),
    ],
)
def test_what_takes_one_size_only_is_refused(tmp_path: Path, recipe: str, override: str, said: str):
    source = written(tmp_path, *[{"height": 32, "width": 64}, {"height": 64, "width": 32}] * 20)
    words = [f"data.train={source}", "rewards=[{name: jpeg_compressibility}]", override]
    faults = check(load_recipe(recipe, words)).texts("fault")
    assert any(said in fault and "columns height and width" in fault for fault in faults), faults


def test_the_parts_of_a_rollout_hold_the_same_prompts_in_every_size():
    draw = random.Random(3)
    for _ in range(50):
        count, updates = draw.randint(1, 12), draw.randint(1, 4)
        given = [draw.choice([None, (1, 2), (2, 1)]) for _ in range(count)]
        cuts = part_bounds(count, updates, None)[1:-1]
        for part in range(updates):
            bounds = part_bounds(count, updates, cuts)
            inside = set(range(bounds[part], bounds[part + 1]))
            found: set[int] = set()
            for _, places in by_size(given):
                own = part_bounds(len(places), updates, own_cuts(cuts, places))
                found |= set(places[own[part] : own[part + 1]])
            assert found == inside


class Rollout:
    """A rollout of images of one size, without a model."""

    def __init__(self, groups: list[int], size: tuple[int, int]) -> None:
        self.groups = torch.tensor(groups)
        self.prompt_of_sample = groups
        self.samples = torch.rand(len(groups), 3, *size)

    def siblings(self, among: str) -> torch.Tensor:
        return self.groups + (among == "split")


def test_groups_of_several_sizes_stay_apart():
    parts = Rollout([0, 0, 1, 1], (4, 4)), Rollout([0, 0], (2, 4)), Rollout([0, 1, 1], (2, 2))
    whole = SizedRollout(parts, ((1, 4), (0,), (2, 3)), ((4, 4), (2, 4), (2, 2)))  # type: ignore[arg-type]
    assert whole.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 4]
    assert whole.prompt_of_sample == [1, 1, 4, 4, 0, 0, 2, 3, 3]
    for ids in (whole.groups, whole.siblings("group"), whole.siblings("split")):
        owners: dict[int, set[int]] = {}
        for group, prompt in zip(ids.tolist(), whole.prompt_of_sample):
            owners.setdefault(group, set()).add(prompt)
        assert len(owners) == 5
        assert all(len(found) == 1 for found in owners.values())
    assert [tuple(image.shape) for image in whole.samples] == [(3, 4, 4)] * 4 + [(3, 2, 4)] * 2 + [(3, 2, 2)] * 3
    same = SizedRollout(parts[:1], ((0, 1),), (None,))  # type: ignore[arg-type]
    assert isinstance(same.samples, torch.Tensor)


def test_images_of_several_sizes_are_scored_size_by_size_and_put_back_in_order():
    seen: list[tuple[int, ...]] = []

    def area(images: torch.Tensor, prompts: list[str], tag: list[str]) -> Scores:
        seen.append(tuple(images.shape))
        if "bad" in tag:
            raise RuntimeError("no")
        means = images.double().mean(dim=(1, 2, 3))
        notes = [f"{prompt} {own}" for prompt, own in zip(prompts, tag)]
        return Scores(means + images[0].numel(), sub_scores={"mean": means.tolist()}, notes=notes)

    def best(images: torch.Tensor, groups: list[int]) -> list[float]:
        assert len(set(groups)) == 1, "a group has one size"
        return [float(len(images))] * len(images)

    best.whole_group = True  # type: ignore[attr-defined]
    shapes = [(4, 4), (2, 8), (8, 2), (4, 4), (2, 8)]
    images = [torch.rand(3, *shape) for shape in shapes]
    prompts, tags, groups = [f"p{k}" for k in range(5)], list("abcde"), [0, 1, 2, 0, 1]
    rewards = RewardSet([Reward(area, "area"), Reward(best, "best")])
    found = rewards.score(images, prompts, {"tag": tags}, groups)
    assert seen == [(2, 3, 4, 4), (2, 3, 2, 8), (1, 3, 8, 2)]
    assert found.values[:, 1].tolist() == [2.0, 2.0, 1.0, 2.0, 2.0]
    for k, image in enumerate(images):
        alone = RewardSet([Reward(area, "area")]).score(image[None], prompts[k : k + 1], {"tag": tags[k : k + 1]})
        own, other = found.record(k), alone.record(0)
        assert own["notes"] == other["notes"] == {"area": f"p{k} {tags[k]}"}
        assert own["sub_scores"] == other["sub_scores"]
        assert own["rewards"]["area"] == other["rewards"]["area"]
    one = [torch.rand(3, 4, 4) for _ in range(3)]
    listed, stacked = (
        rewards.score(given, prompts[:3], {"tag": tags[:3]}, [0] * 3) for given in (one, torch.stack(one))
    )
    assert torch.equal(listed.values, stacked.values)
    with pytest.raises(RewardError, match=r"sample 14 \(prompt 'p4'\)"):
        rewards.score(images, prompts, {"tag": [*tags[:4], "bad"]}, groups, first=10)


def test_trackers_get_images_of_several_sizes():
    class Tracker:
        def __init__(self, name: str) -> None:
            self.name, self.images = name, []

        def log_images(self, values: dict[str, Any], step: int, **options: Any) -> None:
            [self.images] = values.values()

        def log(self, values: dict[str, Any], step: int) -> None:
            pass

    images = [torch.ones(3, 4, 2), torch.ones(3, 2, 6)]
    board, other = Tracker("tensorboard"), Tracker("comet_ml")
    for tracker in (board, other):
        give_samples(tracker, shown_samples("eval", 0, images, [{}, {}]))
    assert [image.shape for image in other.images] == [(4, 2, 3), (2, 6, 3)]
    assert board.images.shape == (2, 4, 6, 3)
    assert [int(image.sum()) // 255 for image in board.images] == [4 * 2 * 3, 2 * 6 * 3]
    assert (board.images[0][:, :2] == 255).all()
    assert (board.images[1][:2] == 255).all()


VIDEOS = ["model.path=owner/videos", "model.call={num_frames: 9}"]


@pytest.mark.parametrize("name", ["num_frames", "frames"])
def test_a_column_of_frames_is_noted_once(name: str, tmp_path: Path):
    source = written(tmp_path, {name: 9}, {name: 17}, {name: 33}, {})
    told = (
        f"{source}: the column `{name}` sets no number of frames; all videos of a run have 9 frames: write "
        "model.call.num_frames: 17 for another number"
    )
    assert frame_notes(f"data.train={source}", *VIDEOS) == [told]
    assert frame_notes(f"data.train={source}", *VIDEOS, f"data.heldout={source}") == [told]
    # The embedded pipeline makes pictures, and there the column can mean anything.
    assert frame_notes(f"data.train={source}") == []


def test_a_column_of_frames_that_says_the_same_or_that_a_reward_reads_is_not_noted(tmp_path: Path):
    alike = written(tmp_path, {"num_frames": 9}, {"num_frames": "9"}, {"num_frames": None}, {})
    assert frame_notes(f"data.train={alike}", *VIDEOS) == []
    (tmp_path / "r.py").write_text("def level(images, frames):\n    return [0.0] * len(images)\n")
    read = written(tmp_path, {"frames": 17}, {"frames": 33})
    assert frame_notes(f"data.train={read}", *VIDEOS, f"rewards=[{{name: '{tmp_path}/r.py:level'}}]") == []


@pytest.mark.slow
def test_frames_are_those_of_the_pipeline_s_call_if_the_recipe_sets_none(tmp_path: Path):
    TINY["WanPipeline"].fresh().save_pretrained(tmp_path / "wan")
    source = written(tmp_path, {"num_frames": 17}, {"num_frames": 17})
    [note] = frame_notes(f"data.train={source}", f"model.path={tmp_path / 'wan'}")
    assert "all videos of a run have 81 frames: write model.call.num_frames: 17" in note
