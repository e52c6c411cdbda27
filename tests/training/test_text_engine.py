"""Runs whose completions another engine samples: equal to plain ones, corrected where its numbers differ."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.session import Session
from flowgrpo.training.text.token_objective import TokenObjective
from tests.text import stub_vllm
from tests.training.text_runs import trainer_of

VLLM = "generation.engine=vllm"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, in the place of the package."""
    monkeypatch.setitem(sys.modules, "vllm", stub_vllm)
    monkeypatch.setattr(stub_vllm.LLM, "made", [])
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    return stub_vllm


@pytest.fixture
def small(small_text: list[str]) -> list[str]:
    return [
        *small_text, "evaluate.prompts=3", "run={iterations: 3, checkpoint_every: 3, sample_every: 1}",
        "optimizer={learning_rate: 0.01, updates: 1, ema: {decay: 0.5}}",
    ]  # fmt: skip


def answers(folder: Path) -> str:
    return (folder / "samples" / "index.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_run_with_equal_numbers_is_the_plain_run(
    vllm: ModuleType, small: list[str], tmp_path: Path, train: str
) -> None:
    small = [*small, f"model.train={train}", "optimizer.learning_rate=0.003"]
    plain = trainer_of(small, tmp_path / "plain")
    other = trainer_of(small, tmp_path / "other", VLLM, "objective.correction=none")
    plain.train()
    other.train()
    assert answers(tmp_path / "plain") == answers(tmp_path / "other")
    # Before three rollouts, and before evaluations at iterations 0, 2 and 3.
    [made] = vllm.LLM.made
    assert made.reloads == 6
    for one, two in zip(plain.task.weights.parameters(), other.task.weights.parameters(), strict=True):
        assert torch.equal(one, two)


def test_an_engine_is_corrected_unless_the_recipe_says_otherwise(
    vllm: ModuleType, small: list[str], tmp_path: Path
) -> None:
    trainer = trainer_of(small, tmp_path / "auto", VLLM)
    assert any(
        line.startswith("vllm samples the completions, with correction auto") for line in trainer.task.describe()
    )
    record = trainer.iterate(0)
    assert record["weight"] == pytest.approx(1, abs=1e-4)
    assert record["correction_cut"] == 0
    assert "weight" not in trainer_of(small, tmp_path / "none", VLLM, "objective.correction=none").iterate(0)
    assert "weight" not in trainer_of(small, tmp_path / "plain").iterate(0)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        # Of exp(0.5), exp(0.25), 1, and exp(-1) at every fourth token: capped at 1.5.
        ("{name: truncate, cap: 1.5}", [1.5, 1.2840254, 1.0, 0.3678794]),
        ("{name: mask, cap: 1.5, floor: 0.4}", [0.0, 1.2840254, 1.0, 0.0]),
    ],
)
def test_false_numbers_of_the_engine_are_weighed_by_hand(
    vllm: ModuleType,
    small: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    correction: str,
    weights: list[float],
) -> None:
    shifts = [-0.5, -0.25, 0.0, 1.0]
    monkeypatch.setattr(vllm.LLM, "shift", staticmethod(lambda request, place: shifts[place % 4]))
    trainer = trainer_of(small, tmp_path / "run", VLLM, f"objective.correction={correction}")
    rows, e = trainer.collect(0)
    advantages = trainer.advantages(trainer.score(trainer.rewards, rows, e), e, rows)
    trainer.objective.prepare(e)
    everything = list(range(12))
    tokens = int(e.lengths.sum())
    outcome = trainer.objective.backward(e, everything, advantages, None, torch.tensor(float(tokens)))
    # The engine's log-probs do not change the ratio, which compares the training engine before and after the update.
    assert float(outcome.error) == 0.0
    places = [place % 4 for ids in e.sampled.ids for place in range(len(ids))]
    total, count = outcome.metrics["weight"].tolist()
    assert count == tokens
    assert total == pytest.approx(sum(weights[place] for place in places), rel=1e-4)
    gap, _ = outcome.metrics["sampler_gap"].tolist()
    assert gap == pytest.approx(sum(abs(shifts[place]) for place in places), rel=1e-3)
    cut, _ = outcome.metrics["correction_cut"].tolist()
    assert cut == sum(weights[place] in (0.0, 1.5) for place in places)
    # On-policy the gradient is that of -weight × advantage × log-prob, over the tokens of the step.
    parameters = trainer.task.weights.parameters()
    found = [p.grad.clone() for p in parameters if p.grad is not None]
    trainer.optimizer.zero_grad(set_to_none=True)
    log_probs, mask = trainer.task.policy.log_probs(e, everything)  # type: ignore[attr-defined]
    by_place = torch.tensor([weights[t % 4] for t in range(log_probs.shape[1])], device=log_probs.device)
    (-(by_place * advantages[:, None] * log_probs * mask).sum() / tokens).backward()
    wanted = [p.grad for p in parameters if p.grad is not None]
    largest = max(float(g.abs().max()) for g in wanted)
    assert largest > 0
    for one, two in zip(found, wanted, strict=True):
        assert torch.allclose(one, two, atol=1e-4 * largest)


def test_the_recipe_chooses_level_and_bounds(small: list[str], tmp_path: Path) -> None:
    gap = torch.tensor([[0.5, -1.0], [1.0, 1.0]])
    for more, wanted in (
        (["objective.correction=truncate"], [[1.6487213, 0.3678794], [2.0, 2.0]]),
        (["objective.correction={name: truncate, level: sequence, cap: 3}"], [[0.6065307] * 2, [3.0] * 2]),
        (["objective.correction=mask", "objective.correction.level=sequence"], [[0.6065307] * 2, [0.0] * 2]),
    ):
        objective = trainer_of(small, tmp_path / more[-1], *more).objective
        assert isinstance(objective, TokenObjective)
        assert torch.allclose(objective.correction(gap)[0], torch.tensor(wanted)), more


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["objective.correction={name: truncate, floor: 0.5}"], "correction truncate has no option 'floor'"),
        (["objective.correction.cap=2"], "'cap' is an option of correction truncate"),
        (["objective.correction={name: mask, floor: 2}"], "floor 2, which is not below cap 2"),
        (["generation.engine_options={enforce_eager: true}"], "engine_options belong to engine vllm"),
        (["objective={name: answers, correction: truncate}"], "text objective answers has no option 'correction'"),
        (["generation.engine=sglang"], "'transformers' or 'vllm'"),
    ],
)
def test_what_does_not_go_together_is_refused(override: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("text", override)


def test_a_form_of_whole_answers_goes_with_an_engine(vllm: ModuleType, small: list[str], tmp_path: Path) -> None:
    objective = "objective={name: answers, loss: {name: dpo, beta: 0.1}}"
    record = trainer_of(small, tmp_path / "run", VLLM, objective).iterate(0)
    assert record["ratio/first_error"] == 0.0


def test_several_processes_cannot_share_an_engine(
    vllm: ModuleType, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "of_this_run", lambda: Processes(0, 2))
    with pytest.raises(ValueError, match="runs in one process, and this run has 2"):
        Session(load_recipe("text", [*small, VLLM]))
    assert vllm.LLM.made == []


def test_a_missing_engine_is_named_before_anything_is_sampled(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="pip install vllm"):
        Session(load_recipe("text", [*small, VLLM]))
