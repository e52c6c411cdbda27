"""JPEG size: compared with PIL itself, and changes that must increase it."""

import io

import pytest
import torch
from PIL import Image

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.models.jpeg import JpegCompressibility, JpegIncompressibility, jpeg_kilobytes


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def test_size_is_that_of_the_file_pil_writes() -> None:
    picture = noise(1, 3, 24, 40)
    pixels = (picture[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    assert jpeg_kilobytes(picture) == [len(buffer.getvalue()) / 1000]


def test_published_sizes_at_512_pixels() -> None:
    flat, rough = jpeg_kilobytes(torch.cat([torch.full((1, 3, 512, 512), 0.5), noise(1, 3, 512, 512)]))
    assert flat == pytest.approx(4.7, abs=0.2)
    assert rough == pytest.approx(308, rel=0.03)


def test_the_two_rewards_are_scaled_and_opposed() -> None:
    images = torch.cat([torch.zeros(1, 3, 32, 32), noise(1, 3, 32, 32)])
    specs = [RewardSpec("jpeg_compressibility"), RewardSpec("jpeg_incompressibility")]
    result = RewardSet(specs).score(images, ["a", "b"])
    sizes = torch.tensor(jpeg_kilobytes(images))
    torch.testing.assert_close(result.values, torch.stack([-sizes / 500, sizes], 1))
    assert result.sub_scores["jpeg_compressibility"]["kilobytes"] == pytest.approx(sizes.tolist())
    assert sizes[0] < sizes[1]


def test_video_is_the_mean_over_frames() -> None:
    video = noise(2, 3, 3, 16, 16)
    frames = torch.tensor(jpeg_kilobytes(video.flatten(0, 1))).view(2, 3)
    torch.testing.assert_close(torch.tensor(jpeg_kilobytes(video)), frames.mean(1))


def test_quality_counts_and_wrong_ones_are_refused() -> None:
    images = noise(1, 3, 32, 32)
    low, high = JpegIncompressibility(quality=10), JpegIncompressibility(quality=95)
    assert low(images=images, prompts=["a"]).values < high(images=images, prompts=["a"]).values
    with pytest.raises(ValueError, match="from 1 to 100"):
        JpegCompressibility(quality=0)
    for wrong in ("high", 95.5, True):
        with pytest.raises(ValueError, match="give a whole number from 1 to 100"):
            JpegCompressibility(quality=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[B, 3, H, W\]"):
        jpeg_kilobytes(torch.zeros(2, 1, 8, 8))
