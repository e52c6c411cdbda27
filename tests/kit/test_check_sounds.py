"""Checks of rewards of sounds: drawn sounds, faults that must be found, and rewards without a fault."""

from pathlib import Path

import pytest
import torch

from flowgrpo.kit.check import CheckPlan, check_reward
from flowgrpo.kit.drawn_sounds import KINDS, NEAR_SOUNDS, OTHER_SOUNDS, drawn_sounds, edge_lengths, edge_sounds
from flowgrpo.kit.entries import parse_reward
from flowgrpo.kit.findings import Report
from flowgrpo.media.sound import write_sound
from flowgrpo.rewards.base import RewardSpec

CODE = """
import torch


def low(sounds, sampling_rate, **columns):
    power = torch.fft.rfft(sounds.mean(dim=1)).abs().square()
    hertz = torch.fft.rfftfreq(sounds.shape[-1], 1 / sampling_rate)
    return -(power * hertz).sum(dim=1) / power.sum(dim=1) / 1000


def compared(sounds):
    return sounds.square().mean((1, 2)) / sounds.square().mean()


def right(sounds):
    return [float(sound[1].abs().max()) for sound in sounds]


def writes(sounds):
    return sounds.abs_().mean((1, 2))


def sample(sounds):
    return sounds[:, 0, 5000] * 1e6 % 1
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "hearing.py"
    path.write_text(CODE)
    return path


def checked(code: Path, name: str, **plan: object) -> Report:
    return check_reward(RewardSpec(f"{code}:{name}"), CheckPlan(prompts=3, seeds=3, **plan))  # type: ignore[arg-type]


def found(report: Report, severity: str) -> set[str]:
    return {finding.code for finding in report.findings if finding.severity == severity}


@pytest.mark.parametrize(
    ("name", "severity", "expected"),
    [
        ("low", "fault", {"blank"}),
        ("compared", "fault", {"batch"}),
        ("right", "warning", {"channels"}),
        ("writes", "warning", {"mutation"}),
        ("sample", "warning", {"noise", "format", "tiny"}),
    ],
)
def test_a_fault_of_a_reward_of_sounds_is_found(name: str, severity: str, expected: set[str], code: Path) -> None:
    assert found(checked(code, name), severity) == expected


def test_loudness_has_no_fault_and_a_gradient() -> None:
    report = check_reward(RewardSpec("loudness"), CheckPlan(prompts=3, seeds=3))
    assert not found(report, "fault") | found(report, "warning")
    text = report.text()
    assert "has a gradient with respect to the sounds" in text
    assert "by prompt: " in text
    assert "images" not in text
    assert "picture" not in text


def test_a_folder_of_files_is_checked_too(code: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(4):
        sound = 0.1 * torch.randn(1, 8000, generator=torch.Generator().manual_seed(number)).clamp(-3, 3)
        write_sound(folder / f"rain-{number}.wav", sound.numpy(), 8000)
    write_sound(folder / "wind.wav", torch.zeros(2, 100).numpy(), 8000)
    report = checked(code, "low", images=folder)
    assert "4 sounds of 1 s" in report.text()
    assert "4 of 5 sounds, all of the most frequent length" in report.text()
    with pytest.raises(ValueError, match="has no sounds; name a folder of WAV files"):
        checked(code, "low", images=_pictures(tmp_path / "pictures"))


def _pictures(folder: Path) -> Path:
    from PIL import Image

    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    return folder


def test_what_does_not_fit_sounds_is_refused(code: Path) -> None:
    with pytest.raises(ValueError, match="scores sounds, which have no frames; leave out --frames"):
        checked(code, "low", frames=4)
    with pytest.raises(ValueError, match="scores `sounds`, and cannot be checked on images"):
        checked(code, "low", task="images")
    with pytest.raises(ValueError, match="scores `images`, and cannot be checked on sounds"):
        check_reward(parse_reward("gold"), CheckPlan(task="sounds"))


def test_drawn_sounds_are_the_same_each_time_and_differ_from_one_another() -> None:
    material, again = (drawn_sounds(None, len(KINDS), 3) for _ in range(2))
    assert torch.equal(material.images, again.images)
    assert material.images.shape == (18, 2, 16_000)
    assert material.images.abs().max() <= 1
    flat = material.images.flatten(1)
    assert (torch.cdist(flat, flat) + torch.eye(18)).min() > 0.1
    assert material.prompts[::3] == list(KINDS)
    for _, change in (*NEAR_SOUNDS.values(), *OTHER_SOUNDS.values()):
        changed = change(material.images)
        assert changed.shape == material.images.shape
        assert not torch.equal(changed, material.images)
    for _, _, sound in edge_sounds(material.images[0]):
        assert sound.shape == (2, 16_000)
        assert sound.abs().max() <= 1
    shapes = [tuple(sounds.shape[1:]) for _, _, sounds in edge_lengths(material.images[:2], [16_000] * 2)]
    assert shapes == [(2, 160), (2, 32_001), (2, 960_000), (1, 16_000)]
