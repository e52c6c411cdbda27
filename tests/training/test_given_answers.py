"""Training on given completions: they are scored and trained as the policy's own, and nothing is sampled."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.answer_losses import kto
from flowgrpo.training.checking import check
from flowgrpo.training.data import PromptRow, read_prompts
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.prompts.prompt_rows import row_of
from flowgrpo.training.recipe_launches import check_ranks
from flowgrpo.training.session import Session
from flowgrpo.training.text.forms.from_data import answer_of
from flowgrpo.training.text.whole_answers import WholeAnswers, answer_loss
from flowgrpo.training.trainer import Trainer


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Three pairs of answers, one in the form of conversations."""
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "11", "better": 3, "worse": 1},
        {"prompt": "2+2=", "chosen": "4", "rejected": "", "better": 2, "worse": 1},
        {
            "prompt": "3+3=",
            "chosen": [{"role": "user", "content": "3+3="}, {"role": "assistant", "content": "6"}],
            "rejected": [{"role": "assistant", "content": "33"}],
            "better": 2,
            "worse": 2,
        },
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(model: Path, file: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", f"data.train={file}", "data.heldout=null", "rollout.prompts=3",
        "run={iterations: 3, checkpoint_every: 1, sample_every: 1, keep: 3}",
        "optimizer={learning_rate: 0.01, warmup: 0, ema: null}", *more,
    ]  # fmt: skip


def trainer_of(folder: Path, overrides: list[str]) -> Trainer:
    return Session(load_recipe("text_dpo", overrides), RunFolder.create(folder, "")).trainer(Silent())


