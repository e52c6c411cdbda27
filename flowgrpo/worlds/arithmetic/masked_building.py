"""The embedded masked language model: the same sums and differences, learned by masked diffusion.

The model is a small `BertForMaskedLM` with the character tokenizer and a mask token. It is trained as LLaDA is (arXiv
2502.09992, Eq. 3): a level t is drawn uniformly, every position of the completion is masked with probability t, and the
loss is the cross-entropy of the masked tokens divided by t. A completion has `COMPLETION` positions: the number, and
end tokens that fill the rest.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM

from .problems import Report, build_character_tokenizer, save_tokenizer, split_problems

COMPLETION = 4  # Room for the longest answer, such as 198 or -99, with one end token.
PROMPT = 6  # Tokens of the longest prompt, such as 99+99=.
MASK = "<mask>"


@dataclass(frozen=True)
class MaskedSettings:
    """Settings of the embedded masked model's training; the defaults make the shipped model."""

    seed: int = 0
    steps: int = 1_950
    batch: int = 256
    learning_rate: float = 1e-3
    warmup: int = 100


def build_masked_model(vocabulary: int, *, width: int = 128, layers: int = 2, heads: int = 4) -> BertForMaskedLM:
    """An untrained BERT of this size without dropout, which sees all positions at once."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=64,
            type_vocab_size=1,
            pad_token_id=0,
            tie_word_embeddings=True,
        )
    )


def build_masked(folder: Path, settings: MaskedSettings, report: Report) -> None:
    """Train the model on the first set of `split_problems`, and write model and tokenizer to `folder`.

    The model is written in half precision. The result is deterministic for a seed on one kind of machine.

    Raises:
        ValueError: the folder already holds a model.
    """
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} already holds a model; name a new folder")
    tokenizer = build_character_tokenizer()
    tokenizer.add_special_tokens({"mask_token": MASK})
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(settings.seed)
        model = build_masked_model(len(tokenizer)).train()
    ids, answers = _rows(tokenizer, split_problems()[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    began = time.perf_counter()
    for step in range(1, settings.steps + 1):
        rows = torch.randint(len(ids), (settings.batch,), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(step / settings.warmup, 1.0)
        level = torch.rand(settings.batch, 1, generator=generator).clamp(min=1e-2)
        hidden = answers[rows] & (torch.rand(settings.batch, ids.shape[1], generator=generator) < level)
        seen = ids[rows].masked_fill(hidden, tokenizer.mask_token_id)
        attention = (ids[rows] != tokenizer.pad_token_id).long()
        logits = model(input_ids=seen, attention_mask=attention).logits
        errors = F.cross_entropy(logits.transpose(1, 2), ids[rows], reduction="none")
        loss = (errors * hidden / level).sum() / (settings.batch * COMPLETION)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            speed = step * settings.batch / (time.perf_counter() - began)
            report(f"masked {step:>5}  loss {float(loss.detach()):.4f}  {speed:.0f} problems/s")
    model.eval().half().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / "flowgrpo.json").write_text(json.dumps({"build": asdict(settings)}, indent=2) + "\n", encoding="utf-8")


def _rows(tokenizer: object, problems: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [N, W] of prompt, answer and end tokens, padded on the right; and where the completion is, [N, W] bool."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id  # type: ignore[attr-defined]
    ids = torch.full((len(problems), PROMPT + COMPLETION), pad)
    answers = torch.zeros(ids.shape, dtype=torch.bool)
    for k, (prompt, answer) in enumerate(problems):
        head, tail = tokenizer(prompt).input_ids, tokenizer(answer).input_ids  # type: ignore[operator]
        whole = [*head, *tail, *[end] * (COMPLETION - len(tail))]
        ids[k, : len(whole)] = torch.tensor(whole)
        answers[k, len(head) : len(whole)] = True
    return ids, answers
