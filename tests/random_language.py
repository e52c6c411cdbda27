"""Language models with random weights whose distributions are far from uniform, and differ by prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flowgrpo.worlds.arithmetic.problems import save_tokenizer


def save_random(folder: Path, tokenizer: Any, build: Callable[[], Any], *, seed: int = 5, factor: float = 8.0) -> Path:
    """Write a model and its tokenizer, and return the folder.

    Args:
        folder: of the model.
        tokenizer: of the model.
        build: makes the model with random weights.
        seed: of the weights.
        factor: each matrix is multiplied by it, because the matrices of a new model are small.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder
