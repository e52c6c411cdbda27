"""HPS v2.1 on a tiny architecture, in the layout of its published checkpoint."""

from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.models.clip_score import ClipScore
from flowgrpo.rewards.models.hpsv2 import HpsV2
from tests.rewards.slopes import slope_ratio
from tests.tiny_rewards import WORDS, as_pil, pictures, save_open_clip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hpsv2")
    architecture, weights = save_open_clip(folder, "tiny-hpsv2-test")
    state = torch.load(weights, weights_only=True)
    torch.save({"epoch": 1, "name": "hps", "state_dict": state}, folder / "HPS_v2.1_compressed.pt")
    return {"checkpoint": str(folder / "HPS_v2.1_compressed.pt"), "model": str(architecture)}


@pytest.mark.parametrize("size", [(32, 32), (30, 60), (64, 36)])
def test_cosine_of_the_whole_image_on_black(files: dict[str, str], size: tuple[int, int]) -> None:
    images = pictures(3, 3, *size)
    model = open_clip.create_model(Path(files["model"]).stem).eval()
    state = torch.load(files["checkpoint"], weights_only=True)["state_dict"]
    model.load_state_dict(state)
    transform = image_transform_v2(PreprocessCfg(size=32, resize_mode="longest", fill_color=0), is_train=False)
    with torch.no_grad():
        seen = model.encode_image(torch.stack([transform(as_pil(image)) for image in images]), normalize=True)
        read = model.encode_text(open_clip.tokenize(WORDS, context_length=16), normalize=True)
    reward = HpsV2(**files)
    scores = reward(images=images, prompts=WORDS)
    # Pillow rounds to 8 bits on the way.
    torch.testing.assert_close(scores, (seen * read).sum(-1), atol=2e-3, rtol=0.0)
    assert scores.std() > 0.01
    reward.close()


def test_cutting_to_a_square_would_be_another_score(files: dict[str, str]) -> None:
    wide, square = pictures(2, 3, 30, 60), pictures(2, 3, 40, 40)
    reward, clip = HpsV2(**files), ClipScore(files["model"], files["checkpoint"])
    difference = reward(images=wide, prompts=WORDS[:2]) - clip(images=wide, prompts=WORDS[:2])
    assert difference.abs().min() > 1e-3
    torch.testing.assert_close(reward(images=square, prompts=WORDS[:2]), clip(images=square, prompts=WORDS[:2]))
    reward.close(), clip.close()


def test_videos_none_and_a_set(files: dict[str, str]) -> None:
    video = pictures(2, 3, 3, 30, 60)
    rewards = RewardSet([RewardSpec("hpsv2", options=files)])
    frames = rewards.score(video.flatten(0, 1), [word for word in WORDS[:2] for _ in range(3)]).values.view(2, 3)
    torch.testing.assert_close(rewards.score(video, WORDS[:2]).values[:, 0], frames.mean(1))
    assert rewards.score(video[:0], []).values.shape == (0, 1)
    assert rewards.rewards[0].function(images=video[:0], prompts=[]).shape == (0,)
    rewards.close()


def test_files_that_cannot_be_used(files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"hpsv2: checkpoint=.*is not a file"):
        HpsV2(str(tmp_path / "absent.pt"), model=files["model"])
    state = torch.load(files["checkpoint"], weights_only=True)
    del state["state_dict"]["logit_scale"]
    torch.save(state, tmp_path / "part.pt")
    with pytest.raises(ValueError, match="cannot be loaded"):
        HpsV2(str(tmp_path / "part.pt"), model=files["model"])
    asked: list[tuple[str, ...]] = []

    def download(repository: str, file: str) -> str:
        asked.append((repository, file))
        if len(asked) > 1:
            raise OSError("no route to the hub")
        return files["checkpoint"]

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    reward = HpsV2(model=files["model"])
    assert asked == [("xswu/HPSv2", "HPS_v2.1_compressed.pt")]
    reward.close()
    with pytest.raises(ValueError, match=r"cannot be downloaded .*no route.*set checkpoint to the path of a copy"):
        HpsV2(model=files["model"])


def test_the_gradient_is_the_slope_of_the_scores(files: dict[str, str]) -> None:
    for reward in (HpsV2(**files), ClipScore(files["model"], files["checkpoint"])):
        assert slope_ratio(reward, 0.25 + 0.5 * pictures(3, 3, 40, 36), WORDS, 1e-3) == pytest.approx(1.0, abs=0.02)
        reward.close()
