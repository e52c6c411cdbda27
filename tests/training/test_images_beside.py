"""Images of data beside a rollout: which prompt gets which, their error at the noise level of a step, and resuming."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.core.addressing import address
from flowgrpo.core.penalties import Edges, data
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.pipeline_error import PipelineError
from flowgrpo.samplers.moves import draw_noise
from flowgrpo.training.checking import check
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.images.images_beside import drawn
from flowgrpo.training.prompt_embeddings import kept_prompts, met_beside
from flowgrpo.training.prompts.prompt_rows import PromptRow
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer
from tests.parts.own_parts import same_when_resumed
from tests.training import ranks
from tests.training.test_given import picture

COUNT = 5


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five captions with an image each, of several sizes."""
    folder = tmp_path_factory.mktemp("images")
    rows = []
    for k in range(COUNT):
        picture(folder / f"{k}.png", k, (64, 64 + 32 * (k % 2)))
        rows.append({"prompt": f"a photo of {k} blue stars", "file_name": f"{k}.png"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "metadata.jsonl"


def words_of(model: Path, source: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", "rollout={prompts: 3, group: 2, batch: 4}", "sampler.steps=4",
        "sampler.plan.window={name: frozen, size: 2, start: 1}", "rewards=[{name: jpeg_compressibility}]",
        "data.heldout=null", "evaluate.rewards=null", "optimizer.ema=null",
        f"penalties=[{{name: data, source: '{source}', column: file_name, weight: 0.5}}]", *more,
    ]  # fmt: skip


def trainer_of(folder: Path, words: Sequence[str], name: str = "ddrl") -> Trainer:
    return Session(load_recipe(name, list(words)), RunFolder.create(folder, "")).trainer(Silent())


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in trainer.task.weights.named_parameters().items() if p.grad is not None}
    trainer.optimizer.zero_grad(set_to_none=True)
    return found


def backward(trainer: Trainer, experience: Any, advantage: float) -> dict[str, torch.Tensor]:
    """The gradients of all batches; the advantages of nodes are `advantage` and its opposite in turn."""
    rows = torch.tensor(float(trainer.objective.rows(experience, 0, None)))
    advantages = torch.full((len(experience.rollout.parent),), advantage)
    advantages[::2] *= -1
    for batch in trainer.objective.batches(experience, 0, None):
        trainer.objective.backward(experience, batch, advantages, None, rows)
    return gradients(trainer)


def error_by_hand(trainer: Trainer, e: Any, prompt: int, step: int, level: tuple[int, ...], sigma: float) -> Any:
    """The error of flow matching on the image of a prompt, evaluated alone."""
    x0 = e.beside.x[prompt][None]
    noise = draw_noise(x0.shape[1:], [address(e.keys[prompt], -6, *level)])
    velocity = trainer.task.policy.velocity_of(e.beside.prompts)  # type: ignore[attr-defined]
    found = velocity((1 - sigma) * x0 + sigma * noise, step, [prompt])
    return (found - (noise - x0)).square().mean()


def test_the_penalty_is_the_error_on_the_data() -> None:
    error = torch.tensor([0.5, 0.25])
    given: dict[str, Any] = {
        "step": 0, "std": 1.0, "shift": error, "log_ratio": error[:, None], "advantage": error, "mask": None,
        "to_reference": lambda: error, "to_guided": lambda: error,
    }  # fmt: skip
    assert data(Edges(**given, to_data=lambda: error), source="a.jsonl") is error
    with pytest.raises(ValueError, match="there are no images beside the rollout; add penalty data, whose `source`"):
        data(Edges(**given), source="a.jsonl")


def test_a_prompt_gets_its_image_by_its_own_address() -> None:
    rows = [PromptRow(k, f"{k}") for k in range(7)]
    keys = [address(3, 1, k) for k in range(2000)]
    found = drawn(rows, keys)
    assert drawn(rows, keys[100:]) == found[100:]
    counts = [sum(row.id == k for row in found) for k in range(7)]
    # Each count is near 2000 / 7 = 286, with a standard deviation of 16.
    assert min(counts) > 286 - 5 * 16
    assert max(counts) < 286 + 5 * 16


def test_only_captions_that_a_run_draws_are_encoded_before_it(source: Path) -> None:
    words = [f"penalties.data.source={source}", "run.iterations=2", "rollout.prompts=3"]
    rows = [PromptRow(k, f"{k}") for k in range(1000)]
    recipe = load_recipe("ddrl", words)
    met = {row.id for row in met_beside(recipe, rows)}
    assert met == {row.id for row in drawn(rows, [address(0, 1, k) for k in range(6)])}
    # The rounds of a budget have addresses of their own.
    assert len(met_beside(load_recipe("ddrl", [*words, "rollout.budget={}"]), rows)) == 1000
    plain = load_recipe("ddrl", [*words, "penalties=[]"])
    assert met_beside(plain, []) == []
    assert (kept_prompts(plain, 5), kept_prompts(recipe, 5)) == (12, 18)


def test_loss_and_gradient_are_those_by_hand(random_pipeline: Path, source: Path, tmp_path: Path) -> None:
    """Without advantages, the loss is the weighted mean of the data's errors over the trained edges."""
    trainer = trainer_of(tmp_path / "run", words_of(random_pipeline, source))
    _, e = trainer.collect(0)
    captions = [f"a photo of {k} blue stars" for k in range(COUNT)]
    assert [captions.index(text) for text in e.beside.prompts] == [address(key, -5) % COUNT for key in e.keys]
    assert e.beside.x.shape == (3, *e.rollout.x.shape[1:])
    trainer.task.policy.bind(e.plan)  # type: ignore[attr-defined]
    errors = [error_by_hand(trainer, e, p, step, (step,), e.plan.sigmas[step]) for p in range(3) for step in (1, 2)]
    expected = torch.stack(errors).mean()
    (0.5 * expected).backward()
    by_hand = gradients(trainer)
    found = backward(trainer, e, 0.0)
    assert max(float(value.abs().max()) for value in found.values()) > 0
    for name, value in found.items():
        torch.testing.assert_close(value, by_hand[name], rtol=1e-4, atol=1e-7)
    record = trainer.update(e, torch.zeros(len(e.rollout.parent)))
    assert record["data"] == pytest.approx(expected.item(), rel=1e-5)
    assert record["loss"] == pytest.approx(0.5 * expected.item(), rel=1e-5)
    assert record["ratio/first_error"] == 0.0


def test_the_gradient_is_that_of_the_rewards_and_that_of_the_data(random_pipeline, source, tmp_path) -> None:
    both = trainer_of(tmp_path / "both", words_of(random_pipeline, source))
    alone = trainer_of(tmp_path / "alone", words_of(random_pipeline, source, "penalties=[]"))
    e, without = both.collect(0)[1], alone.collect(0)[1]
    assert without.beside is None
    assert torch.equal(e.rollout.x, without.rollout.x)
    whole, rewards, images = backward(both, e, 1.0), backward(alone, without, 1.0), backward(both, e, 0.0)
    for name, value in whole.items():
        torch.testing.assert_close(value, rewards[name] + images[name], rtol=1e-4, atol=1e-7)
    assert any(bool(value.any()) for value in rewards.values())


@pytest.mark.parametrize("more", [(), ("objective.draw=between", "objective.times=2")])
def test_a_loss_of_finished_images_has_data_at_its_own_noise_levels(more, random_pipeline, source, tmp_path) -> None:
    own = [word for word in words_of(random_pipeline, source) if not word.startswith("sampler.plan")]
    trainer = trainer_of(tmp_path / "run", [*own, "objective.old=null", *more], "awm")
    _, e = trainer.collect(0)
    objective = trainer.objective
    errors = []
    for level in objective.drawn_levels(e):  # type: ignore[attr-defined]
        trainer.task.policy.bind(e.plan, {level.step: level.sigma} if more else None)  # type: ignore[attr-defined]
        with torch.no_grad():
            errors += [error_by_hand(trainer, e, p, level.step, level.address, level.sigma) for p in range(3)]
    assert trainer.update(e, torch.zeros(len(e.rollout.parent)))["data"] == pytest.approx(
        float(torch.stack(errors).mean()), rel=1e-5
    )


def test_the_policy_learns_the_images(random_pipeline: Path, source: Path, tmp_path: Path) -> None:
    words = ["penalties.data.weight=1.0", "optimizer.learning_rate=0.01", "optimizer.schedule=constant"]
    trainer = trainer_of(tmp_path / "run", words_of(random_pipeline, source, *words))
    found = [trainer.iterate(k)["data"] for k in range(12)]
    assert sum(found[-3:]) < 0.9 * sum(found[:3])


def test_chunks_have_the_images_of_all_prompts(random_pipeline: Path, source: Path, tmp_path: Path) -> None:
    words = words_of(random_pipeline, source, "rollout.batch=2", "rollout.decode_batch=2")
    whole, parts = (trainer_of(tmp_path / f"{k}", [*words, *more]) for k, more in enumerate([[], ["rollout.chunk=1"]]))
    one, two = whole.collect(0)[1], parts.collect(0)[1]
    assert torch.equal(one.beside.x, two.beside.x)
    assert one.beside.prompts == two.beside.prompts
    assert whole.iterate(0)["data"] == parts.iterate(0)["data"]


def test_a_run_resumes_to_the_last_bit(random_pipeline: Path, source: Path, tmp_path: Path) -> None:
    more = ["run.iterations=2", "run.checkpoint_every=1", "model.release_text_encoders=true", "optimizer.updates=2"]
    same_when_resumed("ddrl", words_of(random_pipeline, source, *more), tmp_path)


def test_a_run_on_two_processes_equals_a_run_on_one(random_pipeline: Path, source: Path, tmp_path: Path) -> None:
    # A batch holds the same states on one process and on two.
    more = words_of(random_pipeline, source, "rollout.batch=2", "rollout.decode_batch=1", "run.iterations=2")
    ranks.run_all(
        [
            {"words": ["train", "ddrl", "--out", str(tmp_path / name), *more], "count": count, "log": log}
            for name, count, log in (("one", 1, str(tmp_path / "log1")), ("two", 2, str(tmp_path / "log2")))
        ]
    )
    one, two = (
        [line for line in RunFolder.open(tmp_path / name).read_metrics() if "loss" in line] for name in ("one", "two")
    )
    assert len(one) == 2
    assert [line["data"] for line in two] == pytest.approx([line["data"] for line in one], rel=1e-5)
    assert [line["grad_norm"] for line in two] == pytest.approx([line["grad_norm"] for line in one], rel=1e-4)
    assert all(line["ratio/first_error"] == 0.0 for line in two)


def test_images_get_the_size_of_the_prompt_that_they_stand_beside(random_pipeline, source, tmp_path) -> None:
    prompts = tmp_path / "sized.jsonl"
    sizes = [(32, 64), (64, 64), (64, 32)]
    rows = [{"prompt": f"a red star {k}", "height": high, "width": wide} for k, (high, wide) in enumerate(sizes)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = trainer_of(tmp_path / "run", words_of(random_pipeline, source, f"data.train={prompts}"))
    _, e = trainer.collect(0)
    assert len(e.rounds) == 3
    assert all(part.beside.x.shape[1:] == part.rollout.x.shape[1:] for part in e.rounds)
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["data"] > 0


def test_rounds_of_a_budget_have_images_of_their_own(random_pipeline, source, tmp_path) -> None:
    budget = "rollout={prompts: 3, group: 2, batch: 4, budget: {choice: variance, rounds: 2, most: 4}}"
    trainer = trainer_of(tmp_path / "run", words_of(random_pipeline, source, budget))
    parts = trainer.collector.sample(0).experience.rounds
    assert len(parts) == 2
    assert all(len(part.beside.prompts) == len(part.prompts) for part in parts)
    assert trainer.iterate(0)["ratio/first_error"] == 0.0


@pytest.mark.slow
def test_the_picture_that_an_editor_is_shown_is_not_the_image_that_it_learns(tmp_path: Path) -> None:
    """A pipeline that edits is shown the picture of the caption, and learns the other picture."""
    tiny = TINY["FluxKontextPipeline"]
    tiny.fresh().save_pretrained(tmp_path / "model")
    for name in ("shown", "made"):
        picture(tmp_path / f"{name}.png", len(name), (64, 64))
    file = tmp_path / "edits.jsonl"
    file.write_text(json.dumps({"prompt": "make it red", "image": "shown.png", "made": "made.png"}) + "\n")
    call = json.dumps({name: value for name, value in tiny.call.items() if isinstance(value, (int, float))})
    more = [f"data.train={file}", "rollout={prompts: 1, group: 2, batch: 2}", "penalties.data.column=made"]
    trainer = trainer_of(tmp_path / "run", words_of(tmp_path / "model", file, *more, f"model.call={call}"))
    _, e = trainer.collect(0)
    assert [text.call.keys() for text in e.beside.prompts] == [{"image"}]
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["data"] > 0


@pytest.mark.slow
def test_a_pipeline_that_may_be_shown_a_picture_is_not_shown_the_one_that_it_learns(tmp_path: Path) -> None:
    tiny = TINY["FluxKontextPipeline"]
    tiny.fresh().save_pretrained(tmp_path / "model")
    picture(tmp_path / "made.png", 1, (64, 64))
    file = tmp_path / "metadata.jsonl"
    file.write_text(json.dumps({"prompt": "a star", "image_file_name": "made.png", "tag": 1}) + "\n")
    (tmp_path / "prompts.txt").write_text("a circle\n")
    call = json.dumps({name: value for name, value in tiny.call.items() if isinstance(value, (int, float))})
    more = [f"data.train={tmp_path}/prompts.txt", "rollout={prompts: 1, group: 2, batch: 2}"]
    more += [f"model.call={call}", "penalties.data.column=image"]
    trainer = trainer_of(tmp_path / "run", words_of(tmp_path / "model", file, *more))
    [row] = trainer.task.images  # type: ignore[attr-defined]
    assert (row.shown, dict(row.columns)) == ((), {"tag": 1})
    assert trainer.collect(0)[1].beside.prompts == ("a star",)
    assert trainer.iterate(0)["data"] > 0


@pytest.mark.slow
def test_an_editor_that_needs_a_picture_is_not_asked_about_a_caption_without_one(tmp_path: Path) -> None:
    """The class has no picture as a default, and fails without one. The training prompts have theirs."""
    tiny = TINY["QwenImageEditPlusPipeline"]
    tiny.fresh().save_pretrained(tmp_path / "model")
    for name in ("shown", "made"):
        picture(tmp_path / f"{name}.png", len(name), (64, 64))
    (tmp_path / "edits.jsonl").write_text(json.dumps({"prompt": "make it red", "image": "shown.png"}) + "\n")
    file = tmp_path / "made.jsonl"
    file.write_text(json.dumps({"prompt": "a star", "made": "made.png"}) + "\n")
    call = json.dumps({name: value for name, value in tiny.call.items() if isinstance(value, (int, float, str))})
    more = [f"data.train={tmp_path}/edits.jsonl", "rollout={prompts: 1, group: 2, batch: 2}", f"model.call={call}"]
    with pytest.raises(PipelineError) as caught:
        trainer_of(tmp_path / "run", words_of(tmp_path / "model", file, *more, "penalties.data.column=made"))
    assert str(caught.value).startswith(f"{file}, line 1: QwenImageEditPlusPipeline cannot be called: ")
    assert str(caught.value).endswith("Its call takes pictures, and none is given for image")


def test_an_objective_of_penalties_alone_may_learn_images(random_pipeline, source, tmp_path) -> None:
    own = [word for word in words_of(random_pipeline, source) if not word.startswith("sampler.plan")]
    trainer = trainer_of(tmp_path / "run", [*own, "model.teachers=[]"], "diffusion_opd")
    record = trainer.iterate(0)
    assert record["loss"] == pytest.approx(0.5 * record["data"], rel=1e-5)
    assert record["data"] > 0


def test_images_may_be_learned_beside_a_pull_along_differences(random_pipeline, source, tmp_path) -> None:
    """The pulls of a pair are opposite, so at rest the penalty is the whole loss."""
    record = trainer_of(tmp_path / "run", words_of(random_pipeline, source), "fdfo").iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["loss"] == pytest.approx(0.5 * record["data"], rel=1e-4)
    assert record["data"] > 0


@pytest.mark.parametrize("name", ["draft", "refl"])
def test_images_may_be_learned_beside_the_gradient_of_a_reward(name, random_pipeline, source, tmp_path) -> None:
    """ReFL trains on given images beside the reward."""
    own = [word for word in words_of(random_pipeline, source) if not word.startswith(("rewards", "sampler.plan"))]
    window = f"sampler.plan.window={{name: {'last' if name == 'draft' else 'random'}, size: 2}}"
    trainer = trainer_of(tmp_path / "run", [*own, window, "rewards=[{name: proxy}]"], name)
    record = trainer.iterate(0)
    assert record["loss"] == pytest.approx(0.5 * record["data"] - record["reward/proxy"], rel=0.2)
    assert record["data"] > 0
    alone = trainer_of(tmp_path / "alone", [*own, window, "rewards=[{name: proxy}]", "penalties=[]"], name).iterate(0)
    assert record["loss"] == pytest.approx(0.5 * record["data"] + alone["loss"], rel=1e-4)
    assert record["grad_norm"] != pytest.approx(alone["grad_norm"], rel=1e-3)


# -- what is refused -----------------------------------------------------------------------------------------------


def test_faults_of_the_source_are_told_before_a_model_is_loaded(source: Path, tmp_path: Path) -> None:
    def said(*words: str, name: str = "ddrl") -> list[str]:
        return check(load_recipe(name, list(words))).texts("fault", "needed")

    own = f"penalties=[{{name: data, source: '{source}', weight: 0.1}}]"
    assert said(own, "penalties.data.column=file_name") == []
    [absent] = said(own)
    assert "there is no column 'image' of images (it has file_name); write the column" in absent
    assert "as penalties.data.column" in absent
    [gone] = said("penalties.data.source=nowhere.jsonl")
    assert gone.startswith("no prompt file 'nowhere.jsonl' (in ")
    assert gone.endswith("give the path of a prompt file with a column of images as penalties.data.source")
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "a star", "image": "no.png"}\n')
    [lost] = said(f"penalties.data.source={file}", "penalties.data.column=image")
    assert "line 1" in lost
    assert "no.png does not exist" in lost
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "image": str(source.parent / "0.png")}))
    [talk] = said(f"penalties.data.source={file}", "penalties.data.column=image")
    assert "is a conversation" in talk


def test_samples_of_another_kind_are_refused_before_the_run(random_pipeline: Path, source: Path, tmp_path: Path):
    file = tmp_path / "frames.jsonl"
    picture(tmp_path / "frames.png", 1, (128, 64))
    file.write_text(json.dumps({"prompt": "a star", "image": "frames.png", "image_frames": 2}) + "\n")
    words = words_of(random_pipeline, source, f"penalties.data.source={file}", "penalties.data.column=image")
    with pytest.raises(ValueError, match="the pipeline makes pictures, and the data give a video of 2 frames"):
        trainer_of(tmp_path / "run", words)
