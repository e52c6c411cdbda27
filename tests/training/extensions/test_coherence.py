"""A right answer earns a bonus if it is likelier after its reasoning than the right answers of its group."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.combination import coherent_rewards
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.extensions import Coherence
from flowgrpo.training.extensions.extension import Rewards
from flowgrpo.training.reporting.clock import Clock
from flowgrpo.training.text.text_policy import Completions
from tests.training.test_text import task_of
from tests.training.text_runs import trainer_of

NAN = math.nan


def test_right_samples_above_the_mean_of_their_right_peers() -> None:
    """Group 0: the right ones have 0.2, 0.5 and 0.2, a mean of 0.3; the wrong one has 0.9. Group 1: equal. 2: alone."""
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 1, 1, NAN])
    likelihood = torch.tensor([0.2, 0.5, 0.2, 0.9, 0.3, 0.3, 0.8, 0.8])
    found = coherent_rewards(rewards, likelihood, [0, 0, 0, 0, 1, 1, 2, 2])
    assert found[:7].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert found[7].isnan()
    # Without an answer there is no bonus, and the mean leaves the sample out: 0.4 is above 0.3.
    found = coherent_rewards(torch.tensor([2.0, 3, 2]), torch.tensor([NAN, 0.4, 0.2]), [0, 0, 0], at_least=2.0)
    assert found.tolist() == [0, 3, 0]
    # The mean of equal numbers, rounded, must not be below them.
    assert coherent_rewards(torch.ones(3), torch.full((3,), 0.1), [0] * 3).tolist() == [0, 0, 0]


class Fixed:
    """A policy that writes letters, whose log-probs are minus the place of a letter in the alphabet."""

    def __init__(self) -> None:
        self.recipe = load_recipe("text")
        self.language = SimpleNamespace(decode=lambda ids: "".join(chr(96 + k) for k in ids))

    def statistics(self, completions: Completions, rows: list[int], *, entropy: bool) -> SimpleNamespace:
        ids = [completions.sampled.ids[row] for row in rows]
        width = max(map(len, ids))
        return SimpleNamespace(log_probs=-torch.tensor([one + [0] * (width - len(one)) for one in ids]).float())


def test_the_likelihood_is_that_of_the_tokens_after_the_last_marker() -> None:
    texts = ["dezab", "zzb", "zabz", "aba", "z"]
    ids = [[ord(c) - 96 for c in text] for text in texts]
    completions = Completions([[1]], Sampled(ids, [], [True] * 5), texts, [0] * 5)
    recipe = SimpleNamespace(rewards=[SimpleNamespace(name="right", label=None)])
    extension = Coherence(reward="right", marker="z", rewards=Rewards(recipe.rewards, ["right"]))
    extension.policy = Fixed()  # type: ignore[assignment]
    extension.average = SimpleNamespace(applied=nullcontext)  # type: ignore[assignment]
    found = torch.tensor(extension.measured(SimpleNamespace(experience=completions)))  # type: ignore[arg-type]
    # "ab": the mean of -1 and -2. "b": -2. Nothing is after the last z of the third, and the others have no answer.
    assert found[:2].tolist() == pytest.approx([math.exp(-1.5), math.exp(-2)])
    assert bool(found[2:].isnan().all())


LINES = (
    "rewards=[{name: digit_share}, {name: digit_share, label: follows, weight: 0.5}]",
    "extensions=[{name: coherence, reward: follows, marker: t, at_least: 0.08, decay: 0.75}]",
)


def test_a_run_asks_a_slow_average_of_its_weights(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", *LINES, "generation.max_tokens=12")
    coherence = trainer.extensions.each["coherence"]
    assert isinstance(coherence, Coherence)
    weights = task_of(trainer).weights
    seen = [[one.detach().clone() for one in weights.named_parameters().values()]]
    rows, experience = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, experience)
    # The average still has the weights of now.
    now = torch.tensor(coherence.measured(SimpleNamespace(experience=experience)))  # type: ignore[arg-type]
    assert 0 < int(now.isnan().sum()) < len(now)
    expected = coherent_rewards(scores.values[:, 1], now, experience.groups, at_least=0.08)
    assert float(expected.sum()) > 0
    for iteration in range(2):
        record = trainer.iterate(iteration)
        seen.append([one.detach().clone() for one in weights.named_parameters().values()])
        if iteration == 0:
            assert record["reward/follows"] == pytest.approx(float(expected.mean()))
            assert record["coherence"] == pytest.approx(float(now.nanmean()), rel=1e-5)
        assert record["ratio/first_error"] == 0.0
    # The first update copies the weights, and the second keeps three quarters of the copy.
    kept = coherence.state_dict()["average"].values()
    for one, first, second in zip(kept, seen[1], seen[2]):
        assert torch.allclose(one, 0.75 * first + 0.25 * second, atol=1e-7)
    again = Coherence(reward="follows", rewards=Rewards(trainer.recipe.rewards, trainer.rewards.names))
    again.begin(trainer.task, Processes(), Clock(torch.device("cpu"), ("scoring", "rest")))
    again.load_state_dict(coherence.state_dict())
    assert again.average.steps == 2
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict()["average"].values(), kept))


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="asks reward 'follows'"):
        load_recipe("text", ["rewards=[{name: answer}]", "extensions=[{name: coherence, reward: follows}]"])
    with pytest.raises(ValueError, match="only a causal language model tells"):
        load_recipe("default", ["rewards=[{name: gold}]", "extensions=[{name: coherence, reward: gold}]"])
    with pytest.raises(ValueError, match=r"rollout\.budget samples a prompt in several rounds"):
        load_recipe(
            "text",
            ["extensions=[{name: coherence, reward: answer}]", "rollout.budget={choice: interval, rounds: 2}"],
        )
