"""Answers and signals of rewards from a recipe's lines: SEED-GRPO, ASPO and MMR1, for images and text."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import AnyRecipe
from flowgrpo.configs.sections import CurriculumConfig, ShapingConfig, UncertaintyConfig
from flowgrpo.core.replay import VarianceCurriculum
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.bench import Silent
from flowgrpo.training.data import PromptRow
from flowgrpo.training.memory import Memory
from flowgrpo.training.pooled import Pooled, pooled
from flowgrpo.training.processes import Processes
from flowgrpo.training.readings import as_reported, certainty, held_back, readers, shaped
from flowgrpo.training.run_folder import RunFolder
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


def pooled_of(scores: RewardBatch, shaping: ShapingConfig | None = None, key: str | None = None) -> Pooled:
    e = completions("a", "b", "c", "d")
    return pooled(Processes(), [0, 1], ROWS, e, scores, None, shaping, {"r": key} if key else None)


# -- SEED-GRPO ---------------------------------------------------------------------------------------------------------


def one_group(answers: list[str | None], outcomes: list[bool] | None = None) -> Pooled:
    found = pooled_of(batch([0.0] * 4, answers), key="advantage.uncertainty")
    kept = found.outcomes if outcomes is None else torch.tensor(outcomes)
    return replace(found, groups=torch.zeros(4, dtype=torch.long), outcomes=kept)


def test_advantages_shrink_where_answers_disagree() -> None:
    """Halves and quarters of four have ln 2, 3/2 ln 2 and 2 ln 2 of at most 2 ln 2 nats."""
    plain = UncertaintyConfig(reward="r", alpha=1.0)
    for answers, x in ((["7"] * 4, 0.0), (["7", "8"] * 2, 0.5), (["7", "7", "8", "9"], 0.75), (list("abcd"), 1.0)):
        assert certainty(one_group(answers), plain).tolist() == pytest.approx([1 - x] * 4, abs=1e-6)
        half = UncertaintyConfig(reward="r")
        assert certainty(one_group(answers), half).tolist() == pytest.approx([1 - x / 2] * 4, abs=1e-6)
        soft = UncertaintyConfig(reward="r", form="exponential", alpha=2.0)
        assert certainty(one_group(answers), soft).tolist() == pytest.approx([math.exp(-2 * x)] * 4, abs=1e-6)


def test_what_was_not_read_and_what_is_no_result_have_no_say() -> None:
    plain = UncertaintyConfig(reward="r", alpha=1.0)
    assert certainty(one_group(["7", "7", None, None]), plain).tolist() == [1.0] * 4
    assert certainty(one_group(["7", "8", None, None]), plain).tolist() == pytest.approx([0.0] * 4, abs=1e-6)
    assert certainty(one_group([None] * 4), plain).tolist() == [1.0] * 4
    assert certainty(one_group(["7", "7", "7", "8"], [True, True, True, False]), plain).tolist() == [1.0] * 4


def test_groups_are_held_back_each_by_its_own_answers() -> None:
    found = pooled_of(batch([0.0] * 4, ["7", "8", "7", "7"]), key="advantage.uncertainty")
    factors = certainty(found, UncertaintyConfig(reward="r", alpha=1.0))
    assert factors.tolist() == pytest.approx([0, 0, 1, 1], abs=1e-6)
    e, plain = completions("a", "b", "c", "d"), UncertaintyConfig(reward="r", alpha=1.0)
    assert held_back(torch.arange(4.0), found, e, plain).tolist() == pytest.approx([0, 0, 2, 3], abs=1e-6)
    # By token.
    tokens = torch.arange(8.0).view(4, 2)
    assert held_back(tokens, found, e, plain).tolist() == [[0, 0], [0, 0], [4, 5], [6, 7]]
    assert held_back(tokens, found, e, None) is tokens


def test_a_reward_without_answers_is_named() -> None:
    with pytest.raises(ValueError, match=r"advantage.uncertainty asks reward r for answers.*\(none of this recipe\)"):
        pooled_of(batch([0.0] * 4), key="advantage.uncertainty")


# -- ASPO --------------------------------------------------------------------------------------------------------------


def test_a_signal_shapes_advantages_within_its_bound() -> None:
    """Signals 0, 3 and 1, 2 lie 3/2 and 1/2 from their means; half of the advantages 2, -1, 1, 0 is the bound."""
    shaping = ShapingConfig(reward="r", sub_score="nines", strength=1.0)
    found = pooled_of(batch([0.0] * 4, nines=[0.0, 3.0, 1.0, 2.0]), shaping)
    advantages = torch.tensor([2.0, -1.0, 1.0, 0.0])
    assert shaped(advantages, found, shaping).tolist() == pytest.approx([1.0, -0.5, 0.5, 0.0])
    less = ShapingConfig(reward="r", sub_score="nines", strength=-0.4)
    assert shaped(advantages, found, less).tolist() == pytest.approx([2.6, -1.5, 1.2, 0.0])
    assert shaped(advantages, found, None) is advantages
    # The reward itself.
    itself = ShapingConfig(reward="r")
    assert pooled_of(batch([0.5, NAN, 0.25, 1.0]), itself).signal.nan_to_num(9.0).tolist() == [0.5, 9.0, 0.25, 1.0]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"advantage.shaping asks reward r for the sub-score 'tens'.*it gives nines"):
        pooled_of(batch([0.0] * 4, nines=[0.0] * 4), ShapingConfig(reward="r", sub_score="tens"))


# -- MMR1 --------------------------------------------------------------------------------------------------------------


def test_the_curriculum_adds_the_diversity_of_answers() -> None:
    """Prompt 5 has rewards 1 and 0 with one answer, prompt 6 equal rewards and three answers of three."""
    recipe = load_recipe(
        "text", ["rewards=[{name: answer}]", "data.curriculum={diversity: {reward: answer, weight: 0.2}}"]
    )
    memory = Memory(recipe)
    scores = replace(batch([1, 0, 0, 0, 0]), names=("answer",), answers={"answer": ["7", "7", "1", "2", "3"]})
    ids, all_count = [5, 5, 6, 6, 6], torch.ones(5, dtype=torch.bool)
    memory.observe(Pooled(scores, ids, torch.tensor(ids), all_count, None, None, None, list(range(5))))
    assert isinstance(memory.curriculum, VarianceCurriculum)
    assert memory.curriculum.score(5) == pytest.approx(0.25)
    assert memory.curriculum.score(6) == pytest.approx(0.2)
    assert memory.record() == {"diversity": 0.5}
    assert memory.record() == {}
    assert CurriculumConfig().diversity is None


# -- runs --------------------------------------------------------------------------------------------------------------


def test_what_is_read_is_pooled_in_the_order_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str | None] = ["a", "b", None, "d", "e", "f"]

    def work(mine: Processes) -> Pooled:
        places = mine.share(3)
        own = [2 * place + k for place in places for k in range(2)]
        e = made_up([1] * len(own), [True] * len(own), [p for p in range(len(places)) for _ in range(2)])
        scores = batch([0.0] * len(own), [answers[k] for k in own], nines=[float(k) for k in own])
        rows = [PromptRow(place, "p") for place in places]
        shaping = ShapingConfig(reward="r", sub_score="nines")
        return pooled(mine, places, rows, e, scores, None, shaping, {"r": "key"}, [k / 7 for k in own])

    for count in (1, 2):
        for found in Threads(count, monkeypatch).run(work):
            assert found.scores.answers == {"r": answers}
            assert found.signal is not None
            assert found.divergence is not None
            assert found.signal.tolist() == [0, 1, 2, 3, 4, 5]
            assert found.divergence.tolist() == [k / 7 for k in range(6)]


def lines(base: str, folder: Path) -> list[str]:
    """All three methods by one reward; a second one is what is learned."""
    reward = folder / "read.py"
    reward.write_text(REWARD)
    name, sub, learned = {
        "default": ("level", "red", "{name: jpeg_compressibility}"), "text": ("length", "nines", "{name: digit_share}"),
    }[base]  # fmt: skip
    return [
        f"rewards=[{learned}, {{name: '{reward}:{name}', weight: 0, label: read}}]",
        "data.curriculum={diversity: {reward: read}}", "advantage.uncertainty={reward: read, alpha: 0.9}",
        f"advantage.shaping={{reward: read, sub_score: {sub}, strength: 2.0, bound: 0.3}}", "data.heldout=null",
    ]  # fmt: skip


@pytest.fixture
def of(request: pytest.FixtureRequest, tmp_path: Path) -> AnyRecipe:
    """A small run with all three methods, of images or text."""
    base = request.param
    small = request.getfixturevalue({"default": "small", "text": "small_text"}[base])
    return load_recipe(base, [*small, *lines(base, tmp_path)])


def trainer(recipe: AnyRecipe, folder: Path) -> Trainer:
    return Session(recipe, RunFolder.create(folder, "")).trainer(Silent())


@pytest.mark.parametrize("of", ["default", "text"], indirect=True)
def test_advantages_of_a_run_are_shaped_and_held_back(of: AnyRecipe, tmp_path: Path) -> None:
    found = trainer(of, tmp_path / "run")
    rows, e = found.collect(0)
    scores = found.score(found.rewards, rows, e)
    assert set(scores.answers) == {"read"}
    assert len(set(scores.answers["read"])) > 1
    plain = of.advantage.model_copy(update={"uncertainty": None, "shaping": None, "clamp": None})
    found.recipe = of.model_copy(update={"advantage": plain})
    before = found.advantages(scores, e, rows)
    found.recipe = of.model_copy(
        update={"advantage": plain.model_copy(update={"uncertainty": of.advantage.uncertainty})}
    )
    held = found.advantages(scores, e, rows)
    found.recipe = of
    both = found.advantages(scores, e, rows)
    assert bool((before != 0).any())
    share = (held / before)[before != 0]
    assert bool((share < 1).any())
    assert bool((share >= 0.1 - 1e-6).all())
    assert len(share.unique()) <= 2 * of.rollout.prompts  # a factor for each prompt, to rounding
    assert not torch.equal(both, held)
    ratio = (both / held)[held.abs() > 1e-6]
    assert bool(((ratio > 0.69) & (ratio < 1.31)).all())


@pytest.mark.parametrize("of", ["default", "text"], indirect=True)
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
    more = ["rollout.budget={choice: variance, rounds: 2}", "advantage.credit=leaf"]
    found = trainer(load_recipe("text", [*small_text, *lines("text", tmp_path), *more]), tmp_path / "run")
    record = found.iterate(0)
    assert record["rounds"] == 2
    assert 0 < record["certainty"] < 1
    assert record["ratio/first_error"] == 0


@pytest.mark.parametrize("base", ["default", "text"])
def test_which_answers_a_recipe_needs(base: str, tmp_path: Path) -> None:
    assert readers(load_recipe(base, lines(base, tmp_path))) == {"read": "advantage.uncertainty"}
    only = [*lines(base, tmp_path), "advantage.uncertainty=null"]
    assert readers(load_recipe(base, only)) == {"read": "data.curriculum.diversity"}
    assert readers(load_recipe(base)) == {}


@pytest.mark.parametrize("base", ["default", "text"])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["advantage.uncertainty={reward: tag}"], "advantage.uncertainty asks reward 'tag'; the rewards are"),
        (["advantage.uncertainty={reward: r, alpha: 1.5}"], "alpha is 1.5 with form linear, which would turn signs"),
        (["advantage.shaping={reward: tag}"], "advantage.shaping asks reward 'tag'; the rewards are"),
        (["advantage.shaping={reward: r, bound: 1.0}"], "less than 1"),
        (["advantage.shaping={reward: r}", "advantage.credit=anchor"], "bends the advantages of samples, not of steps"),
        (["data.curriculum={diversity: {reward: tag}}"], "data.curriculum.diversity asks reward 'tag'"),
    ],
)
def test_what_cannot_be_read_is_refused(base: str, more: list[str], message: str) -> None:
    name = "gold" if base == "default" else "answer"
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
                f"advantage={{estimator: stratified, stratum: {{reward: '{asked}'}}}}",
                f"advantage.uncertainty={{reward: '{asked}'}}",
                f"data.curriculum={{diversity: {{reward: '{asked}'}}}}",
            ],
        )
        found = as_reported(recipe, ["answer", "length"])
        curriculum = found.data.curriculum
        assert curriculum is not None
        sections = [found.rewards[0].gate, found.advantage.stratum, found.advantage.uncertainty, curriculum.diversity]
        assert [section.reward for section in sections if section is not None] == ["length"] * 4
        assert found.rewards[1].gate is None
    with pytest.raises(ValueError, match="the gate of reward answer asks 'answer'; the other rewards are"):
        load_recipe("text", ["rewards=[{name: answer, gate: {reward: answer}}]"])
    twice = f"rewards=[{{name: '{name}'}}, {{name: '{tmp_path}/other.py:length'}}]"
    with pytest.raises(ValueError, match="asks reward 'length'"):
        load_recipe("text", [twice, "advantage.uncertainty={reward: length}"])
