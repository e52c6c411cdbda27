"""The rewards that look through transformers' CLIP-like towers, against the library called directly."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowgrpo.rewards import RewardSet, RewardSpec, Scores
from flowgrpo.rewards.backbones import sharing
from flowgrpo.rewards.backbones.towers import _resampling, process_images
from flowgrpo.rewards.base import Reward
from flowgrpo.rewards.models.aesthetic import Aesthetic
from flowgrpo.rewards.models.clip_score import ClipScore
from flowgrpo.rewards.models.pickscore import PickScore
from flowgrpo.rewards.models.siglip import Siglip
from flowgrpo.rewards.pixels import preprocess_images
from tests.tiny_rewards import WORDS, as_pil, pictures, save_clip, save_siglip


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def siglip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_siglip(tmp_path_factory.mktemp("siglip")))


@pytest.fixture(autouse=True)
def nothing_left_in_memory() -> Any:
    yield
    assert not sharing._LOADED


def direct(folder: str, images: Tensor, prompts: list[str], **options: Any) -> Tensor:
    """The logits that the library's own model and processor give PIL pictures and their prompts."""
    from transformers import AutoModel, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    inputs = processor(
        text=prompts, images=[as_pil(image) for image in images], return_tensors="pt", truncation=True, **options
    )
    inputs.pop("attention_mask")
    with torch.no_grad():
        return model(**inputs).logits_per_image.diag()


@pytest.mark.parametrize("size", [(32, 32), (48, 80), (90, 40), (20, 17)])
def test_pickscore_is_the_librarys_logit(clip: str, size: tuple[int, int]) -> None:
    images = pictures(3, 3, *size)
    logits = direct(clip, images, WORDS, padding=True)
    reward = PickScore(clip)
    scores = reward(images=images, prompts=WORDS)
    torch.testing.assert_close(scores.values, logits / 26, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(scores.sub_scores["cosine"]), logits * 0.07, atol=2e-6, rtol=1e-4)
    assert logits.std() > 0.05
    reward.close()


def test_pickscore_divisor_and_processor_of_another_folder(clip: str, tmp_path: Path) -> None:
    from transformers import CLIPModel

    CLIPModel.from_pretrained(clip).save_pretrained(tmp_path / "bare")
    images = pictures(3, 3, 40, 40)
    reward, plain = PickScore(str(tmp_path / "bare"), processor=clip, divisor=1), PickScore(clip)
    ours, usual = reward(images=images, prompts=WORDS), plain(images=images, prompts=WORDS)
    torch.testing.assert_close(ours.values, usual.values * 26)
    reward.close(), plain.close()
    with pytest.raises(ValueError, match="bare holds no processor"):
        PickScore(str(tmp_path / "bare"))
    with pytest.raises(ValueError, match="divisor is 0; give a number above 0"):
        PickScore(clip, divisor=0)


