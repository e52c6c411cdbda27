"""Answers and signals of rewards from a recipe's lines: SEED-GRPO, ASPO and MMR1, for images and text."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import AnyRecipe
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.credit.from_scores import Credit
from flowgrpo.training.credit.pooling import Batch, Pooled, pooled
from flowgrpo.training.data import PromptRow
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.extensions import Curriculum, Shaping, Uncertainty
from flowgrpo.training.extensions.extension import Comparison, Extension, Extensions, Rewards
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.reported import as_reported
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer
from tests.training.test_processes import Threads
from tests.training.test_text import made_up
from tests.training.test_text_processes import lines_of
from tests.training.test_text_replay import completions

NAN = math.nan
ROWS = [PromptRow(0, "one"), PromptRow(1, "two")]
REWARD = """
from flowgrpo.rewards import Scores

def level(images, **columns):
    means = images.mean(dim=(1, 2, 3)).tolist()
    return Scores(means, {"red": images[:, 0].mean(dim=(1, 2))}, answers=[str(int(1e6 * mean) % 3) for mean in means])

def length(completions, **columns):
    return Scores([len(text) / 10 for text in completions], {"nines": [text.count("9") for text in completions]},
                  answers=[text[:1] or None for text in completions])
"""


def batch(values: list[float], answers: list[str | None] | None = None, **subs: list[float]) -> RewardBatch:
    read = {} if answers is None else {"r": answers}
    return RewardBatch(torch.tensor(values)[:, None], ("r",), torch.ones(1), {"r": subs}, {}, {}, answers=read)


REWARDS = Rewards(load_recipe("text", ["rewards=[{name: answer, label: r}]"]).rewards, ["r"])


def uncertainty(**settings: Any) -> Uncertainty:
    return Uncertainty(reward="r", rewards=REWARDS, **settings)


def shaping(**settings: Any) -> Shaping:
    return Shaping(reward="r", rewards=REWARDS, **settings)


def shared(scores: RewardBatch, *extensions: Extension) -> tuple[Batch, Pooled]:
    """A batch of two prompts as extensions leave it, and all samples."""
    given = Batch([0, 1], ROWS, completions("a", "b", "c", "d"), scores)
    found = Extensions({str(k): one for k, one in enumerate(extensions)}).samples_scored(given)
    return found, pooled(Processes(), [0, 1], ROWS, found.experience, scores, None, found.columns)


# -- SEED-GRPO ---------------------------------------------------------------------------------------------------------


def one_group(answers: list[str | None], outcomes: list[bool] | None = None) -> Pooled:
    _, found = shared(batch([0.0] * 4, answers), uncertainty())
    kept = found.outcomes if outcomes is None else torch.tensor(outcomes)
    return replace(found, groups=torch.zeros(4, dtype=torch.long), outcomes=kept)


def test_advantages_shrink_where_answers_disagree() -> None:
    """Halves and quarters of four have ln 2, 3/2 ln 2 and 2 ln 2 of at most 2 ln 2 nats."""
    plain, soft = uncertainty(alpha=1.0), uncertainty(form="exponential", alpha=2.0)
    for answers, x in ((["7"] * 4, 0.0), (["7", "8"] * 2, 0.5), (["7", "7", "8", "9"], 0.75), (list("abcd"), 1.0)):
        assert plain.certainty(one_group(answers)).tolist() == pytest.approx([1 - x] * 4, abs=1e-6)
        assert uncertainty().certainty(one_group(answers)).tolist() == pytest.approx([1 - x / 2] * 4, abs=1e-6)
        assert soft.certainty(one_group(answers)).tolist() == pytest.approx([math.exp(-2 * x)] * 4, abs=1e-6)


def test_what_was_not_read_and_what_is_no_result_have_no_say() -> None:
    plain = uncertainty(alpha=1.0)
    assert plain.certainty(one_group(["7", "7", None, None])).tolist() == [1.0] * 4
    assert plain.certainty(one_group(["7", "8", None, None])).tolist() == pytest.approx([0.0] * 4, abs=1e-6)
    assert plain.certainty(one_group([None] * 4)).tolist() == [1.0] * 4
    assert plain.certainty(one_group(["7", "7", "7", "8"], [True, True, True, False])).tolist() == [1.0] * 4


def test_groups_are_held_back_each_by_its_own_answers() -> None:
    plain = uncertainty(alpha=1.0)
    mine, found = shared(batch([0.0] * 4, ["7", "8", "7", "7"]), plain)
    assert plain.certainty(found).tolist() == pytest.approx([0, 0, 1, 1], abs=1e-6)
    held = plain.advantages_made(torch.arange(4.0), found, mine)
    assert held.tolist() == pytest.approx([0, 0, 2, 3], abs=1e-6)
    assert plain.record() == {"certainty": 0.5}
    # By token.
    tokens = torch.arange(8.0).view(4, 2)
    assert plain.advantages_made(tokens, found, mine).tolist() == [[0, 0], [0, 0], [4, 5], [6, 7]]


def test_a_reward_without_answers_is_named() -> None:
    with pytest.raises(ValueError, match=r"extension uncertainty asks reward r for answers.*\(none of this recipe\)"):
        shared(batch([0.0] * 4), uncertainty())


# -- ASPO --------------------------------------------------------------------------------------------------------------


def shaped(one: Shaping, scores: RewardBatch, advantages: list[float]) -> list[float]:
    _, found = shared(scores, one)
    made = one.samples_compared(torch.tensor(advantages), Comparison(found, scores, lambda values: values))
    return made.tolist()


def test_a_signal_shapes_advantages_within_its_bound() -> None:
    """Signals 0, 3 and 1, 2 lie 3/2 and 1/2 from their means; half of the advantages 2, -1, 1, 0 is the bound."""
    nines, before = batch([0.0] * 4, nines=[0.0, 3.0, 1.0, 2.0]), [2.0, -1.0, 1.0, 0.0]
    assert shaped(shaping(sub_score="nines"), nines, before) == pytest.approx([1.0, -0.5, 0.5, 0.0])
    assert shaped(shaping(sub_score="nines", strength=-0.4), nines, before) == pytest.approx([2.6, -1.5, 1.2, 0.0])
    # The reward itself.
    itself = shaping()
    _, found = shared(batch([0.5, NAN, 0.25, 1.0]), itself)
    assert torch.tensor(found.columns[itself.column]).nan_to_num(9.0).tolist() == [0.5, 9.0, 0.25, 1.0]
    with pytest.raises(ValueError, match=r"extension shaping asks reward r for the sub-score 'tens'.*it gives nines"):
        shared(batch([0.0] * 4, nines=[0.0] * 4), shaping(sub_score="tens"))


# -- MMR1 --------------------------------------------------------------------------------------------------------------


def test_the_curriculum_adds_the_diversity_of_answers() -> None:
    """Prompt 5 has rewards 1 and 0 with one answer, prompt 6 equal rewards and three answers of three."""
    recipe = load_recipe(
        "text",
        ["rewards=[{name: answer}]", "extensions=[{name: curriculum, diversity: {reward: answer, weight: 0.2}}]"],
    )
    one = Extensions.of(recipe, ["answer"], ["answer"]).each["curriculum"]
    assert isinstance(one, Curriculum)
    scores = replace(batch([1, 0, 0, 0, 0]), names=("answer",))
    ids, all_count = [5, 5, 6, 6, 6], torch.ones(5, dtype=torch.bool)
    answers = {"curriculum/answers": ["7", "7", "1", "2", "3"]}
    one.update_done(
        Pooled(scores, ids, torch.tensor(ids), all_count, None, None, None, list(range(5)), answers), {}
    )  # fmt: skip
    assert one.curriculum.score(5) == pytest.approx(0.25)
    assert one.curriculum.score(6) == pytest.approx(0.2)
    assert one.record() == {"diversity": 0.5}


# -- runs --------------------------------------------------------------------------------------------------------------


def test_what_is_shared_is_pooled_in_the_order_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str | None] = ["a", "b", None, "d", "e", "f"]

    def work(mine: Processes) -> Pooled:
        places = mine.share(3)
        own = [2 * place + k for place in places for k in range(2)]
        e = made_up([1] * len(own), [True] * len(own), [p for p in range(len(places)) for _ in range(2)])
        rows = [PromptRow(place, "p") for place in places]
        columns = {"read": [answers[k] for k in own], "sizes": [float(k) for k in own]}
        return pooled(mine, places, rows, e, batch([0.0] * len(own)), None, columns)

    for count in (1, 2):
        for found in Threads(count, monkeypatch).run(work):
            assert found.columns == {"read": answers, "sizes": [0, 1, 2, 3, 4, 5]}


def lines(base: str, folder: Path) -> list[str]:
    """All three methods by one reward; a second one is what is learned."""
    reward = folder / "read.py"
    reward.write_text(REWARD)
    name, sub, learned = {
        "mixgrpo_flash_guard": ("level", "red", "{name: jpeg_compressibility}"),
        "text": ("length", "nines", "{name: digit_share}"),
    }[base]  # fmt: skip
    return [
        f"rewards=[{learned}, {{name: '{reward}:{name}', weight: 0, label: read}}]",
        "extensions=[{name: curriculum, diversity: {reward: read}}, {name: uncertainty, reward: read, alpha: 0.9}, "
        f"{{name: shaping, reward: read, sub_score: {sub}, strength: 2.0, bound: 0.3}}]", "data.heldout=null",
    ]  # fmt: skip


@pytest.fixture
def of(request: pytest.FixtureRequest, tmp_path: Path) -> AnyRecipe:
    """A small run with all three methods, of images or text."""
    base = request.param
    small = request.getfixturevalue({"mixgrpo_flash_guard": "small", "text": "small_text"}[base])
    return load_recipe(base, [*small, *lines(base, tmp_path)])


def trainer(recipe: AnyRecipe, folder: Path) -> Trainer:
    return Session(recipe, RunFolder.create(folder, "")).trainer(Silent())


@pytest.mark.slow
@pytest.mark.parametrize("of", ["mixgrpo_flash_guard", "text"], indirect=True)
def test_advantages_of_a_run_are_shaped_and_held_back(of: AnyRecipe, tmp_path: Path) -> None:
    found = trainer(of, tmp_path / "run")
    rows, e = found.collect(0)
    scores = found.score(found.rewards, rows, e)
    assert set(scores.answers) == {"read"}
    assert len(set(scores.answers["read"])) > 1
    everything = dict(found.extensions.each)
    found.credit = Credit(of.model_copy(update={"clamp": None}))
    found.extensions.each = {"curriculum": everything["curriculum"]}
    before = found.advantages(scores, e, rows)
    found.extensions.each = {"uncertainty": everything["uncertainty"]}
    held = found.advantages(scores, e, rows)
    found.extensions.each = everything
    both = found.advantages(scores, e, rows)
    assert bool((before != 0).any())
    share = (held / before)[before != 0]
    assert bool((share < 1).any())
    assert bool((share >= 0.1 - 1e-6).all())
    assert len(share.unique()) <= 2 * of.rollout.prompts  # a factor for each prompt, to rounding
    assert not torch.equal(both, held)
    ratio = (both / held)[held.abs() > 1e-6]
    assert bool(((ratio > 0.69) & (ratio < 1.31)).all())


@pytest.mark.slow
@pytest.mark.parametrize("of", ["mixgrpo_flash_guard", "text"], indirect=True)
def test_a_run_that_reads_resumes_to_the_last_bit(of: AnyRecipe, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    trainer(of, whole).train()
    first = trainer(of, cut)
    for iteration in range(2):
        first.run.log(first.iterate(iteration))
        first.next_iteration = iteration + 1
    first.keeper.write(first.next_iteration)
    again = Session(of, RunFolder.open(cut)).trainer(Silent())
    again.resume()
    assert again.next_iteration == 2
    again.train()
    records = [
        [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines_of(folder / "metrics.jsonl")]
        for folder in (whole, cut)
    ]
    assert records[0] == records[1]
    assert all(0 < line["certainty"] < 1 and 0 < line["diversity"] <= 1 for line in records[0])
    ours, theirs = (load_file(next((folder / "lora").glob("*.safetensors"))) for folder in (whole, cut))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_groups_of_several_rounds_are_read_whole(small_text: list[str], tmp_path: Path) -> None:
    more = ["rollout.budget={choice: variance, rounds: 2}", "credit=leaf"]
    found = trainer(load_recipe("text", [*small_text, *lines("text", tmp_path), *more]), tmp_path / "run")
    record = found.iterate(0)
    assert record["rounds"] == 2
    assert 0 < record["certainty"] < 1
    assert record["ratio/first_error"] == 0


@pytest.mark.parametrize("base", ["mixgrpo_flash_guard", "text"])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["extensions=[{name: uncertainty, reward: tag}]"], "extension uncertainty asks reward 'tag'; the rewards are"),
        (
            ["extensions=[{name: uncertainty, reward: r, alpha: 1.5}]"],
            "alpha is 1.5 with form linear, which would flip signs",
        ),
        (["extensions=[{name: shaping, reward: tag}]"], "extension shaping asks reward 'tag'; the rewards are"),
        (["extensions=[{name: shaping, reward: r, bound: 1.0}]"], "less than 1"),
        (
            ["extensions=[{name: shaping, reward: r}]", "credit=anchor"],
            "changes the advantages of samples, not of steps",
        ),
        (["extensions=[{name: curriculum, diversity: {reward: tag}}]"], r"curriculum \(diversity\) asks reward 'tag'"),
        (["extensions=[curriculum, curriculum]"], "extensions has curriculum 2 times; write it once"),
    ],
)
def test_what_cannot_be_read_is_refused(base: str, more: list[str], message: str) -> None:
    name = "gold" if base == "mixgrpo_flash_guard" else "answer"
    two = f"rewards=[{{name: {name}, label: r}}, {{name: {name}, label: s}}]"
    with pytest.raises(ValueError, match=message):
        load_recipe(base, [two, *more])


def test_a_reward_is_meant_by_its_label_its_name_or_the_name_in_its_file(tmp_path: Path) -> None:
    reward = tmp_path / "read.py"
    reward.write_text(REWARD)
    name = f"{reward}:length"
    for asked in (name, "length"):
        recipe = load_recipe(
            "text",
            [
                f"rewards=[{{name: answer, gate: {{reward: '{asked}'}}}}, {{name: '{name}', weight: 0}}]",
                f"advantage={{name: stratified, stratum: {{reward: '{asked}'}}}}",
                f"extensions=[{{name: uncertainty, reward: '{asked}'}}, "
                f"{{name: curriculum, diversity: {{reward: '{asked}'}}}}]",
            ],
        )
        found = as_reported(recipe, ["answer", "length"])
        each = Extensions.of(recipe, ["answer", "length"], ["answer", "length"]).each
        assert [each[name].reward for name in ("uncertainty", "curriculum")] == ["length"] * 2  # type: ignore[attr-defined]
        sections = [found.rewards[0].gate, found.advantage["stratum"]]
        assert [section.reward for section in sections if section is not None] == ["length"] * 2
        assert found.rewards[1].gate is None
    with pytest.raises(ValueError, match="the gate of reward answer asks for 'answer'; the other rewards are"):
        load_recipe("text", ["rewards=[{name: answer, gate: {reward: answer}}]"])
    twice = f"rewards=[{{name: '{name}'}}, {{name: '{tmp_path}/other.py:length'}}]"
    with pytest.raises(ValueError, match="asks reward 'length'"):
        load_recipe("text", [twice, "extensions=[{name: uncertainty, reward: length}]"])
