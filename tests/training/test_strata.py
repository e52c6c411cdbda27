"""Which samples of a prompt are alike, and advantages among them, from a recipe's lines."""

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.parts.choice import chosen
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.credit.comparing import compare
from flowgrpo.training.credit.pooling import Pooled, pooled
from flowgrpo.training.credit.strata import Stratum, stratum_ids, stratum_values
from flowgrpo.training.data import PromptRow
from flowgrpo.training.distributed.processes import Processes
from tests.training.test_text_replay import completions

NAN = float("nan")


def scores(values: list[float], calls: list[float] | None = None) -> RewardBatch:
    subs = {} if calls is None else {"right": {"calls": calls}}
    return RewardBatch(torch.tensor(values)[:, None], ("right",), torch.ones(1), subs, {}, {})


def pooled_with(batch: RewardBatch, stratum: Stratum | None) -> Pooled:
    rows = [PromptRow(0, "one"), PromptRow(1, "two")]
    return pooled(Processes(), [0, 1], rows, completions("a", "b", "c", "d"), batch, stratum)


def test_distinct_values_are_strata() -> None:
    ids = stratum_ids([3.0, NAN, 0.0, 3.0, NAN], []).tolist()
    assert ids[0] == ids[3]
    assert ids[1] == ids[4]
    assert len(set(ids)) == 3
    # A value on an edge belongs to what is above it.
    assert stratum_ids([0.0, 2.0, 5.0, 1.9, NAN, 9.0], [2.0, 5.0]).tolist() == [0, 1, 2, 0, -1, 2]


def test_a_reward_or_its_sub_score_says_which() -> None:
    batch = scores([1.0, 0.5, 0.0, 1.0], [2.0, 0.0, 2.0, 3.0])
    assert stratum_values(batch, Stratum(reward="right")) == [1.0, 0.5, 0.0, 1.0]
    assert stratum_values(batch, Stratum(reward="right", sub_score="calls")) == [2.0, 0.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="the sub-score 'turns', which it does not give; it gives calls"):
        stratum_values(batch, Stratum(reward="right", sub_score="turns"))
    with pytest.raises(ValueError, match="it gives none, so leave `sub_score` out"):
        stratum_values(scores([1.0, 0.0, 0.0, 1.0]), Stratum(reward="right", sub_score="turns"))


def test_advantages_among_samples_that_are_alike() -> None:
    """One prompt of four samples: with calls 0, 0, 1, 1 each pair is compared by itself, 1 and 3 over sqrt(2) / 2."""
    batch = scores([0.0, 1.0, 2.0, 5.0], [0.0, 0.0, 1.0, 1.0])
    stratum = {"reward": "right", "sub_score": "calls"}
    advantage = chosen("advantage", {"name": "stratified", "alpha": 0.75, "eps": 0.0, "stratum": stratum})
    whole = pooled_with(batch, advantage["stratum"])
    assert whole.strata is not None
    assert whole.strata.tolist() == [0, 0, 1, 1]
    one = Pooled(**{**vars(whole), "groups": torch.zeros(4, dtype=torch.long)})
    inside = 2**-0.5
    spread = (14 / 3) ** 0.5  # of 0, 1, 2, 5 about their mean of 2
    expected = [0.75 * s * inside + 0.25 * d / spread for s, d in ((-1, -2), (1, -1), (-1, 0), (1, 3))]
    assert compare(advantage.make(), batch, one).tolist() == pytest.approx(expected)


def test_without_strata_none_are_pooled() -> None:
    assert pooled_with(scores([0.0, 1.0, 2.0, 5.0]), None).strata is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["advantage.stratum={reward: gold}"], "'stratum' is an option of advantage stratified"),
        (["advantage=stratified"], "advantage.stratum: is missing"),
        (["advantage={name: stratified, stratum: {reward: tag}}"], "asks reward 'tag'; the rewards are gold"),
        (["advantage={name: stratified, stratum: {reward: gold}}", "credit=depth"], "compares samples, not steps"),
        (["advantage={name: stratified, stratum: {reward: gold, edges: [2, 2]}}"], "give rising numbers"),
    ],
)
def test_strata_that_cannot_be_are_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("mixgrpo_flash_guard", ["rewards=[{name: gold}]", *lines])
