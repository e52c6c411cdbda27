"""Values of a whole group or step reach the loss of a run of text, in one process or two."""

from pathlib import Path

import pytest
import torch

from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.credit.pooling import Pooled, pooled
from flowgrpo.training.credit.strata import Stratum
from flowgrpo.training.data import PromptRow
from flowgrpo.training.distributed.processes import Processes
from tests.training.test_processes import Threads
from tests.training.test_text import made_up
from tests.training.test_text_processes import launched, lines_of
from tests.training.text_runs import trainer_of


def test_strata_and_likelihoods_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0.0, 2.0, float("nan"), 1.0, 2.0, 0.0]

    def work(mine: Processes) -> Pooled:
        places = mine.share(3)
        own = [2 * place + k for place in places for k in range(2)]
        owners = [p for p in range(len(places)) for _ in range(2)]
        e = made_up([1 + k for k in own], [True] * len(own), owners)
        scores = RewardBatch(
            torch.ones(len(own), 1), ("right",), torch.ones(1), {"right": {"calls": [calls[k] for k in own]}}, {}, {}
        )
        rows = [PromptRow(place, "p") for place in places]
        return pooled(mine, places, rows, e, scores, Stratum(reward="right", sub_score="calls", edges=[1.0, 2.0]))

    for count in (1, 2):
        for found in Threads(count, monkeypatch).run(work):
            assert found.strata is not None
            assert found.log_probs is not None
            assert found.strata.tolist() == [0, 2, -1, 1, 2, 0]
            # Each token has a log-prob of -1.
            assert found.log_probs.tolist() == [-1, -2, -3, -4, -5, -6]


@pytest.mark.slow
def test_a_run_that_rewards_the_unlikely(small_text: list[str], tmp_path: Path) -> None:
    reward = tmp_path / "right.py"
    reward.write_text("def right(prompts, **columns):\n    return [1.0] * len(prompts)\n")
    trainer = trainer_of(small_text, tmp_path / "run", f"rewards=[{{name: '{reward}:right', unlikely: 0.5}}]")
    rows, e = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, e)
    found = trainer.advantages(scores, e, rows)
    whole = torch.tensor([sum(one) for one in e.sampled.log_probs])
    # All are right, so what tells them apart is how likely they were; the least likely is best.
    for group in range(3):
        mine = e.groups == group
        assert int(found[mine].argmax()) == int(whole[mine].argmin())
    assert trainer.iterate(0)["grad_norm"] > 0


@pytest.mark.slow
def test_two_processes_settle_on_the_same(small_text: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1+2=\n47-85=\n9\n30+4=\n")
    lines = [
        *(line for line in small_text if not line.startswith("optimizer")), f"data={{train: {prompts}, heldout: null}}",
        "optimizer={learning_rate: 0.01, epochs: 2, eps: 1.0e-3}", "run={iterations: 2, checkpoint_every: 2}",
        "objective={surrogate: bapo, balance: {}, entropy: {target: 9.0, value: 0.01}}",
        "penalties=[{name: llds, weight: 0.1}]",
        "credit=prefix",
        "advantage=null",
    ]  # fmt: skip
    records = []
    for count in (1, 2):
        folder = tmp_path / str(count) / "run"
        folder.parent.mkdir()
        launched(lines, folder, count, {})
        records.append(lines_of(folder / "metrics.jsonl"))
    for mine, theirs in zip(*records, strict=True):
        for name in ("bound/lower", "bound/upper", "exact_entropy", "entropy_bonus", "llds", "loss", "grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-6), name
        assert mine["entropy_bonus"] > 0
