"""Self-distillation: who has which teacher, the gradient of the loss by hand, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.training.extensions import Teacher
from flowgrpo.training.text.text_policy import Completions, TextPolicy
from flowgrpo.training.trainer import Trainer
from tests.training.test_text import gradient, task_of
from tests.training.text_runs import trainer_of

TEACHER = "extensions=[{name: teacher, template: '{solution} {prompt}', success: -0.4%s}]"
SRPO = [TEACHER % "", "objective={name: distilled, doubt: 0.5, top: 1000}"]
SDPO = [TEACHER % ", failed: false", "objective={name: distilled, others: none, top: 1000, direction: forward}"]


def with_teachers(trainer: Trainer) -> tuple[Completions, torch.Tensor]:
    """A rollout in which some completions have a teacher, and advantages."""
    _, e = trainer.collect(0)
    hints = {0: [5, 6], 3: [7], 4: [8, 9, 5], 9: [6]}
    teachers = [hints[row] + e.context(row) if row in hints else None for row in range(12)]
    return replace(e, teachers=teachers), torch.linspace(-1, 1, 12)


def logits_of(policy: TextPolicy, context: list[int], ids: list[int]) -> torch.Tensor:
    """[T, V] the logits of the tokens of one completion, from one pass over the whole sequence."""
    whole = torch.tensor([context + ids])
    found: torch.Tensor = policy.language.model(input_ids=whole).logits[0, len(context) - 1 : -1]
    return found.float()


def by_hand(trainer: Trainer, e: Completions, forward: bool, doubt: float) -> dict[int, torch.Tensor]:
    """The sum over the tokens of each taught completion of the weighted KL over all tokens."""
    policy, found = task_of(trainer).policy, {}
    assert e.teachers is not None
    for row, context in enumerate(e.teachers):
        if context is None:
            continue
        student = logits_of(policy, e.context(row), e.sampled.ids[row]).log_softmax(1)
        teacher = logits_of(policy, context, e.sampled.ids[row]).log_softmax(1).detach()
        first, second = (teacher, student) if forward else (student, teacher)
        unsure = -(teacher.exp() * teacher).sum(1)
        found[row] = ((-doubt * unsure).exp() * (first.exp() * (first - second)).sum(1)).sum()
    return found


def same_gradient(trainer: Trainer, mine: dict[str, torch.Tensor]) -> None:
    largest = max(float(g.abs().max()) for g in mine.values())
    assert largest > 1e-4
    for name, parameter in trainer.task.weights.named_parameters().items():
        if parameter.grad is not None:
            assert torch.allclose(mine[name], parameter.grad, atol=1e-4 * largest), name


@pytest.mark.parametrize("shared", ["true", "false"])
def test_taught_completions_are_distilled_and_the_others_reinforced(
    small_text: list[str], tmp_path: Path, shared: str
) -> None:
    """SRPO, in batches that hold both kinds of completions."""
    trainer = trainer_of(small_text, tmp_path / "run", *SRPO, f"model.shared_prefix={shared}", "rollout.tokens=100")
    e, advantages = with_teachers(trainer)
    mine = gradient(trainer, e, advantages)
    taught = by_hand(trainer, e, forward=False, doubt=0.5)
    assert list(taught) == [0, 3, 4, 9]
    assert all(value.item() > 0 for value in taught.values())
    log_probs, mask = task_of(trainer).policy.log_probs(e, range(12))
    rest = mask & torch.tensor([row not in taught for row in range(12)])[:, None]
    loss = policy_loss(log_probs, None, advantages, rest, denom=float(mask.sum()))[0]
    (loss + sum(taught.values()) / mask.sum()).backward()
    same_gradient(trainer, mine)


def test_without_others_only_the_taught_tokens_count(small_text: list[str], tmp_path: Path) -> None:
    """SDPO, with the other direction of the KL."""
    trainer = trainer_of(small_text, tmp_path / "run", *SDPO)
    e, advantages = with_teachers(trainer)
    tokens = int(e.lengths[[0, 3, 4, 9]].sum())
    assert trainer.objective.rows(e, 0, None) == tokens
    assert trainer.objective.rows(replace(e, teachers=None), 0, None) == 0
    mine = gradient(trainer, e, advantages)
    (sum(by_hand(trainer, e, forward=True, doubt=0.0).values()) / tokens).backward()
    same_gradient(trainer, mine)


def test_equal_completions_have_one_teacher(small_text: list[str], tmp_path: Path) -> None:
    """The first of them decides, because equal completions of a prompt are scored once."""
    trainer = trainer_of(small_text, tmp_path / "run", *SDPO)
    e, advantages = with_teachers(trainer)
    ids, chances = list(e.sampled.ids), list(e.sampled.log_probs)
    for row in (1, 3):
        ids[row], chances[row] = ids[0], chances[0]
    e = replace(e, sampled=replace(e.sampled, ids=ids, log_probs=chances))
    assert e.teachers is not None
    teachers = [e.teachers[0] if row in (1, 3) else own for row, own in enumerate(e.teachers)]
    assert teachers != e.teachers
    found = gradient(trainer, e, advantages)
    e = replace(e, teachers=teachers)
    again = gradient(trainer, e, advantages)
    assert all(torch.equal(found[name], again[name]) for name in found)
    taught = by_hand(trainer, e, forward=True, doubt=0.0)
    assert list(taught) == [0, 1, 3, 4, 9]
    (sum(taught.values()) / e.lengths[[*taught]].sum()).backward()
    same_gradient(trainer, again)


@pytest.mark.parametrize("failed", [True, False])
def test_the_teacher_sees_another_success_of_the_group(small_text: list[str], tmp_path: Path, failed: bool) -> None:
    reward = tmp_path / "odd.py"
    reward.write_text("def odd(completions, **columns):\n    return [sum(map(ord, t)) % 2 for t in completions]\n")
    lines = [f"rewards=[{{name: '{reward}:odd'}}]", *(SRPO if failed else SDPO)]
    lines[1] = lines[1].replace("-0.4", "0.5")
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    before = trainer.collector.sample(0)
    e = trainer.extensions.samples_scored(before).experience
    scores, language = before.scores.values[:, 0].tolist(), task_of(trainer).policy.language
    seen = set()
    for row, context in enumerate(e.teachers):
        group = [k for k in range(12) if k // 4 == row // 4]
        good = [k for k in group if scores[k] == 1 and e.sampled.ids[k] != e.sampled.ids[row]]
        won = scores[row] == 1
        if not good or (won and failed):
            assert context is None
        else:
            assert context == language.encode(f"{e.samples[good[0]]} {before.rows[row // 4].text}")
        seen.add((won, context is None))
    assert ((True, False) in seen) != failed
    assert (False, False) in seen


def test_feedback_is_what_rewards_say_and_braces_stay(small_text: list[str], tmp_path: Path) -> None:
    reward = tmp_path / "noted.py"
    reward.write_text(
        "from flowgrpo.rewards import Scores\n\ndef noted(completions, **columns):\n"
        "    return Scores([0.0] * len(completions), notes=['', '1{prompt}'] * (len(completions) // 2))\n"
    )
    template = "extensions=[{name: teacher, template: '{prompt}+{feedback}{solution}'}]"
    lines = [f"rewards=[{{name: '{reward}:noted'}}]", template, "objective=distilled"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    batch = trainer.extensions.samples_scored(trainer.collector.sample(0))
    found = batch.experience.teachers
    assert [context is None for context in found] == [True, False] * 6
    text = batch.rows[0].text
    assert found[1] == task_of(trainer).policy.language.encode(f"{text}+1{{prompt}}")


@pytest.mark.parametrize("lines", [SRPO, SDPO], ids=["srpo", "sdpo"])
def test_an_iteration_starts_at_a_ratio_of_1_and_teaches(
    small_text: list[str], tmp_path: Path, lines: list[str]
) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert 0 < record["taught"] < 1
    assert record["distillation"] > 0
    assert record["grad_norm"] > 0
    assert isinstance(trainer.extensions.each["teacher"], Teacher)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["objective=distilled"], "nothing says what it then knows; add extension teacher"),
        ([TEACHER % ""], "no other objective uses, and objective is tokens; use objective distilled"),
        (["objective=distilled", "extensions=[{name: teacher, template: '{solution}'}]"], "write {prompt}, and"),
        (["objective=distilled", "extensions=[{name: teacher, template: '{prompt}'}]"], "write {prompt}, and"),
        ([TEACHER % "", "objective={name: distilled, surrogate: capo}"], "surrogate capo measures their curvature"),
        ([*SRPO, "rollout.budget={choice: until, rounds: 2}"], "rollout.budget samples a prompt in several rounds"),
    ],
)
def test_what_does_not_go_together_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", lines)
