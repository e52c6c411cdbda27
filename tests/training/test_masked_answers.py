"""Whole answers of masked models: given pairs and samples of the policy, on estimates that share their masks."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.text.masked_model import load_masked_model
from flowgrpo.training.checking import check
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer
from flowgrpo.worlds.arithmetic.masked_building import MASK, build_masked_model
from flowgrpo.worlds.arithmetic.problems import build_character_tokenizer
from tests.random_language import save_random
from tests.simulated import simulated_device
from tests.text.diffusion_folders import dream_folder, llada2_folder, llada_folder, sdar_folder
from tests.training import ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = build_character_tokenizer()
    tokenizer.add_special_tokens({"mask_token": MASK})
    found = tmp_path_factory.mktemp("masked") / "model"
    made = partial(build_masked_model, len(tokenizer), width=32, layers=2, heads=2)
    return save_random(found, tokenizer, made, factor=6)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "11"},
        {"prompt": "2+2=", "chosen": "4", "rejected": ""},
        {
            "prompt": "3+3=",
            "chosen": [{"role": "user", "content": "3+3="}, {"role": "assistant", "content": "6"}],
            "rejected": [{"role": "assistant", "content": "333"}],
        },
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(model: Path, file: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", f"data.train={file}", "data.heldout=null", "rollout={prompts: 3, group: 2, batch: 64}",
        "run={iterations: 3, checkpoint_every: 1, sample_every: 1, keep: 3}",
        "optimizer={learning_rate: 0.01, warmup: 0, schedule: constant, ema: null}", *more,
    ]  # fmt: skip


def trainer_of(out: Path, overrides: list[str]) -> Trainer:
    return Session(load_recipe("vrpo", overrides), RunFolder.create(out, "")).trainer(Silent())


def gradient(trainer: Trainer) -> Tensor:
    """The gradient of an iteration, before a step is taken."""
    rows, experience = trainer.collect(0)
    trainer.objective.prepare(experience)
    advantages = torch.tensor([1.0, -1.0] * len(rows))
    count = torch.tensor(float(trainer.objective.rows(experience, 0, None)))
    for batch in list(trainer.objective.batches(experience, 0, None)):
        trainer.objective.backward(experience, batch, advantages, None, count)
    return torch.cat([p.grad.flatten() for p in trainer.task.weights.parameters() if p.grad is not None])


@pytest.mark.slow
def test_given_answers_are_trained_without_sampling(folder: Path, pairs: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", words(folder, pairs))

    def nothing(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a completion was sampled")

    trainer.task.policy.sample = nothing
    first, second = trainer.iterate(0), trainer.iterate(1)
    assert first["preferred"] == 0.5
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["ratio/first_error"] == 0.0
    assert first["evaluations"] == 0
    assert second["loss"] < first["loss"]
    lines = [json.loads(line) for line in (tmp_path / "run/samples/index.jsonl").read_text().splitlines()]
    shown = {(line["prompt"], line["rewards"]["given"]): line["completion"] for line in lines}
    assert shown == {
        ("1+1=", 1.0): "2", ("1+1=", 0.0): "11", ("2+2=", 1.0): "4", ("2+2=", 0.0): "", ("3+3=", 1.0): "6",
        ("3+3=", 0.0): "333",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stop", [False, True])
def test_a_completion_ends_as_the_model_ends_it(stop: bool, folder: Path, pairs: Path, tmp_path: Path) -> None:
    """End tokens fill it and count, as this model was trained; or nothing behind the first end token counts."""
    trainer = trainer_of(tmp_path / "run", words(folder, pairs, f"generation.stop_at_end={str(stop).lower()}"))
    language, experience = trainer.task.policy.language, trainer.collect(0)[1]
    end = language.tokenizer.eos_token_id
    for ids, text in zip(experience.rollout.x.tolist(), experience.samples):
        assert ids[: len(text)] == language.tokenizer.encode(text, add_special_tokens=False)
        assert ids[len(text)] == end
        assert set(ids[len(text) + 1 :]) <= {language.mask if stop else end}
    counted = trainer.task.policy.moves.counted(experience.rollout.x).sum(1).tolist()
    assert counted == [len(text) + 1 if stop else 4 for text in experience.samples]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "likelihood", "{name: contrastive, beta: 0.5}"])
def test_the_gradient_does_not_depend_on_how_many_passes_are_evaluated_at_once(
    loss: str, folder: Path, pairs: Path, tmp_path: Path
) -> None:
    found = []
    for batch in (64, 16, 3):
        more = (f"objective.loss={loss}", f"rollout.batch={batch}", "advantage.scale=none")
        found.append(gradient(trainer_of(tmp_path / f"run-{batch}", words(folder, pairs, *more))))
    assert float(found[0].norm()) > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_estimate_is_that_of_masks_put_in_by_hand(folder: Path, pairs: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", words(folder, pairs, "objective.loss=likelihood"))
    _, experience = trainer.collect(0)
    objective, language = trainer.objective, load_masked_model(str(folder))
    each = []
    for leaf, ids in enumerate(experience.rollout.x):
        passes, _ = objective.remasking.drawn(experience, leaf, 0)
        assert passes.masked.shape == (8, 4)
        frame = experience.frames[experience.prompt_of_sample[leaf]]
        with torch.no_grad():
            logits = language.logits([frame] * 8, torch.where(passes.masked, language.mask, ids))
        # No text has a mask, so the mask token is never drawn.
        logits[..., language.mask] = -torch.inf
        own = logits.log_softmax(-1).gather(2, ids.expand(8, 4)[..., None])[..., 0]
        each.append(-float((own * passes.weight).sum()) / 4)
    assert trainer.iterate(0)["loss"] == pytest.approx(sum(each) / len(each), rel=1e-5)


@pytest.mark.slow
def test_samples_of_the_policy_are_compared_as_well_and_the_first_ratio_is_1(
    folder: Path, pairs: Path, tmp_path: Path
) -> None:
    more = (
        "sampler.plan={name: window, window: {name: all}, stochastic: all}", "rollout={prompts: 3, group: 6, batch: 7}",
        "objective={name: answers, loss: {name: regression}, likelihood: {name: quadrature, levels: 2}}",
        "rewards=[{name: length, options: {limit: 3, buffer: 3}}]", "optimizer.epochs=2", "optimizer.updates=3",
    )  # fmt: skip
    trainer = trainer_of(tmp_path / "run", words(folder, pairs, *more))
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["evaluations"] > 0
    assert record["grad_norm"] > 0
    assert record["steps"]["0"]["log_ratio_var"] > 0


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(folder: Path, pairs: Path, command: Any) -> None:
    more = words(folder, pairs, "rollout.batch=5")
    for name in ("one", "two"):
        assert command("train", "vrpo", "--out", name, *more)[0] == 0
    for number in (2, 3):
        shutil.rmtree(Path("two/checkpoints") / f"iter-{number:06d}")
    assert command("resume", "two")[0] == 0
    one, two = (Path(name) / "checkpoints/iter-000003/trained.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
def test_two_processes_train_as_one(folder: Path, pairs: Path, tmp_path: Path) -> None:
    """The processes have different numbers of pairs, and one of them evaluates its passes in several batches."""
    # With this eps AdamW amplifies no rounding.
    own = words(folder, pairs, "rollout.batch=20", "optimizer.epochs=2", "optimizer.eps=1.0e-3")
    for count in (1, 2):
        job = {"words": ["train", "vrpo", *own, "--out", str(tmp_path / str(count))], "count": count, "environment": {}}
        ranks.run_all([{**job, "log": str(tmp_path / f"log{count}")}], patience=300)
        printed = [(tmp_path / f"log{count}-{rank}.txt").read_text() for rank in range(count)]
        assert json.loads((tmp_path / f"log{count}.json").read_text()) == [0] * count, "\n".join(printed)
    one, two = (
        [json.loads(line) for line in (tmp_path / str(count) / "metrics.jsonl").read_text().splitlines()]
        for count in (1, 2)
    )
    for mine, theirs in zip(one, two, strict=True):
        for name in ("loss", "preferred", "grad_norm", "ratio/first_error", "entropy"):
            assert theirs.get(name) == pytest.approx(mine.get(name), rel=1e-3, abs=1e-6), name


@pytest.mark.slow
def test_a_run_on_another_device_leaves_no_tensor_behind(
    folder: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    with simulated_device() as device:
        monkeypatch.setattr(Accelerator, "device", property(lambda self: device.device))
        for batch in (64, 5):
            more = (f"rollout.batch={batch}", "optimizer.epochs=2", "objective.loss=rpo")
            trainer = trainer_of(tmp_path / f"run-{batch}", words(folder, pairs, *more))
            trainer.train()
            assert all(p.device == device.device for p in trainer.task.weights.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "block", "ended"),
    [
        (llada_folder, None, ["<|eot_id|>", "<|endoftext|>"]),
        (dream_folder, None, ["<|im_end|>", "<|endoftext|>"]),
        (sdar_folder, 4, ["<|im_end|>", "<|endoftext|>"]),
        (llada2_folder, 4, ["<|eot_id|>", "<|endoftext|>"]),
    ],
)
def test_every_family_is_trained_on_given_answers(
    made: Any, block: int | None, ended: list[str], pairs: Path, tmp_path: Path
) -> None:
    """An answer ends with the end of the assistant's turn, and the tokenizer's end token fills what follows."""
    model = made(tmp_path / "model")
    more = [f"model.block={block or 'null'}", "model.train=lora", "generation.tokens=8", "rollout.batch=24"]
    trainer = trainer_of(tmp_path / "run", words(model, pairs, *more))
    tokenizer, experience = trainer.task.policy.language.tokenizer, trainer.collect(0)[1]
    ids = experience.rollout.x[experience.samples.index("11")].tolist()
    assert tokenizer.convert_ids_to_tokens(ids) == ["1", "1", ended[0], *[ended[1]] * 5]
    first, second = trainer.iterate(0), trainer.iterate(1)
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["ratio/first_error"] == 0.0
    assert second["loss"] < first["loss"]


@pytest.mark.slow
def test_long_answers_are_refused_or_left_out(folder: Path, pairs: Path, tmp_path: Path) -> None:
    short = words(folder, pairs, "generation.tokens=3", "sampler.steps=3")
    with pytest.raises(ValueError, match=r"a completion of prompt 3 has 4 tokens; generation\.tokens is 3: raise"):
        trainer_of(tmp_path / "run", [*short, "generation.long_prompts=refuse"])
    recipe = load_recipe("vrpo", [*short, "generation.long_prompts=drop", "rollout.prompts=2"])
    session = Session(recipe, RunFolder.create(tmp_path / "other", ""))
    assert [row.text for row in session.data.train.rows] == ["1+1=", "2+2="]
    said = "1 of 3 prompts of {} are left out, because their completions have more than 3 tokens (generation.tokens)"
    assert said.format(pairs) in session.notes


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["objective=trajectory"], r"plan given gives completions that the policy did not draw, .* use objective answ"),
        (["objective=estimated"], r"plan given gives completions that the policy did not draw"),
        (["generation.temperature=0.5"], r"generation\.temperature is 0\.5, .* use generation\.temperature 1"),
        (["objective.likelihood=trace"], r"likelihood trace takes its masks from the steps .* use objective\.likel"),
        (["penalties=[{name: kl, weight: 0.1}]"], r"token penalty kl works on tokens, .* or use objective estimated"),
        (["select=[{name: extremes, keep: 2}]"], r"objective answers takes whole groups; leave select out"),
        (["advantage.baseline=none"], r"answer loss dpo compares the best and the worst sample"),
        (["rollout.group=4"], r"rollout\.group is 4, and sampler\.plan\.columns names 2: chosen, rejected; write"),
        (["extensions=[variants]"], r"extension variants makes other prompts, .* the data give its samples"),
        (["data.templates=['{prompt} ']"], r"plan given trains on the samples of the data, and data\.templates"),
        (["objective.loss={name: dpo, smoothing: 0.7}"], r"`smoothing` is 0\.7; use a probability in \[0, 0\.5\)"),
    ],
)
def test_what_cannot_go_with_given_answers_is_refused(more: list[str], why: str) -> None:
    with pytest.raises((RecipeError, ValueError), match=why):
        check(load_recipe("vrpo", more)).require()


def test_faults_of_the_data_are_told_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"

    def faults(row: dict[str, Any], *more: str) -> list[str]:
        file.write_text(json.dumps({"prompt": "1+1="} | row) + "\n")
        return check(load_recipe("vrpo", [f"data.train={file}", "rollout.prompts=1", *more])).texts("fault")

    assert faults({"chosen": "2", "rejected": "3"}) == []
    (lacking,) = faults({"chosen": "2"})
    assert "plan given reads column 'rejected', and the prompts have the columns chosen; name them with sam" in lacking
    (number,) = faults({"chosen": "2", "rejected": 3})
    assert "line 1: `rejected` is 3; write the words of a completion" in number
    (taken,) = faults({"chosen": "2", "rejected": "3", "given_place": 3})
    assert "the prompts have a column 'given_place', which rewards receive anyway; rename it" in taken


def test_a_file_of_pairs_needs_no_column_for_the_prompt(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "1+1="}]
    row = {name: [*talk, {"role": "assistant", "content": text}] for name, text in (("chosen", "2"), ("rejected", "3"))}
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n")
    checked = check(load_recipe("vrpo", [f"data.train={file}", "rollout.prompts=1"]))
    assert checked.texts("fault") == []
    assert checked.data is not None
    assert [row.text for row in checked.data.train.rows] == ["1+1="]


@pytest.mark.slow
def test_plan_says_that_nothing_is_sampled(command: Any) -> None:
    status, said, _ = command("plan", "vrpo", "--gpu", "h100")
    assert status == 0
    assert "nothing is sampled: the completions are in the columns chosen, rejected of arithmetic:pairs" in said
    assert "(NFE of the old policy, of θ): (0, 8), with shared states (0, 8)" in said


@pytest.mark.slow
def test_fine_tuning_on_good_answers_alone_shows_its_loss(folder: Path, pairs: Path, command: Any) -> None:
    """The reward of given samples never changes, so the table has the loss in its place."""
    more = [
        "sampler.plan.columns=[chosen]", "rollout.group=1", "objective.loss=likelihood", "advantage.baseline=none",
        "advantage.scale=none",
    ]  # fmt: skip
    status, said, _ = command("train", "vrpo", "--out", "run", *words(folder, pairs, *more))
    assert status == 0
    lines = [line.split() for line in said.splitlines()]
    assert ["iteration", "loss", "texts/s", "s/iter", "left"] in lines
    losses = [float(line[1]) for line in lines if line and line[0] in ("1/3", "2/3", "3/3")]
    recorded = [json.loads(line)["loss"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(recorded, abs=1e-4)
    assert losses[2] < losses[0]


@pytest.mark.slow
def test_evaluations_with_a_temperature_write_different_completions(folder: Path, pairs: Path, command: Any) -> None:
    """Pairs of them need completions that differ. Without a temperature they are the likeliest tokens, all equal."""
    reward = "evaluate.rewards=[{name: length, options: {limit: 4, buffer: 4}}]"
    more = [word for word in words(folder, pairs, reward, "evaluate.seeds=4") if "heldout" not in word]
    more += [f"data.heldout={pairs}"]
    noted = "without a temperature all completions of a prompt are equal; set evaluate.temperature"
    assert noted in " ".join(command("plan", "vrpo", *more)[1].split())
    for out, heat in (("likeliest", "0"), ("drawn", "2.0")):
        run = ["evaluate", str(folder), "vrpo", "--out", out, *more, f"evaluate.temperature={heat}"]
        status, said, errors = command(*run)
        assert status == 0, errors
        lines = [json.loads(line) for line in Path(out, "index.jsonl").read_text().splitlines()]
        texts = [{line["completion"] for line in lines if line["prompt_id"] == prompt} for prompt in range(3)]
        assert all((len(one) == 1) == (heat == "0") for one in texts)
    assert "temperature 2" in said
    status, _, errors = command("pairs", "likeliest", "--out", "none")
    assert status == 1
    assert "the completions of each prompt are equal; sample them with evaluate.temperature=1" in " ".join(
        errors.split()
    )
