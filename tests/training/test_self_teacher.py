"""The policy as its own teacher: which weights teach, what a teacher is shown, importance weights, what is refused."""

import re
from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.estimate.language import estimate_text
from flowgrpo.parts.traits import rewarded
from flowgrpo.training.checking import check
from flowgrpo.training.data import read_prompts
from flowgrpo.training.text.text_policy import Completions
from flowgrpo.training.trainer import Trainer
from tests.parts.own_parts import same_when_resumed
from tests.training.test_distilled import by_hand, same_gradient, with_teachers
from tests.training.test_text import gradient, task_of
from tests.training.text_runs import trainer_of

SHOWN = "extensions=[{name: teacher, template: '{answer} {prompt}', failed: false}]"
FULL = ["model.train=full", "model.dtype=float32"]


def objective(more: str) -> str:
    return f"objective={{name: distilled, others: none, top: 1000, {more}}}"


def moved(trainer: Trainer, by: float = 0.05) -> None:
    """Move the trained weights as optimizer steps would, with the averages behind them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.task.weights.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)


def distributions(trainer: Trainer, e: Completions) -> list[torch.Tensor]:
    """[T, V] what the teachers of completions predict with the present weights."""
    policy = task_of(trainer).policy
    assert e.teachers is not None
    found = []
    with torch.no_grad():
        for row, context in enumerate(e.teachers):
            if context is not None:
                whole = torch.tensor([context + e.sampled.ids[row]])
                logits = policy.language.model(input_ids=whole).logits[0, len(context) - 1 : -1]
                found.append(logits.float().log_softmax(1))
    return found


def apart(trainer: Trainer, e: Completions, teachers: list[torch.Tensor], weigh: bool = False) -> torch.Tensor:
    """The sum over taught tokens of the KL of the policy from what teachers predict, with gradient."""
    policy, total = task_of(trainer).policy, torch.zeros(())
    assert e.teachers is not None
    taught = [row for row, context in enumerate(e.teachers) if context is not None]
    for row, teacher in zip(taught, teachers, strict=True):
        context, ids = e.context(row), e.sampled.ids[row]
        logits = policy.language.model(input_ids=torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
        student = logits.float().log_softmax(1)
        each = (student.exp() * (student - teacher)).sum(1)
        if weigh:
            now = student.detach().gather(1, torch.tensor(ids)[:, None])[:, 0]
            each = each * (now - torch.tensor(e.sampled.log_probs[row])).exp().clamp(max=1.1)
        total = total + each.sum()
    return total


def require_taught(trainer: Trainer, e: Completions, advantages: torch.Tensor, teachers: list[torch.Tensor]) -> None:
    """Require that the gradient of the loss is the one by which the policy nears what these teachers predict."""
    mine = gradient(trainer, e, advantages)
    (apart(trainer, e, teachers) / int(e.lengths[[0, 3, 4, 9]].sum())).backward()
    same_gradient(trainer, mine)


@pytest.mark.parametrize("train", [[], FULL], ids=["lora", "full"])
def test_a_frozen_teacher_has_the_weights_of_the_start(small_text: list[str], tmp_path: Path, train: list[str]) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", SHOWN, objective("frozen: true"), *train)
    e, advantages = with_teachers(trainer)
    at_start = distributions(trainer, e)
    moved(trainer)
    now = distributions(trainer, e)
    assert all((old - new).abs().max() > 1e-3 for old, new in zip(at_start, now))
    require_taught(trainer, e, advantages, at_start)


def test_an_average_teaches_and_follows_the_policy(small_text: list[str], tmp_path: Path) -> None:
    lines = [SHOWN, objective("ema: {decay: 0.5, rise: 1.0, first: 0.5}")]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    assert set(trainer.averages) == {"compared"}
    trainer.iterate(0)
    e, advantages = with_teachers(trainer)
    with trainer.averages["compared"].applied():
        average = distributions(trainer, e)
    now = distributions(trainer, e)
    assert all((old - new).abs().max() > 1e-5 for old, new in zip(average, now))
    require_taught(trainer, e, advantages, average)


@pytest.mark.slow
def test_a_run_with_an_average_goes_on_to_the_last_bit(small_text: list[str], tmp_path: Path) -> None:
    same_when_resumed("text", [*small_text, SHOWN, objective("ema: {decay: 0.5}")], tmp_path)


def test_a_column_is_shown_to_every_teacher(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", SHOWN, objective("frozen: true"), "rollout.group=1")
    batch = trainer.extensions.samples_scored(trainer.collector.sample(0))
    language = task_of(trainer).policy.language
    assert batch.experience.teachers == [language.encode(f"{row.columns['answer']} {row.text}") for row in batch.rows]
    record = trainer.iterate(0)
    assert record["taught"] == 1.0
    assert "reward/nines" in record
    assert not rewarded(trainer.recipe)
    said = "taught by itself, with the weights of the start; rewards are only reported"
    assert said in list(task_of(trainer).describe())


def test_what_is_no_solution_is_left_out_of_it(small_text: list[str], tmp_path: Path) -> None:
    options = "success: -9, failed: false, without: '[a-m]'"
    template = f"extensions=[{{name: teacher, template: '{{solution}} {{prompt}}', {options}}}]"
    trainer = trainer_of(small_text, tmp_path / "run", template, objective("frozen: true"))
    batch = trainer.extensions.samples_scored(trainer.collector.sample(0))
    e, language = batch.experience, task_of(trainer).policy.language
    first, second = e.samples[0], e.samples[1]
    assert e.sampled.ids[0] != e.sampled.ids[1]
    assert first != re.sub("[a-m]", "", first) != ""
    assert e.teachers[1] == language.encode(f"{re.sub('[a-m]', '', first)} {batch.rows[0].text}")
    assert e.teachers[0] == language.encode(f"{re.sub('[a-m]', '', second)} {batch.rows[0].text}")


def test_a_token_counts_by_its_bounded_ratio(small_text: list[str], tmp_path: Path) -> None:
    lines = [SHOWN, objective("bound: 1.1"), "optimizer.epochs=2"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    e, advantages = with_teachers(trainer)
    plain = by_hand(trainer, e, forward=False, doubt=0.0)
    trainer.objective.prepare(e)
    moved(trainer, 0.02)
    mine = gradient_of(trainer, e, advantages)
    tokens = int(e.lengths[[0, 3, 4, 9]].sum())
    weighed = apart(trainer, e, distributions(trainer, e), weigh=True)
    assert abs(float(weighed.detach()) - float(sum(plain.values()).detach())) > 1e-3
    (weighed / tokens).backward()
    same_gradient(trainer, mine)


def gradient_of(trainer: Trainer, e: Completions, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of an update that began before the weights moved."""
    prepare = trainer.objective.prepare
    trainer.objective.prepare = lambda experience: None  # type: ignore[method-assign]
    try:
        return gradient(trainer, e, advantages)
    finally:
        trainer.objective.prepare = prepare  # type: ignore[method-assign]


