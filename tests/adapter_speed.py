"""Prints what LoRA costs, in the type of its base, in float32 and as peft has it: `python tests/adapter_speed.py`.

A transformer of Stable Diffusion 3 of middle size with random weights is called without an adapter and with each form
of adapter, by turns. "base" and "float32" are the values of `model.lora.compute`, and "peft" is "base" with the layers
of peft as they are. An iteration is ten calls without gradients, nine with a backward pass, and an AdamW step. With
`--dtype float32` the base is in float32, so "float32" is the same as "base".
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
from peft.tuners.lora import Linear

from flowgrpo.weights.lora import LoraSpec
from flowgrpo.weights.lora_layer import AddingLora
from flowgrpo.weights.precision import cast_base
from flowgrpo.weights.trained import TrainedWeights

Work = Callable[[], None]
FORMS = ("none", "float32", "base", "peft")


def subject(form: str, asked: argparse.Namespace, dtype: torch.dtype) -> tuple[Any, TrainedWeights | None]:
    """The transformer, with this form of adapter."""
    width, head = asked.width, min(64, asked.width // 4)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        module = SD3Transformer2DModel(
            sample_size=32, patch_size=2, in_channels=16, out_channels=16, num_layers=asked.layers,
            attention_head_dim=head, num_attention_heads=width // head, joint_attention_dim=width,
            caption_projection_dim=width, pooled_projection_dim=width, pos_embed_max_size=32,
        )  # fmt: skip
    pipe: Any = SimpleNamespace(components={"transformer": module}, transformer=module)
    cast_base(pipe, dtype)
    if form == "none":
        module.requires_grad_(False)
        return module, None
    weights = TrainedWeights.lora(pipe, LoraSpec(compute="float32" if form == "float32" else "base"), seed=0)
    if form == "peft":
        for layer in module.modules():
            if isinstance(layer, AddingLora):
                layer.__class__ = Linear
    return module, weights


def works(form: str, asked: argparse.Namespace, dtype: torch.dtype) -> dict[str, Work]:
    """What is timed for one form of adapter, by name."""
    module, weights = subject(form, asked, dtype)
    batch, width, side = asked.batch, asked.width, asked.side
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    given = (
        drawn(batch, 16, side, side),
        drawn(batch, asked.words, width),
        drawn(batch, width),
        torch.full((batch,), 500.0),
    )

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
    for name, value in {"width": 512, "layers": 4, "batch": 4, "side": 32, "words": 77, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    asked = parser.parse_args(words)
    dtype = getattr(torch, asked.dtype)
    made = {form: works(form, asked, dtype) for form in FORMS}
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(asked.repeats + 1):
        for form, named in made.items():
            for name, work in named.items():
                began = time.perf_counter()
                work()
                if turn:  # the first turn warms up
                    seconds.setdefault((name, form), []).append(time.perf_counter() - began)
    for name in made["base"]:
        middle = {form: median(seconds[name, form]) for form in made if (name, form) in seconds}
        listed = ", ".join(f"{form} {value:.3f} s" for form, value in middle.items())
        ratios = ", ".join(f"base / {form} {middle['base'] / middle[form]:.3f}" for form in middle if form != "base")
        print(f"{name}: {listed}; {ratios}")


if __name__ == "__main__":
    main()