@pytest.mark.slow
def test_given_answers_are_trained_without_sampling(random_language_folder: Path, pairs: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", words(random_language_folder, pairs))

    def nothing(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a completion was sampled")

    trainer.task.policy.sampler = nothing
    first, second = trainer.iterate(0), trainer.iterate(1)
    assert first["preferred"] == 0.5
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["ratio/first_error"] == 0.0
    assert "sampler_gap" not in first
    assert first["reward/given"] == 0.5
    assert second["preferred"] == 1.0
    assert second["loss"] < first["loss"]
    lines = [json.loads(line) for line in (tmp_path / "run/samples/index.jsonl").read_text().splitlines()]
    shown = {(line["prompt"], line["rewards"]["given"]): line["completion"] for line in lines}
    assert shown == {
        ("1+1=", 1.0): "2", ("1+1=", 0.0): "11", ("2+2=", 1.0): "4", ("2+2=", 0.0): "", ("3+3=", 1.0): "6",
        ("3+3=", 0.0): "33",
    }  # fmt: skip


@pytest.mark.slow
def test_the_entropy_is_that_of_the_given_tokens(random_language_folder: Path, pairs: Path, tmp_path: Path) -> None:
    """The loss `likelihood` is the mean of -log p over the tokens of each answer, here computed answer by answer."""
    more = ["objective.loss=likelihood", "objective.drop_truncated=false"]
    trainer = trainer_of(tmp_path / "run", words(random_language_folder, pairs, *more))
    rows, experience = trainer.collect(0)
    policy = trainer.task.policy
    each = []
    for row in range(len(experience.samples)):
        values, mask = policy.log_probs(experience, [row])
        each.append(float(-values[mask].detach().sum() / mask.sum()))
    record = trainer.iterate(0)
    assert record["loss"] == pytest.approx(sum(each) / len(each), rel=1e-5)
    assert [len(ids) for ids in experience.sampled.ids] == [len(text) + 1 for text in experience.samples]
    assert trainer.iterate(1)["loss"] < record["loss"]
    assert len(rows) == 3


@pytest.mark.slow
def test_scores_of_the_data_rank_answers_and_a_tie_teaches_nothing(
    random_language_folder: Path, pairs: Path, tmp_path: Path
) -> None:
    reward = "rewards=[{name: given, options: {scores: [better, worse]}}]"
    trainer = trainer_of(tmp_path / "run", words(random_language_folder, pairs, reward))
    rows, experience = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, experience).values[:, 0].tolist()
    assert scores == [value for row in rows for value in (row.columns["better"], row.columns["worse"])]
    assert trainer.iterate(0)["pairs"] == pytest.approx(2 / 3)


@pytest.mark.slow
def test_a_resumed_run_on_given_answers_equals_an_unbroken_one(
    random_language_folder: Path, pairs: Path, command: Any
) -> None:
    more = words(random_language_folder, pairs)
    for name in ("one", "two"):
        assert command("train", "text_dpo", "--out", name, *more)[0] == 0
    for number in (2, 3):
        shutil.rmtree(Path("two/checkpoints") / f"iter-{number:06d}")
    assert command("resume", "two")[0] == 0
    one, two = (Path(name) / "checkpoints/iter-000003/trained.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
def test_long_answers_are_refused_or_left_out(
    random_language_folder: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = words(random_language_folder, pairs, "generation.max_tokens=2")
    with pytest.raises(ValueError, match=r"a completion of prompt 1 has 3 tokens; generation\.max_tokens is 2: raise"):
        trainer_of(tmp_path / "run", short)
    more = ["generation.long_prompts=drop", "rollout.prompts=1"]
    session = Session(load_recipe("text_dpo", [*short, *more]), RunFolder.create(tmp_path / "other", ""))
    assert [row.text for row in session.data.train.rows] == ["2+2="]
    assert any(
        "2 of 3 prompts" in note and "their completions have more than 2 tokens" in note for note in session.notes
    )
    with pytest.raises(ValueError, match="all prompts have completions of more than"):
        trainer_of(tmp_path / "third", [*short, *more, "generation.max_tokens=1"])


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            ["generation.temperature=0.5"],
            r"form given gives .* nothing is sampled, and generation\.temperature is",
        ),
        (["extensions=[variants]"], r"extension variants makes other prompts, .* the data give its samples"),
        (
            ["generation.engine=vllm"],
            r"form given takes completions from the data, so generation\.engine vllm",
        ),
        (
            ["advantage.baseline=none"],
            r"answer loss dpo compares the best and the worst sample .* use advantage",
        ),
        (
            ["rewards=[{name: given, options: {scores: [a]}}]"],
            r"reward given names 1 columns of scores, and chosen, rejected are 2 columns of samples; name one",
        ),
        (["objective=tokens"], r"form given gives completions that the policy did not draw"),
        (["rollout.group=4"], r"rollout\.group is 4, and rollout\.form\.columns names 2: chosen, rejected; write"),
        (["rollout.form.columns=[chosen, chosen]"], r"name one column or more, each once"),
        (["data.templates=['{prompt} ']"], r"form given trains on the completions of the data, and data\.templates"),
    ],
)
def test_what_cannot_go_with_given_answers_is_refused(more: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        load_recipe("text_dpo", more)


@pytest.mark.slow
def test_plan_says_that_nothing_is_sampled(command: Any) -> None:
    status, said, _ = command("plan", "text_dpo")
    assert status == 0
    assert "nothing is sampled: the completions are in the columns chosen, rejected of arithmetic:pairs" in said
    assert "at most 512 tokens scored an iteration, 1 time(s)" in said
    assert "tokens sampled" not in said
    assert "may write more" not in said


def test_faults_of_the_data_are_told_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"

    def faults(row: dict[str, Any], *more: str) -> list[str]:
        file.write_text(json.dumps({"prompt": "1+1="} | row) + "\n")
        recipe = load_recipe("text_dpo", [f"data.train={file}", "rollout.prompts=1", *more])
        return check(recipe).texts("fault")

    assert faults({"chosen": "2", "rejected": "3"}) == []
    (lacking,) = faults({"chosen": "2"})
    assert "form given reads column 'rejected'" in lacking
    assert "name them with rollout.form.columns" in lacking
    (number,) = faults({"chosen": "2", "rejected": 3})
    assert "line 1: `rejected` is 3; write the words of a completion" in number
    other = [{"role": "user", "content": "5+5="}, {"role": "assistant", "content": "10"}]
    (strange,) = faults({"chosen": other, "rejected": "3"})
    assert "`chosen` is a conversation that does not begin with the prompt" in strange
    asked = [{"role": "user", "content": "1+1="}]
    (role,) = faults({"chosen": [*asked, {"role": "user", "content": "77"}], "rejected": "3"})
    assert "`chosen` is a conversation that does not end with a message of the assistant" in role
    echoed = [{"role": "assistant", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (echo,) = faults({"chosen": echoed, "rejected": "3"})
    assert "does not begin with the prompt" in echo
    scores = "rewards=[{name: given, options: {scores: [a, b]}}]"
    (worded,) = faults({"chosen": "2", "rejected": "3", "a": 1, "b": "bad"}, scores)
    assert "line 1: given: column `b` has 'bad'; write a number for each sample, or null" in worded
    (taken,) = faults({"chosen": "2", "rejected": "3", "given_place": 3})
    assert "the prompts have a column 'given_place', which rewards receive anyway; rename it" in taken
    (evaluated,) = faults({"chosen": "2", "rejected": "3"}, "evaluate.rewards=[{name: given}]")
    assert "these samples are not given; use sampler.plan given (text: rollout.form given)" in evaluated


def test_a_content_may_be_a_list_of_texts() -> None:
    parts = [{"type": "text", "text": "1+1="}]
    chosen = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "2"}]}]
    row = row_of("here", 0, {"prompt": chosen[:1], "chosen": chosen}, None)
    assert answer_of(row, "chosen") == "2"


