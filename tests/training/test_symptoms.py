"""A run that learns nothing says so in time, but not at every iteration; a resumed run gives the same numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.reporting.records import standard_errors
from flowgrpo.training.reporting.symptoms import Symptom, Symptoms
from flowgrpo.training.session import Session, start

HEALTHY = {
    "reward/total": 0.5, "reward/a": 0.5, "reward_error/a": 0.05, "reward/b": None, "advantage/largest": 0.8,
    "degenerate_groups": 0.2, "loss": 0.01, "grad_norm": 0.1, "ratio/mean": 1.0, "approx_kl": 0.01,
}  # fmt: skip
WEIGHTS = {"a": 1.0, "b": 0.5, "recorded": 0.0}


def said(records: Sequence[Mapping[str, Any]], symptoms: Symptoms | None = None) -> list[tuple[int, str, int]]:
    """Iteration, name and count of everything that is said."""
    symptoms = symptoms or Symptoms(WEIGHTS, 64)
    return [(k, s.name, s.count) for k, record in enumerate(records) for s in symptoms.iteration(record)]


def evaluation(**means: tuple[float, float]) -> dict[str, float]:
    """The line of an evaluation, by mean and standard error."""
    return {f"eval/{k}": v[0] for k, v in means.items()} | {f"eval_error/{k}": v[1] for k, v in means.items()}


def fallen(*lines: dict[str, float], weights: Mapping[str, float] = WEIGHTS, prompts: int = 64) -> list[int]:
    """The evaluations that are reported as far below the first one."""
    symptoms = Symptoms(weights, prompts)
    return [k for k, line in enumerate(lines) if symptoms.evaluation(line)]


def test_a_healthy_run_says_nothing() -> None:
    assert said([HEALTHY] * 200) == []
    assert said([{**HEALTHY, "grad_norm": 0.1 * 3.0 ** (k % 5)} for k in range(100)]) == []


@pytest.mark.parametrize(
    ("change", "name", "first"),
    [
        ({"reward/a": None, "advantage/largest": 0.0, "grad_norm": 0.0, "loss": None}, "no_score", 5),
        ({"advantage/largest": 0.0, "degenerate_groups": 1.0, "grad_norm": 0.0, "loss": None}, "no_difference", 10),
        ({"loss": None}, "not_finite", 1),
        ({"approx_kl": None}, "not_finite", 1),
        ({"approx_kl": 2.0}, "ratio", 3),
        ({"reward/a": 0.1}, "reward", 5),
        ({"grad_norm": 1e-5}, "gradient", 5),
        ({"grad_norm": 1e3}, "gradient", 5),
    ],
)
def test_what_lasts_is_said_and_then_each_time_it_has_lasted_twice_as_long(
    change: dict[str, Any], name: str, first: int
) -> None:
    found = said([HEALTHY] * 5 + [{**HEALTHY, **change}] * 4 * first)
    assert found == [(4 + first * k, name, first * k) for k in (1, 2, 4)]
    assert said([HEALTHY] * 5 + [{**HEALTHY, **change}, HEALTHY] * 40) == ([] if first > 1 else [
        (5, name, 1),
    ])  # fmt: skip


def test_what_comes_and_goes_is_said_ever_less_often() -> None:
    """Three in a row give one warning; the next warning needs six."""
    bad = {**HEALTHY, "approx_kl": 2.0}
    assert said(([bad] * 3 + [HEALTHY]) * 10) == [(2, "ratio", 3)]


def test_a_ratio_that_is_far_beyond_reason_is_told_at_once() -> None:
    extreme = {**HEALTHY, "approx_kl": 3.66}
    assert said([HEALTHY, extreme, extreme, HEALTHY]) == [(1, "ratio", 1), (2, "ratio", 2)]
    assert said([extreme, *[HEALTHY] * 5, extreme, {**HEALTHY, "approx_kl": 2.0}]) == [(0, "ratio", 1), (7, "ratio", 2)]


def test_completions_that_are_all_cut_are_told_unless_one_has_ended_before() -> None:
    """A model that has learned to write to the end of its room is no symptom. A resumed run has not forgotten it."""
    whole, some = {**HEALTHY, "truncated": 1.0}, {**HEALTHY, "truncated": 0.9}
    assert said([whole, {**whole, "truncated": 0.96}] * 5 + [whole]) == [(4, "cut", 5), (9, "cut", 10)]
    assert said([whole] * 4 + [some] + [whole] * 40) == []
    resumed = Symptoms(WEIGHTS, 64)
    resumed.replay([{**some, "iteration": 0}])
    assert said([whole] * 20, resumed) == []
    [symptom] = [s for k in [Symptoms(WEIGHTS, 64)] for _ in range(5) for s in k.iteration(whole)]
    assert "were cut at the longest length (for 5 iterations): generation.max_tokens is too small" in symptom.text


def test_a_fall_of_the_training_reward_is_measured_by_how_much_iterations_vary() -> None:
    def rewards(*values: float, error: float | None = 0.05, **more: Any) -> list[dict[str, Any]]:
        return [{**HEALTHY, "reward/a": value, "reward_error/a": error, **more} for value in values]

    # Four times √2 times 0.05 is 0.28.
    assert said(rewards(0.8, *[0.5] * 5)) == [(5, "reward", 5)]
    assert said(rewards(0.8, *[0.53] * 50)) == []
    # One iteration of prompts that are alike says little of how much other prompts vary.
    assert said([*rewards(0.8, error=0.0), *rewards(*[0.6] * 50)]) == []
    assert said([*rewards(0.8), *rewards(*[0.1] * 5, error=0.0)]) == [(5, "reward", 5)]
    # A single prompt has no error, and another trained reward may have risen instead.
    assert said(rewards(0.8, *[0.1] * 50, error=None)) == []
    other = {"reward_error/b": 0.01}
    risen = [*rewards(0.8, **other, **{"reward/b": 0.1}), *rewards(*[0.1] * 50, **other, **{"reward/b": 0.9})]
    assert said(risen) == []
    assert said(rewards(0.1, *[0.8] * 50), Symptoms({"a": -1.0}, 64))[0] == (5, "reward", 5)


def test_a_reward_for_few_prompts_and_one_that_only_records_do_not_matter() -> None:
    """Reward b never applies in HEALTHY; and a score of weight 0 teaches nothing."""
    bad = {**HEALTHY, "reward/a": None, "reward/recorded": 1.0, "advantage/largest": 0.0}
    assert said([bad] * 5) == [(4, "no_score", 5)]
    assert said([{**bad, "reward/b": 0.1, "advantage/largest": 0.1}] * 50) == []


def test_groups_without_a_difference_are_no_symptom_where_samples_are_compared_with_something_else() -> None:
    assert said([{**HEALTHY, "degenerate_groups": 1.0}] * 100) == []


def test_a_held_out_fall_has_to_be_beyond_its_error_and_of_a_size() -> None:
    """Of 64 prompts a standard error of 0.05 is a deviation of 0.4: half of it, and 4 times √2 times 0.05, is 0.28."""
    start = evaluation(a=(0.75, 0.05))
    assert fallen(start, evaluation(a=(0.0, 0.0))) == [1]
    assert fallen(start, evaluation(a=(0.48, 0.05))) == []
    assert fallen(start, evaluation(a=(0.46, 0.05))) == [1]
    # A fall of more than 3 times √2 times 0.05, which is 0.21, is told if it lasts.
    assert fallen(start, *[evaluation(a=(0.48, 0.05))] * 4) == [2, 4]
    assert fallen(start, *[evaluation(a=(0.55, 0.05))] * 8) == []
    assert fallen(start, *[evaluation(a=(0.48, 0.05)), start] * 4) == []
    # A thousand prompts: the fall is significant, but too small to matter.
    assert fallen(evaluation(a=(0.75, 0.01)), evaluation(a=(0.66, 0.01)), prompts=1000) == []
    # Four prompts are too few to show anything.
    assert fallen(start, evaluation(a=(0.0, 0.0)), prompts=4) == []
    # All evaluations are compared with the first one; the warning is repeated after twice as long.
    assert fallen(start, *[evaluation(a=(0.0, 0.01))] * 8) == [1, 2, 4, 8]


def test_a_fall_is_of_what_is_trained_for_and_by_the_sign_of_its_weight() -> None:
    low, high = (0.1, 0.01), (0.9, 0.01)
    assert fallen(evaluation(a=high, other=high), evaluation(a=high, other=low)) == []
    assert fallen(evaluation(other=high), evaluation(other=low)) == [1]
    assert fallen(evaluation(a=low), evaluation(a=high), weights={"a": -1.0}) == [1]
    assert fallen(evaluation(a=high), evaluation(a=low), weights={"a": -1.0}) == []
    # If one reward rises at the cost of another, that is for a guard to see; the run has not unlearned.
    assert fallen(evaluation(a=high, b=low), evaluation(a=low, b=high)) == []


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_been() -> None:
    bad = {**HEALTHY, "advantage/largest": 0.0, "grad_norm": 0.0}
    lines: list[dict[str, Any]] = [{**HEALTHY, **evaluation(a=(0.9, 0.01))}, *[bad] * 40, evaluation(a=(0.1, 0.01))]

    def heard(symptoms: Symptoms, records: Sequence[Mapping[str, Any]]) -> list[Symptom]:
        return [s for r in records for s in (*symptoms.evaluation(r), *symptoms.iteration({**HEALTHY, **r}))]

    for cut in (1, 7, 11, 12, 41):
        whole, resumed = Symptoms(WEIGHTS, 64), Symptoms(WEIGHTS, 64)
        heard(whole, lines[:cut])
        resumed.replay([{"iteration": k, **line} for k, line in enumerate(lines[:cut])])
        assert heard(whole, lines[cut:]) == heard(resumed, lines[cut:])


def test_evaluations_of_another_measure_are_no_start() -> None:
    before, after = evaluation(a=(0.9, 0.01)), evaluation(a=(0.1, 0.01))
    for since, warned in ((0, True), (10, False)):
        symptoms = Symptoms(WEIGHTS, 64)
        symptoms.replay([{"iteration": 0, **before}], since)
        assert bool(symptoms.evaluation(after)) == warned


def test_the_error_of_a_mean_is_over_prompts() -> None:
    """Two samples each, prompts of means 1, 3 and 5: a deviation of 2, over √3."""
    values = torch.tensor([[0.0], [2.0], [3.0], [3.0], [4.0], [6.0]])
    assert standard_errors(values, torch.tensor([7, 7, 2, 2, 4, 4])).tolist() == pytest.approx([2 / 3**0.5])
    assert standard_errors(values[:2], torch.tensor([7, 7])).isnan().all()


def test_the_error_counts_a_prompt_as_the_mean_does() -> None:
    """The mean of 0, 2, 3 and 5 is 2.5. The prompts lie −3, 0.5 and 2.5 from it in sum: √(15.5 · 3/2) / 4."""
    values = torch.tensor([[0.0, 1.0], [2.0, torch.nan], [3.0, torch.nan], [5.0, 2.0]])
    errors = standard_errors(values, torch.tensor([7, 7, 2, 4]))
    assert errors.tolist() == pytest.approx([(15.5 * 1.5) ** 0.5 / 4, 0.5])
    assert standard_errors(torch.tensor([[0.1], [0.2], [torch.nan]]), torch.tensor([0, 0, 1])).isnan().all()


def test_the_error_is_the_spread_of_means_of_uneven_groups() -> None:
    """4 or 32 samples of a prompt, as a budget gives them: the means of many rollouts spread as the errors say."""
    torch.manual_seed(0)
    means, errors = [], []
    for _ in range(400):
        sizes = torch.where(torch.rand(60) < 0.8, 4, 32)
        owners = torch.arange(60).repeat_interleave(sizes)
        values = (torch.randn(60)[owners] + 0.5 * torch.randn(len(owners)))[:, None]
        means.append(values.mean())
        errors.append(standard_errors(values, owners)[0])
    spread, said = torch.stack(means).std(), torch.stack(errors).square().mean().sqrt()
    assert 0.88 < said / spread < 1.12


# -- runs ------------------------------------------------------------------------------------------------------------


class Listening(Silent):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def symptom(self, symptom: Symptom) -> None:
        self.heard.append(symptom.name)


def words(folder: Path, model: Path, reward: str) -> list[str]:
    file = folder / "rewards.py"
    file.write_text(
        "def nothing(completions):\n    return [None] * len(completions)\n\n"
        "def one(completions):\n    return [0.1] * len(completions)\n\n"
        "def digits(completions):\n    return [sum(c.isdigit() for c in text) / 4 for text in completions]\n"
    )
    return [
        f"model.path={model}", f"rewards=[{{name: '{file}:{reward}', label: aim}}]", "generation.max_tokens=4",
        "rollout={prompts: 2, group: 4, batch: 8, tokens: 60}", "evaluate={every: 6, prompts: 16}",
        "run={iterations: 12, checkpoint_every: 4, sample_every: 100}",
    ]  # fmt: skip


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "name", "at"), [("nothing", "no_score", [4, 9]), ("one", "no_difference", [9])])
def test_a_reward_that_teaches_nothing(
    reward: str, name: str, at: list[int], tmp_path: Path, random_language_folder: Path
) -> None:
    heard = Listening()
    recipe = load_recipe("text", words(tmp_path, random_language_folder, reward))
    start(recipe, tmp_path / "run").trainer(heard).train()
    assert heard.heard == [name] * len(at)
    records = metrics(tmp_path / "run")
    marked = {r["iteration"]: r[f"symptom/{name}"] for r in records if f"symptom/{name}" in r}
    assert marked == {k: float(k + 1) for k in at}
    assert all(r["advantage/largest"] == 0 for r in records[:12])


@pytest.mark.slow
def test_a_learning_rate_that_destroys_the_model_and_the_run_resumed(
    tmp_path: Path, random_language_folder: Path
) -> None:
    """The embedded model of arithmetic, after one step of such a size."""
    given = words(tmp_path, random_language_folder, "nothing")[2:]
    more = ["rewards=[{name: answer}]", "evaluate.prompts=150", "rollout={prompts: 8, group: 8, batch: 256}"]
    recipe = load_recipe("text", [*given, *more, "optimizer.learning_rate=1e3"])
    heard = Listening()
    start(recipe, tmp_path / "whole").trainer(heard).train()
    assert sorted(heard.heard) == ["heldout", "heldout", "no_difference", "reward", "reward"]

    class Interrupted(Exception):
        pass

    class StopAfter(Listening):
        def iteration(self, record: Mapping[str, Any]) -> None:
            if record["iteration"] == 6:
                raise Interrupted

    with pytest.raises(Interrupted):
        start(recipe, tmp_path / "run").trainer(StopAfter()).train()
    again = Session(recipe, RunFolder.open(tmp_path / "run")).trainer(Silent())
    again.resume()
    assert again.next_iteration == 4
    again.train()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_that_learns_says_nothing(tmp_path: Path, random_language_folder: Path) -> None:
    heard = Listening()
    recipe = load_recipe("text", words(tmp_path, random_language_folder, "digits"))
    start(recipe, tmp_path / "run").trainer(heard).train()
    assert heard.heard == []
