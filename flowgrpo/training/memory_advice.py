"""What to change if a device has too little memory for a part of a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..configs.load import with_keys
from ..configs.schema import AnyRecipe
from ..parts.traits import differentiates
from .device_memory import OutOfMemory, lacks_memory, part_of, said_by
from .folder.changing import may_change

WHERE = {
    "denoiser": "while samples were made", "sampling": "while samples were made",
    "decode": "while samples were decoded",
    "reward": "while rewards were computed", "optimizer": "in the optimizer step",
    "rest": "between the parts of an iteration",
}  # fmt: skip
"""What a message calls the parts of the clock."""
SMALLER = {
    "images": {"denoiser": ["rollout.batch"], "decode": ["rollout.decode_batch"], "update": ["rollout.batch"]},
    "text": {"sampling": ["rollout.batch", "evaluate.batch"], "update": ["rollout.tokens"]},
    "masked": {"sampling": ["rollout.batch"], "update": ["rollout.batch"]},
}
"""Keys with which a part of a run needs less memory, by task and part."""


@contextmanager
def memory_explained(recipe: AnyRecipe, run: Path, processes: int = 1) -> Iterator[None]:
    """Tell what helps if a device has too little memory for a run.

    Args:
        recipe: of the run.
        run: its folder.
        processes: how many processes share the prompts of an iteration.

    Raises:
        OutOfMemory: in the place of an error of the device.
    """
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise OutOfMemory(_advice(recipe, run, processes, error)) from error


def _advice(recipe: AnyRecipe, run: Path, processes: int, error: BaseException) -> str:
    part, said = part_of(error) or "rest", said_by(error)
    # Only an update shows the clock more than the name of a part.
    updates = part not in WHERE
    where = "in the update" if updates else WHERE[part]
    keys = SMALLER[recipe.task].get("update" if updates else part, [])
    if updates and differentiates(recipe):
        keys = ["rollout.decode_batch", *keys]
    sizes = {key: size for key in keys if (size := _smaller(recipe, key, processes)) is not None}
    rest = f"`{shlex.join(['flowgrpo', 'plan', str(run / 'config.yaml')])}` estimates the memory"
    if updates and not recipe.model.gradient_checkpointing:
        rest = f"A new run needs less with model.gradient_checkpointing: true. {rest}"
    if not sizes:
        return f"out of memory {where} ({said}). {rest}"
    command = shlex.join(["flowgrpo", "resume", str(run), *(f"{key}={size}" for key, size in sizes.items())])
    return (
        f"out of memory {where} ({said}). Go on with smaller batches, such as `{command}`; only rounding changes. "
        f"{rest}"
    )


def _smaller(recipe: AnyRecipe, key: str, processes: int) -> int | None:
    """About half of a batch; None if the run may not change it, or the recipe takes no smaller one."""
    section, name = key.split(".")
    size = getattr(getattr(recipe, section), name)
    if size is None or not may_change(key, recipe):
        return None
    if section == "rollout" and name.endswith("batch"):
        # A batch is never larger than what a process samples at a time.
        prompts = math.ceil(recipe.rollout.prompts / processes)
        size = min(size, min(getattr(recipe.rollout, "chunk", None) or prompts, prompts) * recipe.rollout.group)
    # Some losses need whole groups in a call.
    return next((n for n in range(max(size // 2, 1), size) if _takes(recipe, {key: n})), None)


def _takes(recipe: AnyRecipe, changes: Mapping[str, int]) -> bool:
    try:
        with_keys(recipe, changes)
    except ValueError:
        return False
    return True
