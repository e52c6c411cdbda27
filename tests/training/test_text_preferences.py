"""Losses of whole answers on a language model: what their first gradient is, worked out by hand."""

from pathlib import Path

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer


def trainer_of(model: Path, folder: Path, *more: str) -> Trainer:
    reward = folder.parent / "reward.py"
    reward.write_text("def weight(completions, **columns):\n    return [sum(map(ord, t)) / 500 for t in completions]\n")
    words = [
        f"model.path={model}", f"rewards=[{{name: '{reward}:weight'}}]", "generation.max_tokens=6",
        "rollout.prompts=2", "rollout.group=4", "rollout.batch=8", "data.heldout=null",
        "optimizer.max_grad_norm=1e9", *more,
    ]  # fmt: skip
    return Session(load_recipe("text", words), RunFolder.create(folder, "")).trainer(Silent())


def answers(loss: str) -> str:
    return f"objective={{name: answers, loss: {loss}}}"


def gradient_of(trainer: Trainer, form: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradient of the loss, and the gradient from a formula of the summed log-probs at the first step."""
    rows, e = trainer.collect(0)
    advantages = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)
    objective = trainer.objective
    objective.prepare(e)
    count = torch.tensor(float(objective.rows(e, 0, None)))
    for batch in objective.batches(e, 0, None):
        outcome = objective.backward(e, batch, advantages, None, count)
        assert float(outcome.error) == 0.0
    found = [p.grad.clone() for p in trainer.task.weights.parameters() if p.grad is not None]
    trainer.optimizer.zero_grad()
    log_probs, mask = trainer.task.policy.log_probs(e, list(range(8)))  # type: ignore[attr-defined]
    total = torch.where(mask, log_probs, 0.0).sum(1)
    lengths = mask.sum(1)
    loss = torch.zeros(())
    for p in (0, 1):
        mine = (e.groups == p).nonzero().flatten()
        a = advantages[mine]
        best, worst = mine[a.argmax()], mine[a.argmin()]
        if form == "dpo":
            loss = loss - torch.nn.functional.logsigmoid(0.1 * (total[best] - total[worst]).sub(
                (total[best] - total[worst]).detach()
            )) / 2  # fmt: skip
        if form == "simpo":
            gap = total[best] / lengths[best] - total[worst] / lengths[worst]
            loss = loss - torch.nn.functional.logsigmoid(2.0 * gap - 1.0) / 2
        if form == "regression":
            # At a ratio of 1 it is REINFORCE.
            loss = loss - (a * total[mine]).sum() / 8
    loss.backward()
    expected = [p.grad.clone() for p in trainer.task.weights.parameters() if p.grad is not None]
    return found, expected


@pytest.mark.parametrize("form", ["dpo", "simpo", "regression"])
def test_the_first_gradient(random_language_folder: Path, tmp_path: Path, form: str) -> None:
    trainer = trainer_of(random_language_folder, tmp_path / "run", answers(form))
    found, expected = gradient_of(trainer, form)
    assert max(float(g.abs().max()) for g in expected) > 1e-6
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("form", ["dpo", "simpo", "regression", "real", "contrastive", "disco", "inpo"])
def test_a_step_raises_what_it_should(random_language_folder: Path, tmp_path: Path, form: str) -> None:
    more = ("optimizer.learning_rate=1e-3", "optimizer.weight_decay=0.0")
    trainer = trainer_of(random_language_folder, tmp_path / "run", answers(form), *more)
    rows, e = trainer.collect(0)
    advantages = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)

    def gap() -> float:
        with torch.no_grad():
            log_probs, mask = trainer.task.policy.log_probs(e, list(range(8)))  # type: ignore[attr-defined]
        mean = torch.where(mask, log_probs, 0.0).sum(1) / mask.sum(1)
        return sum(float(mean[i] - mean[j]) for p in (0, 1) for i, j in [_ends(advantages, e.groups, p)])

    before = gap()
    record = trainer.update(e, advantages)
    assert record["ratio/first_error"] == 0.0
    assert gap() > before
    if form in ("dpo", "simpo", "inpo"):
        assert record["pairs"] == 1.0


def _ends(advantages: torch.Tensor, groups: torch.Tensor, p: int) -> tuple[int, int]:
    mine = (groups == p).nonzero().flatten()
    return int(mine[advantages[mine].argmax()]), int(mine[advantages[mine].argmin()])


def test_a_prompt_whose_answers_are_all_right_teaches_nothing(random_language_folder: Path, tmp_path: Path) -> None:
    """Its advantages are all 0, and these do not say that the answers are wrong."""
    for form in ("real", "contrastive", "disco", "dpo"):
        trainer = trainer_of(random_language_folder, tmp_path / form, answers(form))
        _, e = trainer.collect(0)
        record = trainer.update(e, torch.zeros(8))
        assert record["grad_norm"] == 0.0, form
        mixed = torch.tensor([0.0] * 4 + [1.0, -1.0, 1.0, -1.0])
        assert trainer.update(e, mixed)["grad_norm"] > 0.0, form


@pytest.mark.parametrize(
    "words", ["rollout.budget={choice: until, rounds: 2}", "data.templates=['{prompt}', 'so {prompt}']"]
)
def test_answers_and_conflicts_are_compared_in_one_round(words: str) -> None:
    with pytest.raises(RecipeError, match=r"takes a whole group in a call, and .* cuts it into rounds"):
        load_recipe("text", [answers("dpo"), "penalties=[]", words])
    with pytest.raises(
        RecipeError, match=r"compares whole groups with `conflict`, and .* samples a prompt in several rounds"
    ):
        load_recipe("text", ["objective.conflict=2.0", words])


def test_completions_that_are_in_no_batch_are_not_missed(random_language_folder: Path, tmp_path: Path) -> None:
    """The greedy completion beside a group has a score alone."""
    trainer = trainer_of(random_language_folder, tmp_path / "run", answers("dpo"), "rollout.form=greedy")
    assert trainer.iterate(0)["ratio/first_error"] == 0.0


def test_groups_are_not_cut(random_language_folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(random_language_folder, tmp_path / "run", answers("dpo"), "rollout.tokens=16")
    with pytest.raises(ValueError, match=r"compares the 4 completions of a prompt.*rollout\.tokens 16"):
        trainer.iterate(0)


def test_settings_of_another_form_are_refused(random_language_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="token penalty kl works on tokens, and text objective answers works on whole answers"
    ):
        trainer_of(random_language_folder, tmp_path / "a", answers("dpo"), "penalties=[{name: kl, weight: 0.1}]")
    with pytest.raises(ValueError, match=r"objective\.loss\.tau: answer loss dpo has no option 'tau'"):
        trainer_of(random_language_folder, tmp_path / "b", "objective={name: answers, loss: {name: dpo, tau: 1}}")
    with pytest.raises(ValueError, match=r"`smoothing` is 0\.7; use a probability"):
        trainer_of(
            random_language_folder, tmp_path / "c", "objective={name: answers, loss: {name: dpo, smoothing: 0.7}}"
        )
    with pytest.raises(ValueError, match=r"answers takes whole groups; leave select out"):
        trainer_of(random_language_folder, tmp_path / "d", answers("real"), "select=[{name: extremes, keep: 2}]")
