"""Another language model that teaches: the gradient of the loss by hand, what stays frozen, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.estimate.language import estimate_text
from flowgrpo.parts.traits import rewarded
from flowgrpo.text.model import load_language_model
from flowgrpo.training.checking import check
from flowgrpo.training.planning import teachers_line
from flowgrpo.training.text.text_policy import Completions
from flowgrpo.training.trainer import Trainer
from flowgrpo.worlds.arithmetic.problems import build_character_tokenizer, build_model
from tests.parts.own_parts import same_when_resumed
from tests.random_language import save_random
from tests.training.test_distilled import same_gradient
from tests.training.test_text import gradient, task_of
from tests.training.text_runs import trainer_of

Apart = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ALL = "objective={name: distilled, others: none, top: 1000}"


def saved(folder: Path, *, seed: int = 9, more: int = 0, words: tuple[str, ...] = ()) -> Path:
    """A random model of another width, whose table has `more` rows than it has tokens, and further tokens."""
    tokenizer = build_character_tokenizer()
    tokenizer.add_tokens(list(words))
    made = partial(build_model, len(tokenizer) + more, width=16, layers=1, heads=2)
    return save_random(folder, tokenizer, made, seed=seed)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return saved(tmp_path / "teacher")


def reverse(own: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """[T] the KL of the student from the teacher, whose log-probs are [T, V]."""
    return (own.exp() * (own - taught)).sum(1)


def jensen_shannon(own: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """[T] with a share of 0.3 of the teacher in the mixture."""
    mixed = (0.7 * own.exp() + 0.3 * taught.exp()).log()
    return 0.3 * (taught.exp() * (taught - mixed)).sum(1) + 0.7 * (own.exp() * (own - mixed)).sum(1)


def by_hand(
    trainer: Trainer,
    e: Completions,
    folder: Path,
    contexts: list[list[int] | None],
    apart: Apart = reverse,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The sum over all tokens of the divergence from the teacher, over all tokens that both models have."""
    student, other = task_of(trainer).policy.language.model, AutoModelForCausalLM.from_pretrained(folder)
    size, total = student.config.vocab_size, torch.zeros(())
    for row, context in enumerate(contexts):
        if context is None:
            continue
        found = []
        for model, before in ((student, e.context(row)), (other, context)):
            whole = torch.tensor([before + e.sampled.ids[row]])
            logits = model(input_ids=whole).logits[0, len(before) - 1 : -1].float() / temperature
            found.append(logits.log_softmax(1)[:, :size])
        own, taught = found[0], found[1].detach()
        total = total + apart(own, taught).sum()
    return total


