"""TEMPO from a recipe's lines: tokens have advantages of their own, where completions of a prompt part."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.text.text_policy import Completions
from tests.training.judging import credited
from tests.training.test_text import gradient, made_up, task_of
from tests.training.text_runs import trainer_of

IDS = [[5, 6, 3], [5, 7, 3], [8, 3], [8, 3]]


def found(**more: object) -> torch.Tensor:
    sampled = Sampled(IDS, [[-1.0] * len(ids) for ids in IDS], [True] * 4)
    completions = Completions([[1]], sampled, [""] * 4, [0, 0, 0, 0])
    scores = RewardBatch(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), ("right",), torch.ones(1), {}, {}, {})
    return credited(completions, scores, {"name": "prefix", "eps": 0.0, **more})


def test_tokens_gain_where_completions_part() -> None:
    """Mean 1/4, deviation 1/2: the first two are worth 1/2 up to their second token, and then 1 and 0."""
    assert found().tolist() == [
        pytest.approx(row) for row in ([1.5, 2.5, 1.5], [-0.5, -1.5, -0.5], [-0.5, -0.5, 0.0], [-0.5, -0.5, 0.0])
    ]  # fmt: skip
    # From the prompt, worth 1/4, the first tokens part as well.
    assert found(root=True)[:, 0].tolist() == pytest.approx([2.0, 0.0, -1.0, -1.0])


def test_each_token_is_trained_by_its_own(small_text: list[str], tmp_path: Path) -> None:
    """Batches of completions shorter than the longest, with advantages [N, T] by token."""
    trainer = trainer_of(small_text, tmp_path / "run", "credit=prefix", "advantage=null", "rollout.tokens=12")
    policy = task_of(trainer).policy
    e = made_up([5, 2, 3, 1], [True] * 4, [0, 0, 1, 1])
    advantages = torch.arange(20.0).view(4, 5) - 9
    mine = gradient(trainer, e, advantages)
    assert len(list(trainer.objective.batches(e, 0, None))) > 1
    log_probs, mask = policy.log_probs(e, [0, 1, 2, 3])
    policy_loss(log_probs, log_probs.detach(), advantages, mask, denom=11)[0].backward()
    for name, parameter in trainer.task.weights.named_parameters().items():
        if parameter.grad is not None:
            assert torch.allclose(mine[name], parameter.grad, atol=1e-6), name


def test_a_run_with_advantages_by_token(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(
        small_text, tmp_path / "run", "advantage=null", "credit={name: prefix, root: true}", "rollout.group=8",
        "rollout.tokens=1000", "select=[{name: extremes, keep: 4}]", "optimizer.epochs=2",
        "objective={surrogate: bapo, balance: {}}",
    )  # fmt: skip
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0
    rows, e = trainer.collect(1)
    advantages = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)
    assert advantages.shape == (24, int(e.lengths.max()))
    # Eight completions of a prompt share a token somewhere, so somewhere one parts from the others.
    assert any(len(row[: len(ids)].unique()) > 1 for row, ids in zip(advantages, e.sampled.ids))


@pytest.mark.parametrize(
    ("base", "lines", "message"),
    [
        ("mixgrpo_flash_guard", [], "use depth for a tree of images"),
        ("text", ["advantage.scale=none"], "compares by itself.*write advantage: null"),
        ("text", ["advantage=anchored"], "compares by itself.*and advantage is anchored"),
        ("text", ["objective=answers"], "use objective tokens, not answers"),
        ("text", ["rollout.budget={}"], "use credit leaf"),
    ],
)
def test_what_has_no_tokens_is_refused(base: str, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(base, ["credit=prefix", *lines])
