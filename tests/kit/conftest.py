"""Scenes to try rewards on, drawn rather than sampled."""

import numpy as np
import pytest
import torch

from flowgrpo.kit.material import Material
from flowgrpo.worlds.scenes.draw import draw
from flowgrpo.worlds.scenes.scene_prompts import compose, disturb, ground_colour, split


@pytest.fixture(scope="session")
def scenes() -> Material:
    """Four prompts with six pictures each, every second one of which shows something else than it should."""
    rng = np.random.default_rng(7)
    pictures, prompts = [], split(heldout=True, per_skill=1)[2:6]
    for prompt in prompts:
        for k in range(6):
            items = disturb(prompt.items, rng) if k % 2 else prompt.items
            pictures.append(torch.from_numpy(draw(compose(items, rng), ground_colour(rng))).permute(2, 0, 1))
    rows = [prompt for prompt in prompts for _ in range(6)]
    return Material(
        torch.stack(pictures).float(),
        [prompt.text for prompt in rows],
        {"include": [prompt.as_record()["include"] for prompt in rows]},
        [k // 6 for k in range(24)],
        [f"picture {k}" for k in range(24)],
        "24 drawn scenes",
    )


@pytest.fixture(scope="session")
def sums() -> Material:
    """Three sums with four completions each."""
    texts = ["5", "6", " 5", "the answer is 5"] * 3
    return Material(
        texts, [f"{k}+{5 - k}=" for k in range(3) for _ in range(4)], {"answer": ["5"] * 12},
        [k // 4 for k in range(12)], [f"row {k}" for k in range(12)], "12 completions",
    )  # fmt: skip
