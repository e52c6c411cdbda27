"""What rewards of sounds share: resampling, and the spectra that encoders of sounds read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_POWER = 1e-10
"""Power below it counts as this power, in a spectrum in decibels."""


def resampled(sounds: Tensor, rate: int, wanted: int) -> Tensor:
    """Sounds [..., S] of `rate` samples a second as [..., round(S * wanted / rate)] of `wanted`, differentiably.

    The spectrum is cut off, or filled up with zeros, so nothing folds back (`scipy.signal.resample` does the same).
    """
    if rate == wanted:
        return sounds
    before = sounds.shape[-1]
    after = max(1, round(before * wanted / rate))
    spectrum = torch.fft.rfft(sounds, dim=-1)
    kept = min(before, after) // 2 + 1
    cut = spectrum[..., :kept]
    if min(before, after) % 2 == 0 and before != after:
        # The highest frequency stands for a pair of frequencies in the longer form, and for one in the shorter form.
        last = cut[..., -1:] * (0.5 if after > before else 2.0)
        cut = torch.cat([cut[..., :-1], last], dim=-1)
    whole = torch.nn.functional.pad(cut, (0, after // 2 + 1 - kept))
    return torch.fft.irfft(whole, n=after, dim=-1) * (after / before)


def log_mel(sounds: Tensor, window: int, hop: int, filters: Tensor) -> Tensor:
    """Log-mel spectra in decibels [B, T, M] of sounds [B, S], differentiably.

    The frames have a Hann window, are centred, and are reflected at the ends, as in librosa.

    Args:
        sounds: mono.
        window: samples of a frame.
        hop: samples from one frame to the next.
        filters: [window // 2 + 1, M].
    """
    shape = torch.hann_window(window, dtype=torch.float64, device=sounds.device)
    spectrum = torch.stft(
        sounds.double(), window, hop, window=shape, center=True, pad_mode="reflect", return_complex=True
    )
    power = spectrum.abs().square().transpose(1, 2) @ filters.double().to(sounds.device)
    return (10.0 * power.clamp(min=LEAST_POWER).log10()).float()


def fitting(sound: Tensor, length: int) -> Sequence[Tensor]:
    """Parts [length] of a mono sound [S]: repeated as often as it fits and then silent, or cut into equal distances.

    A longer sound has as many parts as are needed to cover it.
    """
    size = len(sound)
    if size <= length:
        whole = sound.repeat(length // size)
        return [torch.nn.functional.pad(whole, (0, length - len(whole)))]
    count = -(-size // length)
    return [sound[k * (size - length) // (count - 1) :][:length] for k in range(count)]
