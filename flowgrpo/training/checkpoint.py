"""What a run must remember to continue to the very same numbers: trained weights, optimizer, average, iteration.

Noise, prompts and windows are addressed by seed and iteration, so no generator state is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..pipelines.ema import Ema
from ..pipelines.weights import TrainedWeights


def write_checkpoint(
    folder: Path, iteration: int, weights: TrainedWeights, optimizer: torch.optim.Optimizer, ema: Ema | None
) -> None:
    """Fill an empty folder with the state before `iteration`."""
    save_file({k: v.contiguous() for k, v in weights.state_dict().items()}, folder / "trained.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    if ema is not None:
        torch.save(ema.state_dict(), folder / "ema.pt")
    (folder / "state.json").write_text(json.dumps({"iteration": iteration}), encoding="utf-8")


def read_checkpoint(folder: Path, weights: TrainedWeights, optimizer: torch.optim.Optimizer, ema: Ema | None) -> int:
    """Put a checkpoint back in place; returns the iteration to do next.

    Raises:
        ValueError: the checkpoint has no moving average but the recipe asks for one, or weights do not fit.
    """
    weights.load_state_dict(load_file(folder / "trained.safetensors"))
    optimizer.load_state_dict(_load(folder / "optimizer.pt"))
    if ema is not None:
        if not (folder / "ema.pt").exists():
            raise ValueError(f"{folder} holds no moving average; set optimizer.ema to null as in the run that wrote it")
        ema.load_state_dict(_load(folder / "ema.pt"))
    state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return int(state["iteration"])


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)
