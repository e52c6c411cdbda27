"""Rewards of sounds: what they get, what is refused, and the built-in ones against other libraries."""

from pathlib import Path

import numpy as np
import pytest
import torch

from flowgrpo.rewards.base import Reward, RewardSpec
from flowgrpo.rewards.models.clap import Clap
from flowgrpo.rewards.models.loudness import Loudness
from flowgrpo.rewards.runner import RewardSet
from flowgrpo.rewards.spectra import fitting, resampled
from tests.tiny_rewards import save_clap

PROMPTS = ["rain", "a car", "rain"]


def sounds(channels: int = 2, samples: int = 2600) -> torch.Tensor:
    return torch.rand(3, channels, samples, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def clap(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_clap(tmp_path_factory.mktemp("clap")))


def test_a_reward_gets_sounds_within_range_and_one_sampling_rate():
    seen = {}

    def my_reward(sounds, prompts, sampling_rate, key):
        seen.update(sounds=sounds, rate=sampling_rate, key=key)
        return [0.0] * len(prompts)

    columns = {"sampling_rate": [8000] * 3, "key": ["a", "b", "c"]}
    RewardSet([Reward(my_reward, "mine")]).score(3 * sounds(), PROMPTS, columns)
    assert seen["rate"] == 8000
    assert seen["key"] == ["a", "b", "c"]
    assert seen["sounds"].shape == (3, 2, 2600)
    assert float(seen["sounds"].abs().max()) == 1.0


def test_a_reward_that_takes_any_column_gets_no_sampling_rate():
    seen = {}

    def my_reward(sounds, **columns):
        seen.update(columns)
        return [0.0] * len(sounds)

    RewardSet([Reward(my_reward, "mine")]).score(sounds(), PROMPTS, {"sampling_rate": [8000] * 3})
    assert set(seen) == {"prompts"}


@pytest.mark.parametrize(
    ("samples", "columns", "message"),
    [
        (sounds(), {}, "column `sampling_rate`"),
        (sounds(), {"sampling_rate": [1, 2, 2]}, "the same samples a second"),
        (sounds() / 0.0, {"sampling_rate": [1] * 3}, "give finite floats"),
        (sounds()[:, :, :0], {"sampling_rate": [1] * 3}, "C channels of S samples"),
        (sounds().long(), {"sampling_rate": [1] * 3}, "sounds are torch.int64"),
    ],
)
def test_sounds_that_cannot_be_scored_are_refused(samples, columns, message):
    with pytest.raises(ValueError, match=message):
        RewardSet([RewardSpec("loudness")]).score(samples, PROMPTS, columns)


def test_rewards_of_another_kind_are_refused_both_ways():
    with pytest.raises(ValueError, match="scores `images`, but the samples here are sounds; choose a reward of sounds"):
        RewardSet([RewardSpec("jpeg_compressibility")]).score(sounds(), PROMPTS, {"sampling_rate": [8000] * 3})
    with pytest.raises(ValueError, match="scores `sounds`, but the samples here are images"):
        RewardSet([RewardSpec("loudness")]).score(torch.rand(3, 3, 8, 8), PROMPTS)


def test_a_column_of_images_called_sampling_rate_stays_a_list():
    seen = {}

    def my_reward(images, sampling_rate):
        seen["rate"] = sampling_rate
        return [0.0] * len(images)

    RewardSet([Reward(my_reward, "mine")]).score(torch.rand(3, 3, 8, 8), PROMPTS, {"sampling_rate": [1, 2, 3]})
    assert seen["rate"] == [1, 2, 3]


def test_a_sound_that_makes_a_reward_fail_is_kept_as_a_file(tmp_path: Path):
    from flowgrpo.media.sound import read_sound
    from flowgrpo.rewards.base import RewardError

    def broken(sounds, prompts):
        raise RuntimeError("no")

    rewards = RewardSet([Reward(broken, "broken")], quarantine=tmp_path, retries=0)
    with pytest.raises(RewardError) as caught:
        rewards.score(sounds(), PROMPTS, {"sampling_rate": [8000] * 3})
    found, rate = read_sound(next(iter(sorted(caught.value.saved.glob("*.wav")))))
    assert rate == 8000
    assert np.abs(found - sounds()[0].numpy()).max() < 2**-15


def test_loudness_is_the_distance_from_the_target_in_decibels():
    tone = 0.1 * torch.ones(2, 1, 100)
    tone[1] = 0.0
    found = Loudness(target=-26.0)(tone)
    assert found.values.tolist() == pytest.approx([-6.0, -94.0], abs=1e-4)
    assert found.sub_scores["peak"] == pytest.approx([0.1, 0.0])
    assert Loudness()(torch.ones(1, 1, 4)).sub_scores["clipped"] == [1.0]
    with pytest.raises(ValueError, match="give decibels from -120 to 0"):
        Loudness(target=3.0)


@pytest.mark.parametrize(
    ("rate", "wanted", "samples"), [(44100, 48000, 441), (48000, 16000, 480), (44100, 16000, 442), (8000, 8000, 7)]
)
def test_resampling_is_scipys(rate, wanted, samples):
    signal = pytest.importorskip("scipy.signal")
    x = sounds(1, samples).double()
    expected = signal.resample(x.numpy(), round(samples * wanted / rate), axis=-1)
    assert np.abs(resampled(x, rate, wanted).numpy() - expected).max() < 1e-12


def test_parts_cover_a_long_sound_and_repeat_a_short_one():
    assert [part.tolist() for part in fitting(torch.arange(3), 7)] == [[0, 1, 2, 0, 1, 2, 0]]
    assert [part.tolist() for part in fitting(torch.arange(5), 2)] == [[0, 1], [1, 2], [3, 4]]
    assert [part.tolist() for part in fitting(torch.arange(4), 4)] == [[0, 1, 2, 3]]


@pytest.mark.slow
def test_clap_is_the_cosine_that_transformers_computes(clap: str):
    from transformers import ClapModel, ClapProcessor

    reward, x = Clap(clap), sounds()
    found = reward(x, PROMPTS, sampling_rate=8000)
    heard = [one.mean(0).numpy() for one in x]
    # The processor's own call has its sounds by another name before transformers 5.
    processor = ClapProcessor.from_pretrained(clap)
    texts = processor.tokenizer(PROMPTS, return_tensors="pt", padding=True)
    asked = {**texts, **processor.feature_extractor(heard, return_tensors="pt", sampling_rate=8000)}
    spectra, _ = reward.lease.value.spectra(x, 8000)
    assert float((spectra - asked["input_features"]).abs().max()) < 1e-4
    with torch.no_grad():
        out = ClapModel.from_pretrained(clap).eval()(**asked)
    assert torch.allclose(found, (out.audio_embeds * out.text_embeds).sum(-1), atol=1e-5)
    assert reward(sounds(samples=20000), PROMPTS, sampling_rate=8000).isfinite().all()


@pytest.mark.slow
def test_clap_has_the_gradient_of_its_score(clap: str):
    rewards = RewardSet([RewardSpec("clap", weight=2.0, options={"model": clap})])
    values, slopes = rewards.gradients(x := 0.5 * sounds(1, 800), PROMPTS, {"sampling_rate": [8000] * 3})
    away = 1e-2 * slopes / slopes.flatten(1).norm(dim=1).view(-1, 1, 1)
    columns = {"sampling_rate": [8000] * 3}
    up, down = (rewards.score(x + sign * away, PROMPTS, columns).values[:, 0] for sign in (1, -1))
    expected = slopes.flatten(1).norm(dim=1)
    assert torch.allclose(2.0 * (up - down) / 2e-2, expected, rtol=0.1)
    assert torch.allclose(values, 2.0 * rewards.score(x, PROMPTS, columns).values[:, 0], atol=1e-5)


@pytest.mark.slow
def test_a_clap_that_fuses_random_crops_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="would have several scores"):
        Clap(str(save_clap(tmp_path, fused=True)))
