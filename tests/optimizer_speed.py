"""Prints what a step of AdamW costs in PyTorch's three ways, by turns: `python tests/optimizer_speed.py`.

"fused" moves all weights in one kernel, "foreach" has a kernel for each operation, and "each" has kernels for each
operation and each weight. Without a choice, PyTorch takes "foreach" on a CUDA device and "each" on a CPU. The weights
have the shapes of the embedded denoiser, or of a LoRA `--like` on a known model. A run uses one kernel on a CUDA device
only (`updating.has_fused`).
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


WAYS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "each": {"foreach": False}}


def main(words: Sequence[str] | None = None) -> None:
    """Time steps by turns; print each way's median, and the ratio of "fused" to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--like", help="a known model id")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=50)
    asked = parser.parse_args(words)
    sizes, optimizers = shapes(asked), dict[str, torch.optim.AdamW]()
    for way, choice in WAYS.items():
        weights = [nn.Parameter(torch.zeros(size, device=asked.device)) for size in sizes]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizers[way] = torch.optim.AdamW(weights, lr=1e-4, **choice)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(asked.repeats + 5):
        for way, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            if asked.device != "cpu":
                torch.cuda.synchronize()
            if turn >= 5:  # the first turns warm up
                seconds[way].append(time.perf_counter() - began)
    steps = {way: median(times) for way, times in seconds.items()}
    numbers = sum(size.numel() for size in sizes)
    print(f"a step of AdamW over {numbers:,} numbers in {len(sizes):,} tensors")
    for way, step in steps.items():
        print(f"{way:8} {1000 * step:8.2f} ms, ratio {steps['fused'] / step:.2f}")


if __name__ == "__main__":
    main()