@pytest.mark.slow
def test_pairs_that_are_too_long_to_be_scored_together_are_told_before_the_run(
    random_language_folder: Path, pairs: Path, tmp_path: Path
) -> None:
    short = words(random_language_folder, pairs, "rollout.tokens=13")
    with pytest.raises(ValueError, match=r"the 2 completions of prompt 1 are compared, and have 14 tokens .* rollout"):
        trainer_of(tmp_path / "run", short)
    session = Session(
        load_recipe("text_dpo", [*short, "generation.long_prompts=drop", "rollout.prompts=1"]),
        RunFolder.create(tmp_path / "other", ""),
    )
    assert [row.text for row in session.data.train.rows] == ["2+2="]


def test_a_conversation_may_be_repeated_with_or_without_its_system_message() -> None:
    talk = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1="},
    )
    answer = {"role": "assistant", "content": "2"}
    for before in ([*talk], [talk[1]], []):
        row = PromptRow(0, "1+1=", {"chosen": [*before, answer]}, talk)
        assert answer_of(row, "chosen") == "2"
    with pytest.raises(ValueError, match="does not begin with the prompt"):
        answer_of(PromptRow(0, "1+1=", {"chosen": [talk[0], answer]}, talk), "chosen")
    with pytest.raises(ValueError, match="is None; write the words of a completion"):
        answer_of(PromptRow(0, "1+1=", {}), "chosen")


def test_what_an_answer_thinks_is_not_lost_without_a_word() -> None:
    row = PromptRow(0, "1+1=", {"chosen": [{"role": "assistant", "content": "2", "thinking": "one more"}]})
    with pytest.raises(ValueError, match="the role 'assistant' has `thinking`, and only `role` and `content` are read"):
        answer_of(row, "chosen")


def test_a_system_message_of_both_answers_is_kept_without_the_prompt() -> None:
    system = {"role": "system", "content": "Be brief."}
    pair = {"chosen": [system, *CHOSEN], "rejected": [system, *REJECTED]}
    with pytest.raises(ValueError, match="the assistant alone, or leave out `prompt`, and it is read from the two"):
        answer_of(row_of("here", 0, {"prompt": "1+1=", **pair}, None), "chosen")
    row = row_of("here", 0, pair, None)  # what the message says works
    assert row.messages == (system, CHOSEN[0])
    assert [answer_of(row, name) for name in pair] == ["2", "11"]


def test_conversations_that_part_before_their_last_message_are_called_so() -> None:
    later = [{"role": "user", "content": "and 2+2="}, {"role": "assistant", "content": "4"}]
    row = row_of("here", 0, {"chosen": [*CHOSEN, *later], "rejected": [*REJECTED, *later]}, None)
    for name in ("chosen", "rejected"):
        with pytest.raises(
            ValueError, match="here: the conversations of `chosen` and `rejected` differ before their la"
        ):
            answer_of(row, name)


CHOSEN = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
REJECTED = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "11"}]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_preference_data_without_a_prompt_have_it_in_their_conversations(ending: str, tmp_path: Path) -> None:
    file, entry = tmp_path / f"pairs.{ending}", {"chosen": CHOSEN, "rejected": REJECTED}
    if ending == "jsonl":
        file.write_text(json.dumps(entry) + "\n")
    else:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({name: [value] for name, value in entry.items()}), file)
    (row,) = read_prompts(str(file))
    assert (row.text, row.messages) == ("1+1=", (CHOSEN[0],))
    assert dict(row.columns) == entry
    assert [answer_of(row, column) for column in ("chosen", "rejected")] == ["2", "11"]


@pytest.mark.parametrize(
    "entry",
    [
        {"chosen": CHOSEN[1:], "rejected": REJECTED[1:]},
        {"chosen": CHOSEN, "rejected": [{"role": "user", "content": "2+2="}, REJECTED[1]]},
    ],
)
def test_preference_data_that_do_not_begin_alike_need_a_prompt(entry: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(entry) + "\n")
    with pytest.raises(
        ValueError, match="line 1: there is no `prompt`, and `chosen` and `rejected` are no conversation"
    ):
        read_prompts(str(file))


