"""Prints what LoRA costs in the type of its base and in float32: `python tests/adapter_speed.py [--repeats N]`.

A transformer of Stable Diffusion 3 of middle size with random weights in bfloat16 is called without an adapter and with
both adapters, by turns. An iteration is ten calls without gradients, nine with a backward pass, and an AdamW step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import SD3Transformer2DModel

from flowgrpo.weights.lora import LoraSpec
from flowgrpo.weights.precision import cast_base
from flowgrpo.weights.trained import TrainedWeights

Work = Callable[[], None]


def subject(compute: str | None, width: int, layers: int) -> tuple[Any, TrainedWeights | None]:
    """The transformer, with an adapter that computes in this type; without an adapter if `compute` is None."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        module = SD3Transformer2DModel(
            sample_size=32, patch_size=2, in_channels=16, out_channels=16, num_layers=layers, attention_head_dim=64,
            num_attention_heads=width // 64, joint_attention_dim=width, caption_projection_dim=width,
            pooled_projection_dim=width, pos_embed_max_size=32,
        )  # fmt: skip
    pipe: Any = SimpleNamespace(components={"transformer": module}, transformer=module)
    cast_base(pipe, torch.bfloat16)
    if compute is None:
        module.requires_grad_(False)
        return module, None
    weights = TrainedWeights.lora(pipe, LoraSpec(compute=compute), seed=0)  # type: ignore[arg-type]
    return module, weights


def works(compute: str | None, width: int, layers: int, batch: int) -> dict[str, Work]:
    """What is timed for one adapter, by name."""
    module, weights = subject(compute, width, layers)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    given = (drawn(batch, 16, 32, 32), drawn(batch, 77, width), drawn(batch, width), torch.full((batch,), 500.0))

    @torch.no_grad()
    def forward() -> None:
        module(*given)

    if weights is None:
        return {"forward": forward}
    optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-4)

    def train() -> None:
        module(*given)[0].float().square().mean().backward()

    def iteration() -> None:
        for _ in range(10):
            forward()
        for _ in range(9):
            train()
        optimizer.step()
        weights.write()
        optimizer.zero_grad()

    return {"forward": forward, "forward and backward": train, "iteration": iteration}


def main(words: Sequence[str] | None = None) -> None:
    """Time all works by turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"width": 512, "layers": 4, "batch": 4, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args(words)
    made = {c or "none": works(c, asked.width, asked.layers, asked.batch) for c in (None, "float32", "base")}
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(asked.repeats + 1):
        for compute, named in made.items():
            for name, work in named.items():
                began = time.perf_counter()
                work()
                if turn:  # the first turn warms up
                    seconds.setdefault((name, compute), []).append(time.perf_counter() - began)
    for name in made["base"]:
        middle = {compute: median(seconds[name, compute]) for compute in made if (name, compute) in seconds}
        listed = ", ".join(f"{compute} {value:.3f} s" for compute, value in middle.items())
        print(f"{name}: {listed}; base / float32 {middle['base'] / middle['float32']:.3f}")


if __name__ == "__main__":
    main()