def test_all_completions_are_taught_on_their_own_tokens(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", ALL, f"model.teachers=[{{path: {teacher}}}]")
    _, e = trainer.collect(0)
    tokens = int(e.lengths.sum())
    assert trainer.objective.rows(e, 0, None) == tokens
    mine = gradient(trainer, e, torch.linspace(-1, 1, 12))
    # No reward has a part in it.
    other = gradient(trainer, e, torch.zeros(12))
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    (by_hand(trainer, e, teacher, [e.context(row) for row in range(12)]) / tokens).backward()
    same_gradient(trainer, mine)


def test_a_divergence_between_the_two_kl(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    lines = [ALL.replace("}", ", direction: jsd, beta: 0.3}"), f"model.teachers=[{{path: {teacher}}}]"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    _, e = trainer.collect(0)
    mine = gradient(trainer, e, torch.zeros(12))
    contexts = [e.context(row) for row in range(12)]
    (by_hand(trainer, e, teacher, contexts, jensen_shannon) / e.lengths.sum()).backward()
    same_gradient(trainer, mine)


def test_early_tokens_may_count_more(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    """IW-OPD: the weight falls by what the log-probs of the tokens before differ."""
    lines = [ALL.replace("}", ", early: 0.5}"), f"model.teachers=[{{path: {teacher}}}]"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    _, e = trainer.collect(0)
    mine = gradient(trainer, e, torch.zeros(12))
    ids = iter(e.sampled.ids)

    def weighted(own: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        place = torch.tensor(next(ids))[:, None]
        size = (taught - own.detach()).gather(1, place)[:, 0].abs()
        return (1.5 - 0.5 * (size.cumsum(0) - size) / size.sum()) * reverse(own, taught)

    (by_hand(trainer, e, teacher, [e.context(row) for row in range(12)], weighted) / e.lengths.sum()).backward()
    same_gradient(trainer, mine)


@pytest.mark.parametrize("others", ["policy", "none"])
def test_rewards_train_the_taught_completions_too(small_text, teacher, tmp_path: Path, others: str) -> None:
    """KDRL. Where an extension says who is taught, `others` says what becomes of the others."""
    lines = [f"objective={{name: distilled, others: {others}, both: true, weight: 0.4, top: 1000}}"]
    lines += [f"model.teachers=[{{path: {teacher}}}]"]
    lines += ["extensions=[{name: teacher, template: '{solution} {prompt}', success: -0.4, failed: false}]"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    _, e = trainer.collect(0)
    contexts = [[5, *e.context(row)] if row in (2, 7) else None for row in range(12)]
    e = replace(e, teachers=contexts)
    advantages = torch.linspace(-1, 1, 12)
    mine = gradient(trainer, e, advantages)
    log_probs, mask = task_of(trainer).policy.log_probs(e, range(12))
    if others == "none":
        mask = mask & torch.tensor([context is not None for context in contexts])[:, None]
    loss = policy_loss(log_probs, None, advantages, mask, denom=float(mask.sum()))[0]
    (loss + 0.4 * by_hand(trainer, e, teacher, contexts) / mask.sum()).backward()
    same_gradient(trainer, mine)
    record = trainer.iterate(0)
    assert record["distillation"] > 0
    assert "ratio/mean" in record


def given_answers(folder: Path) -> list[str]:
    """Overrides of a run that learns a teacher's predictions on answers of the data."""
    prompts = folder / "answered.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{k}+2=", "solution": "{k + 2}"}}\n' for k in range(4)))
    form = "rollout={prompts: 3, group: 1, tokens: 60, form: {name: given, columns: [solution]}}"
    return [ALL, form, f"data={{train: {prompts}, heldout: null}}", "evaluate.rewards=null"]


def test_answers_of_the_data_are_distilled(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    """GKD with lambda 0: nothing is sampled, and no reward has a part in the loss."""
    lines = [*given_answers(tmp_path), f"model.teachers=[{{path: {teacher}}}]"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    _, e = trainer.collect(0)
    assert not e.drawn
    assert len(e.samples) == 3
    mine = gradient(trainer, e, torch.linspace(-1, 1, 3))
    (by_hand(trainer, e, teacher, [e.context(row) for row in range(3)]) / e.lengths.sum()).backward()
    same_gradient(trainer, mine)
    record = trainer.iterate(0)
    assert record["distillation"] > 0
    assert "sampler_gap" not in record


def test_some_prompts_have_answers_of_the_data_and_others_own_ones(
    small_text: list[str], teacher: Path, tmp_path: Path
) -> None:
    """GKD with a lambda between 0 and 1: who writes is drawn for each prompt and iteration, and all are distilled."""
    lines = [*given_answers(tmp_path), f"model.teachers=[{{path: {teacher}}}]", "rollout.form.own=0.4"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines, "generation.temperature=0.9")
    kinds = []
    for iteration in range(40):
        rows, e = trainer.collect(iteration)
        assert not e.drawn
        assert e.prompt_of_sample == [0, 1, 2]
        own = [told["given_place"] is None for told in e.origins()]
        for row, (mine, prompt) in enumerate(zip(own, rows, strict=True)):
            chances = e.sampled.log_probs[row]
            assert all(one < 0 for one in chances) if mine else set(chances) == {0.0}
            assert mine or e.samples[row] == prompt.columns["solution"]
        kinds.append(own)
    assert 0.25 < sum(map(sum, kinds)) / 120 < 0.55
    assert {(True, False), (False, True)} <= {(one, other) for one, other, _ in kinds}
    e = trainer.collect(next(k for k, own in enumerate(kinds) if any(own) and not all(own)))[1]
    mine = gradient(trainer, e, torch.linspace(-1, 1, 3))
    whole = by_hand(trainer, e, teacher, [e.context(row) for row in range(3)], temperature=0.9)
    (whole / e.lengths.sum()).backward()
    same_gradient(trainer, mine)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["objective={name: answers, loss: likelihood}", "model.teachers=[]"],
            "objective answers compares the completions",
        ),
        (["rewards=[{name: given}]"], "reward given ranks the completions of the data; use another reward"),
        (
            ["rollout.form.own=0", "generation.temperature=0.9"],
            "so nothing is sampled, and generation.temperature is 0.9",
        ),
    ],
)
def test_own_answers_beside_given_ones_need_a_teacher(
    small_text: list[str], teacher: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    lines = [*given_answers(tmp_path), f"model.teachers=[{{path: {teacher}}}]", "rollout.form.own=0.4"]
    with pytest.raises(RecipeError, match=message):
        load_recipe("text", [*small_text, *lines, "advantage={baseline: none, scale: none}", *more])


def test_rewards_of_given_answers_are_refused(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    lines = [
        *given_answers(tmp_path),
        f"model.teachers=[{{path: {teacher}}}]",
        "advantage={baseline: none, scale: none}",
    ]
    with pytest.raises(RecipeError, match="without `both` and without extension teacher"):
        load_recipe("text", [*small_text, *lines, "objective.both=true"])
    load_recipe("text", [*small_text, *lines])


def test_a_prompt_may_have_one_completion(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    """Nothing is compared, unless rewards have a part in the loss."""
    lines = ["rollout.group=1", f"model.teachers=[{{path: {teacher}}}]"]
    trainer = trainer_of(small_text, tmp_path / "run", ALL, *lines)
    assert trainer.iterate(0)["distillation"] > 0
    with pytest.raises(RecipeError, match="a group of one has no baseline"):
        load_recipe("text", [*small_text, *lines, "objective={name: distilled, both: true}"])


@pytest.fixture
def two(small_text: list[str], teacher: Path, tmp_path: Path) -> tuple[list[str], dict[str, Path]]:
    """Overrides of a run with two teachers, and their folders by the name that a prompt says."""
    folders = {"sums": teacher, "others": saved(tmp_path / "second", seed=11)}
    prompts = tmp_path / "taught.jsonl"
    names = ("sums", "others", "sums", "others", "sums")
    prompts.write_text("".join(f'{{"prompt": "{k}+2=", "teacher": "{name}"}}\n' for k, name in enumerate(names)))
    listed = ", ".join(f"{{name: {name}, path: {folder}}}" for name, folder in folders.items())
    return [*small_text, ALL, f"model.teachers=[{listed}]", f"data={{train: {prompts}, heldout: null}}"], folders


def test_each_prompt_has_its_own_teacher(two: tuple[list[str], dict[str, Path]], tmp_path: Path) -> None:
    words, folders = two
    # All twelve completions are one batch, which both teachers read.
    trainer = trainer_of(words, tmp_path / "run", "rollout.tokens=1000")
    _, e = trainer.collect(0)
    assert set(e.taught_by) == {"sums", "others"}
    mine = gradient(trainer, e, torch.zeros(12))
    total = torch.zeros(())
    for name, folder in folders.items():
        own = [e.context(k) if e.taught_by[p] == name else None for k, p in enumerate(e.prompt_of_sample)]
        total = total + by_hand(trainer, e, folder, own)
    (total / e.lengths.sum()).backward()
    same_gradient(trainer, mine)


def test_one_answer_of_two_prompts_has_two_teachers(two: tuple[list[str], dict[str, Path]], tmp_path: Path) -> None:
    """The words of both prompts are the same, and a model would score the answer once."""
    words, folders = two
    prompts = tmp_path / "same.jsonl"
    prompts.write_text("".join(f'{{"prompt": "3+2=", "solution": "5", "teacher": "{name}"}}\n' for name in folders))
    form = "rollout={prompts: 2, group: 1, tokens: 60, form: {name: given, columns: [solution]}}"
    lines = [form, f"data={{train: {prompts}, heldout: null}}", "evaluate.rewards=null"]
    # With fewer tokens than there are, the tokens of the two teachers differ.
    trainer = trainer_of([*words, *lines], tmp_path / "run", "objective.top=3")
    _, e = trainer.collect(0)
    assert sorted(e.taught_by) == ["others", "sums"]
    together = gradient(trainer, e, torch.zeros(2))
    for rows in ([0], [1]):
        trainer.objective.backward(e, rows, torch.zeros(2), None, e.lengths.sum().float())
    for name, one in trainer.task.weights.named_parameters().items():
        if one.grad is not None:
            torch.testing.assert_close(together[name], one.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_a_run_with_two_teachers_resumes_to_the_last_bit(
    two: tuple[list[str], dict[str, Path]], tmp_path: Path
) -> None:
    words, _ = two
    same_when_resumed("text", [*words, "optimizer.updates=2", "run.iterations=3"], tmp_path)


def test_one_model_with_two_names_is_held_once(two: tuple[list[str], dict[str, Path]], tmp_path: Path) -> None:
    words, folders = two
    listed = ", ".join(f"{{name: {name}, path: {folders['sums']}}}" for name in folders)
    trainer = trainer_of(words, tmp_path / "run", f"model.teachers=[{listed}]")
    first, second = trainer.objective._teachers.values()  # type: ignore[attr-defined]
    assert first.language.model is second.language.model


@pytest.mark.slow
@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_run_may_teach(small_text: list[str], tmp_path: Path, train: str) -> None:
    words = [*small_text, f"model.train={train}", "run.iterations=1"]
    run = tmp_path / "taught"
    trainer_of(words, run).train()
    lines = [*small_text, ALL, f"model.teachers=[{{path: {run}}}]"]
    faults = check(load_recipe("text", lines)).texts("fault")
    if train == "lora":
        assert faults == [
            f"model.teachers.0.path '{run}' is a run of a LoRA; add the LoRA into its model with `flowgrpo export "
            f"{run} --merge --out FOLDER`, and give FOLDER"
        ]
        return
    assert not faults
    found = load_language_model(f"{run}/model").model.state_dict()
    [own] = trainer_of(lines, tmp_path / "other").objective._teachers.values()  # type: ignore[attr-defined]
    assert all(torch.equal(value, found[name]) for name, value in own.language.model.state_dict().items())


def test_a_prompt_that_names_no_teacher_is_told(two: tuple[list[str], dict[str, Path]], tmp_path: Path) -> None:
    words, _ = two
    prompts = tmp_path / "untaught.jsonl"
    names = ("sums", "sums", "maths")
    prompts.write_text("".join(f'{{"prompt": "{k}+2=", "teacher": "{name}"}}\n' for k, name in enumerate(names)))
    [fault] = check(load_recipe("text", [*words, f"data.train={prompts}"])).texts("fault")
    assert "has teacher 'maths', and model.teachers has several; write one of sums, others there" in fault
    assert f"{prompts}" in fault


def test_prompts_that_name_another_teacher_than_the_only_one_are_told(
    two: tuple[list[str], dict[str, Path]],
) -> None:
    words, folders = two
    alone = f"model.teachers=[{{name: sums, path: {folders['sums']}}}]"
    [fault] = check(load_recipe("text", [*words, alone])).texts("fault")
    assert "line 2 has teacher 'others', and model.teachers has sums alone; leave out the name" in fault
    assert not check(load_recipe("text", [*words, alone.replace("name: sums, ", "")])).texts("fault")


def test_a_lora_is_no_teacher_until_it_is_in_its_model(small_text: list[str], tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    [fault] = check(load_recipe("text", [*small_text, ALL, f"model.teachers=[{{path: {tmp_path}/lora}}]"])).texts(
        "fault"
    )
    assert "is a LoRA; add it into its model, as `flowgrpo export RUN --merge --out FOLDER` does for a run" in fault


def test_a_teacher_reads_the_contexts_of_extension_teacher(small_text, teacher, tmp_path: Path) -> None:
    more = "extensions=[{name: teacher, template: '{solution} {prompt}', success: -0.4, failed: false}]"
    trainer = trainer_of(small_text, tmp_path / "run", ALL, f"model.teachers=[{{path: {teacher}}}]", more)
    _, e = trainer.collect(0)
    contexts = [[5, 6, *e.context(row)] if row in (2, 7) else None for row in range(12)]
    e = replace(e, teachers=contexts)
    mine = gradient(trainer, e, torch.zeros(12))
    (by_hand(trainer, e, teacher, contexts) / e.lengths[[2, 7]].sum()).backward()
    same_gradient(trainer, mine)


def test_rows_of_a_table_that_are_no_tokens_are_never_taught(small_text: list[str], tmp_path: Path) -> None:
    """Tables of one family of models have different numbers of spare rows."""
    wide = saved(tmp_path / "wide", more=40)
    trainer = trainer_of(small_text, tmp_path / "run", ALL, f"model.teachers=[{{path: {wide}}}]")
    record = trainer.iterate(0)
    assert record["distillation"] > 0
    assert record["grad_norm"] > 0


def test_the_student_comes_closer_and_the_teacher_stays(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    trainer = trainer_of(
        small_text, tmp_path / "run", ALL, f"model.teachers=[{{path: {teacher}}}]", "run.iterations=12"
    )
    before = {name: value.clone() for name, value in load_language_model(str(teacher)).model.state_dict().items()}
    found = [trainer.iterate(k) for k in range(12)]
    assert found[0]["ratio/first_error"] == 0.0
    assert sum(one["distillation"] for one in found[-3:]) < 0.7 * sum(one["distillation"] for one in found[:3])
    assert not any("ratio/mean" in one for one in found)
    frozen = trainer.objective._teachers["teacher"].language.model  # type: ignore[attr-defined]
    assert all(torch.equal(value, before[name]) for name, value in frozen.state_dict().items())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@pytest.mark.slow
def test_a_run_with_a_teacher_resumes_to_the_last_bit(small_text: list[str], teacher: Path, tmp_path: Path) -> None:
    words = [*small_text, ALL, f"model.teachers=[{{path: {teacher}}}]", "run.iterations=2"]
    same_when_resumed("text", words, tmp_path)


def test_rewards_that_have_no_part_in_the_loss_are_no_symptom(small_text, teacher, tmp_path: Path) -> None:
    recipe = load_recipe("text", [*small_text, ALL, f"model.teachers=[{{path: {teacher}}}]"])
    assert not rewarded(recipe)
    both = "objective={name: distilled, both: true}"
    assert not rewarded(
        load_recipe("text", [*small_text, "objective=distilled", f"model.teachers=[{{path: {teacher}}}]"])
    )
    assert rewarded(load_recipe("text", [*small_text, both, f"model.teachers=[{{path: {teacher}}}]"]))
    trainer = trainer_of(small_text, tmp_path / "run", ALL, f"model.teachers=[{{path: {teacher}}}]")
    assert not trainer.symptoms.rewarded
    record: dict[str, float | None] = {"reward/nines": 0.0, "advantage/largest": 0.0, "grad_norm": 1.0}
    assert [trainer.symptoms.iteration(record) for _ in range(30)] == [[]] * 30
    # A selection has left all samples out, and no number has overflowed.
    record |= {"loss": None, "grad_norm": 0.0}
    said = [one.text for _ in range(10) for one in trainer.symptoms.iteration(record)]
    assert len(said) == 1
    assert said[0].startswith("no reward tells two samples of a group apart")


def test_memory_of_a_teacher_is_estimated(small_text: list[str], teacher: Path) -> None:
    plain, taught = (
        estimate_text(load_recipe("text", [*small_text, *more]), [])
        for more in ((), (ALL, f"model.teachers=[{{path: {teacher}}}]"))
    )
    model = load_language_model(str(teacher)).model
    held = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
    assert "teachers" not in plain.resting
    assert taught.resting["teachers"] == held


def test_a_teacher_with_other_tokens_is_refused(small_text: list[str], tmp_path: Path) -> None:
    other = saved(tmp_path / "other", words=("seven", "eight"))
    with pytest.raises(
        ValueError, match=r"2 differ, such as 'eight', 'seven'\).*use a teacher with the same tokenizer"
    ):
        trainer_of(small_text, tmp_path / "run", ALL, f"model.teachers=[{{path: {other}}}]")


def test_a_teacher_whose_table_lacks_tokens_is_refused(small_text: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has embeddings for 41 tokens, and its tokenizer has 43; get the model"):
        trainer_of(
            small_text, tmp_path / "run", ALL, f"model.teachers=[{{path: {saved(tmp_path / 'narrow', more=-2)}}}]"
        )


def test_a_teacher_with_less_room_than_the_model_is_refused_before_the_run(
    small_text: list[str], tmp_path: Path
) -> None:
    """A model with a table of positions fails on a token for which the table has no row."""
    tokenizer = build_character_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=30, n_embd=16, n_layer=1, n_head=2)
    folder = save_random(tmp_path / "short", tokenizer, lambda: GPT2LMHeadModel(config), seed=3)
    lines = [ALL, f"model.teachers=[{{path: {folder}}}]", "generation.max_tokens=6"]
    said = (
        r"has positions for 31 tokens in all, and a prompt of generation.max_prompt_tokens 26 and a completion of "
        r"generation.max_tokens 6 have 32; lower these, or use another teacher"
    )
    with pytest.raises(ValueError, match=said):
        trainer_of(small_text, tmp_path / "run", *lines, "generation.max_prompt_tokens=26")
    trainer = trainer_of(small_text, tmp_path / "fits", *lines, "generation.max_prompt_tokens=25")
    assert trainer.iterate(0)["distillation"] > 0


def test_a_model_with_random_weights_is_no_teacher(small_text: list[str]) -> None:
    """Its folder is the folder of the trained model, which would teach in its place."""
    lines = [*small_text, ALL, "model.teachers=[{path: 'arithmetic:untrained'}]"]
    [fault] = check(load_recipe("text", lines)).texts("fault")
    assert fault == (
        "model.teachers.0.path 'arithmetic:untrained' has random weights, which teach nothing; write arithmetic"
    )


@pytest.mark.parametrize(("both", "said"), [(False, "; rewards are only reported"), (True, "")])
def test_a_run_says_who_teaches_and_what_binds(small_text, teacher, tmp_path: Path, both: bool, said: str) -> None:
    lines = [f"objective={{name: distilled, both: {both}}}", f"model.teachers=[{{path: {teacher}}}]"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    told = list(trainer.task.describe())
    assert f"taught by {teacher}{said}" in told
    # Without rewards in the loss there is no ratio, and nothing clips it.
    assert any("clip" in line for line in told) is both


def test_a_plan_counts_what_teachers_read(two: tuple[list[str], dict[str, Path]]) -> None:
    words, folders = two
    recipe = load_recipe("text", [*words, "optimizer.epochs=2"])
    paths = ", ".join(map(str, folders.values()))
    assert teachers_line(recipe) == f"a teacher reads each of them 2 time(s), without gradients: {paths}"
    assert teachers_line(load_recipe("text", [])) is None


def test_entropies_of_a_teacher_are_made_where_they_count(small_text, teacher, tmp_path: Path) -> None:
    for doubt, made in ((0.0, False), (0.5, True)):
        lines = [ALL, f"objective.doubt={doubt}", f"model.teachers=[{{path: {teacher}}}]"]
        trainer = trainer_of(small_text, tmp_path / f"run-{made}", *lines)
        _, e = trainer.collect(0)
        target = trainer.objective._predicted(e, [0, 1])  # type: ignore[attr-defined]
        assert (target.entropy is not None) is made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["model.teachers=[{path: arithmetic}]", ALL, "penalties=[{name: kl, weight: 0.1}]"],
            "penalties are added to the loss of the tokens that rewards train, and with text objective distilled "
            "rewards train none here; leave penalties out, or write objective.both: true",
        ),
        (
            ["model.teachers=[{path: arithmetic}]", "objective={name: distilled, surrogate: {name: clip, low: 0.1}}"],
            "rewards train no completion here without `both`, so it has no effect; leave it out",
        ),
        (
            [
                "extensions=[{name: teacher, template: '{solution} {prompt}'}]",
                ALL,
                "penalties=[{name: kl, weight: 1.0}]",
            ],
            "rewards train none here",
        ),
        (
            ["model.teachers=[{path: arithmetic}]", ALL, "rollout.group=1", "select=[varied]"],
            "select varied leaves out groups of equal rewards, and rollout.group is 1, so it leaves out every sample",
        ),
        (
            ["model.teachers=[{path: arithmetic}]"],
            "only objective distilled learns from model.teachers, and objective is tokens",
        ),
        (["objective=distilled"], "add extension teacher, or name another model in model.teachers"),
        (
            ["objective={name: distilled, beta: 0.3}", "model.teachers=[{path: arithmetic}]"],
            "mixes the two distributions with `beta`, and objective.direction is reverse; use objective.direction jsd",
        ),
        (
            [ALL, "model.teachers=[{path: arithmetic}, {name: sums, path: arithmetic}]"],
            "2 teachers, and number 0 has no name",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("text", words)
    assert said in str(caught.value)


def test_groups_of_equal_rewards_may_be_left_out_of_trees_with_one_root() -> None:
    assert load_recipe("tempflow_grpo", ["rollout.group=1", "select=[varied]"]).rollout.group == 1
    with pytest.raises(RecipeError, match="it leaves out every sample"):
        load_recipe("diffusion_opd", ["rollout.group=1", "select=[varied]"])


def test_a_teacher_that_is_not_there_is_told_before_a_model_is_loaded(small_text: list[str], tmp_path: Path) -> None:
    lines = [*small_text, ALL, f"model.teachers=[{{path: {tmp_path}/no}}]"]
    # A model of the hub is not looked at before the run, and its teachers are.
    for more in ((), ("model.path=owner/name",)):
        [fault] = check(load_recipe("text", [*lines, *more])).texts("fault")
        assert fault.startswith("model.teachers.0.path ")
        assert f"{tmp_path}/no" in fault
