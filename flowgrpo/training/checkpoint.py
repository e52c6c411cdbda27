"""What a run must remember to go on to the very same numbers: weights, optimizer, averages, critic, iteration.

Noise, prompts and windows are addressed by seed and iteration, so no generator state is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from ..pipelines.sharding import wholes
from ..pipelines.weights import TrainedWeights


class Stateful(Protocol):
    """Part of a run that is remembered."""

    def state_dict(self) -> dict[str, Any]:
        """Everything `load_state_dict` needs."""

    def load_state_dict(self, state: Any) -> object:
        """Continue from a state."""


class Gathered:
    """The state of sharded weights, or of what works on them, as it was when this was made.

    All processes must make it; only that of the first is whole.
    """

    def __init__(self, part: Stateful) -> None:
        self._state: dict[str, Any] = wholes(part.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors on the CPU."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Never called: a checkpoint is read into the part itself."""
        raise NotImplementedError


def write_checkpoint(
    folder: Path, iteration: int, weights: TrainedWeights | Gathered, parts: Mapping[str, Stateful]
) -> None:
    """Fill an empty folder with the state before `iteration`: the weights, and a file for each part."""
    save_file({k: v.contiguous() for k, v in weights.state_dict().items()}, folder / "trained.safetensors")
    for name, part in parts.items():
        torch.save(part.state_dict(), folder / f"{name}.pt")
    (folder / "state.json").write_text(json.dumps({"iteration": iteration}), encoding="utf-8")


def read_checkpoint(folder: Path, weights: TrainedWeights, parts: Mapping[str, Stateful]) -> int:
    """Put a checkpoint back in place; returns the iteration to do next.

    Raises:
        ValueError: the checkpoint lacks a part that the recipe asks for, or weights do not fit.
    """
    missing = [name for name in parts if not (folder / f"{name}.pt").exists()]
    if missing:
        raise ValueError(
            f"{folder} holds no {', '.join(missing)}; resume with the recipe of the run that wrote it, in its "
            "config.yaml"
        )
    weights.load_state_dict(load_file(folder / "trained.safetensors"))
    for name, part in parts.items():
        # Mapped, for of shards each process needs only its own.
        state = torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True, mmap=True)
        part.load_state_dict(state)
    noted: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return int(noted["iteration"])
