"""Prints what LoRA costs, in the type of its base, in float32 and as peft has it: `python tests/adapter_speed.py`.

A transformer with random weights is called without an adapter and with each form of adapter, by turns. It is a
transformer of Stable Diffusion 3 of middle size, or `--like` a known model, such as black-forest-labs/FLUX.1-dev.
"base" and "float32" are the values of `model.lora.compute`, and "peft" is "base" with the layers of peft as they are.
An iteration is ten calls without gradients, nine with a backward pass, and an AdamW step. With `--dtype float32` the
base is in float32, so "float32" is the same as "base".
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
from torch import Tensor, nn

from flowgrpo.pipelines.random_weights import random_pipeline
from flowgrpo.weights.kernel_choice import without_cudnn_attention
from flowgrpo.weights.lora import LoraSpec
from flowgrpo.weights.lora_layer import AddingLora
from flowgrpo.weights.precision import cast_base
from flowgrpo.weights.trained import TrainedWeights

Work = Callable[[], None]
FORMS = ("none", "float32", "base", "peft")
SIZES = {"width": 512, "layers": 4, "batch": 4, "side": 32, "words": 77, "rank": 32, "repeats": 5}


def transformer(asked: argparse.Namespace, dtype: torch.dtype) -> Any:
    """The transformer that all forms of adapter share."""
    if asked.like:
        return random_pipeline(asked.like, {}, dtype, torch.device(asked.device)).transformer
    width, head = asked.width, min(64, asked.width // 4)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        module = SD3Transformer2DModel(
            sample_size=32, patch_size=2, in_channels=16, out_channels=16, num_layers=asked.layers,
            attention_head_dim=head, num_attention_heads=width // head, joint_attention_dim=width,
            caption_projection_dim=width, pooled_projection_dim=width, pos_embed_max_size=32,
        )  # fmt: skip
    cast_base(SimpleNamespace(components={"transformer": module}), dtype)
    return module.to(asked.device).requires_grad_(False)


def inputs(module: Any, asked: argparse.Namespace, dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments of the transformer's call; `asked.side` is the side of the latents."""
    generator = torch.Generator().manual_seed(0)
    batch, side, config = asked.batch, asked.side, module.config

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(asked.device, dtype)

    given = {
        "encoder_hidden_states": drawn(batch, asked.words, config.joint_attention_dim),
        "pooled_projections": drawn(batch, config.pooled_projection_dim),
        "timestep": torch.full((batch,), 500.0, device=asked.device),
    }
    if isinstance(module, SD3Transformer2DModel):
        return {"hidden_states": drawn(batch, config.in_channels, side, side), **given}
    places = torch.zeros(side // 2, side // 2, 3)
    places[..., 1], places[..., 2] = torch.arange(side // 2)[:, None], torch.arange(side // 2)[None]
    return {
        "hidden_states": drawn(batch, side * side // 4, config.in_channels),
        **given,
        "timestep": given["timestep"] / 1000,
        "img_ids": places.reshape(-1, 3).to(asked.device, dtype),
        "txt_ids": torch.zeros(asked.words, 3, device=asked.device, dtype=dtype),
        "guidance": torch.full((batch,), 3.5, device=asked.device),
    }


class Forms:
    """Exchanges the adapted layers of one transformer, so that every form of adapter has the same base.

    Attributes:
        weights: of each form that has an adapter.
    """

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._module = module
        self._bases = dict(module.named_modules())
        self._layers: dict[str, dict[str, nn.Module]] = {"none": {}}
        self.weights: dict[str, TrainedWeights] = {}
        pipe: Any = SimpleNamespace(components={"transformer": module}, transformer=module)
        for form in FORMS[1:]:
            spec = LoraSpec(rank, 2 * rank, compute="float32" if form == "float32" else "base")
            self.weights[form] = TrainedWeights.lora(pipe, spec, seed=0)
            layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Linear)}
            for layer in layers.values():
                if form == "peft" and isinstance(layer, AddingLora):
                    layer.__class__ = Linear
            self._layers[form] = layers
            self.use("none")
            del module.peft_config
            module._hf_peft_config_loaded = False  # type: ignore[assignment]

    def use(self, form: str) -> None:
        """Give the transformer the layers of this form."""
        adapted = self._layers[form]
        for name in self._layers.get("float32", adapted):
            self._module.set_submodule(name, adapted.get(name, self._bases[name]))


def works(form: str, forms: Forms, module: Any, given: dict[str, Tensor]) -> dict[str, Work]:
    """What is timed for one form of adapter, by name."""

    @torch.no_grad()
    def forward() -> None:
        module(**given)

    if form == "none":
        return {"forward": forward}
    weights = forms.weights[form]
    optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-4)

    def train() -> None:
        weights.backward(module(**given)[0].float().square().mean())

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
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--like", help="a known model id, in place of --width and --layers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-iteration", action="store_true", help="time only single passes")
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks again in the backward pass")
    asked = parser.parse_args(words)
    dtype = getattr(torch, asked.dtype)
    without_cudnn_attention()
    module = transformer(asked, dtype)
    forms, given = Forms(module, asked.rank), inputs(module, asked, dtype)
    if asked.checkpointing:
        module.enable_gradient_checkpointing()
    made: dict[str, dict[str, Work]] = {}
    for form in FORMS:
        forms.use(form)
        made[form] = works(form, forms, module, given)
        if asked.no_iteration:
            made[form].pop("iteration", None)
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(asked.repeats + 1):
        for form, named in made.items():
            forms.use(form)
            for name, work in named.items():
                began = time.perf_counter()
                work()
                if asked.device != "cpu":
                    torch.cuda.synchronize()
                if turn:  # the first turn warms up
                    seconds.setdefault((name, form), []).append(time.perf_counter() - began)
    for name in made["base"]:
        middle = {form: median(seconds[name, form]) for form in made if (name, form) in seconds}
        listed = ", ".join(f"{form} {value:.3f} s" for form, value in middle.items())
        ratios = ", ".join(
            f"{form} / {other} {middle[form] / middle[other]:.3f}"
            for form, other in (("base", "none"), ("base", "float32"), ("base", "peft"), ("none", "float32"))
            if other in middle and form in middle
        )
        print(f"{name}: {listed}; {ratios}", flush=True)


if __name__ == "__main__":
    main()
