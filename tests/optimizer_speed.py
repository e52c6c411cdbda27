"""Prints what a step of AdamW costs in one kernel and in several, by turns: `python tests/optimizer_speed.py`.

The weights have the shapes of the embedded denoiser, or of a LoRA `--like` on a known model. A run uses one kernel on a
CUDA device only (`updating.has_fused`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import nn

from flowgrpo.pipelines.architectures import architecture_of, built
from flowgrpo.training.model_paths import model_folder
from flowgrpo.weights.lora import LoraSpec
from flowgrpo.weights.trained import TrainedWeights


def shapes(asked: argparse.Namespace) -> list[torch.Size]:
    """The shapes of the trained weights."""
    if not asked.like:
        config = SD3Transformer2DModel.load_config(model_folder("scenes"), subfolder="transformer")
        with torch.device("meta"):
            return [p.shape for p in SD3Transformer2DModel.from_config(config).parameters()]
    module = built(*architecture_of(asked.like).denoiser, torch.float32)
    pipe: Any = SimpleNamespace(components={"transformer": module}, transformer=module)
    return [p.shape for p in TrainedWeights.lora(pipe, LoraSpec(asked.rank, 2 * asked.rank), seed=0).parameters()]


def main(words: Sequence[str] | None = None) -> None:
    """Time steps by turns and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--like", help="a known model id")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=50)
    asked = parser.parse_args(words)
    sizes, optimizers = shapes(asked), dict[bool, torch.optim.AdamW]()
    for fused in (True, False):
        weights = [nn.Parameter(torch.zeros(size, device=asked.device)) for size in sizes]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizers[fused] = torch.optim.AdamW(weights, lr=1e-4, fused=fused)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(asked.repeats + 5):
        for fused, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            if asked.device != "cpu":
                torch.cuda.synchronize()
            if turn >= 5:  # the first turns warm up
                seconds[fused].append(time.perf_counter() - began)
    one, several = median(seconds[True]), median(seconds[False])
    numbers = sum(size.numel() for size in sizes)
    print(
        f"a step of AdamW over {numbers:,} numbers: one kernel {1000 * one:.2f} ms, several {1000 * several:.2f} ms, "
        f"ratio {one / several:.2f}"
    )


if __name__ == "__main__":
    main()