@pytest.mark.slow
def test_answers_without_pairs_are_good_or_bad(random_language_folder: Path, tmp_path: Path) -> None:
    """KTO: the drift is that of each answer behind the next prompt, whatever the batches."""
    file, rows = tmp_path / "labels.jsonl", [("1+1=", "2", True), ("2+2=", "5", False), ("3+3=", "66", False)]
    file.write_text("".join(json.dumps({"prompt": p, "completion": c, "label": good}) + "\n" for p, c, good in rows))
    single = [
        "rollout.form={name: given, columns: [completion]}", "rollout.group=1", "rewards.given.options.scores=[label]",
        "advantage={baseline: none, scale: none}", "objective={name: answers, loss: {name: kto, beta: 2.0}}",
    ]  # fmt: skip
    found = []
    for tokens in (16, 4096):
        more = [*single, f"rollout.tokens={tokens}"]
        trainer = trainer_of(tmp_path / f"run-{tokens}", words(random_language_folder, file, *more))
        first = trainer.iterate(0)
        assert (first["loss"], first["drift"]) == (0.5, 0.0)
        policy, before = trainer.task.policy, {}
        _, moved = trainer.collect(1)
        moved = replace(moved, contexts=[moved.prompts[(row + 1) % 3] for row in range(3)])
        with torch.no_grad():
            now = policy.log_probs(moved, [0, 1, 2])[0].sum(1)
            with policy.reference():
                before = policy.log_probs(moved, [0, 1, 2])[0].sum(1)
        drift = max(float((now - before).mean()), 0.0)
        second = trainer.iterate(1)
        assert second["drift"] == pytest.approx(drift, abs=1e-5)
        assert second["loss"] < 0.5
        found.append((second["loss"], second["drift"], second["grad_norm"]))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize(
    ("recipe", "more", "why"),
    [
        (
            "text_dpo",
            ["rollout.prompts=1"],
            r"asks for drift, .* behind other prompts, and rollout\.prompts is 1; raise",
        ),
        (
            "text_dpo",
            ["rollout.prompts=5", "optimizer.updates=3"],
            r"optimizer\.updates 3 leaves steps with a single one of rollout\.prompts 5; lower",
        ),
        ("vrpo", [], "asks for drift, which is measured for causal models alone; use another loss, such as apo"),
    ],
)
def test_the_drift_needs_other_prompts_and_a_causal_model(recipe: str, more: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        load_recipe(recipe, ["objective.loss=kto", *more])


def test_processes_with_a_prompt_each_measure_no_drift() -> None:
    recipe = load_recipe("text_dpo", ["objective.loss=kto", "rollout.prompts=12", "optimizer.updates=3"])
    check_ranks(recipe, 3)
    with pytest.raises(ValueError, match="an optimizer step has 4 prompts for 4 processes; raise"):
        check_ranks(recipe, 4)
    check_ranks(load_recipe("text_dpo", ["rollout.prompts=12", "optimizer.updates=3"]), 4)


@pytest.mark.parametrize(("compared", "counted"), [(True, [0, 1, 4, 5]), (False, [0, 1, 2, 3, 4, 5])])
def test_answers_that_are_all_at_the_baseline_are_not_bad(compared: bool, counted: list[int]) -> None:
    """A prompt whose answers are all right has advantages of 0 after a baseline, and labels of 0 are bad answers."""
    logp = torch.full((6,), -3.0, requires_grad=True)
    advantages, groups = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.5, 0.5]), torch.tensor([4, 4, 2, 2, 9, 9])
    answers = WholeAnswers(
        logp, logp.detach(), torch.ones(6), torch.ones(6, dtype=torch.bool), advantages, groups,
        lambda: torch.full((6,), -2.0), True, torch.tensor(0.0), compared,
    )  # fmt: skip
    loss, _ = answer_loss(kto, answers)
    (slope,) = torch.autograd.grad(loss, logp)
    assert slope.nonzero().flatten().tolist() == counted


@pytest.mark.slow
def test_the_recipe_learns_from_the_embedded_pairs(tmp_path: Path) -> None:
    """No pair comes twice in 60 iterations, so `preferred` is of pairs that the policy has not seen."""
    trainer = trainer_of(tmp_path / "run", ["data.heldout=null", "run.iterations=60"])
    assert trainer.recipe.rollout.prompts * 60 < len(read_prompts("arithmetic:pairs"))
    records = [trainer.iterate(k) for k in range(60)]
    assert sum(record["preferred"] for record in records[-20:]) / 20 > 0.6
