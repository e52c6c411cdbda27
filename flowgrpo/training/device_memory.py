"""Errors of a device without free memory: how they are known, and what they say."""

from __future__ import annotations

import re

import torch

from ..rewards.base import RewardError

SIGNS = "out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"
"""What torch says if a device has no memory left and the error has no class of its own."""
_PART = "part_of_the_run"


class OutOfMemory(RuntimeError):
    """A device had too little memory for a part of a run; the message says what helps."""


def lacks_memory(error: BaseException | None) -> bool:
    """Whether a device had no memory left for a tensor; a reward that failed has an error of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    own = isinstance(error, (OutOfMemory, RewardError))
    return isinstance(error, RuntimeError) and not own and any(sign in str(error) for sign in SIGNS)


def said_by(error: BaseException) -> str:
    """What the device said, without its advice on settings of torch."""
    lines = str(error).strip().splitlines()
    return " ".join(re.split(r"(?<=\.)\s+", lines[0])[:2]).rstrip(".") if lines else type(error).__name__


def met_in(error: BaseException, part: str) -> None:
    """Leave a mark on an error with the part of a run that met it. The innermost part calls first; its mark stays."""
    vars(error).setdefault(_PART, part)


def part_of(error: BaseException) -> str | None:
    """The mark of `met_in`; None if there is none."""
    found = vars(error).get(_PART)
    return None if found is None else str(found)
