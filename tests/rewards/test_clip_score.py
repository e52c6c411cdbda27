"""CLIP score on a tiny architecture: file weights, hand-computed cosines, preprocessing."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.models.clip_score import ClipScore
from flowgrpo.rewards.pixels import preprocess_images
from tests.tiny_rewards import OPEN_CLIP, save_open_clip

PROMPTS = ["a red circle", "two blue squares", "a red circle"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("clip")
    architecture, checkpoint = save_open_clip(folder, "tiny-clip-score-test")
    packed = folder / "packed"
    packed.mkdir()
    settings = {"model_cfg": OPEN_CLIP, "preprocess_cfg": {"resize_mode": "squash", "mean": [0.5] * 3}}
    (packed / "open_clip_config.json").write_text(json.dumps(settings))
    shutil.copy(checkpoint, packed / "open_clip_pytorch_model.bin")
    return {"model": str(architecture), "pretrained": str(checkpoint), "folder": str(packed)}


@pytest.fixture(scope="module")
def scorer(files: dict[str, str]) -> ClipScore:
    return ClipScore(files["model"], files["pretrained"])


def pictures(*shape: int) -> torch.Tensor:
    coarse = torch.rand(*shape[:-2], 6, 6, generator=torch.Generator().manual_seed(1))
    flat = coarse.flatten(0, -4) if len(shape) > 4 else coarse
    smooth = torch.nn.functional.interpolate(flat, size=shape[-2:], mode="bilinear")
    return smooth.view(shape)


def pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())


def test_cosine_by_hand_from_a_checkpoint_file(files: dict[str, str], scorer: ClipScore) -> None:
    model = open_clip.create_model(Path(files["model"]).stem, pretrained=files["pretrained"]).eval()
    images = pictures(3, 3, 32, 32)
    mean = torch.tensor(open_clip.OPENAI_DATASET_MEAN).view(3, 1, 1)
    std = torch.tensor(open_clip.OPENAI_DATASET_STD).view(3, 1, 1)
    with torch.no_grad():
        vision = model.encode_image((images - mean) / std)
        text = model.encode_text(open_clip.tokenize(PROMPTS, context_length=16))
    expected = (vision * text).sum(-1) / (vision.norm(dim=-1) * text.norm(dim=-1))
    scores = scorer(images=images, prompts=PROMPTS)
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)
    assert scores.dtype == torch.float32
    assert expected.std() > 1e-3
    scaled = ClipScore(files["model"], files["pretrained"], logit_scaled=True)(images=images, prompts=PROMPTS)
    torch.testing.assert_close(scaled, expected / 0.07, atol=1e-4, rtol=1e-4)


def test_a_batch_scores_as_its_members_do(scorer: ClipScore) -> None:
    images = pictures(3, 3, 40, 64)
    singly = [scorer(images=images[i : i + 1], prompts=PROMPTS[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(scorer(images=images, prompts=PROMPTS), torch.cat(singly), atol=1e-6, rtol=1e-5)


def test_a_video_is_the_mean_over_frames(scorer: ClipScore) -> None:
    video = pictures(2, 3, 3, 40, 40)
    frames = scorer(images=video.flatten(0, 1), prompts=[p for p in PROMPTS[:2] for _ in range(3)])
    torch.testing.assert_close(scorer(images=video, prompts=PROMPTS[:2]), frames.view(2, 3).mean(1))


def test_autocast_around_the_call_leaves_float32(scorer: ClipScore) -> None:
    images = pictures(3, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scorer(images=images, prompts=PROMPTS), scorer(images=images, prompts=PROMPTS))
        inside = scorer(images=images, prompts=PROMPTS)
    assert torch.equal(inside, scorer(images=images, prompts=PROMPTS))


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", [(48, 80), (90, 40), (20, 17), (64, 64)])
@pytest.mark.parametrize("target", [32, (24, 40)])
def test_preprocessing_matches_open_clips_on_8_bit_pictures(mode: str, size: tuple[int, int], target: Any) -> None:
    settings = PreprocessCfg(size=target, resize_mode=mode, fill_color=0)
    image = (pictures(1, 3, *size) * 255).round() / 255
    expected = image_transform_v2(settings, is_train=False)(pil(image[0]))
    ours = preprocess_images(image, vars(settings))[0]
    assert ours.shape == expected.shape
    # Pillow rounds to 8 bits after each of its two passes, and its filter weights besides.
    levels = (ours - expected).abs() * 255 * torch.tensor(settings.std).view(3, 1, 1)
    assert levels.max() < 1.25
    assert levels.mean() < 0.35


def test_overshoot_of_bicubic_is_clamped_as_in_8_bit() -> None:
    edge = torch.zeros(1, 3, 8, 8)
    edge[..., 4:] = 1
    settings = {"size": 32, "mean": (0.0,) * 3, "std": (1.0,) * 3, "resize_mode": "squash"}
    result = preprocess_images(edge, settings)
    assert result.min() == 0
    assert result.max() == 1


def test_a_folder_brings_weights_and_preprocessing(files: dict[str, str], scorer: ClipScore) -> None:
    packed = ClipScore(files["folder"])
    wide = pictures(1, 3, 32, 64)
    assert packed(images=wide, prompts=PROMPTS[:1]) != scorer(images=wide, prompts=PROMPTS[:1])
    alike = ClipScore(files["model"], files["pretrained"], preprocess={"resize_mode": "squash", "mean": (0.5,) * 3})
    assert torch.equal(alike(images=wide, prompts=PROMPTS[:1]), packed(images=wide, prompts=PROMPTS[:1]))
    assert ClipScore(f"local-dir:{files['folder']}").lease.value is packed.lease.value


def test_missing_weights_are_refused_before_building(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing may be built")

    monkeypatch.setattr(open_clip, "create_model", build)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "open_clip_config.json").write_text(json.dumps({"model_cfg": OPEN_CLIP}))
    other = tmp_path / Path(files["model"]).name
    other.write_text(json.dumps({**OPEN_CLIP, "embed_dim": 8}))
    faults: list[tuple[dict[str, Any], str]] = [
        ({"model": files["model"]}, "no weights.*`pretrained`"),
        ({"model": files["model"], "pretrained": "/no/such.pt"}, "/no/such.pt"),
        ({"model": "ViT-B-32", "pretrained": "opnai"}, "not one of the tags.*openai"),
        ({"model": "ViT-B-32", "pretrained": "openai"}, "QuickGELU"),
        ({"model": "ViT-B32"}, "did you mean 'ViT-B-32'"),
        ({"model": str(empty)}, "has no weights"),
        ({"model": str(tmp_path), "pretrained": None}, "no open_clip_config.json"),
        ({"model": files["folder"], "pretrained": files["pretrained"]}, "its own weights"),
        ({"model": str(other)}, "already has another architecture"),
        ({"model": str(tmp_path / "absent.json")}, "no architecture file"),
        ({"model": files["model"], "preprocess": {"resize": "squash"}}, "preprocess has no entry 'resize'"),
    ]
    for arguments, message in faults:
        with pytest.raises(ValueError, match=message):
            ClipScore(**arguments)


def test_weights_that_do_not_fit_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    state = torch.load(files["pretrained"], weights_only=True)
    del state["text_projection"]
    torch.save(state, tmp_path / "part.pt")
    with pytest.raises(ValueError, match="cannot be loaded"):
        ClipScore(files["model"], str(tmp_path / "part.pt"))
    (tmp_path / "junk.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="cannot be loaded"):
        ClipScore(files["model"], str(tmp_path / "junk.pt"))


def test_random_weights_only_on_demand_and_without_touching_the_generator(files: dict[str, str]) -> None:
    images = pictures(2, 3, 32, 32)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = ClipScore(files["model"], allow_random=True)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(12)
    second = ClipScore(files["model"], allow_random=True)
    arguments = {"images": images, "prompts": PROMPTS[:2]}
    assert torch.equal(first(**arguments), second(**arguments))


def test_as_a_plugin_in_a_set(files: dict[str, str], scorer: ClipScore) -> None:
    options = {"model": files["model"], "pretrained": files["pretrained"], "batch_size": 2}
    result = RewardSet([RewardSpec("clip_score", options=options)]).score(pictures(3, 3, 40, 32), PROMPTS)
    expected = scorer(images=pictures(3, 3, 40, 32), prompts=PROMPTS)
    np.testing.assert_allclose(result.values[:, 0].numpy(), expected.numpy(), atol=1e-6)
    assert result.names == ("clip_score",)
