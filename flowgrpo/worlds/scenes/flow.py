"""The embedded pipeline: a small StableDiffusion3Pipeline that is trained from scratch on drawn scenes.

There are three stages, each with its own seed. The first stage trains an autoencoder (64×64 pixels to 8×8 latents). The
second stage trains the denoiser together with its two text encoders by conditional flow matching (Lipman et al.,
2210.02747, with SD3's logit-normal times, 2403.03206); Muon (Jordan et al. 2024) updates the matrices. The third stage
continues the second stage on new scenes. Some scenes are learned with the empty prompt, so that a `guidance_scale` has
an effect (2207.12598).

The folder is loaded by `StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)`.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from ...training.number_format import fast_precision, has_bfloat16
from ..training_states import EVERY, TrainingStates
from .draw import SIZE
from .networks import (
    LATENT_CHANNELS,
    TOKENS,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
    write_vocabulary,
)
from .scene_prompts import ScenePrompt, sample_scenes

CALL = {"height": SIZE, "width": SIZE, "guidance_scale": 1.0, "max_sequence_length": 0}
Report = Callable[[str], None]


@dataclass(frozen=True)
class BuildSettings:
    """Lengths and rates of the stages of training; the defaults make the shipped folder."""

    seed: int = 0
    scenes: int = 60_000
    vae_steps: int = 2_000
    vae_batch: int = 32
    steps: int = 4_200
    batch: int = 128
    learning_rate: float = 2e-3
    warmup: int = 100
    empty: float = 0.08
    ema: float = 0.998
    shift: float = 1.0
    second_steps: int = 1_500
    second_rate: float = 1e-3


SHARES = (1, 2, 2, 1, 3, 3)
"""Shares of the six skills in the scenes, in the order of `SKILLS`. Skills that combine two things have larger shares,
because they are learned last."""


def draw_scenes(count: int, seed: int) -> tuple[list[ScenePrompt], torch.Tensor]:
    """`count` prompts with the skills in `SHARES`, and a drawn scene for each prompt, uint8 [count, 3, 64, 64]."""
    prompts, pictures = [], np.empty((count, SIZE, SIZE, 3), dtype=np.uint8)
    for k, (prompt, _, picture) in enumerate(sample_scenes(count, np.random.default_rng([seed, 1]), SHARES)):
        pictures[k] = picture
        prompts.append(prompt)
    return prompts, torch.from_numpy(pictures).permute(0, 3, 1, 2)


def _warm_cosine(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return float(0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * (step - warmup) / max(steps - warmup, 1))))


def _batches(count: int, batch: int, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(count, generator=generator)])
        yield order[:batch]
        order = order[batch:]


def train_vae(pictures: torch.Tensor, settings: BuildSettings, report: Report, states: TrainingStates) -> AutoencoderKL:
    """Fit the autoencoder to pictures uint8 [N, 3, 64, 64] with L1 + L2 error and a small KL term.

    Then set the autoencoder's scaling and shift so that latents have mean 0 and variance 1.
    """
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed + 11)
    vae = build_vae().train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=1e-4, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _warm_cosine(s, settings.vae_steps, 100))
    trained = {"vae": vae, "optimizer": optimizer, "schedule": schedule}
    continued = 0
    if state := states.load("vae"):
        continued = state["step"]
        for name, part in trained.items():
            part.load_state_dict(state[name])
        report(f"vae: continues after {continued} steps")
    began = time.perf_counter()
    for step, rows in enumerate(_batches(len(pictures), settings.vae_batch, settings.vae_steps, generator)):
        noise = torch.randn(len(rows), LATENT_CHANNELS, SIZE // 8, SIZE // 8, generator=generator)
        if step < continued:
            continue
        target = pictures[rows].float().div(127.5).sub(1)
        with fast_precision():
            posterior = vae.encode(target).latent_dist
            output = vae.decode(posterior.mean + posterior.std * noise).sample
        error = output.float() - target
        divergence = posterior.kl().float().mean() / posterior.mean[0].numel()
        loss = error.abs().mean() + error.square().mean() + 3e-4 * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % EVERY == 0 or step == settings.vae_steps - 1:
            states.save("vae", {"step": step + 1} | {name: part.state_dict() for name, part in trained.items()})
        if step % 250 == 0 or step == settings.vae_steps - 1:
            rate = (step + 1 - continued) * settings.vae_batch / (time.perf_counter() - began)
            report(f"vae {step:>6}  L1 {error.abs().mean().item():.4f}  {rate:.0f} images/s")
    vae.eval().requires_grad_(False)
    latents = encode(vae, pictures[:4096])
    vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))
    return vae


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: torch.Tensor, batch: int = 256) -> torch.Tensor:
    """Latent means of pictures uint8 [N, 3, 64, 64], before scaling, [N, 8, 8, 8] float32."""
    parts = [vae.encode(p.float().div(127.5).sub(1)).latent_dist.mean for p in pictures.split(batch)]
    return torch.cat(parts)


def _velocity(modules: torch.nn.ModuleList, x: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Prediction of denoiser and text encoders, with the same embeddings as StableDiffusion3Pipeline.encode_prompt."""
    transformer, *encoders = modules
    towers = [encoder(ids, output_hidden_states=True) for encoder in encoders]
    found: torch.Tensor = transformer(
        hidden_states=x,
        encoder_hidden_states=torch.cat([tower.hidden_states[-2] for tower in towers], dim=-1),
        pooled_projections=torch.cat([tower.text_embeds for tower in towers], dim=-1),
        timestep=1000 * sigma,
        return_dict=False,
    )[0]
    return found


