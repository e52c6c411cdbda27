"""Sounds as WAV files that browsers play, and as pictures of their spectrum."""

from __future__ import annotations

import os
import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

WIDTH, HEIGHT = 384, 128
"""Pixels of the picture of a sound."""
LOWEST = 40.0
"""Hertz of the lowest row."""
FALL = 80.0
"""Decibels below the loudest place of a picture at which it is black."""
_WINDOW = 0.046
"""Seconds of sound that a column shows; a power of two of samples is taken, at most as long."""
_COLOURS = ((0, 0, 4), (59, 15, 112), (140, 41, 129), (222, 73, 104), (254, 159, 109), (252, 253, 191))
"""Black, violet, red and light yellow, of a lightness that rises evenly."""
_SHORT = float(2**15 - 1)


def write_sound(path: Path, sound: NDArray[np.floating], rate: int) -> None:
    """Write a sound as a WAV file of 16 bits.

    Args:
        path: the file; no part of it is left if it cannot be written.
        sound: [C, S] from -1 to 1. What is above or below is cut off.
        rate: samples a second.

    Raises:
        OSError: the file cannot be written.
    """
    whole = np.rint(np.clip(np.asarray(sound, dtype=np.float64), -1.0, 1.0) * _SHORT).astype("<i2")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle, wave.open(handle, "wb") as file:
            file.setnchannels(len(whole))
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(np.ascontiguousarray(whole.T).tobytes())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_sound(path: Path) -> tuple[NDArray[np.float32], int]:
    """Read a WAV file of 16 bits: [C, S] from -1 to 1, and samples a second.

    Raises:
        ValueError: the file is no WAV file of 16 bits, or is cut short.
        OSError: the file cannot be read.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, count = file.getparams()[:4]
            data = file.readframes(count)
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path} is not a WAV file of 16 bits ({error}); convert it first") from None
    if width != 2:
        raise ValueError(f"{path} has {8 * width} bits a sample; convert it to a WAV file of 16 bits")
    if len(data) != 2 * channels * count:
        raise ValueError(f"{path} is cut short: it has {len(data)} of {2 * channels * count} bytes; get it again")
    whole = np.frombuffer(data, dtype="<i2").reshape(count, channels).T
    return np.ascontiguousarray(whole, dtype=np.float32) / np.float32(_SHORT), rate


def spectrogram(sound: NDArray[np.floating], rate: int) -> Image.Image:
    """A picture of WIDTH × HEIGHT pixels: time goes to the right, and pitch, by octaves, upwards.

    Args:
        sound: [C, S]; the channels are averaged.
        rate: samples a second.
    """
    mono = np.asarray(sound, dtype=np.float64).mean(axis=0)
    size = 2 ** max(4, int(np.log2(max(rate * _WINDOW, 16.0))))
    padded = np.pad(mono, (size // 2, size // 2 + size))
    starts = np.linspace(0, max(len(mono) - 1, 0), WIDTH).astype(int)
    columns = padded[starts[:, None] + np.arange(size)] * np.hanning(size)
    power = np.abs(np.fft.rfft(columns, axis=1)) ** 2
    top = rate / 2.0
    wanted = np.geomspace(min(LOWEST, top / 2.0), top, HEIGHT)
    place = np.clip(wanted / rate * size, 0, power.shape[1] - 1)
    below = np.floor(place).astype(int)
    above, part = np.minimum(below + 1, power.shape[1] - 1), place - below
    rows = power[:, below] * (1.0 - part) + power[:, above] * part
    loudest = rows.max()
    decibels = 10.0 * np.log10(np.maximum(rows, 1e-30) / max(loudest, 1e-20))
    level = np.clip(1.0 + decibels / FALL, 0.0, 1.0).T[::-1]
    stops = np.linspace(0.0, 1.0, len(_COLOURS))
    colours = np.stack([np.interp(level, stops, [c[k] for c in _COLOURS]) for k in range(3)], axis=-1)
    return Image.fromarray(np.rint(colours).astype(np.uint8))
