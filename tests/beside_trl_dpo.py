"""Trains on the embedded pairs by flowgrpo and by TRL, and compares their losses: `python tests/beside_trl_dpo.py`.

Both get the same model, pairs in the same order, loss, optimizer and constant learning rate. Printed are the largest
difference of the losses of a step, whether the shares of preferred pairs are equal after the first step (before it, no
pair is preferred, which TRL counts as 0 and flowgrpo as a half), and the seconds of the two trainings. TRL and datasets
have to be installed; the figures in docs/given_samples.md are of TRL 1.16.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.data import PromptRow
from flowgrpo.training.session import start
from flowgrpo.training.trainer import Trainer

PAIRS, RATE = 32, 1e-4
Figures = tuple[list[float], list[float], float]
"""Losses, shares of preferred pairs, seconds."""


def trainer_of(folder: str, steps: int, beta: float) -> Trainer:
    """The recipe `text_dpo` without warm-up and decay."""
    words = [
        f"run={{iterations: {steps}, checkpoint_every: {steps}, sample_every: {steps}}}", "data.heldout=null",
        f"optimizer={{learning_rate: {RATE}, warmup: 0, schedule: constant, ema: null, weight_decay: 0.0}}",
        f"rollout.prompts={PAIRS}", f"objective.loss.beta={beta}",
    ]  # fmt: skip
    return start(load_recipe("text_dpo", words), Path(folder) / "run").trainer(Silent())


def by_flowgrpo(steps: int, beta: float) -> Figures:
    """Train by the recipe."""
    with TemporaryDirectory() as folder:
        trainer = trainer_of(folder, steps, beta)
        begun = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begun
        lines = [line for line in trainer.run.read_metrics() if "loss" in line]
    return [line["loss"] for line in lines], [line["preferred"] for line in lines], seconds


def by_trl(steps: int, beta: float) -> Figures:
    """Train the same model on the same pairs by TRL's DPOTrainer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def pair(row: PromptRow) -> dict[str, str]:
        return {"prompt": row.text, "chosen": row.columns["chosen"], "rejected": row.columns["rejected"]}

    with TemporaryDirectory() as folder:
        own = trainer_of(folder, steps, beta)
        language = own.task.policy.language  # type: ignore[attr-defined]
        pairs = Dataset.from_list([pair(row) for row in own.data.train.take(0, steps * PAIRS)])
        config = DPOConfig(
            output_dir=f"{folder}/trl", per_device_train_batch_size=PAIRS, max_steps=steps, learning_rate=RATE,
            beta=beta, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0,
            logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
            gradient_checkpointing=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = InOrder(model=language.model, args=config, train_dataset=pairs, processing_class=language.tokenizer)
        begun = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begun
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [line["loss"] for line in lines], [line["rewards/accuracies"] for line in lines], seconds


def main() -> None:
    """Compare the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--beta", type=float, default=2.0)
    asked = parser.parse_args()
    ours, theirs = by_flowgrpo(asked.steps, asked.beta), by_trl(asked.steps, asked.beta)
    worst = max(abs(one - other) for one, other in zip(ours[0], theirs[0], strict=True))
    print(f"losses from {ours[0][0]:.4f} to {ours[0][-1]:.4f}, largest difference {worst:.1e} in {asked.steps} steps")
    print(f"shares of preferred pairs equal after the first step: {ours[1][1:] == theirs[1][1:]}")
    print(f"seconds: flowgrpo {ours[2]:.2f}, TRL {theirs[2]:.2f}")


if __name__ == "__main__":
    main()
