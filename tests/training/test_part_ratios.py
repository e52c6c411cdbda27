"""Ratios of the parts of completions from a recipe's lines: their loss by hand, SSPO's clip, and whole runs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from flowgrpo.bench.measures import Silent
from flowgrpo.cli.app import app
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.checking import check
from flowgrpo.training.extensions import Replay
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer
from tests.training.test_text import gradient, numbers, task_of
from tests.training.text_runs import trainer_of

CUT = "parts={cut: pattern, pattern: '[0-4]'}"
RATIO = [CUT, "objective.level=part", "objective.reduce=part", "optimizer.epochs=2"]
SSPO = [CUT, "objective={surrogate: {name: sspo, low: 0.1, high: 0.15}, level: part}", "optimizer.epochs=2"]
REWARD = """
from flowgrpo.rewards import Scores

def nines(completions, prompts, parts):
    scores = [[float(part.count("9") - 0.1 * len(part)) for part in own] for own in parts]
    return Scores([sum(own) for own in scores], parts=scores)
"""


@pytest.fixture
def by_part(small_text: list[str], tmp_path: Path) -> list[str]:
    """Overrides as `small_text`, with a reward that scores parts."""
    reward = tmp_path / "by_part.py"
    reward.write_text(REWARD)
    return [*small_text, CUT, f"rewards=[{{name: '{reward}:nines'}}]"]


def parts_of(ids: list[int]) -> list[list[int]]:
    """Tokens of each part of a completion."""
    return [[t for t, part in enumerate(ids) if part == number] for number in range(ids[-1] + 1)]


def moved(trainer: Trainer) -> tuple:
    """A rollout, its advantages and log-probs as sampled, once the weights have moved away from them."""
    rows, e = trainer.collect(0)
    advantages = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)
    policy = task_of(trainer).policy
    with torch.no_grad():
        before = policy.statistics(e, list(range(12)), entropy=True)
    trainer.objective.prepare(e)
    trainer.updater._settle(e, 0, advantages, None)
    rows_of_step = torch.tensor(float(trainer.objective.rows(e, 0, None)))
    for batch in trainer.objective.batches(e, 0, None):
        trainer.objective.backward(e, batch, advantages, None, rows_of_step)
    trainer.updater._step()
    return e, advantages, before


def mine_and(trainer: Trainer, e, advantages: torch.Tensor, terms: torch.Tensor) -> None:
    """The objective's gradient is that of a loss by hand."""
    rows = torch.tensor(float(trainer.objective.rows(e, 0, None)))
    for batch in trainer.objective.batches(e, 0, None):
        trainer.objective.backward(e, batch, advantages, None, rows)
    weights = trainer.task.weights.named_parameters()
    found = {name: parameter.grad.clone() for name, parameter in weights.items() if parameter.grad is not None}
    trainer.optimizer.zero_grad(set_to_none=True)
    terms.backward()
    largest = max(float(g.abs().max()) for g in found.values())
    assert largest > 1e-3
    for name, parameter in weights.items():
        assert torch.allclose(found[name], parameter.grad, atol=2e-5 * largest), name


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def test_the_ratio_of_a_part_is_the_geometric_mean_of_its_tokens(small_text: list[str], tmp_path: Path) -> None:
    """Rank-GRPO's objective: the mean over completions of the mean over their parts, in batches of other widths."""
    trainer = trainer_of(small_text, tmp_path / "run", *RATIO, "rollout.tokens=40", "optimizer.learning_rate=0.05")
    e, advantages, before = moved(trainer)
    assert len({len(part) for ids in e.parts.ids for part in parts_of(ids)}) > 1
    now = task_of(trainer).policy.log_probs(e, list(range(12)))[0]
    rows, cut = [], 0
    for row, ids in enumerate(e.parts.ids):
        terms = []
        for tokens in parts_of(ids):
            ratio = (now[row, tokens] - before.log_probs[row, tokens]).mean().exp()
            terms.append(clipped(ratio, advantages[row], 0.2, 0.28))
            cut += not 0.8 < float(ratio.detach()) < 1.28
        rows.append(torch.stack(terms).mean())
    assert 0 < cut < sum(ids[-1] + 1 for ids in e.parts.ids)
    mine_and(trainer, e, advantages, torch.stack(rows).mean())


