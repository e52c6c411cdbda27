"""GenEval: its rules on planted detections, and a small random detector of the real class."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.backbones.detector import COCO_NAMES, Detection, class_names, load_detector
from flowgrpo.rewards.models.geneval import Geneval, name_colours
from flowgrpo.rewards.models.geneval_rules import COLOURS, Wanted, judge, read_wanted, relations
from tests.tiny_rewards import pictures, save_clip, save_mask2former

LABELS = ["dog", "cat", "cup"]


def at(label: str, x: float, y: float, score: float = 0.95, size: float = 10) -> Detection:
    """A square object with this centre."""
    mask = torch.zeros(100, 100, dtype=torch.bool)
    mask[int(y - size / 2) : int(y + size / 2), int(x - size / 2) : int(x + size / 2)] = True
    return Detection(label, score, (x - size / 2, y - size / 2, x + size / 2, y + size / 2), mask)


def verdict(found: list[Detection], include: list[dict[str, Any]], exclude: Any = (), colours: Any = ()) -> Any:
    seen = list(colours)
    answer = judge(found, read_wanted(include, LABELS), read_wanted(list(exclude), LABELS), lambda objects: seen)
    return answer.benchmark, answer.strict, answer.partial


DOG, CAT = at("dog", 20, 50), at("cat", 80, 50)


@pytest.mark.parametrize(
    ("found", "include", "exclude", "expected"),
    [
        ([DOG], [{"class": "dog", "count": 1}], [], (True, True, 1.0)),
        ([], [{"class": "dog", "count": 1}], [], (False, False, 0.0)),
        ([DOG, CAT], [{"class": "dog", "count": 1}], [], (True, True, 1.0)),
        ([DOG, DOG], [{"class": "dog", "count": 1}], [], (True, False, 0.0)),
        ([DOG] * 3, [{"class": "dog", "count": 1}], [], (True, False, 0.0)),
        ([DOG] * 3, [{"class": "dog", "count": 4}], [], (False, False, 0.75)),
        ([DOG] * 5, [{"class": "dog", "count": 4}], [{"class": "dog", "count": 5}], (False, False, 0.75)),
        ([DOG] * 4, [{"class": "dog", "count": 4}], [{"class": "dog", "count": 5}], (True, True, 1.0)),
        ([DOG], [{"class": "dog", "count": 1}, {"class": "cat", "count": 1}], [], (False, False, 0.5)),
        ([DOG, CAT], [{"class": "dog", "count": 1}], [{"class": "cat", "count": 1}], (False, True, 1.0)),
    ],
)
def test_objects_and_counts(found: Any, include: Any, exclude: Any, expected: Any) -> None:
    assert verdict(found, include, exclude) == expected


@pytest.mark.parametrize(
    ("found", "seen", "expected"),
    [
        ([DOG, DOG], ["red", "red"], (True, True, 1.0)),
        ([DOG, DOG], ["red", "blue"], (False, False, (1 + 0.5) / 2)),
        ([DOG], ["red"], (False, False, (0.5 + 0) / 2)),
        ([DOG] * 3, ["red", "red"], (True, False, (0.5 + 0) / 2)),
    ],
)
def test_colours(found: Any, seen: list[str], expected: Any) -> None:
    assert verdict(found, [{"class": "dog", "count": 2, "color": "red"}], colours=seen) == expected


@pytest.mark.parametrize(
    ("found", "relation", "expected"),
    [
        ([DOG, CAT], "right of", (True, True, 1.0)),
        ([DOG, CAT], "left of", (False, False, 2 / 3)),
        ([DOG, CAT], "above", (False, False, 2 / 3)),
        ([CAT], "right of", (False, False, 1 / 3)),
        ([DOG, CAT, at("cat", 5, 50)], "right of", (True, False, 1 / 3)),
    ],
)
def test_positions(found: Any, relation: str, expected: Any) -> None:
    include = [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": [relation, 0]}]
    answer = verdict(found, include)
    assert answer[:2] == expected[:2]
    assert answer[2] == pytest.approx(expected[2])


@pytest.mark.parametrize(
    ("dx", "dy", "expected"),
    [
        (30, 0, {"right of"}),
        (-30, 2, {"left of"}),
        (0, -30, {"above"}),
        (30, 30, {"right of", "below"}),
        (2, 0, set()),
        (0, 0, set()),
        # (4 - 2) / 4 is not above one half, (4.1 - 2) / 4.1 is.
        (4, 0, set()),
        (4.1, 0, {"right of"}),
        # (20 - 2) / 40.3 is not, though the object is further right than its width.
        (20, 35, {"below"}),
    ],
)
def test_relations_of_boxes_of_10_pixels(dx: float, dy: float, expected: set[str]) -> None:
    assert relations((50 + dx, 50 + dy, 60 + dx, 60 + dy), (50, 50, 60, 60)) == expected


def test_metadata_that_cannot_be_read() -> None:
    assert read_wanted('[{"class": "dog"}]', LABELS) == (Wanted("dog", 1),)
    for entries, message in [
        ([{"class": "dgo"}], "has no class 'dgo'; did you mean 'dog'"),
        ([{"class": "dog", "count": 0}], "count of 'dog' is 0"),
        ([{"class": "dog", "color": "teal"}], "'teal' is not one of the colours"),
        ([{"class": "dog", "position": ["left of", 0]}], "number of an earlier object"),
        ([{"class": "dog", "position": "left of"}], "the position of 'dog' is 'left of'; give a list of one of"),
        ([{"class": "dog", "position": ["left of"]}], r"the position of 'dog' is \['left of'\]; give a list"),
        ([{"class": "dog", "position": 5}], "the position of 'dog' is 5; give a list"),
        ("two dogs", "not a list of objects"),
        (3, "not a list of objects"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_wanted(entries, LABELS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("geneval")
    return {
        "detector": str(save_mask2former(folder / "detector", LABELS)),
        "clip": str(save_clip(folder / "clip", length=64)),
    }


def test_detections_are_those_of_the_library(folders: dict[str, str]) -> None:
    from transformers import Mask2FormerForUniversalSegmentation

    lease = load_detector("geneval", folders["detector"], resolution=64)
    images = pictures(2, 3, 64, 96)
    model = Mask2FormerForUniversalSegmentation.from_pretrained(folders["detector"]).eval()
    with torch.no_grad():
        output = model(pixel_values=(images - 0.5) / 0.25)
    found = lease.value(images, threshold=0.0)
    assert any(found)
    for row, objects in enumerate(found):
        scores = [detection.score for detection in objects]
        assert scores == sorted(scores, reverse=True)
        classes = output.class_queries_logits[row].softmax(-1)[:, :-1]
        masks = torch.nn.functional.interpolate(output.masks_queries_logits[row][None], size=(64, 96), mode="bilinear")[
            0
        ]
        expected = [
            (LABELS[label], classes[query, label] * masks[query].sigmoid()[masks[query] > 0].mean(), masks[query])
            for query in range(len(masks))
            for label in range(len(LABELS))
            if (masks[query] > 0).any()
        ]
        assert len(objects) == len(expected)
        for detection in objects:
            mask = detection.mask
            # If the logit is 0 up to rounding, both sides are right.
            assert any(
                label == detection.label
                and abs(score - detection.score) < 1e-4
                and not ((mask != (logits > 0)) & (logits.abs() > 1e-4)).any()
                for label, score, logits in expected
            )
            left, top, right, bottom = (int(edge) for edge in detection.box)
            assert mask[top:bottom, left:right].sum() == mask.sum()
            assert mask[top].any()
            assert mask[bottom - 1].any()
            assert mask[:, left].any()
            assert mask[:, right - 1].any()
    strongest = found[0][0].score
    assert [len(lease.value(images, threshold=bar)[0]) for bar in (strongest - 1e-4, strongest)] == [1, 0]
    lease.close()


def test_coco_classes_by_place_under_genevals_names() -> None:
    assert len(set(COCO_NAMES)) == 80
    assert [COCO_NAMES.index(name) for name in ("computer mouse", "tv remote", "computer keyboard")] == [64, 65, 66]
    written = {place: f"label {place}" for place in range(1, 79)}
    assert class_names({0: "person", **written, 79: "toothbrush"}) == COCO_NAMES
    assert class_names({1: "cat", 0: "dog"}) == ("dog", "cat")


class PlantedDetector:
    """Stands in for the network with given detections for each image, in turn."""

    labels = tuple(LABELS)

    def __init__(self, *found: list[Detection]) -> None:
        self.found, self.sizes = list(found), []

    def __call__(self, images: Tensor, threshold: float) -> list[list[Detection]]:
        assert threshold == 0.3
        self.sizes.append(len(images))
        return [self.found.pop(0) for _ in images]


def planted(folders: dict[str, str], *found: list[Detection], **options: Any) -> tuple[Geneval, PlantedDetector]:
    reward = Geneval(**folders, **options)
    stand_in = PlantedDetector(*found)
    reward.detector.value = stand_in  # type: ignore[assignment]
    return reward, stand_in


def test_scores_notes_and_rows_without_metadata(folders: dict[str, str]) -> None:
    include = [[{"class": "dog", "count": 2}], None, '[{"class": "cat", "count": 1}]']
    reward, stand_in = planted(folders, [DOG], [CAT, CAT])
    include.append([])
    columns = {"include": include, "exclude": [None, None, [{"class": "cat", "count": 2}], []], "tag": [None] * 4}
    batch = RewardSet([reward_of(reward)]).score(pictures(4, 3, 100, 100), [""] * 4, columns)
    assert batch.values[:, 0].tolist() == pytest.approx([0.5, float("nan"), 0.0, float("nan")], nan_ok=True)
    assert batch.record(0)["sub_scores"]["geneval"] == {"partial": 0.5, "strict": 0.0, "benchmark": 0.0}
    assert batch.notes["geneval"] == [
        "1 dog instead of 2",
        "",
        "2 cat instead of 1; 2 cat where fewer than 2 are allowed",
        "",
    ]
    assert stand_in.sizes == [2]
    reward.close()


def reward_of(function: Geneval) -> Any:
    from flowgrpo.rewards.base import Reward

    return Reward(function, "geneval")


def test_counting_needs_surer_detections_and_at_most_16_count(folders: dict[str, str]) -> None:
    unsure, include = [at("dog", 20, 20, score=0.6)] * 2, [[{"class": "dog", "count": 2}]]
    many = [at("dog", 20, 20, score=0.95)] * 20
    sixteen = [[{"class": "dog", "count": 16}]]
    reward, _ = planted(folders, unsure, unsure, many, score="strict")
    images = pictures(1, 3, 100, 100)
    assert reward(images=images, prompts=[""], include=include, tag=["single_object"]).values == [1.0]
    assert reward(images=images, prompts=[""], include=include, tag=["counting"]).values == [0.0]
    assert reward(images=images, prompts=[""], include=sixteen).values == [1.0]
    reward.close()


def test_videos_are_the_mean_over_a_few_frames(folders: dict[str, str]) -> None:
    include = [[{"class": "dog", "count": 1}]]
    reward, stand_in = planted(folders, [DOG], [], [DOG], frames=3, batch_size=2)
    scores = reward(images=pictures(1, 9, 3, 100, 100), prompts=[""], include=include)
    assert scores.values == pytest.approx([2 / 3])
    assert stand_in.sizes == [2, 1]
    assert list(reward(images=torch.zeros(0, 3, 64, 64), prompts=[], include=[]).values) == []
    reward.close()


def test_a_colour_is_that_of_the_nearest_sentences(folders: dict[str, str]) -> None:
    from transformers import AutoProcessor, CLIPModel

    from tests.tiny_rewards import as_pil

    reward, _ = planted(folders)
    image = pictures(1, 3, 100, 100)[0]
    objects = [at("cup", 30, 40, size=40), at("cup", 70, 60, size=30)]
    processor, model = AutoProcessor.from_pretrained(folders["clip"]), CLIPModel.from_pretrained(folders["clip"]).eval()
    expected = []
    for detection in objects:
        left, top, right, bottom = (int(edge) for edge in detection.box)
        on_grey = torch.where(detection.mask, image, 0x99 / 255)
        crop = as_pil(on_grey[:, top:bottom, left:right])
        likeness = []
        for colour in COLOURS:
            texts = [
                f"a photo of a {colour} cup",
                f"a photo of a {colour}-colored cup",
                f"a photo of a {colour} object",
            ]
            inputs = processor(text=texts, images=crop, return_tensors="pt", padding=True)
            with torch.no_grad():
                output = model(**inputs)
            sentence = output.text_embeds.mean(0)
            likeness.append((output.image_embeds[0] @ sentence / sentence.norm()).item())
        expected.append(COLOURS[max(range(10), key=likeness.__getitem__)])
    assert name_colours(reward.towers.value, image, objects) == expected
    assert name_colours(reward.towers.value, image, []) == []
    include = [[{"class": "cup", "count": 1, "color": expected[0]}]]
    coloured, _ = planted(folders, objects[:1])
    assert coloured(images=image[None], prompts=[""], include=include).values == [1.0]
    for one in (reward, coloured):
        one.close()


def test_what_is_not_the_object_is_grey_to_clip(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    reward, _ = planted(folders)
    towers, image = reward.towers.value, pictures(1, 3, 100, 100)[0]
    seen: list[Tensor] = []
    prepare = towers.prepare
    monkeypatch.setattr(towers, "prepare", lambda crop: (seen.append(crop), prepare(crop))[1])
    mask = torch.zeros(100, 100, dtype=torch.bool)
    mask[20:30, 40] = mask[20, 40:60] = True
    name_colours(towers, image, [Detection("cup", 0.9, (40, 20, 60, 30), mask)])
    crop = seen[0][0]
    assert crop.shape == (3, 10, 20)
    assert torch.equal(crop[:, 0], image[:, 20, 40:60])
    assert torch.equal(crop[:, :, 0], image[:, 20:30, 40])
    assert torch.equal(crop[:, 1:, 1:], torch.full((3, 9, 19), 153 / 255))
    reward.close()


def test_the_real_classes_from_end_to_end(folders: dict[str, str]) -> None:
    options = {**folders, "resolution": 64}
    rewards = RewardSet([RewardSpec("geneval", options=options)])
    columns = {"include": [[{"class": "dog", "count": 1, "color": "red"}], [{"class": "cat", "count": 3}]]}
    batch = rewards.score(pictures(2, 3, 60, 90), ["", ""], columns)
    assert batch.values.isfinite().all()
    with pytest.raises(Exception, match="has no class 'lion'"):
        rewards.score(pictures(1, 3, 60, 90), [""], {"include": [[{"class": "lion"}]]})
    with pytest.raises(ValueError, match="`include`"):
        rewards.score(pictures(1, 3, 60, 90), [""])
    rewards.close()


def test_options_that_cannot_be_used(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="score is 'soft'; give one of partial, strict, benchmark"):
        Geneval(**folders, score="soft")
    with pytest.raises(ValueError, match="resolution is 0"):
        Geneval(**folders, resolution=0)
    with pytest.raises(ValueError, match="geneval: detector='/no/folder' is not a folder"):
        Geneval("/no/folder", clip=folders["clip"])
    with pytest.raises(ValueError, match=r"geneval: .*(no weights that fit|cannot be loaded as Mask2Former)"):
        Geneval(folders["clip"], clip=folders["clip"])
