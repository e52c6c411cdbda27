"""Sounds to try a reward on: drawn ones, versions that sound alike, and sounds at the edge of what a model makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rewards.base import SAMPLING_RATE
from ..training.data import columns_of, read_prompts
from .given_samples import given_samples
from .material import Material, groups_of
from .sound_files import LabelledSound

RATE, SECONDS, CHANNELS = 16_000, 1.0, 2
"""Samples a second, length and channels of drawn sounds."""
LEVELS = 2**15 - 1
"""Steps of a 16-bit WAV file from 0 to 1."""


def _tone(hertz: Tensor) -> Tensor:
    """A tone whose pitch [S] may change."""
    return (2 * math.pi * hertz.cumsum(0) / RATE).sin()


def _clicks(time: Tensor, draw: torch.Generator) -> Tensor:
    times = torch.randperm(len(time), generator=draw)[:12]
    return torch.zeros(len(time)).index_fill(0, times, 1.0)


def _pitch(low: float, high: float, draw: torch.Generator) -> Tensor:
    return low * (high / low) ** torch.rand((), generator=draw)


KINDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "a low tone": lambda time, draw: _tone(_pitch(80, 300, draw).expand(len(time))),
    "a high tone": lambda time, draw: _tone(_pitch(1500, 5000, draw).expand(len(time))),
    "a rising tone": lambda time, draw: _tone(_pitch(150, 400, draw) * 4**time),
    "noise": lambda time, draw: torch.randn(len(time), generator=draw) / 3,
    "clicks": _clicks,
    "two tones": lambda time, draw: sum((_tone(_pitch(100, 2000, draw).expand(len(time))) for _ in "ab"), time * 0) / 2,
}
"""What drawn sounds are: prompt -> (seconds [S], generator) -> the sound [S], of full level."""


def drawn_sounds(data: str | None, prompts: int, seeds: int) -> Material:
    """Drawn sounds: for each prompt, `seeds` of them, of different pitch, loudness and place between the channels.

    Args:
        data: a prompt file, whose first prompts take the kinds of sounds in turn; None for prompts that name the kinds.
        prompts: number of prompts.
        seeds: number of sounds for each prompt.

    Raises:
        ValueError: the prompt file cannot be read.
    """
    kinds = list(KINDS)
    rows = None if data is None else read_prompts(data)[:prompts]
    texts = kinds[:prompts] if rows is None else [row.text for row in rows]
    time = torch.arange(int(RATE * SECONDS)) / RATE
    sounds, named = list[Tensor](), list[str]()
    for number, text in enumerate(texts):
        for seed in range(seeds):
            draw = torch.Generator().manual_seed(1000 * number + seed)
            loudness, place = torch.rand(2, generator=draw).tolist()
            mono = KINDS[kinds[number % len(kinds)]](time, draw) * 10 ** (-1.5 * loudness)
            sides = torch.tensor([[1.0 - 0.6 * place], [0.4 + 0.6 * place]])
            sounds.append((mono * sides).clamp(-1, 1))
            named.append(text)
    count = len(sounds)
    columns = {} if rows is None else columns_of([row for row in rows for _ in range(seeds)])
    columns[SAMPLING_RATE] = [RATE] * count
    groups = [row // seeds for row in range(count)]
    labels = [f"prompt {row // seeds + 1}, seed {row % seeds}" for row in range(count)]
    return Material(torch.stack(sounds), named, columns, groups, labels, f"{count} drawn sounds")


def sounds_of_folder(folder: Path, metadata: Path | None, most: int) -> tuple[Material, int]:
    """At most `most` WAV files of a folder, of the most frequent form, as material; and how many files there are.

    Raises:
        ValueError: the folder has no WAV files of 16 bits.
    """
    found = given_samples(folder, metadata)
    kept = [(sample, sample.made) for sample in found if isinstance(sample.made, LabelledSound)]
    if not kept:
        raise ValueError(f"{folder} has no sounds; name a folder of WAV files, since the reward scores `sounds`")
    loaded = [(sample, made.rate, made.load()) for sample, made in kept]
    forms = [(rate, *sound.shape) for _, rate, sound in loaded]
    form = max(dict.fromkeys(forms), key=forms.count)
    taken = [one for one, own in zip(loaded, forms, strict=True) if own == form][:most]
    names = dict.fromkeys(name for sample, _, _ in taken for name in sample.columns)
    columns = {name: [sample.columns.get(name) for sample, _, _ in taken] for name in names}
    columns[SAMPLING_RATE] = [form[0]] * len(taken)
    groups, how = groups_of([sample.prompt for sample, _, _ in taken])
    source = f"{len(taken)} sounds of {form[2] / form[0]:.3g} s, {how}"
    made = [sample.made for sample, _, _ in taken]
    return Material(
        torch.stack([sound for _, _, sound in taken]), [sample.prompt for sample, _, _ in taken], columns, groups,
        [str(one.path) for one in made if isinstance(one, LabelledSound)], source,
    ), len(found)  # fmt: skip


def _hiss(sounds: Tensor) -> Tensor:
    """Sounds plus Gaussian noise of -80 decibels, the same noise on every sound."""
    noise = torch.randn(sounds.shape[1:], generator=torch.Generator().manual_seed(0))
    return (sounds + 1e-4 * noise).clamp(-1, 1)


def _later(sounds: Tensor) -> Tensor:
    """Sounds that begin 32 samples later: 2 milliseconds of a drawn sound."""
    return F.pad(sounds, (32, 0))[..., : sounds.shape[-1]]


NEAR_SOUNDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "16 bits (WAV)": ("format", lambda sounds: (sounds * LEVELS).round() / LEVELS),
    "32 samples later": ("", _later),
    "noise of -80 decibels": ("", _hiss),
    "0.1 decibels quieter": ("", lambda sounds: sounds * 10 ** (-0.1 / 20)),
}
"""Versions that nobody could tell by listening: name -> (code of the finding if it disturbs the order, change)."""

OTHER_SOUNDS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "bfloat16": ("dtype", lambda sounds: sounds.bfloat16().float()),
    "half as loud": ("", lambda sounds: sounds / 2),
    "channels exchanged": ("", lambda sounds: sounds.flip(1)),
    "backwards": ("", lambda sounds: sounds.flip(-1)),
}
"""Other versions; those without a code are only reported."""


def edge_sounds(sound: Tensor) -> list[tuple[str, str, Tensor]]:
    """What a model can come to make in place of a sound [C, S]: (code, name, sound)."""
    noise = torch.rand(sound.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    every = torch.arange(sound.shape[-1]) % 2 * 2.0 - 1.0
    click = torch.zeros_like(sound)
    click[:, sound.shape[-1] // 2] = 1.0
    first = torch.zeros_like(sound)
    first[0] = sound[0]
    return [
        ("blank", "silence", torch.zeros_like(sound)),
        ("blank", "all samples 1", torch.ones_like(sound)),
        ("extreme", "noise at full level", noise),
        ("extreme", "one click", click),
        ("extreme", "the highest tone at full level", every.expand(sound.shape).clone()),
        ("extreme", "cut off at full level", (1000 * sound).clamp(-1, 1)),
        ("extreme", "one channel alone", first),
    ]


def edge_lengths(sounds: Tensor, rates: Sequence[int]) -> list[tuple[str, str, Tensor]]:
    """Sounds [B, C, S] with other numbers of samples or channels: (code, name, sounds)."""
    rate, length = int(rates[0]), sounds.shape[-1]

    def of_length(samples: int) -> Tensor:
        times = -(-samples // length)
        return sounds.repeat(1, 1, times)[..., :samples]

    return [
        ("tiny", "10 milliseconds", of_length(max(rate // 100, 1))),
        ("oblong", "twice the length and a sample", of_length(2 * length + 1)),
        ("huge", "a minute", of_length(60 * rate)),
        ("channels", "one channel", sounds.mean(dim=1, keepdim=True)),
    ]
