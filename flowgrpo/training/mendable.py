"""Errors that a user can mend: a command prints their message, and no traceback."""

from __future__ import annotations

from ..pipelines.pipeline_error import PipelineError
from ..rewards.base import RewardError
from .device_memory import OutOfMemory, lacks_memory, said_by
from .folder.files import explained

MENDABLE = (ValueError, PipelineError, RewardError, OutOfMemory, FloatingPointError, ImportError, OSError)
LESS = "Smaller batches and smaller images need less; `flowgrpo plan` estimates the memory of a run"


def message_of(error: BaseException | None) -> str | None:
    """The message that a command prints for an error that a user can mend; else None."""
    if error is not None and not isinstance(error, MENDABLE) and lacks_memory(error):
        return f"out of memory ({said_by(error)}). {LESS}"
    if not isinstance(error, MENDABLE):
        return None
    return explained(error) if isinstance(error, OSError) else str(error)
