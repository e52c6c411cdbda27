"""Errors that a user can mend: a command prints their message, and no traceback."""

from __future__ import annotations

from ..pipelines.pipeline_error import PipelineError
from ..rewards.base import RewardError
from .folder.files import explained

MENDABLE = (ValueError, PipelineError, RewardError, FloatingPointError, ImportError, OSError)


def message_of(error: BaseException | None) -> str | None:
    """The message that a command prints for an error that a user can mend; else None."""
    if not isinstance(error, MENDABLE):
        return None
    return explained(error) if isinstance(error, OSError) else str(error)
