"""Trains the embedded arithmetic by flowgrpo or by TRL: `python tests/beside_trl.py flowgrpo [--iterations N]`.

Both get the same model, problems, reward, loss, optimizer and number of completions. Each evaluation prints the
iterations, the seconds and processor seconds since training began, evaluations included, and the share of right answers
to the held-out problems with the likeliest tokens. For `trl`, TRL and datasets have to be installed; the figures in
docs/benchmarks/text.md are of TRL 1.16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.rewards.text.answer import Answer
from flowgrpo.text.model import load_language_model
from flowgrpo.text.sampling import sample_completions
from flowgrpo.training.session import start
from flowgrpo.worlds import arithmetic

FOLDER = Path(next(iter(arithmetic.__path__)))
GROUP, COMPLETIONS, TOKENS = 16, 512, 6


def problems(split: str) -> list[dict[str, str]]:
    """Prompts and answers of one split."""
    return [json.loads(line) for line in (FOLDER / "data" / f"{split}.jsonl").read_text().splitlines()]


def clock() -> Callable[[int, float], None]:
    """A function that prints a score with the time since now."""
    seconds, work = time.perf_counter(), time.process_time()

    def say(iterations: int, share: float) -> None:
        passed, worked = time.perf_counter() - seconds, time.process_time() - work
        print(f"{iterations:>5} iterations {passed:>7.1f} s {worked:>7.1f} CPU s   {share:.3f} right", flush=True)

    return say


def by_flowgrpo(iterations: int, every: int, seed: int, rate: float) -> None:
    """Train by the recipe `text` with another length and learning rate."""
    words = [f"run={{iterations: {iterations}, seed: {seed}}}", f"evaluate.every={every}"]
    recipe = load_recipe("text", [*words, f"optimizer={{learning_rate: {rate}, warmup: 0}}"])

    class Reporter(Silent):
        def evaluation(self, iteration: int, record: Any) -> None:
            say(iteration, record["eval/answer"])

    with TemporaryDirectory() as folder:
        trainer = start(recipe, Path(folder) / "run").trainer(Reporter())
        say = clock()
        trainer.train()


def by_trl(iterations: int, every: int, seed: int, rate: float) -> None:
    """Train by TRL with the settings of the recipe `text`."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    language = load_language_model(str(FOLDER / "model"))
    reward, heldout = Answer(), problems("heldout")
    prompts, answers = ([row[key] for row in heldout] for key in ("prompt", "answer"))
    encoded = [language.encode(text) for text in prompts]

    def right(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        values: list[float] = reward(completions, prompts, answer).values
        return values

    def evaluate() -> float:
        language.model.eval()
        order, seeds = range(len(encoded)), [0] * len(encoded)
        found = sample_completions(language, encoded, order, seeds, max_tokens=TOKENS, temperature=0)
        texts = [language.decode(ids) for ids in found.ids]
        return sum(right(prompts, texts, answers)) / len(prompts)

    class Evaluations(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % every == 0:
                say(state.global_step, evaluate())

    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model", padding_side="left")
    with TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, seed=seed, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_steps=10**6, max_steps=iterations, per_device_train_batch_size=COMPLETIONS,
            num_generations=GROUP, max_completion_length=TOKENS, temperature=1.0, learning_rate=rate,
            lr_scheduler_type="linear", weight_decay=1e-4, max_grad_norm=1.0, beta=0.0, epsilon=0.2, epsilon_high=0.28,
            loss_type="dapo", scale_rewards="group", gradient_checkpointing=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=language.model, reward_funcs=right, args=settings, processing_class=tokenizer,
            train_dataset=Dataset.from_list(problems("train")), callbacks=[Evaluations()],
        )  # fmt: skip
        say = clock()
        say(0, evaluate())
        trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trainer", choices=("flowgrpo", "trl"))
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--every", type=int, default=50, help="iterations between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate, which falls linearly to 0")
    asked = parser.parse_args()
    {"flowgrpo": by_flowgrpo, "trl": by_trl}[asked.trainer](asked.iterations, asked.every, asked.seed, asked.rate)


if __name__ == "__main__":
    main()
