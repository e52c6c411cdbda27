"""Measurements of the text path, each one command: `flowgrpo bench NAME`."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.objectives import policy_loss
from ..core.surrogates import reinforce
from ..text.model import LanguageModel
from ..text.scoring import completion_log_probs
from ..worlds.arithmetic.problems import build_character_tokenizer, build_model

Report = Callable[[str], None]
PATHS = {"plain": False, "shared": True}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a random model, and of the prompts and completions that it scores.

    Attributes:
        groups: number of prompts.
        group: completions of each prompt.
        prompt: tokens of a prompt.
        completion: tokens of a completion.
        width: width of the model.
        layers: layers of the model.
        heads: heads of each layer.
    """

    groups: int = 2
    group: int = 16
    prompt: int = 512
    completion: int = 64
    width: int = 256
    layers: int = 4
    heads: int = 4


FULL = Sizes()


def shared_prefix(report: Report, repeats: int = 5, sizes: Sizes = FULL) -> dict[str, Any]:
    """Compare scoring with a prompt encoded once per group and once per completion: loss, gradient, time, memory.

    The forward and backward pass of a REINFORCE loss are measured. The two paths take turns in this process. The peak
    memory of each path is measured in a separate process, as the growth over what that process held before.
    """
    language, prompts, completions, owner = _inputs(sizes)
    found: dict[str, dict[str, torch.Tensor]] = {}
    losses: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in PATHS}
    for turn in range(repeats + 1):
        for name, shared in PATHS.items():
            began = time.perf_counter()
            losses[name] = _backward(language, prompts, completions, owner, shared)
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - began)
            found[name] = {n: p.grad.clone() for n, p in language.model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in found["plain"].values())
    off = max(float((found["shared"][n] - g).abs().max()) for n, g in found["plain"].items()) / largest
    middle = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    peaks = {name: _peak(shared, sizes) for name, shared in PATHS.items()}
    report(
        f"{sizes.groups} prompts of {sizes.prompt} tokens, {sizes.group} completions of {sizes.completion} tokens "
        "each, forward and backward"
    )
    report(f"loss {losses['plain']:.9f} plain, {losses['shared']:.9f} shared")
    report(f"gradients: largest difference over largest entry {off:.1e}")
    report(
        f"seconds {middle['plain']:.2f} plain, {middle['shared']:.2f} shared: {middle['shared'] / middle['plain']:.2f}×"
    )
    report(
        f"peak memory {peaks['plain']:.0f} MB plain, {peaks['shared']:.0f} MB shared: "
        f"{peaks['shared'] / peaks['plain']:.2f}×"
    )
    return {"loss": losses, "gradient_difference": off, "seconds": seconds, "peak_megabytes": peaks}


def _inputs(sizes: Sizes) -> tuple[LanguageModel, list[list[int]], list[list[int]], list[int]]:
    tokenizer = build_character_tokenizer()
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        model = build_model(len(tokenizer), width=sizes.width, layers=sizes.layers, heads=sizes.heads).eval()

    def text(length: int) -> list[int]:
        return torch.randint(3, len(tokenizer), (length,), generator=generator).tolist()

    count = sizes.groups * sizes.group
    prompts = [text(sizes.prompt) for _ in range(sizes.groups)]
    completions = [text(sizes.completion) for _ in range(count)]
    return LanguageModel(model, tokenizer), prompts, completions, [k // sizes.group for k in range(count)]


def _backward(
    language: LanguageModel, prompts: list[list[int]], completions: list[list[int]], owner: list[int], shared: bool
) -> float:
    language.model.zero_grad(set_to_none=True)
    log_probs, mask = completion_log_probs(language, prompts, completions, owner, shared_prefix=shared)
    advantages = torch.linspace(-1, 1, len(owner))
    # On-policy, the value of a loss with ratios does not depend on the log-probs; the REINFORCE loss does.
    loss, _ = policy_loss(log_probs, None, advantages, mask, surrogate=reinforce)
    loss.backward()
    return float(loss.detach())


def _peak(shared: bool, sizes: Sizes) -> float:
    """Peak megabytes of one forward and backward pass in a new process, above what the process held before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured_peak, (shared, sizes))


def _measured_peak(shared: bool, sizes: Sizes) -> float:
    language, prompts, completions, owner = _inputs(sizes)
    _backward(language, [p[:8] for p in prompts], [c[:2] for c in completions], owner, shared)
    before = _status("VmRSS")
    # 5 resets the peak of resident memory to the current value (proc(5)).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    _backward(language, prompts, completions, owner, shared)
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> float:
    """A field of this process's status in kilobytes (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return float(line.split()[1])
    raise ValueError(f"/proc/self/status has no {field}; peak memory is measured on Linux only")


TEXT_MEASUREMENTS: dict[str, Callable[[Report], dict[str, Any]]] = {"shared-prefix": shared_prefix}