def build_pipeline(vae: AutoencoderKL, folder: Path, settings: BuildSettings) -> StableDiffusion3Pipeline:
    """The pipeline with a trained autoencoder, and with a new denoiser and new text encoders."""
    torch.manual_seed(settings.seed + 1)
    tokenizer = build_tokenizer(folder / "tokenizer")
    encoder, encoder_2 = build_text_encoder(tokenizer, 64, 2), build_text_encoder(tokenizer, 32, 2)
    return StableDiffusion3Pipeline(
        transformer=build_transformer(96),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=settings.shift),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder_2,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


class DenoiserTraining:
    """Flow matching of the denoiser and text encoders, with an exponential moving average of both."""

    def __init__(self, pipe: StableDiffusion3Pipeline, settings: BuildSettings) -> None:
        self.pipe, self.settings = pipe, settings
        self.modules = torch.nn.ModuleList([pipe.transformer, pipe.text_encoder, pipe.text_encoder_2])
        self.modules.train().requires_grad_(True)
        self.average = copy.deepcopy(self.modules).requires_grad_(False)
        named = list(self.modules.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embedding" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embedding" in name]
        rate = settings.learning_rate
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.98)),
        ]
        self.generator = torch.Generator().manual_seed(settings.seed + 2)
        self.step = 0

    def update(self, latents: torch.Tensor, ids: torch.Tensor, learning_rate: float) -> float:
        """One optimizer step on latents [B, 8, 8, 8] and token ids [B, 12]; returns the loss."""
        settings = self.settings
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        sigma = torch.sigmoid(torch.randn(len(latents), generator=self.generator))
        sigma = settings.shift * sigma / (1 + (settings.shift - 1) * sigma)
        noise = torch.randn(latents.shape, generator=self.generator)
        blend = sigma.view(-1, 1, 1, 1)
        x = (1 - blend) * latents + blend * noise
        with fast_precision():
            velocity = _velocity(self.modules, x, sigma, ids)
        loss = F.mse_loss(velocity.float(), noise - latents)
        self.modules.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.modules.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        decay = min(self.settings.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.modules.parameters()), 1 - decay)
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes during the training."""
        return {
            "step": self.step,
            "modules": self.modules.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same training."""
        self.step = state["step"]
        self.modules.load_state_dict(state["modules"])
        self.average.load_state_dict(state["average"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.generator.set_state(state["generator"])

    def averaged(self) -> StableDiffusion3Pipeline:
        """A pipeline with the averaged denoiser and text encoders; it shares all other parts with `pipe`."""
        transformer, encoder, encoder_2 = copy.deepcopy(self.average).eval()
        parts: dict[str, Any] = dict(self.pipe.components)
        parts.update(transformer=transformer, text_encoder=encoder, text_encoder_2=encoder_2)
        return StableDiffusion3Pipeline(**parts)


def train_flow(folder: Path, settings: BuildSettings, report: Report, states: Path | None = None) -> None:
    """Train everything from scratch by flow matching, and write the pipeline to `folder`, in full precision.

    The result is deterministic for a seed on one kind of machine, also after interruptions.

    Args:
        folder: a new folder.
        settings: lengths and rates.
        report: called with lines of progress.
        states: an existing folder for the states from which an interrupted training continues; None keeps no states.

    Raises:
        ValueError: `folder` already holds a pipeline, torch is older than 2.9 and has no Muon, or a state does not
            fit the settings.
    """
    _check_new(folder)
    torch.manual_seed(settings.seed)
    prompts, pictures = draw_scenes(settings.scenes, settings.seed)
    precision = "bfloat16" if has_bfloat16() else "float32, because this processor has no instructions for bfloat16"
    report(f"drew {len(pictures)} scenes, training in {precision}")
    kept = TrainingStates(states, asdict(settings))
    vae = train_vae(pictures, settings, report, kept)
    training = DenoiserTraining(build_pipeline(vae, folder, settings), settings)
    train_denoiser(training, prompts, pictures, report, kept, "denoiser")
    write_pipeline(training.averaged(), folder, settings)


def continue_flow(
    source: Path, folder: Path, settings: BuildSettings, report: Report, states: Path | None = None
) -> None:
    """Continue the training of the pipeline in `source` with a second schedule and new scenes.

    The result is written to `folder` in half precision. Guidance distillation (2210.03142) would give a better pipeline
    in less time. But it would teach what a run with the gold reward should learn (docs/benchmarks/search.md).

    Raises:
        ValueError: as in `train_flow`.
    """
    _check_new(folder)
    second = replace(
        settings, seed=settings.seed + 100, steps=settings.second_steps, learning_rate=settings.second_rate,
        warmup=min(50, settings.second_steps),
    )  # fmt: skip
    prompts, pictures = draw_scenes(second.scenes, second.seed)
    training = DenoiserTraining(
        StableDiffusion3Pipeline.from_pretrained(source, text_encoder_3=None, tokenizer_3=None), second
    )
    train_denoiser(training, prompts, pictures, report, TrainingStates(states, asdict(second)), "second")
    write_pipeline(training.averaged().to(torch.float16), folder, settings)


def _check_new(folder: Path) -> None:
    if (folder / "model_index.json").exists():
        raise ValueError(f"{folder} already holds a pipeline; name a new folder")
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"torch {torch.__version__} has no Muon optimizer; build with torch 2.9 or newer")


def train_denoiser(
    training: DenoiserTraining,
    prompts: list[ScenePrompt],
    pictures: torch.Tensor,
    report: Report,
    states: TrainingStates,
    stage: str,
) -> None:
    """Train for one schedule, a warm-up and a cosine decay, on the scenes, pictures uint8 [N, 3, 64, 64]."""
    settings, vae = training.settings, training.pipe.vae
    latents = (encode(vae, pictures) - vae.config.shift_factor) * vae.config.scaling_factor
    ids, empty = _token_ids(training.pipe, [p.text for p in prompts]), _token_ids(training.pipe, [""])
    if state := states.load(stage):
        training.load_state_dict(state)
        report(f"denoiser: continues after {training.step} steps")
    continued, began = training.step, time.perf_counter()
    order = torch.Generator().manual_seed(settings.seed + 3)
    for done, rows in enumerate(_batches(len(latents), settings.batch, settings.steps, order)):
        rate = settings.learning_rate * _warm_cosine(done, settings.steps, settings.warmup)
        blank = torch.rand(len(rows), 1, generator=order) < settings.empty
        if done < continued:
            continue
        loss = training.update(latents[rows], torch.where(blank, empty, ids[rows]), rate)
        if training.step % EVERY == 0:
            states.save(stage, training.state_dict())
        if training.step % 100 == 0:
            speed = (training.step - continued) * settings.batch / (time.perf_counter() - began)
            report(f"denoiser {training.step:>6}  loss {loss:.4f}  {speed:.0f} images/s")


def write_pipeline(pipe: StableDiffusion3Pipeline, folder: Path, settings: BuildSettings) -> None:
    """Save a pipeline, with its recommended call arguments in `flowgrpo.json`."""
    pipe.save_pretrained(folder)
    for file in folder.glob("*/config.json"):
        # The path from which a part was loaded is useless elsewhere, and would make equal builds differ.
        config = json.loads(file.read_text(encoding="utf-8"))
        if config.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for file in folder.glob("*/tokenizer.json"):
        write_vocabulary(json.loads(file.read_text(encoding="utf-8")), file.parent)
    note = {"call": CALL, "build": asdict(settings)}
    (folder / "flowgrpo.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _token_ids(pipe: StableDiffusion3Pipeline, texts: list[str]) -> torch.Tensor:
    known = {text: k for k, text in enumerate(dict.fromkeys(texts))}
    table = pipe.tokenizer(
        list(known), padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    return table[torch.tensor([known[text] for text in texts])]