def test_the_estimate_counts_what_a_teacher_keeps() -> None:
    def resting(*words: str) -> dict[str, int]:
        recipe = load_recipe("text", [SHOWN, *words, "optimizer.ema=null"])
        return dict(estimate_text(recipe, read_prompts("arithmetic:train")[:8]).resting)

    plain, ema, frozen = (
        resting(objective("doubt: 0")),
        resting(objective("ema: {}")),
        resting(objective("frozen: true")),
    )
    assert plain["averages"] == plain["reference"] == ema["reference"] == frozen["averages"] == 0
    assert ema["averages"] == frozen["reference"] == plain["gradients"] > 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([SHOWN, objective("ema: {}, frozen: true")], "ema averages the teacher's weights, and objective.frozen keeps"),
        (
            ["model.teachers=[{path: arithmetic}]", objective("frozen: true")],
            "objective.frozen says which weights of the policy teach, and model.teachers names other models",
        ),
        (
            ["extensions=[{name: teacher, template: '{answer} {prompt}', without: 'x'}]", "objective=distilled"],
            "without shortens solutions, and template has no {solution}; leave without out",
        ),
        (
            ["extensions=[{name: teacher, template: '{solution} {prompt}', without: '('}]", "objective=distilled"],
            "which is no regular expression",
        ),
        (
            [
                "model.teachers=[{path: arithmetic}]", "rollout={form: {name: given, columns: [answer]}, group: 1}",
                objective("bound: 2"),
            ],
            "gives completions that the policy did not draw; leave bound out",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_recipe("text", lines)


@pytest.mark.parametrize(
    ("more", "told"),
    [("top: 5", True), ("frozen: true", False), ("ema: {}", False), ("both: true", False)],
)
def test_a_teacher_that_moves_with_the_policy_is_noted(more: str, told: bool) -> None:
    recipe = load_recipe("text", [SHOWN, f"objective={{name: distilled, others: none, {more}}}"])
    notes = [note for note in check(recipe).texts("note") if "teaches itself with its present weights" in note]
    assert len(notes) == told


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "1+1=", "other": 2}', "line 2 has nothing in 'answer', so the teacher knows no more"),
        ('{"prompt": "1+1=", "answer": null}', "line 2 has nothing in 'answer', so the teacher knows no more"),
        ('{"prompt": "1+1=", "answer": ["2"]}', "line 2 is ['2']; write the text that the teacher reads"),
    ],
)
def test_what_a_teacher_cannot_read_is_told_before_the_run(row: str, message: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "1+2=", "answer": 3}}\n{row}\n')
    words = [SHOWN, objective("frozen: true"), f"data={{train: {prompts}, heldout: null}}", "rollout.prompts=2"]
    (fault,) = check(load_recipe("text", words)).texts("fault")
    assert message in fault


def test_a_missing_column_is_told_before_the_run(small_text: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1 has no column 'anwser'; add the column, or name another"):
        trainer_of(small_text, tmp_path / "run", SHOWN.replace("answer", "anwser"), objective("frozen: true"))