def test_clip_score_takes_a_folder_of_transformers(clip: str) -> None:
    images = pictures(3, 3, 50, 33)
    logits = direct(clip, images, WORDS, padding=True)
    reward, scaled = ClipScore(clip), ClipScore(clip, backend="transformers", logit_scaled=True)
    torch.testing.assert_close(reward(images=images, prompts=WORDS), logits * 0.07, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(scaled(images=images, prompts=WORDS), logits, atol=2e-5, rtol=1e-4)
    reward.close(), scaled.close()
    with pytest.raises(ValueError, match="leave `pretrained`"):
        ClipScore(clip, "weights.pt")
    with pytest.raises(ValueError, match="backend is 'jax'; give one of open_clip, transformers"):
        ClipScore(clip, backend="jax")


def test_siglip_pads_to_64_in_lower_case(siglip: str) -> None:
    images, prompts = pictures(3, 3, 40, 64), ["A red circle", "two blue squares", "a Red circle"]
    logits = direct(siglip, images, [prompt.lower() for prompt in prompts], padding="max_length", max_length=64)
    reward, chance = Siglip(siglip), Siglip(siglip, probability=True)
    scores = reward(images=images, prompts=prompts)
    cosine = (logits + 2) / torch.tensor(1.5).exp()
    torch.testing.assert_close(scores.values, cosine, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(chance(images=images, prompts=prompts).values, logits.sigmoid(), atol=1e-6, rtol=1e-4)
    as_written = Siglip(siglip, lowercase=False)
    assert as_written(images=images, prompts=prompts).values[0] != scores.values[0]
    for one in (reward, chance, as_written):
        one.close()


def head(folder: Path, *sizes: int) -> tuple[str, nn.Sequential]:
    """A file in the layout of the aesthetic predictor, and the network it was saved from, dropout included."""
    torch.manual_seed(4)
    pairs = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    spread: list[nn.Module] = []
    for layer in pairs[:-1]:
        spread += [layer, nn.Dropout(0.2)]
    network = nn.Sequential(*spread, pairs[-1]).eval()
    path = folder / "head.pth"
    torch.save({f"layers.{key}": value for key, value in network.state_dict().items()}, path)
    return str(path), network


def test_aesthetic_is_the_head_on_the_unit_embedding(clip: str, tmp_path: Path) -> None:
    from transformers import CLIPImageProcessor, CLIPModel

    path, network = head(tmp_path, 16, 8, 4, 1)
    images = pictures(3, 3, 48, 40)
    model = CLIPModel.from_pretrained(clip).eval()
    pixels = CLIPImageProcessor.from_pretrained(clip)([as_pil(image) for image in images], return_tensors="pt")
    with torch.no_grad():
        embedding = model.visual_projection(model.vision_model(**pixels).pooler_output)
        expected = network(embedding / embedding.norm(dim=-1, keepdim=True)).squeeze(-1)
    reward = Aesthetic(path, model=clip)
    torch.testing.assert_close(reward(images=images, prompts=WORDS), expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(reward(images=images, prompts=[""] * 3), reward(images=images, prompts=WORDS))
    reward.close()


def test_first_aesthetic_head_by_hand(clip: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1, 16), "bias": torch.tensor([5.237])}, tmp_path / "v1.pth")
    reward = Aesthetic(str(tmp_path / "v1.pth"), model=clip)
    torch.testing.assert_close(reward(images=pictures(2, 3, 32, 32), prompts=["", ""]), torch.tensor([5.237, 5.237]))
    reward.close()


def test_heads_that_do_not_fit_are_refused(clip: str, tmp_path: Path) -> None:
    path, _ = head(tmp_path, 24, 1)
    with pytest.raises(ValueError, match=r"takes embeddings of size 24, but .* makes 16"):
        Aesthetic(path, model=clip)
    path, _ = head(tmp_path, 16, 2)
    with pytest.raises(ValueError, match="has no usable head"):
        Aesthetic(path, model=clip)
    torch.save({"layers.0.weight": nn.Linear}, path)
    with pytest.raises(ValueError, match="convert the file to safetensors"):
        Aesthetic(path, model=clip)
    with pytest.raises(ValueError, match=r"head='/no/head\.pth' is not a file"):
        Aesthetic("/no/head.pth", model=clip)
    with pytest.raises(ValueError, match="incomplete; write 'hf-hub:ORG/NAME/FILE'"):
        Aesthetic("hf-hub:org/name", model=clip)


def test_videos_are_the_mean_over_their_frames(clip: str) -> None:
    video = pictures(2, 5, 3, 40, 40)
    reward = ClipScore(clip)
    frames = reward(images=video.flatten(0, 1), prompts=[word for word in WORDS[:2] for _ in range(5)]).view(2, 5)
    torch.testing.assert_close(reward(images=video, prompts=WORDS[:2]), frames.mean(1))
    thinned = ClipScore(clip, frames=3)
    torch.testing.assert_close(thinned(images=video, prompts=WORDS[:2]), frames[:, [0, 2, 4]].mean(1))
    middle = ClipScore(clip, frames=1)
    torch.testing.assert_close(middle(images=video, prompts=WORDS[:2]), frames[:, 2])
    for one in (reward, thinned, middle):
        one.close()


def values(reward: Any, images: Tensor, prompts: list[str]) -> Tensor:
    scores = reward(images=images, prompts=prompts)
    return torch.as_tensor(scores.values) if isinstance(scores, Scores) else scores


def test_batches_empty_ones_and_autocast(clip: str, tmp_path: Path) -> None:
    images = pictures(3, 3, 40, 64)
    path, _ = head(tmp_path, 16, 1)
    for reward in (PickScore(clip), ClipScore(clip), Aesthetic(path, model=clip)):
        singly = [values(reward, images[i : i + 1], WORDS[i : i + 1]) for i in range(3)]
        torch.testing.assert_close(values(reward, images, WORDS), torch.cat(singly), atol=1e-6, rtol=1e-5)
        assert values(reward, images[:0], []).shape == (0,)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = values(reward, images, WORDS)
        assert torch.equal(inside, values(reward, images, WORDS))
        reward.close()


def test_images_that_are_no_numbers_are_refused_before_scoring(clip: str) -> None:
    rewards = RewardSet([RewardSpec("pickscore", options={"model": clip})])
    images = pictures(2, 3, 32, 32)
    images[1, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="images range from nan"):
        rewards.score(images, WORDS[:2])
    with pytest.raises(ValueError, match=r"\[B, 3, H, W\]"):
        rewards.rewards[0].score(torch.zeros(2, 1, 8, 8), WORDS[:2])
    rewards.close()


def test_missing_weights_are_an_error_and_not_random_numbers(clip: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = save_clip(tmp_path / "broken")
    # Copies: the file that is read is written below, and with old versions a map of it would end the process.
    state = {name: value.clone() for name, value in load_file(broken / "model.safetensors").items()}
    projection = state.pop("visual_projection.weight")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights that fit visual_projection\.weight of"):
        PickScore(str(broken))
    save_file(
        {**state, "visual_projection.weight": projection[:3]},
        broken / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ValueError, match="cannot be loaded as AutoModel"):
        PickScore(str(broken))
    with pytest.raises(ValueError, match="is not a folder; give a folder, or a model id"):
        PickScore("./absent")
    with pytest.raises(ValueError, match="dtype is 'int8'; give one of float32"):
        PickScore(clip, dtype="int8")
    with pytest.raises(ValueError, match="pickscore: batch_size is 0"):
        PickScore(clip, batch_size=0)


def test_bfloat16_weights_score_in_float32(clip: str) -> None:
    images = pictures(3, 3, 40, 40)
    exact, coarse = PickScore(clip), PickScore(clip, dtype="bfloat16")
    one, other = (r(images=images, prompts=WORDS).values for r in (exact, coarse))
    assert other.dtype == torch.float32
    assert 0 < (one - other).abs().max() < 0.05
    exact.close(), coarse.close()


def counted(reward: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that the reward's image tower sees."""
    seen: list[int] = []
    towers = reward.lease.value
    encode = towers._encode_image
    monkeypatch.setattr(towers, "_encode_image", lambda pixels: (seen.append(len(pixels)), encode(pixels))[1])
    return seen


def test_one_backbone_is_loaded_once_and_sees_an_image_once(
    clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModel

    loads: list[str] = []
    load = AutoModel.from_pretrained.__func__
    monkeypatch.setattr(
        AutoModel, "from_pretrained", classmethod(lambda kind, *a, **k: (loads.append(a[0]), load(kind, *a, **k))[1])
    )
    path, _ = head(tmp_path, 16, 1)
    images = pictures(5, 3, 40, 40)
    prompts = [*WORDS, *WORDS[:2]]
    alone = ClipScore(clip)
    expected = alone(images=images, prompts=prompts)
    alone.close()
    specs = [
        RewardSpec("clip_score", options={"model": clip, "batch_size": 5}),
        RewardSpec("aesthetic", options={"head": path, "model": clip, "batch_size": 2}),
    ]
    together = RewardSet(specs)
    assert len(loads) == 2
    seen = counted(together.rewards[0].function, monkeypatch)
    batch = together.score(images, prompts)
    assert seen == [5]
    assert torch.equal(batch.values[:, 0], expected)
    other = Aesthetic(path, model=clip, dtype="bfloat16")
    assert len(loads) == 3
    other.close()
    together.close()


def test_the_model_leaves_memory_with_its_last_reward(clip: str) -> None:
    import weakref

    first, second = PickScore(clip), ClipScore(clip)
    model = weakref.ref(first.lease.value.model)
    assert first.lease.shared
    first.close()
    first.close()
    assert not second.lease.shared
    assert model() is not None
    second.close()
    del first, second
    assert model() is None


def test_a_reward_alone_keeps_no_embeddings(clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = ClipScore(clip)
    seen = counted(reward, monkeypatch)
    for _ in range(2):
        reward(images=pictures(2, 3, 32, 32), prompts=WORDS[:2])
    assert seen == [2, 2]
    assert not reward.lease.value._known
    reward.close()


@pytest.mark.parametrize("size", [(32, 32), (48, 80), (90, 40), (20, 17)])
def test_the_gradient_goes_through_the_resampling_of_the_processor(
    clip: str, siglip: str, size: tuple[int, int]
) -> None:
    from transformers import AutoProcessor

    for folder in (clip, siglip):
        processor = AutoProcessor.from_pretrained(folder).image_processor
        images = pictures(2, 3, *size).requires_grad_()
        values, smooth = process_images(processor, images), preprocess_images(images, _resampling(processor))
        assert values.requires_grad
        assert torch.equal(values.detach(), process_images(processor, images.detach()))
        # The picture is rounded to 8 bits before and after the resampling.
        levels = (values - smooth).detach().abs().max() * 255 * min(processor.image_std)
        assert levels < 1.5


def test_scores_of_transformers_towers_have_a_gradient_and_are_not_remembered(clip: str, siglip: str) -> None:
    images = pictures(3, 3, 40, 40)
    for reward in (PickScore(clip), PickScore(clip), Siglip(siglip)):
        rewards = RewardSet([Reward(reward, "one")])
        plain = rewards.score(images, WORDS).values[:, 0]
        values, slopes = rewards.gradients(images, WORDS)
        torch.testing.assert_close(values, plain, atol=1e-5, rtol=1e-4)
        assert bool((slopes.flatten(1).abs().sum(1) > 0).all())
        assert not any(kept.requires_grad for kept in reward.lease.value._known.values())
        reward.close()
