"""Rewards that compare samples with the picture in column `target_image`, against other libraries and by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowgrpo.rewards.models.image_similarity import ImageSimilarity
from flowgrpo.rewards.models.likeness import Psnr, Ssim, structural_similarity
from flowgrpo.rewards.pixels import load_picture
from tests.rewards.slopes import slope_ratio
from tests.tiny_rewards import save_clip

PROMPTS = ["a cup", "a star"]
SKIMAGE = [0.6958322433441247, 0.6973594934244046]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def save(path: Path, image: Tensor) -> str:
    Image.fromarray((image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()).save(path)
    return str(path)


@pytest.fixture
def targets(tmp_path: Path) -> list[str]:
    return [save(tmp_path / f"{k}.png", picture) for k, picture in enumerate(noise(2, 3, 32, 48))]


def test_structural_similarity_is_that_of_scikit_image() -> None:
    """The numbers are those of `skimage.metrics.structural_similarity` 0.26, in float64 and with Wang's settings."""
    first, second = waves(0.0), waves(0.7)
    torch.testing.assert_close(
        structural_similarity(first, second), torch.tensor(SKIMAGE, dtype=torch.float32), atol=2e-6, rtol=0.0
    )


def waves(shift: float) -> Tensor:
    """Two pictures [3, 20, 28] that have the same numbers in any library."""
    rows, columns = torch.meshgrid(torch.arange(20.0), torch.arange(28.0), indexing="ij")
    made = [[torch.sin(rows / (2 + c) + k + shift) * torch.cos(columns / (3 + c)) for c in range(3)] for k in range(2)]
    return torch.stack([torch.stack(own) for own in made]) / 2 + 0.5


def test_psnr_by_hand_and_at_most_60_decibels(targets: list[str]) -> None:
    images = torch.stack([load_picture(Path(path)) for path in targets])
    assert Psnr()(images, targets).tolist() == pytest.approx([60.0, 60.0])
    shifted = images.clone()
    shifted[1] = (images[1] * 0.8) + 0.1
    error = float((shifted[1] - images[1]).square().mean())
    assert Psnr()(shifted, targets).tolist() == pytest.approx([60.0, -10 * float(torch.tensor(error).log10())])
    assert Ssim()(images, targets).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("plugin", [Psnr, Ssim, lambda: ImageSimilarity("scenes")], ids=["psnr", "ssim", "similarity"])
def test_a_step_along_the_gradient_adds_what_the_gradient_says(
    plugin: Callable[[], object], targets: list[str]
) -> None:
    images = 0.25 + noise(2, 3, 32, 48, seed=1) / 2
    ratio = slope_ratio(plugin(), images, PROMPTS, 1e-3, {"target_image": targets})
    assert ratio == pytest.approx(1.0, abs=0.02)


def test_a_larger_target_is_scaled_and_other_proportions_are_refused(tmp_path: Path) -> None:
    small = noise(1, 3, 8, 12).repeat_interleave(4, 2).repeat_interleave(4, 3)
    large = save(tmp_path / "large.png", small[0].repeat_interleave(2, 1).repeat_interleave(2, 2))
    own = save(tmp_path / "own.png", small[0])
    assert float(Ssim()(small, [large])) > 0.95
    assert float(Psnr()(small, [large])) < float(Psnr()(small, [own]))
    with pytest.raises(ValueError, match=r"wide\.png has 96 × 32 pixels and the sample has 48 × 32; crop the target"):
        Psnr()(small, [save(tmp_path / "wide.png", noise(3, 32, 96))])


def test_what_cannot_be_compared_is_refused(targets: list[str], tmp_path: Path) -> None:
    images = noise(2, 3, 32, 48)
    with pytest.raises(ValueError, match=r"psnr: the column `target_image`, row 1, has None; give the path"):
        Psnr()(images, [targets[0], None])
    with pytest.raises(ValueError, match=r"absent\.png cannot be read as a picture"):
        Ssim()(images, [targets[0], str(tmp_path / "absent.png")])
    with pytest.raises(ValueError, match=r"ssim: images have shape \[1, 2, 3, 32, 48\]; give single images"):
        Ssim()(images[None], targets[:1])
    with pytest.raises(ValueError, match=r"ssim: images have shape \[1, 3, 10, 15\]; give sides of 11 pixels or more"):
        Ssim()(noise(1, 3, 10, 15), targets[:1])


def test_the_similarity_is_the_cosine_of_the_encoder_and_takes_any_size(targets: list[str], tmp_path: Path) -> None:
    from transformers import CLIPModel, CLIPProcessor

    folder = save_clip(tmp_path / "clip")
    tall = save(tmp_path / "tall.png", noise(3, 64, 40, seed=3))
    given, images = [targets[0], tall], noise(2, 3, 32, 48, seed=4)
    scores = ImageSimilarity(str(folder))(images, given)
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    with torch.no_grad():

        def embed(pictures: list[Image.Image]) -> Tensor:
            found = model.get_image_features(**processor(images=pictures, return_tensors="pt"))
            found = found if isinstance(found, Tensor) else found.pooler_output
            return torch.nn.functional.normalize(found, dim=-1)

        samples = [Image.open(save(tmp_path / f"sample-{k}.png", image)) for k, image in enumerate(images)]
        wanted = torch.cat([embed([Image.open(path)]) for path in given])
        torch.testing.assert_close(scores, (embed(samples) * wanted).sum(-1), atol=1e-5, rtol=0.0)
    video = torch.stack([images, images.flip(1)], 1)
    parts = [ImageSimilarity(str(folder))(one, given) for one in (images, images.flip(1))]
    torch.testing.assert_close(ImageSimilarity(str(folder))(video, given), torch.stack(parts).mean(0))