def test_an_uncertain_part_has_a_wider_clip(small_text: list[str], tmp_path: Path) -> None:
    """SSPO: bounds times the part's mean entropy before the weights moved, over that of all tokens of the step."""
    trainer = trainer_of(small_text, tmp_path / "run", *SSPO, "rollout.tokens=40", "optimizer.learning_rate=0.001")
    e, advantages, before = moved(trainer)
    now = task_of(trainer).policy.log_probs(e, list(range(12)))[0]
    mean = before.entropy.sum() / before.mask.sum()
    total, sides = torch.zeros(()), set()
    for row, ids in enumerate(e.parts.ids):
        for tokens in parts_of(ids):
            scale = float((before.entropy[row, tokens].mean() / mean).clamp(0.5, 2.0))
            ratio = (now[row, tokens] - before.log_probs[row, tokens]).mean().exp()
            total = total + len(tokens) * clipped(ratio, advantages[row], 0.1 * scale, 0.15 * scale)
            sides.add((scale > 1, 1 - 0.1 * scale < float(ratio.detach()) < 1 + 0.15 * scale))
    assert len(sides) == 4
    mine_and(trainer, e, advantages, total / int(before.mask.sum()))


@pytest.mark.parametrize("more", [RATIO, SSPO])
def test_micro_batches_add(small_text: list[str], tmp_path: Path, more: list[str]) -> None:
    found = []
    for tokens in (10_000, 60, 1):
        trainer = trainer_of(small_text, tmp_path / f"run-{tokens}", f"rollout.tokens={tokens}", *more)
        rows, e = trainer.collect(0)
        advantages = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)
        found.append(gradient(trainer, e, advantages))
        trainer.updater._settle(e, 0, advantages, None)
    largest = max(float(g.abs().max()) for g in found[0].values())
    assert largest > 0
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.allclose(value, other[name], atol=2e-5 * largest), name


