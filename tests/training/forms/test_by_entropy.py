"""A temperature for every token: how it follows the entropy, and the log-probs that it leaves."""

from pathlib import Path

import pytest
import torch

from flowgrpo.text.scoring import token_entropies
from flowgrpo.training.text.forms import plain
from flowgrpo.training.text.forms.by_entropy import by_entropy
from tests.training.forms.test_writing import writer_of
from tests.training.text_runs import trainer_of


def test_each_token_is_drawn_at_its_own_temperature(small_text: list[str], tmp_path: Path) -> None:
    """The sampler's log-probs are the model's at a temperature that the entropy gives, token by token."""
    writer = writer_of(small_text, tmp_path / "run")
    found = by_entropy(writer, reach=0.5, pivot=3.4)
    model = writer.policy.language.model
    seen = set()
    for one in found:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([one.context + one.ids])).logits[0, len(one.context) - 1 : -1]
        entropy = token_entropies(logits[None])[0]
        own = 1 + 0.5 * (entropy - 3.4) / (entropy + 3.4)
        want = (logits / own[:, None]).log_softmax(1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        assert one.log_probs == pytest.approx(want.tolist(), abs=1e-4)
        seen |= set((own > 1).tolist())
    assert seen == {True, False}


def test_without_reach_it_is_the_plain_form(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run")
    assert [one.ids for one in by_entropy(writer, reach=0.0)] == [one.ids for one in plain(writer)]
    far = by_entropy(writer, reach=0.9, pivot=1000.0)
    assert [one.ids for one in far] != [one.ids for one in plain(writer)]


@pytest.mark.parametrize("surrogate", ["hapo", "clip"])
def test_a_run_starts_at_a_ratio_of_1(small_text: list[str], tmp_path: Path, surrogate: str) -> None:
    lines = [f"objective.surrogate={surrogate}", "rollout.form={name: by_entropy, reach: 0.3}", "optimizer.updates=2"]
    record = trainer_of(small_text, tmp_path / "run", *lines, "advantage.baseline=length").iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["sampler_gap"] > 1e-3
    assert record["grad_norm"] > 0
