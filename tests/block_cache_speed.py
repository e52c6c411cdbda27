"""How long completions of a model of blocks take to write, with and without a cache of finished blocks.

`python tests/block_cache_speed.py` alternates the two on an SDAR with random weights; see docs/masked.md.
"""

from __future__ import annotations

import argparse
import time

import torch

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
    language = MaskedLanguageModel(model, _Tokens(), block=chosen.block)
    frame = (torch.randint(3, 2000, (chosen.prompt,)).tolist(), [])
    steps, rows = chosen.tokens, [frame] * chosen.rows
    plan = Plan(mask_levels(chosen.tokens, steps, block=chosen.block), (StepPlan(),) * steps)
    moves = MaskMoves(chosen.tokens, language.mask, confidence, chosen.device, chosen.block)

    def seconds(cached: bool) -> float:
        logits = FinishedBlocks(language).logits if cached else language.logits
        runner = RolloutRunner(
            lambda x, i, prompts: logits([rows[k] for k in prompts], x), plan, moves=moves, batch=chosen.rows
        )
        begun = time.perf_counter()
        with torch.no_grad():
            runner.run(list(range(chosen.rows))).x.cpu()
        return time.perf_counter() - begun

    seconds(True)
    for _ in range(chosen.repeats):
        plain, cached = seconds(False), seconds(True)
        print(f"without a cache {plain:.2f} s, with it {cached:.2f} s: {cached / plain:.3f} of the time")


if __name__ == "__main__":
    main()
