"""A missing score neither favours nor harms its sample, on every path from scores to advantages."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.rollouts import BudgetConfig
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.credit.combining import total_reward
from flowgrpo.training.credit.pooling import Pooled
from flowgrpo.training.credit.selecting import kept_nodes
from flowgrpo.training.extensions import Curriculum
from flowgrpo.training.extensions.extension import Rewards
from flowgrpo.training.reporting.records import reward_record
from flowgrpo.training.uneven_groups import collect_rounds
from tests.training.judging import selections
from tests.training.score_paths import PATHS, Path, advantages_of, rollout_of, values_of
from tests.training.test_text_replay import completions, mended, replay

NAN = math.nan
APART = {
    "beta": "takes sums of verdicts that are verdicts themselves, where each prompt has one of the rewards",
    "gate": "the mean is that of what the gates leave",
    "gate/closed": "the mean is that of what the gates leave",
    "gate/share": "the mean is that of what the gates leave",
    "gate/apart": "the reward apart is compared among the samples that have it",
    "text/unlikely": "the mean is that of what is left of the rewards of likely successes",
    "constraint": "each of its rewards is normalised by itself, among the samples that have it",
    **{name: "each reward is normalised by itself, among the samples that have it" for name in PATHS if "gdpo" in name},
}
"""Where the mean of a group that stands in is not that of the scores as the reward gave them."""
FROM_ZERO = ("none/", "turning", "minimum", "soft", "virtual", "tracked", "cumulative", "critic", "text/anchor")
"""Reads the level of a sum, so that a reward that a whole group lacks must add nothing to it."""


def advantages(path: Path, values: Tensor) -> Tensor:
    earlier = [values_of(path, 2, seed=9)] * (path.visits - 1)
    return advantages_of(path, values, path.weights, *earlier)


def own(path: Path) -> tuple[Tensor, Tensor]:
    """Groups and outcomes of the samples."""
    e = rollout_of(path.kind)
    return e.groups, e.outcomes


def leaves(path: Path, found: Tensor) -> Tensor:
    e = rollout_of(path.kind)
    found = found[e.rollout.leaf] if hasattr(e, "rollout") else found
    return found if found.ndim == 1 else found.mean(1)


@pytest.mark.parametrize("name", [name for name in PATHS if name not in APART])
def test_it_counts_as_the_mean_of_its_group(name: str) -> None:
    """The samples that lack a score have the advantages that they would have with the mean of those that have it."""
    path = PATHS[name]
    values = values_of(path, 2)
    groups, _ = own(path)
    filled = values.clone()
    for group in groups.unique().tolist()[:-1]:
        rows = (groups == group).nonzero().flatten()
        if len(rows) > 2:
            values[rows[1], 1] = NAN
            filled[rows[1], 1] = (
                filled[rows, 1].double().index_select(0, torch.tensor([0, *range(2, len(rows))])).mean()
            )
    assert bool(values.isnan().any())
    torch.testing.assert_close(advantages(path, values), advantages(path, filled), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, path in PATHS.items() if path.kind != "probed" and name != "beta"])
def test_it_is_no_reason_to_be_the_best_or_the_worst(name: str) -> None:
    """All are equal but for one reward, which one sample of a group lacks: two others are above and below it."""
    path = PATHS[name]
    values = torch.zeros(len(own(path)[0]), 2) + (0.5 if path.values == "unit" else 2.0)
    groups, _ = own(path)
    for group in groups.unique().tolist():
        rows = (groups == group).nonzero().flatten()
        scores = torch.tensor([0.9, 0.5, 0.2, 0.6]).repeat(len(rows))[: len(rows)]
        values[rows, 1] = scores if path.values == "unit" else 8 * scores + 3
    without = values.clone()
    first = groups == groups[0]
    gone = first.nonzero().flatten()[3 if int(first.sum()) > 3 else 0]
    without[gone, 1] = NAN
    found = leaves(path, advantages(path, without))
    low, high = found[first & ~without[:, 1].isnan()].aminmax()
    assert float(low) - 1e-6 <= float(found[gone]) <= float(high) + 1e-6
    assert float(found[gone].abs()) < max(float(low.abs()), float(high.abs())) or float(high) == float(low)


@pytest.mark.parametrize(
    "name", [name for name in PATHS if name not in APART or name.endswith(("group/gdpo", "none/gdpo", "constraint"))]
)
def test_what_a_whole_group_lacks_makes_it_no_better_and_no_worse(name: str) -> None:
    """It adds nothing; in comparisons between groups it counts as the mean of the others.

    The deviation of a batch, by which `batch/gdpo` divides each reward, is that of the samples that have it.
    """
    path = PATHS[name]
    values = values_of(path, 2)
    mine = torch.tensor(rollout_of(path.kind).prompt_of_sample) == 0
    _, outcomes = own(path)
    filled = values.clone()
    values[mine, 1] = NAN
    for kind in (outcomes, ~outcomes):
        zero = name.startswith(FROM_ZERO) or "minimum" in name
        filled[mine & kind, 1] = 0.0 if zero else values[kind, 1].nanmean()
    if name in ("worst", "agreement"):
        alone = advantages_of(path, torch.stack([values[:, 0], values[:, 0]], 1), (0.5, 0.5))
        found = leaves(path, advantages(path, values))
        torch.testing.assert_close(found[mine], leaves(path, alone)[mine], rtol=1e-4, atol=1e-5)
        return
    torch.testing.assert_close(advantages(path, values), advantages(path, filled), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["depth", "value", "text/quantile", "mean/group/sum", "worst", "agreement"])
def test_equal_samples_stay_equal_where_some_lack_a_score(name: str) -> None:
    """All have 1 of one reward and 5 of the other, or nothing: they used to have -1.68 and 0.56, or 1.62."""
    path = PATHS[name]
    values = torch.tensor([1.0, 5.0]).repeat(len(own(path)[0]), 1)
    values[::3, 1] = NAN
    assert advantages(path, values).nan_to_num().abs().max() == 0


def test_what_does_not_count_is_in_no_mean() -> None:
    """Completions cut at the longest length are left out, and so are their scores."""
    e = replace(completions("a", "b", "c", "d"), drop_truncated=True)
    e.sampled.ended[1] = False
    values = torch.tensor([[1.0, 2.0], [1.0, 100.0], [0.0, 4.0], [1.0, NAN]])
    found = total_reward(RewardBatch(values, ("a", "b"), torch.tensor([1.0, 0.5]), {}, {}, {}), e)
    assert found.nan_to_num(-9).tolist() == [2.0, -9.0, 2.0, 3.0]


def scores(*columns: list[float], weights: list[float]) -> RewardBatch:
    return RewardBatch(torch.tensor(columns).T, tuple("abc"[: len(columns)]), torch.tensor(weights), {}, {}, {})


def test_selection_budgets_replays_and_curricula_read_the_same_sums() -> None:
    """Prompts of two samples each. The second reward is unknown of sample 1, and the third is only recorded."""
    e = completions("a", "b", "c", "d")
    batch = scores([0.0, 0.0, 0.0, NAN], [1.0, NAN, 0.0, NAN], [NAN, 9.0, 9.0, 9.0], weights=[1.0, 1.0, 0.0])
    assert total_reward(batch, e).nan_to_num(-9).tolist() == [1.0, 1.0, 0.0, -9.0]
    chosen = selections({"name": "best", "keep": 1}, "varied")
    assert kept_nodes(e, batch, chosen).tolist() == [False] * 4  # type: ignore[union-attr]
    # Sample 1 counts as the success that sample 0 is, and sample 3, of which nothing is known, as neither.
    drawn: list[list[int]] = []

    def sample(prompts: list[int], numbers: list[int]) -> object:
        drawn.append(list(prompts))
        return e if len(drawn) == 1 else completions_of(prompts)

    def scored(part: object, prompts: list[int]) -> RewardBatch:
        return batch if len(drawn) == 1 else scores(*[[0.0] * 2] * 3, weights=[1.0, 1.0, 0.0])

    budget = BudgetConfig(rounds=2, positives=2, negatives=0)
    collect_rounds(budget, 2, 1, 2, sample, scored)  # type: ignore[arg-type]
    assert drawn == [[0, 1], [1]]
    memory = replay()
    mended(memory, e, batch)
    assert len(memory.successes.of(7)) == 2
    assert not memory.successes.of(9)
    remembers = Curriculum(recipe=load_recipe("text"), rewards=Rewards([], ["a"]))
    ids = [7, 7, 9, 9]
    remembers.update_done(Pooled(batch, ids, e.groups, e.outcomes, None, None, None, [0, 1, 2, 3]), {})
    assert (remembers.curriculum.rate(7), remembers.curriculum.rate(9)) == (1.0, 0.0)


def completions_of(prompts: list[int]) -> object:
    return replace(completions("x", "y"), prompt_of_sample=[0, 0])


def test_metrics_leave_out_what_is_missing_and_what_is_only_recorded() -> None:
    def record(*columns: list[float], weights: list[float]) -> dict:
        groups, outcomes = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
        batch = scores(*columns, weights=weights)
        return reward_record(Pooled(batch, [0, 0, 1, 1], groups, outcomes, None, None, None, [0, 1, 2, 3]))

    equal = [1.0] * 4
    found = record(equal, [5.0, NAN, 3.0, NAN], [0.0, 9.0, NAN, 9.0], weights=[1.0, -0.5, 0.0])
    # A mean of 4 over the samples that have it, and groups in which no score that counts tells samples apart.
    assert found["reward/total"] == 1.0 - 0.5 * 4.0
    assert found["reward/c"] == 6.0
    assert {name: value for name, value in found.items() if name.startswith("reward_missing/")} == {
        "reward_missing/b": 0.5, "reward_missing/c": 0.25,
    }  # fmt: skip
    # Means of 5 and 3 by prompt, with one score each. Means of 4.5 and 9 with two scores and one: their deviations from
    # 6 count by 2/3 and 1/3, so the variance is (2/3 · 1.5)² + (1/3 · 3)² = 2, times 2 for the small number of prompts.
    assert found["reward_error/b"] == pytest.approx(1.0)
    assert found["reward_error/c"] == pytest.approx(2.0)
    assert found["degenerate_groups"] == 1.0
    assert record(equal, [NAN] * 4, weights=[1.0, 1.0])["reward/total"] is None
    assert record(equal, [NAN] * 4, weights=[1.0, 0.0])["reward/total"] == 1.0
    assert record([NAN] * 4, weights=[1.0])["reward/total"] is None
