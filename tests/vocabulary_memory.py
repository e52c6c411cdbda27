"""Prints the peak memory of scoring with a large vocabulary: `python tests/vocabulary_memory.py [--dtype NAME]`.

It is the forward and backward pass of a REINFORCE loss on a small random model, whose logits are nearly all of its
memory. On two commits the command compares their peaks: the growth of resident memory over the pass (Linux).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from flowgrpo.text.model import LanguageModel
from flowgrpo.text.scoring import completion_log_probs
from flowgrpo.worlds.arithmetic.problems import build_character_tokenizer, build_model
from tests.rollout_memory import status


def main(words: Sequence[str] | None = None) -> None:
    """Score completions, and print the peak in units of the logits' own memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"vocabulary": 50_000, "completions": 8, "tokens": 256, "width": 64, "layers": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--plain", action="store_true", help="encode the prompt for every completion")
    asked = parser.parse_args(words)
    torch.manual_seed(0)
    model = build_model(asked.vocabulary, width=asked.width, layers=asked.layers, heads=4).eval()
    language = LanguageModel(model.to(getattr(torch, asked.dtype)), build_character_tokenizer())
    ids = torch.randint(3, asked.vocabulary, (asked.completions, asked.tokens)).tolist()
    owner, weight = [0] * len(ids), torch.linspace(-1, 1, len(ids))[:, None]

    def update(completions: list[list[int]]) -> float:
        log_probs, _ = completion_log_probs(language, [[4] * 16], completions, owner, shared_prefix=not asked.plain)
        loss = (weight * log_probs).sum()
        loss.backward()
        return float(loss.detach())

    update([row[:2] for row in ids])
    model.zero_grad()
    before = status("VmRSS")
    # 5 resets the peak of resident memory to the current value (proc(5)).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    began = time.perf_counter()
    loss = update(ids)
    seconds, peak = time.perf_counter() - began, status("VmHWM") - before
    logits = asked.completions * asked.tokens * asked.vocabulary * model.dtype.itemsize
    slope = sum(float(p.grad.double().abs().sum()) for p in model.parameters() if p.grad is not None)
    path = "plain" if asked.plain else "shared"
    print(
        f"{asked.dtype}, {path}: peak {peak / 1e6:.0f} MB, {peak / logits:.2f} times the logits; {seconds:.1f} s; "
        f"loss {loss!r}, gradient {slope!r}"
    )


if __name__ == "__main__":
    main()
