"""An expert's completions where the policy fails: when they are asked for, and what the loss makes of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.training.checking import check
from flowgrpo.training.text.forms import FORMS
from flowgrpo.training.text.forms.expert import expert
from tests.training.forms.test_writing import writer_of
from tests.training.test_text import gradient, task_of
from tests.training.text_runs import trainer_of

GUIDED = ["rollout.form={name: expert, success: -0.45, below: 0.5}", "objective={name: guided, weight: 0.5}"]


def test_the_expert_is_asked_where_too_few_succeed(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run")
    own = writer.write(writer.starts())
    scores = writer.score(own).tolist()
    assert scores.count(max(scores)) == 1  # the best completion is the only success of its group
    for below, asked in ((0.25, 2), (0.26, 3), (0.0, 0)):
        found = expert(writer, success=max(scores), below=below)
        assert [one.ids for one in found[:12]] == [one.ids for one in own]
        assert all(one.counts for one in found[:12])
        added = found[12:]
        assert len(added) == asked
        for one in added:
            assert not one.counts
            assert one.context == writer.context(one.prompt)
            assert one.ids == [*writer.ids(writer.rows[one.prompt].columns["answer"]), writer.policy.language.ends[0]]
            assert all(one.own)
            assert one.ended
    best = own[scores.index(max(scores))].prompt
    assert best not in [one.prompt for one in expert(writer, success=max(scores), below=0.25)[12:]]


def test_the_loss_adds_the_likelihood_of_the_expert(small_text: list[str], tmp_path: Path) -> None:
    """Over all tokens of policy and expert together, in batches that hold both."""
    trainer = trainer_of(small_text, tmp_path / "run", *GUIDED, "rollout.tokens=70")
    _, e = trainer.collect(0)
    told = [bool(one.get("expert")) for one in e.origins()]
    assert 0 < sum(told) <= 3
    assert e.outcomes.tolist() == [not one for one in told]
    advantages = torch.linspace(-1, 1, len(told))
    mine = gradient(trainer, e, advantages)
    assert trainer.objective.rows(e, 0, None) == int(e.lengths.sum())
    log_probs, mask = task_of(trainer).policy.log_probs(e, range(len(told)))
    taught = mask & torch.tensor(told)[:, None]
    loss = policy_loss(log_probs, None, advantages, mask & ~taught, denom=float(mask.sum()))[0]
    (loss - 0.5 * log_probs[taught].sum() / mask.sum()).backward()
    for name, parameter in trainer.task.weights.named_parameters().items():
        if parameter.grad is not None:
            assert torch.allclose(mine[name], parameter.grad, atol=1e-6), name


def test_an_iteration_imitates_and_leaves_the_expert_out_of_the_rewards(small_text: list[str], tmp_path: Path) -> None:
    lines = ["rollout.form={name: expert, success: 99, below: 1.0}", "objective=guided"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    plain = trainer_of(small_text, tmp_path / "plain").iterate(0)
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["reward/nines"] == plain["reward/nines"]
    assert record["expert_loss"] > 1
    later = [trainer.iterate(k)["expert_loss"] for k in range(1, 8)]
    assert later[-1] < record["expert_loss"] - 0.5


def test_what_does_not_go_together_is_refused(small_text: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no other objective trains on, and objective is tokens; use objective guided"):
        load_recipe("text", ["rollout.form=expert"])
    with pytest.raises(ValueError, match=r"trains on completions of an expert.*use rollout\.form expert"):
        load_recipe("text", ["objective=guided"])
    writer = writer_of(small_text, tmp_path / "run")
    with pytest.raises(ValueError, match=r"from column 'solution', and .* has none; add it, or name another column"):
        expert(writer, column="solution", success=1e9)
    assert FORMS["expert"] is expert


def test_the_expert_ends_as_the_chat_template_ends_an_answer(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run")
    language = writer.policy.language
    assert language.answer_end == language.tokenizer.eos_token_id
    language.tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    turn = language.tokenizer.convert_tokens_to_ids("<turn>")
    language.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<turn>{% endfor %}"
    language.model.generation_config.eos_token_id = [language.ends[0], turn]
    chats = replace(language, chat=True)
    assert chats.ends[1] == turn
    assert chats.answer_end == turn
    language.model.generation_config.eos_token_id = language.tokenizer.eos_token_id
    assert replace(language, chat=True).answer_end == language.tokenizer.eos_token_id  # the turn ends nothing here


def test_a_column_that_the_prompts_lack_is_named_before_the_run() -> None:
    for form, message in (
        ("{name: hints, column: nope}", "form hints reads column 'nope', and the prompts have the columns answer"),
        (
            "{name: self_hints, ask: '{prompt} {nope}'}",
            "form self_hints: ask asks for {nope}; there are prompt, answer",
        ),
        ("{name: drafts, template: '{prompt}{draft}{nope}'}", "there are prompt, draft, answer"),
    ):
        [fault] = check(load_recipe("text", [f"rollout.form={form}"])).texts("fault")
        assert message in fault
    reflects = "{name: retries, reflect: '{prompt}{completion}{answer}', template: '{prompt}{completion}{reflection}'}"
    assert check(load_recipe("text", [f"rollout.form={reflects}"])).texts("fault") == []