def test_what_is_left_out_has_no_part_in_the_mean_entropy(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", *SSPO, "objective.drop_truncated=true")
    e = trainer.collect(0)[1]
    trainer.objective.prepare(e)
    keep = torch.arange(12, device=trainer.task.device) != 3
    sums = trainer.objective.measure(e, 0, torch.zeros(12, device=trainer.task.device), keep)
    found = task_of(trainer).policy.statistics(e, list(range(12)), entropy=True)
    counted = found.mask & (e.outcomes & keep)[:, None]
    assert 0 < int(counted.any(1).sum()) < 11
    want = [float(found.entropy[counted].sum().detach()), float(counted.sum())]
    assert sums.tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        RATIO,
        SSPO,
        ["credit=parts", "advantage=null", "objective.level=part", "optimizer.epochs=2"],
        ["credit={name: minimum, temperature: 0.1}", "advantage=null", "optimizer.updates=3"],
    ],
    ids=["ratio", "sspo", "parts", "minimum"],
)
def test_a_run_trains_and_resumes_to_the_bit(by_part: list[str], tmp_path: Path, more: list[str]) -> None:
    # A schedule would depend on the number of iterations, by which the second run is cut short here.
    more = [*more, "optimizer.schedule=constant", "optimizer.learning_rate=0.003"]
    trainer_of(by_part, tmp_path / "whole", *more).train()
    trainer_of(by_part, tmp_path / "broken", *more, "run.iterations=2").train()
    for file in (tmp_path / "broken" / "lora").iterdir():
        file.unlink()
    (tmp_path / "broken" / "lora").rmdir()
    again = Session(load_recipe("text", [*by_part, *more]), RunFolder(tmp_path / "broken")).trainer(Silent())
    again.resume()
    assert again.next_iteration == 2
    again.train()
    records = numbers(tmp_path / "whole")
    assert records == numbers(tmp_path / "broken")
    assert [record["ratio/first_error"] for record in records[:-1]] == [0.0] * 4
    assert all(record["grad_norm"] > 0 for record in records[:-1])
    assert records[0]["parts"] > 1
    one, two = (load_file(tmp_path / name / "lora" / "adapter_model.safetensors") for name in ("whole", "broken"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    lines = (tmp_path / "whole" / "samples" / "index.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        assert sum(record["parts"]["nines"]) == pytest.approx(record["rewards"]["nines"], abs=1e-5)


def test_credit_by_part_raises_the_reward(by_part: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(
        by_part, tmp_path / "run", "credit=parts", "advantage=null", "data.heldout=null", "run.iterations=20",
        "rollout={prompts: 8, group: 8, batch: 64, tokens: 4096}",
    )  # fmt: skip
    first = [trainer.iterate(k)["reward/nines"] for k in range(20)]
    assert sum(first[-5:]) / 5 > sum(first[:3]) / 3 + 0.5


def test_rounds_and_replays_keep_their_parts(small_text: list[str], tmp_path: Path) -> None:
    budget = "rollout={prompts: 3, group: 4, batch: 8, tokens: 60, budget: {choice: until, rounds: 2, success: 99}}"
    record = trainer_of(small_text, tmp_path / "rounds", *SSPO, budget).iterate(0)
    assert (record["rounds"], record["ratio/first_error"]) == (2, 0.0)
    replay = "rollout={prompts: 3, group: 4, batch: 8, tokens: 60}"
    trainer = trainer_of(small_text, tmp_path / "replay", *RATIO, replay, "extensions=[{name: replay, keep: 2}]")
    extension = trainer.extensions.each["replay"]
    assert isinstance(extension, Replay)
    rows, _ = trainer.collect(0)
    scores = {"values": [[9.0]], "sub_scores": {}, "notes": {}, "answers": {}, "parts": {}}
    extension.successes.add(rows[0].id, {"ids": [[5, 6, 7, 1]], "log_probs": [[-1.0] * 4], "ended": [True],
                            "text": ["234"], "parts": [[["2", "34"], [0, 1, 1, 1]]], "scores": scores})  # fmt: skip
    e = trainer.extensions.samples_scored(trainer.collector.sample(0)).experience
    assert extension.record() == {"replayed": 1.0}
    place = e.samples.index("234")
    assert e.parts.ids[place] == [0, 1, 1, 1]
    assert e.parts.texts[place] == ["2", "34"]
    assert [len(own) for own in e.parts.ids] == e.lengths.tolist()


@pytest.mark.parametrize(
    ("base", "lines", "message"),
    [
        ("text", ["objective.level=part"], "objective.level part works on the parts of completions, and nothing says"),
        ("text", ["objective.reduce=part"], "objective.reduce part works on the parts of completions"),
        ("text", [CUT, "objective.surrogate=sspo", "optimizer.epochs=2"], "level is token; use objective.level part"),
        ("text", [*SSPO, "objective.level=sequence"], "objective.level is sequence; use objective.level part"),
        ("text", [*SSPO, "optimizer.epochs=1"], "With one optimizer step per rollout"),
        (
            "text", [CUT, "objective={surrogate: gmpo, level: part}"],
            "pools the row after its clip, and objective.level is part; use objective.level token",
        ),
        ("text", [CUT, "objective={name: answers, level: part}"], "'level' is an option of text objective tokens"),
        (
            "text", [*RATIO, "objective={surrogate: r2vpo, variance: {}, level: part}"],
            "counts tokens with `variance`, and objective.level is part; use objective.level token",
        ),
        ("mixgrpo_flash_guard", ["objective={surrogate: sspo}"], "all steps of images are equally certain"),
        ("mixgrpo_flash_guard", ["objective.level=part"], "'level' is an option of text objective tokens"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(base: str, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(base, lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*SSPO, "objective.surrogate.low=0.6"], "low=0.6, high=0.15, spread=2.0; use"),
        (["rewards=[{name: '%s:nines'}]"], r"'nines' scores the `parts` of completions, but this run does not cut"),
        ([CUT, "data.train=%s.jsonl"], "the prompts have a column 'parts'"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(
    small_text: list[str], tmp_path: Path, lines: list[str], message: str
) -> None:
    plain = tmp_path / "mine.py"
    plain.write_text(REWARD)
    (tmp_path / "mine.py.jsonl").write_text('{"prompt": "1+1=", "parts": 2}\n' * 3)
    given = [line.replace("%s", str(plain)) for line in lines]
    with pytest.raises(ValueError, match=message):
        check(load_recipe("text", [*small_text, *given])).require()


def test_a_plan_says_what_is_done_by_part() -> None:
    def plan(*words: str) -> str:
        return CliRunner().invoke(app, ["plan", "text", *words], catch_exceptions=False).output

    assert "completions are cut where '[0-4]' matches: a ratio each, a clip by their entropy\n" in plan(*SSPO)
    assert "an equal share of the loss\n" in plan(*RATIO)
    credit = plan("parts.cut=sentences", "credit=minimum", "advantage=null")
    assert "completions are cut into sentences: advantages by their scores (minimum)\n" in credit
    assert "completions are cut into lines: for the rewards alone\n" in plan("parts={}")
