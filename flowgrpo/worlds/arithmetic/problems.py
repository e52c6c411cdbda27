"""The embedded language model: sums and differences of two numbers below a hundred; each character is a token.

The model is a small `Olmo2ForCausalLM` with a character tokenizer. `flowgrpo build arithmetic` trains the model from
scratch, and stops long before the model can calculate. Prompts look like `47+85=`; the completion is the number and an
end token.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-= abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("<pad>", "<eos>", "<unk>")
LIMIT = 100
TRAIN, HELDOUT = 4_000, 300
LONG = {"long_train": 1_000, "long_heldout": 200, "long_test": 200}
LONG_LIMIT = 10_000
WIDTH = 11  # Room for the longest problem with its answer and its end token, such as 99+99=198.
Report = Callable[[str], None]


@dataclass(frozen=True)
class ArithmeticSettings:
    """Settings of the embedded model's training; the defaults make the shipped model."""

    seed: int = 0
    steps: int = 640
    batch: int = 256
    learning_rate: float = 1e-3
    warmup: int = 50


def problems() -> list[tuple[str, str]]:
    """All prompts with their answers, in a fixed random order."""
    found = []
    for a in range(LIMIT):
        for b in range(LIMIT):
            found.append((f"{a}+{b}=", str(a + b)))
            found.append((f"{a}-{b}=", str(a - b)))
    order = np.random.default_rng(20_260_101).permutation(len(found))
    return [found[k] for k in order]


def split_problems() -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[tuple[str, str]]]:
    """The problems in three sets: for training the model before any reward, for training with rewards, and held out."""
    every = problems()
    return every[HELDOUT + TRAIN :], every[HELDOUT : HELDOUT + TRAIN], every[:HELDOUT]


def same_problem(prompt: str) -> tuple[str, ...]:
    """The sign and the two numbers in order of size: equal for `47+85=` and `85+47=`, and for `47-85=` and `85-47=`."""
    sign = "+" if "+" in prompt else "-"
    return sign, *sorted(prompt.removesuffix("=").split(sign))


def shipped(seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """The problems of the files that ship: `train`, `heldout` and `test`.

    Test problems are for measurements alone: nothing may be chosen by them. As many as in `heldout` have each sign and
    each length of the answer. None is a training or held-out problem, also not with its numbers exchanged. All 20,000
    problems are divided, so the test problems are among the problems on which the model was trained before any reward.
    """
    before, train, heldout = split_problems()
    known = {same_problem(prompt) for prompt, _ in (*train, *heldout)}
    unseen = [problem for problem in before if same_problem(problem[0]) not in known]
    wanted = Counter((same_problem(prompt)[0], len(answer)) for prompt, answer in heldout)
    test = []
    for k in np.random.default_rng([seed, 2]).permutation(len(unseen)):
        kind = same_problem(unseen[k][0])[0], len(unseen[k][1])
        if wanted[kind]:
            wanted[kind] -= 1
            test.append(unseen[k])
    return {"train": train, "heldout": heldout, "test": test}


def long_problems() -> dict[str, list[tuple[str, str]]]:
    """Problems for a model with a calculator: sums and differences of numbers of three and four digits.

    The model has not seen such problems. No answer is negative, so that `-` can stand for something else.
    """
    dice, found = np.random.default_rng(20_260_102), dict[str, str]()
    while len(found) < sum(LONG.values()):
        one, two = (int(number) for number in dice.integers(LIMIT, LONG_LIMIT, 2))
        prompt, value = (f"{one}+{two}=", one + two) if dice.random() < 0.5 else (f"{one}-{two}=", one - two)
        if value >= 0:
            found[prompt] = str(value)
    rows = iter(found.items())
    return {name: [next(rows) for _ in range(count)] for name, count in LONG.items()}


def write_problem_files(folder: Path) -> None:
    """Write a file for each set of `shipped` and `long_problems`; a line is an object with `prompt` and `answer`."""
    for name, rows in {**shipped(), **long_problems()}.items():
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_character_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """A tokenizer in which each character is a token."""
    vocabulary = {token: k for k, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save a tokenizer under the class name that every supported version of transformers knows."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def build_model(vocabulary: int, *, width: int = 128, layers: int = 2, heads: int = 4) -> Olmo2ForCausalLM:
    """An untrained OLMo 2 of this size, with the ids of its end token and its padding token.

    With a Qwen or Llama model, transformers would replace the character tokenizer by the tokenizer of that family.
    """
    return Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=SPECIAL.index("<pad>"),
            bos_token_id=None,
            eos_token_id=SPECIAL.index("<eos>"),
        )
    )


def build_arithmetic(folder: Path, settings: ArithmeticSettings, report: Report) -> None:
    """Train the model on the first set of `split_problems`, and write model and tokenizer to `folder`.

    The model is written in half precision. The result is deterministic for a seed on one kind of machine.

    Raises:
        ValueError: the folder already holds a model.
    """
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} already holds a model; name a new folder")
    tokenizer = build_character_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(settings.seed)
        model = build_model(len(tokenizer))
    ids, wanted = _sequences(tokenizer, split_problems()[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    began = time.perf_counter()
    for step in range(1, settings.steps + 1):
        rows = torch.randint(len(ids), (settings.batch,), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(step / settings.warmup, 1.0)
        logits = model(input_ids=ids[rows, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), wanted[rows, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            speed = step * settings.batch / (time.perf_counter() - began)
            report(f"arithmetic {step:>5}  loss {float(loss.detach()):.4f}  {speed:.0f} problems/s")
    model.eval().half().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / "flowgrpo.json").write_text(json.dumps({"build": asdict(settings)}, indent=2) + "\n", encoding="utf-8")


def _sequences(tokenizer: Any, rows: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [N, WIDTH], padded on the right; and targets [N, WIDTH], the ids of answers and ends, -100 elsewhere."""
    ids = torch.full((len(rows), WIDTH), tokenizer.pad_token_id)
    wanted = torch.full((len(rows), WIDTH), -100)
    for k, (prompt, answer) in enumerate(rows):
        head, tail = tokenizer(prompt).input_ids, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
        ids[k, : len(head) + len(tail)] = torch.tensor(head + tail)
        wanted[k, len(head) : len(head) + len(tail)] = torch.tensor(tail)
    return ids, wanted
