"""A run of text in two processes is that of one: the same completions, rewards and advantages, weights to rounding."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training import ranks
from tests.training.test_frozen_teacher import saved
from tests.training.test_part_ratios import REWARD as BY_PART

pytestmark = pytest.mark.slow

# With this eps, AdamW does not amplify rounding where a gradient is almost 0.
OPTIMIZER = "optimizer={learning_rate: 0.01, updates: 2, epochs: 2, eps: 1.0e-3, ema: {decay: 0.5}}"


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def overrides(random_language_folder: Path, tmp_path: Path) -> list[str]:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def nines(completions, prompts, **columns):\n"
        "    return [text.count('9') - 0.1 * len(text) for text in completions]\n"
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1+2=\n47-85=\n9\n30+4=\n")
    return [
        f"model.path={random_language_folder}", f"rewards=[{{name: '{reward}:nines'}}]",
        f"data={{train: {prompts}, heldout: {prompts}}}", "extensions=[curriculum, {name: replay, keep: 2}]",
        "rollout={prompts: 3, group: 4, batch: 4, tokens: 60}", "generation.max_tokens=6",
        "model.train=lora", "penalties=[{name: kl, weight: 0.05}]", "evaluate={every: 2, prompts: 3}", OPTIMIZER,
        "run={iterations: 4, checkpoint_every: 2, sample_every: 1}",
    ]  # fmt: skip


def launched(overrides: list[str], folder: Path, count: int, asked: Mapping[str, str]) -> None:
    """A run with `count` processes, started as by a launcher."""
    words = ["train", "text", *overrides, "--out", str(folder)]
    job = {"words": words, "count": count, "log": str(folder.with_name("log")), "environment": dict(asked)}
    ranks.run_all([job], patience=300)
    printed = [folder.with_name(f"log-{rank}.txt").read_text() for rank in range(count)]
    assert json.loads(folder.with_name("log.json").read_text()) == [0] * count, "\n".join(printed)


def both(overrides: list[str], tmp_path: Path, asked: Mapping[str, str] = {}) -> list[dict]:
    """The records of a run in one process, after it was compared with the same in two, launched as asked."""
    one, two = tmp_path / "one", tmp_path / "two"
    launched(overrides, one, 1, {})
    launched(overrides, two, 2, asked)
    assert lines_of(one / "samples" / "index.jsonl") == lines_of(two / "samples" / "index.jsonl")
    records = [lines_of(folder / "metrics.jsonl") for folder in (one, two)]
    for mine, theirs in zip(*records, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if not name.startswith("time/") and name != "steps":
                want = mine[name] if mine[name] is None else pytest.approx(mine[name], rel=1e-3, abs=1e-5)
                assert theirs[name] == want, (mine["iteration"], name)
    weights = [load_file(next(folder.glob("*/*model.safetensors"))) for folder in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert torch.allclose(weight, weights[1][name], atol=1e-5), name
    return records[0]


def test_two_processes_make_the_run_of_one(overrides: list[str], tmp_path: Path) -> None:
    assert sum(record.get("replayed", 0) for record in both(overrides, tmp_path)) > 0


def test_so_they_do_with_full_weights_and_an_optimizer_in_parts(overrides: list[str], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    zero = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    records = both([*overrides, "model.train=full", "optimizer.learning_rate=0.001"], tmp_path, zero)
    assert records[0]["ratio/first_error"] == 0.0
    assert records[0]["grad_norm"] > 0


def test_so_they_do_by_parts(overrides: list[str], tmp_path: Path) -> None:
    """SSPO compares a part's entropy with the mean entropy over all processes."""
    reward = tmp_path / "by_part.py"
    reward.write_text(BY_PART)
    lines = [
        "extensions=[curriculum]", f"rewards=[{{name: '{reward}:nines'}}]", "parts={cut: pattern, pattern: '[0-4]'}",
        "credit=minimum", "advantage=null", "objective={surrogate: {name: sspo, low: 0.1, high: 0.15}, level: part}",
    ]  # fmt: skip
    records = both([*overrides, *lines], tmp_path)
    assert records[0]["parts"] > 1
    assert 0 < records[0]["clip_share"] < 1


@pytest.mark.parametrize(
    "lines",
    [
        ["extensions=[{name: teacher, template: '{solution} {prompt}', success: -0.5}, difficulty]",
         "objective={name: distilled, top: 5}"],
        ["extensions=[{name: exploration, threshold: 3.4}]", "objective={name: guided, surrogate: hapo}",
         "rollout.form={name: expert, success: 99}"],
        ["model.teachers=[{name: a, path: arithmetic}, {name: b, path: RANDOM}]",
         "objective={name: distilled, both: true, direction: jsd, top: 5}"],
        ["extensions=[{name: teacher, template: '{answer} {prompt}', failed: false}]", "penalties=[]",
         "objective={name: distilled, others: none, top: 5, bound: 2, ema: {decay: 0.5}}"],
        # One process may have only prompts whose answers the policy writes.
        ["extensions=[]", "penalties=[]", "model.teachers=[{path: RANDOM}]", "generation.temperature=0.9",
         "rollout={prompts: 3, group: 1, tokens: 60, form: {name: given, columns: [words], own: 0.5}}",
         "objective={name: distilled, others: none, top: 5}"],
    ],
    ids=["distilled", "guided", "frozen teachers", "own average", "own and given"],
)  # fmt: skip
def test_so_they_do_with_teachers_and_with_an_expert(overrides: list[str], tmp_path: Path, lines: list[str]) -> None:
    prompts = tmp_path / "answered.jsonl"
    rows = "".join(
        f'{{"prompt": "{k}+2=", "answer": {k + 2}, "words": "{k + 2}", "teacher": "{"ab"[k % 2]}"}}\n' for k in range(4)
    )
    prompts.write_text(rows)
    random = saved(tmp_path / "random")
    lines = [line.replace("RANDOM", str(random)) for line in lines]
    records = both([*overrides, f"data={{train: {prompts}, heldout: null}}", *lines], tmp_path)
    assert records[0]["ratio/first_error"] == 0.0
    assert max(records[0].get("distillation") or 0.0, records[0].get("expert_loss") or 0.0) > 0
