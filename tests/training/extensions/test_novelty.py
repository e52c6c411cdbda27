"""Good images that differ from the others of their group count more, whatever gives their features."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.nearest_images import nearest_distances, patch_means
from flowgrpo.rewards.models.picture_features import feature_towers
from flowgrpo.training.checking import check
from flowgrpo.training.credit.pooling import Batch
from flowgrpo.training.extensions import EXTENSIONS
from tests.tiny_rewards import pictures, random_weights

TASK = SimpleNamespace(device=torch.device("cpu"))


def novelty(**options: Any) -> Any:
    extension = EXTENSIONS["novelty"](**options)
    extension.begin(TASK, None, None)  # type: ignore[arg-type]
    return extension


def distances(extension: Any, samples: Any, groups: list[int], outcomes: list[bool] | None = None) -> list[float]:
    shown = torch.tensor(outcomes or [True] * len(groups))
    experience = SimpleNamespace(samples=samples, groups=torch.tensor(groups), outcomes=shown)
    batch = extension.samples_scored(Batch([0], [], experience, SimpleNamespace()))  # type: ignore[arg-type]
    found: list[float] = batch.columns["novelty/distance"]
    return found


def save_dino(folder: Path) -> Path:
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    random_weights(Dinov2Model, config).save_pretrained(folder)
    size = {"height": 28, "width": 28}
    BitImageProcessor(size={"shortest_edge": 28}, crop_size=size).save_pretrained(folder)
    return folder


def test_pixels_are_compared_within_their_group() -> None:
    images = pictures(5, 3, 16, 16)
    found = distances(novelty(), images, [0, 0, 0, 1, 1])
    want = nearest_distances(patch_means(images), torch.tensor([0, 0, 0, 1, 1]))
    assert found == pytest.approx(want.tolist())
    # The two images of group 1 have one distance between them.
    assert found[3] == pytest.approx(found[4])


def test_images_of_several_sizes_are_a_list_and_a_video_is_the_mean_of_its_frames() -> None:
    images = pictures(3, 3, 16, 16)
    again = distances(novelty(), list(images), [0, 0, 0])
    assert again == pytest.approx(distances(novelty(), images, [0, 0, 0]))
    still = images[:, None].expand(3, 4, 3, 16, 16)
    assert distances(novelty(), still, [0, 0, 0]) == pytest.approx(again)


def test_a_preview_is_compared_with_nothing() -> None:
    images = pictures(3, 3, 16, 16)
    found = distances(novelty(), images, [0, 0, 0], [True, False, True])
    assert found[1] != found[1]
    assert [found[0], found[2]] == pytest.approx(distances(novelty(), images[[0, 2]], [0, 0]))


@pytest.mark.slow
def test_an_encoder_of_pictures_alone_gives_features_and_no_texts(tmp_path: Path) -> None:
    folder = str(save_dino(tmp_path / "dino"))
    images = pictures(4, 3, 40, 48)
    found = distances(novelty(features=folder, batch=3), images, [0, 0, 0, 0])
    lease = feature_towers("test", folder, "cpu", "float32")
    want = nearest_distances(lease.value.embed_images(images, 4), torch.zeros(4, dtype=torch.long))
    assert found == pytest.approx(want.tolist(), abs=1e-5)
    assert min(found) > 0
    with pytest.raises(ValueError, match="is a Dinov2Model, which embeds no texts; give a CLIP or SigLIP model"):
        lease.value.embed_texts(["a star"])
    lease.close()


@pytest.mark.slow
def test_the_scorer_of_the_scenes_gives_features() -> None:
    images = pictures(3, 3, 64, 64)
    assert distances(novelty(features="scenes"), images, [0, 0, 0]) != pytest.approx(
        distances(novelty(), images, [0, 0, 0])
    )


def test_good_images_are_multiplied_and_bad_ones_are_not() -> None:
    extension, advantages = novelty(), torch.tensor([1.0, -1.0, 2.0])
    columns = {"novelty/distance": [0.1, 0.4, 0.4]}
    comparison = SimpleNamespace(samples=SimpleNamespace(columns=columns, groups=torch.zeros(3, dtype=torch.long)))
    assert extension.samples_compared(advantages, comparison).tolist() == pytest.approx([1 / 3, -1.0, 8 / 3])
    assert extension.record() == {"novelty/distance": pytest.approx(0.3)}


@pytest.mark.parametrize(
    ("base", "words", "said"),
    [
        ("text", ["extensions=[novelty]"], "compares images"),
        ("flow_grpo", ["extensions=[novelty]", "credit={name: value}"], "changes the advantages of samples, not of"),
        ("flow_grpo", ["extensions=[novelty, novelty]"], "novelty 2 times; write it once"),
        ("flow_grpo", ["extensions=[{name: novelty, dtype: half}]"], "'float32', 'bfloat16' or 'float16'"),
    ],
)
def test_what_does_not_go_together_is_refused(base: str, words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(base, words)
    assert said in str(error.value)


def test_a_folder_that_is_missing_is_told_before_a_run() -> None:
    faults = check(load_recipe("flow_grpo", ["extensions=[{name: novelty, features: ./gone}]"])).texts("fault")
    assert any(
        "features is './gone', and there is no such folder; give the folder of an image" in one for one in faults
    )
