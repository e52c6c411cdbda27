"""How long completions of a model of blocks take to write, with and without a cache of finished blocks.

`python tests/block_cache_speed.py` alternates the two on an SDAR with random weights; see docs/masked.md. With
`--threshold`, a third run reveals all tokens above it, with a cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flowgrpo.samplers.plans import Plan, StepPlan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.unmasking import MaskMoves, confidence, mask_levels
from flowgrpo.text.finished_blocks import FinishedBlocks
from flowgrpo.text.masked_model import MaskedLanguageModel
from flowgrpo.text.sdar import SDARConfig, SDARForCausalLM


class _Tokens:
    mask_token_id, pad_token_id, eos_token_id, sep_token_id = 1, 0, 2, None


def main() -> None:
    """Print the seconds of each run, and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 512), ("layers", 8), ("prompt", 64), ("tokens", 64), ("block", 4), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    config = SDARConfig(
        hidden_size=chosen.width, intermediate_size=3 * chosen.width, num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.width // 64, num_key_value_heads=max(chosen.width // 128, 1), head_dim=64,
        vocab_size=2000,
    )  # fmt: skip
    dtype = torch.float32 if chosen.device == "cpu" else torch.bfloat16
    model = SDARForCausalLM(config).eval().to(chosen.device, dtype)
    with torch.no_grad():
        # Without this, all tokens would be about as likely. So about a third of the likeliest tokens have 0.9 or more.
        model.lm_head.weight *= 400 / chosen.width**0.5
    language = MaskedLanguageModel(model, _Tokens(), block=chosen.block)
    frames = [(torch.randint(3, 2000, (chosen.prompt,)).tolist(), []) for _ in range(chosen.rows)]
    steps, rows = chosen.tokens, frames
    plan = Plan(mask_levels(chosen.tokens, steps, block=chosen.block), (StepPlan(),) * steps)

    def seconds(cached: bool, threshold: float | None = None) -> tuple[float, int, int]:
        """Seconds, calls of the model, and states that it evaluated."""
        moves = MaskMoves(
            chosen.tokens, language.mask, partial(confidence, threshold=threshold), chosen.device, chosen.block
        )
        logits, states = FinishedBlocks(language).logits if cached else language.logits, list[int]()

        def evaluated(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
            going = moves.going(x).nonzero().flatten()
            found = torch.zeros(len(x), chosen.block, 2000, dtype=dtype, device=x.device)
            if len(going):
                states.append(len(going))
                found[going] = logits([rows[prompts[k]] for k in going.tolist()], x[going])
            return found

        runner = RolloutRunner(evaluated, plan, moves=moves, batch=chosen.rows)
        begun = time.perf_counter()
        with torch.no_grad():
            runner.run(list(range(chosen.rows))).x.cpu()
        return time.perf_counter() - begun, len(states), sum(states)

    seconds(True)
    for _ in range(chosen.repeats):
        (plain, *_), (cached, calls, states) = seconds(False), seconds(True)
        print(f"without a cache {plain:.2f} s, with it {cached:.2f} s: {cached / plain:.3f} of the time")
        if chosen.threshold is not None:
            found, fewer, evaluated = seconds(True, chosen.threshold)
            print(
                f"with a threshold and the cache {found:.2f} s: {found / cached:.3f} of the time with the cache alone, "
                f"for {fewer / calls:.3f} of the calls and {evaluated / states:.3f} of the states"
            )


if __name__ == "__main__":
    main()
