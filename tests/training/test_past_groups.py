"""Groups of earlier iterations that are trained again, weighted by the ratio of the policies."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.token_penalties import kl_convex
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.credit.pooling import Batch
from flowgrpo.training.data import PromptRow
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.extensions import PastGroups
from flowgrpo.training.text.text_policy import Completions
from tests.parts.own_parts import TEXT, same_when_resumed
from tests.training.test_text_processes import both, overrides  # noqa: F401
from tests.training.text_runs import trainer_of

LINES = ["objective.correction=truncate", "optimizer.epochs=2"]


def extension(share: float = 1.0, **more: int) -> PastGroups:
    recipe = SimpleNamespace(run=SimpleNamespace(seed=3), rollout=SimpleNamespace(prompts=2))
    found = PastGroups(share=share, recipe=recipe, **more)
    found.begin(None, Processes(), None)  # type: ignore[arg-type]
    return found


def batch(*texts: str, rewards: tuple[float, ...] = (1.0, 0.0, 0.5, 0.25), ids: tuple[int, int] = (7, 9)) -> Batch:
    tokens = [[ord(one) for one in text] for text in texts]
    sampled = Sampled(tokens, [[-float(len(text))] * len(text) for text in texts], [True, False, True, True])
    e = Completions([[1], [2]], sampled, list(texts), [0, 0, 1, 1])
    scores = RewardBatch(
        torch.tensor(rewards)[:, None], ("right",), torch.ones(1), {"right": {"size": [1.0, 2.0, 3.0, 4.0]}},
        {"right": list(texts)}, {"right": 2.0},
    )  # fmt: skip
    return Batch([0, 1], [PromptRow(k, f"prompt {k}", {"answer": str(k)}) for k in ids], e, scores)


def mixed(one: PastGroups, iteration: int, given: Batch) -> Batch:
    one.prompts_drawn(given.rows, given.rows, iteration)
    return one.samples_scored(given)


def test_groups_come_back_whole() -> None:
    one = extension()
    assert mixed(one, 0, batch("ab", "c", "de", "f")).experience.samples == ["ab", "c", "de", "f"]
    assert one.record() == {"past_groups": 0.0}
    found = mixed(one, 1, batch("u", "v", "w", "xyz", ids=(4, 5)))
    assert one.record() == {"past_groups": 2.0}
    e = found.experience
    assert e.prompt_of_sample == [0, 0, 1, 1, 2, 2, 3, 3]
    order = [0, 1] if found.places[2] == 2 else [1, 0]
    assert sorted(found.places) == [0, 1, 2, 3]
    groups = [["ab", "c"], ["de", "f"]]
    assert e.samples == ["u", "v", "w", "xyz", *groups[order[0]], *groups[order[1]]]
    row = 4 + 2 * order[0]
    assert e.samples[row] == "ab"
    assert e.sampled.log_probs[row] == [-2.0, -2.0]
    assert e.sampled.ended[row : row + 2] == [True, False]
    assert e.prompts[e.prompt_of_sample[row]] == [1]
    assert found.rows[e.prompt_of_sample[row]] == PromptRow(7, "prompt 7", {"answer": "7"})
    assert found.scores.values[row : row + 2, 0].tolist() == [1.0, 0.0]
    assert found.scores.sub_scores["right"]["size"][row : row + 2] == [1.0, 2.0]
    assert found.scores.notes["right"][row] == "ab"
    assert found.scores.seconds == {"right": 2.0}
    assert e.origins() == [{}] * 4 + [{"sampled_at": 0}] * 4


def test_a_share_comes_back_and_the_oldest_are_forgotten() -> None:
    one, two = extension(0.5), extension(1.0, keep=2)
    for k in range(4):
        text = "abcd"[k]
        few = mixed(one, k, batch(*[text] * 4))
        many = mixed(two, k, batch(*[text] * 4))
    assert few.experience.samples == ["d"] * 4 + ["c"] * 2
    assert len(many.rows) == 4
    assert set(many.experience.samples) <= {"d", "c", "b"}
    assert sorted(one.state_dict()["past"]) == [3]
    assert sorted(two.state_dict()["past"]) == [2, 3]


def test_a_later_iteration_draws_other_groups() -> None:
    drawn = set()
    for k in range(1, 30):
        one = extension(0.5)
        mixed(one, k - 1, batch("a", "a", "b", "b"))
        drawn.add(mixed(one, k, batch("c", "c", "c", "c")).experience.samples[-1])
    assert drawn == {"a", "b"}


def test_no_group_comes_back_from_an_iteration_on() -> None:
    one = extension(until=2)
    sizes = [len(mixed(one, k, batch("a", "b", "c", "d")).rows) for k in range(4)]
    assert sizes == [2, 4, 2, 2]
    assert one.record() == {"past_groups": 0.0}


def test_groups_survive_a_checkpoint(tmp_path: Path) -> None:
    one, again = extension(0.5), extension(0.5)
    mixed(one, 0, batch("ab", "c", "de", "f"))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    found = [mixed(each, 1, batch("u", "v", "w", "x")) for each in (one, again)]
    assert found[0].experience == found[1].experience
    assert found[0].rows == found[1].rows


def test_old_groups_are_weighted_by_the_ratio_of_the_policies(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(
        small_text, tmp_path / "run", "extensions=[{name: past_groups, share: 1.0}]", *LINES, "rollout.tokens=3000",
        "penalties=[{name: kl_convex, weight: 0.1}]",
    )  # fmt: skip
    first = trainer.iterate(0)
    assert first["ratio/first_error"] == 0.0
    assert first["weight"] == pytest.approx(1.0, abs=1e-4)
    trainer.collector.rows(1)
    found, _, advantages = trainer._compared(trainer.collector.sample(1))
    e = found.experience
    assert len(e.prompts) == 6
    assert advantages.shape == (24,)
    for prompt in range(6):
        mine = [row for row, owner in enumerate(e.prompt_of_sample) if owner == prompt]
        assert float(advantages[mine].sum()) == pytest.approx(0, abs=1e-5)
    trainer.objective.prepare(e)
    [rows] = trainer.objective.batches(e, 0, None)
    scored = trainer.objective._scored(e, rows, advantages, None)
    gap = scored.gap.detach().cpu()
    assert float(gap[:12].abs().max()) < 1e-4
    assert float(gap[12:].abs().max()) > 0.01
    weight, _ = trainer.objective.correction(scored.gap)
    then = torch.tensor(e.sampled.log_probs[12])
    now = scored.old[12, : len(then)].cpu()
    assert weight[12, : len(then)].tolist() == pytest.approx((now - then).exp().clamp(max=2.0).tolist(), abs=1e-5)


def test_the_mixture_of_divergences() -> None:
    """Log-ratios of 2 and -1: a quarter of 2^2 / 2, and three quarters of 1 / 2; the gradient is the mixed ratio."""
    logp = torch.tensor([[-1.0]], requires_grad=True)
    found = kl_convex(logp, torch.tensor([[-3.0]]), torch.tensor([[0.0]]), base=0.25)
    assert float(found.detach()) == pytest.approx(0.25 * 2 + 0.75 * 0.5)
    found.sum().backward()
    assert float(logp.grad) == pytest.approx(0.25 * 2 - 0.75)


@pytest.mark.parametrize(
    ("base", "lines", "message"),
    [
        ("text", ["optimizer.epochs=2"], "ratio of the policies, and objective.correction is auto"),
        ("text", [*LINES, "optimizer.updates=2"], "use optimizer.epochs for more steps"),
        ("text", [*LINES, "rollout.budget={}"], "adds groups"),
        ("text", [*LINES, "rollout.form=elastic"], "keeps completions of the prompt alone"),
        ("text", [*LINES, "extensions=[{name: uncertainty, reward: answer}, past_groups]"], "write it first"),
        ("text", [*LINES, "extensions=[past_groups, curriculum]"], "extension curriculum learns from all samples"),
        ("text", [*LINES, "advantage=tracked"], "advantage tracked learns from all samples"),
        ("mixgrpo_flash_guard", [], "keeps the tokens of completions"),
        ("text", [*LINES, "optimizer.epochs=1", "penalties=[{name: kl_convex, weight: 0.1}]"], "before it has moved"),
    ],
)
def test_what_does_not_fit_is_refused(base: str, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(base, ["extensions=[past_groups]", *lines])


@pytest.mark.slow
def test_a_run_is_the_same_when_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*TEXT, "extensions=[{name: past_groups, share: 0.5, keep: 2}]", *LINES, "optimizer.updates=1"]
    same_when_resumed("text", words, tmp_path)


@pytest.mark.slow
def test_two_processes_bring_back_the_groups_of_one(overrides: list[str], tmp_path: Path) -> None:  # noqa: F811
    words = [*overrides, "extensions=[{name: past_groups, share: 0.67}]", *LINES, "optimizer.updates=1"]
    records = both(words, tmp_path)
    assert [record.get("past_groups") for record in records[:3]] == [0.0, 2.0, 2.0]
