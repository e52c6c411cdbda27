"""Another language model that teaches: the gradient of the loss by hand, what stays frozen, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.estimate.language import estimate_text
from flowgrpo.parts.traits import rewarded
from flowgrpo.text.model import load_language_model
from flowgrpo.training.checking import check
from flowgrpo.training.text.text_policy import Completions
from flowgrpo.training.trainer import Trainer
from flowgrpo.worlds.arithmetic.problems import build_character_tokenizer, build_model, save_tokenizer
from tests.parts.own_parts import same_when_resumed
from tests.training.test_distilled import same_gradient
from tests.training.test_text import gradient, task_of
from tests.training.text_runs import trainer_of

ALL = "objective={name: distilled, others: none, top: 1000}"


def saved(folder: Path, *, seed: int = 9, more: int = 0, words: tuple[str, ...] = ()) -> Path:
    """A random model of another width, whose table has `more` rows than it has tokens, and further tokens."""
    tokenizer = build_character_tokenizer()
    tokenizer.add_tokens(list(words))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(len(tokenizer) + more, width=16, layers=1, heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return saved(tmp_path / "teacher")


def by_hand(trainer: Trainer, e: Completions, folder: Path, contexts: list[list[int] | None]) -> torch.Tensor:
    """The sum over all tokens of the KL of the policy from the teacher, over all tokens that both models have."""
    student, other = task_of(trainer).policy.language.model, AutoModelForCausalLM.from_pretrained(folder)
    size, total = student.config.vocab_size, torch.zeros(())
    for row, context in enumerate(contexts):
        if context is None:
            continue
        found = []
        for model, before in ((student, e.context(row)), (other, context)):
            whole = torch.tensor([before + e.sampled.ids[row]])
            logits = model(input_ids=whole).logits[0, len(before) - 1 : -1].float()
            found.append(logits.log_softmax(1)[:, :size])
        own, taught = found[0], found[1].detach()
        total = total + (own.exp() * (own - taught)).sum()
    return total


def test_all_completions_are_taught_on_their_own_tokens(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", ALL, f"model.teacher={teacher}")
    _, e = trainer.collect(0)
    tokens = int(e.lengths.sum())
    assert trainer.objective.rows(e, 0, None) == tokens
    mine = gradient(trainer, e, torch.linspace(-1, 1, 12))
    # No reward has a part in it.
    other = gradient(trainer, e, torch.zeros(12))
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    (by_hand(trainer, e, teacher, [e.context(row) for row in range(12)]) / tokens).backward()
    same_gradient(trainer, mine)


def test_a_teacher_reads_the_contexts_of_extension_teacher(small_text, teacher, tmp_path: Path) -> None:
    more = "extensions=[{name: teacher, template: '{solution} {prompt}', success: -0.4, failed: false}]"
    trainer = trainer_of(small_text, tmp_path / "run", ALL, f"model.teacher={teacher}", more)
    _, e = trainer.collect(0)
    contexts = [[5, 6, *e.context(row)] if row in (2, 7) else None for row in range(12)]
    e = replace(e, teachers=contexts)
    mine = gradient(trainer, e, torch.zeros(12))
    (by_hand(trainer, e, teacher, contexts) / e.lengths[[2, 7]].sum()).backward()
    same_gradient(trainer, mine)


def test_rows_of_a_table_that_are_no_tokens_are_never_taught(small_text: list[str], tmp_path: Path) -> None:
    """Tables of one family of models have different numbers of spare rows."""
    wide = saved(tmp_path / "wide", more=40)
    trainer = trainer_of(small_text, tmp_path / "run", ALL, f"model.teacher={wide}")
    record = trainer.iterate(0)
    assert record["distillation"] > 0
    assert record["grad_norm"] > 0


def test_the_student_comes_closer_and_the_teacher_stays(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", ALL, f"model.teacher={teacher}", "run.iterations=12")
    before = {name: value.clone() for name, value in load_language_model(str(teacher)).model.state_dict().items()}
    found = [trainer.iterate(k) for k in range(12)]
    assert found[0]["ratio/first_error"] == 0.0
    assert sum(one["distillation"] for one in found[-3:]) < 0.7 * sum(one["distillation"] for one in found[:3])
    assert not any("ratio/mean" in one for one in found)
    frozen = trainer.objective._teacher.language.model  # type: ignore[attr-defined]
    assert all(torch.equal(value, before[name]) for name, value in frozen.state_dict().items())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@pytest.mark.slow
def test_a_run_with_a_teacher_resumes_to_the_last_bit(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    words = [*small_text, ALL, f"model.teacher={teacher}", "run.iterations=2"]
    same_when_resumed("text", words, tmp_path)


def test_rewards_that_have_no_part_in_the_loss_are_no_symptom(small_text, teacher, tmp_path: Path) -> None:
    recipe = load_recipe("text", [*small_text, ALL, f"model.teacher={teacher}"])
    assert not rewarded(recipe)
    assert rewarded(load_recipe("text", [*small_text, "objective=distilled", f"model.teacher={teacher}"]))
    trainer = trainer_of(small_text, tmp_path / "run", ALL, f"model.teacher={teacher}")
    assert not trainer.symptoms.rewarded
    record = {"reward/nines": 0.0, "advantage/largest": 0.0, "grad_norm": 1.0}
    assert [trainer.symptoms.iteration(record) for _ in range(30)] == [[]] * 30


def test_memory_of_a_teacher_is_estimated(small_text: list[str], teacher: Path) -> None:
    plain, taught = (
        estimate_text(load_recipe("text", [*small_text, *more]), []) for more in ((), (ALL, f"model.teacher={teacher}"))
    )
    model = load_language_model(str(teacher)).model
    held = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
    assert "teacher" not in plain.resting
    assert taught.resting["teacher"] == held


def test_a_teacher_with_other_tokens_is_refused(small_text: list[str], tmp_path: Path) -> None:
    other = saved(tmp_path / "other", words=("seven", "eight"))
    with pytest.raises(
        ValueError, match=r"2 differ, such as 'eight', 'seven'\).*use a teacher with the same tokenizer"
    ):
        trainer_of(small_text, tmp_path / "run", ALL, f"model.teacher={other}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.teacher=arithmetic"], "only objective distilled learns from model.teacher, and objective is tokens"),
        (["objective=distilled"], "add extension teacher, or name another model as model.teacher"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("text", words)
    assert said in str(caught.value)


def test_a_teacher_that_is_not_there_is_told_before_a_model_is_loaded(small_text: list[str], tmp_path: Path) -> None:
    [fault] = check(load_recipe("text", [*small_text, ALL, f"model.teacher={tmp_path}/no"])).texts("fault")
    assert fault.startswith("model.teacher: ")
    assert f"{tmp_path}/no" in fault
