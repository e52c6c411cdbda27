"""What rewards share that learn from people: scales of features, embeddings of texts, and a report in words."""

from typing import Any

import numpy as np
import torch

from flowgrpo.rewards.models.bradley_terry import HeldOut
from flowgrpo.rewards.models.learned_taste import scaled
from flowgrpo.rewards.models.picture_features import known_texts


def test_each_kind_of_features_is_divided_by_the_root_mean_square_of_its_lengths() -> None:
    """Lengths 5 and 5√7 have a mean square of 100; a kind of zeros stays as it is."""
    rows, scales = scaled([np.array([[3.0, 4.0], [0.0, 175**0.5]]), np.zeros((2, 1))])
    np.testing.assert_allclose(scales, [10.0, 1.0])
    np.testing.assert_allclose(rows, [[0.3, 0.4, 0.0], [0.0, 175**0.5 / 10, 0.0]])


def test_texts_are_embedded_once_and_in_batches() -> None:
    calls: list[list[str]] = []

    class Lengths:
        def embed_texts(self, texts: list[str]) -> torch.Tensor:
            calls.append(texts)
            return torch.tensor([[float(len(text))] for text in texts])

    towers: Any = Lengths()
    found = known_texts(towers, ["ccc", "a", "bb", "a", "dddd"], batch_size=3)
    assert found[:, 0].tolist() == [3.0, 1.0, 2.0, 1.0, 4.0]
    assert calls == [["a", "bb", "ccc"], ["dddd"]]


def test_a_report_names_the_share_and_its_interval() -> None:
    """Wilson's interval of 8 right of 10."""
    assert HeldOut(8, 10).words("pairs predicted") == "80% of 10 held-out pairs predicted (95 %: 49% to 94%)"
