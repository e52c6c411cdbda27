"""`evaluate.call`: evaluations call the pipeline with other arguments than rollouts."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_image_recipe, load_recipe
from flowgrpo.inference.model_recipes import evaluation_recipe, image_recipe
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.training.checking import check
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.planning import steps_of
from flowgrpo.training.result_card import _call
from flowgrpo.training.session import Session, start
from flowgrpo.training.trainer import Trainer

GUIDED = "evaluate.call={guidance_scale: 3.0}"


def trainer_of(folder: Path, *words: str) -> Trainer:
    return Session(load_recipe("mixgrpo_guard", words), RunFolder.create(folder, "")).trainer(Silent())


def shown(trainer: Trainer) -> torch.Tensor:
    """The images of the held-out prompts."""
    rows = trainer.data.heldout[:3]
    images = trainer.task.evaluation(rows, range(len(rows)), trainer.clock).samples
    assert isinstance(images, torch.Tensor)
    return images


@pytest.mark.slow
@pytest.mark.parametrize("released", ["true", "false"])
def test_evaluations_have_their_own_guidance_and_rollouts_do_not(released, small: list[str], tmp_path: Path) -> None:
    words = (*small, f"model.release_text_encoders={released}")
    trainer = trainer_of(tmp_path / "apart", *words, GUIDED)
    plain = trainer_of(tmp_path / "plain", *words)
    guided = trainer_of(tmp_path / "guided", *words, "model.call={guidance_scale: 3.0}")
    assert torch.equal(shown(trainer), shown(guided))
    assert not torch.equal(shown(trainer), shown(plain))
    (_, own), (_, other) = trainer.collect(0), plain.collect(0)
    assert torch.equal(own.samples, other.samples)
    assert trainer.iterate(0)["ratio/first_error"] == 0.0
    assert torch.equal(shown(trainer), shown(trainer))


@pytest.mark.slow
def test_evaluations_may_be_larger_than_rollouts(small: list[str], tmp_path: Path) -> None:
    """A held-out prompt of another size keeps its size. A prompt with the size of the evaluations has no other size."""
    heldout = tmp_path / "heldout.jsonl"
    rows = [{"prompt": "a red circle"}, {"prompt": "a blue square", "height": 64, "width": 64},
            {"prompt": "a green circle", "height": 32, "width": 32}]  # fmt: skip
    heldout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = "model.call={height: 32, width: 32}", "evaluate.call={height: 64, width: 64}"
    words = (
        *small,
        *sizes,
        f"data.heldout={heldout}",
        "evaluate.rewards=null",
        "rewards=[{name: jpeg_compressibility}]",
    )
    trainer = start(load_recipe("mixgrpo_guard", words), tmp_path / "run").trainer(Silent())
    assert [row.size for row in trainer.data.heldout] == [None, None, (32, 32)]
    assert trainer.collect(0)[1].samples.shape[-2:] == (32, 32)
    found = trainer.task.evaluation(trainer.data.heldout, range(3), trainer.clock)
    assert [tuple(image.shape[-2:]) for image in found.samples] == 4 * [(64, 64)] + 2 * [(32, 32)]
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval/jpeg_compressibility" in line for line in lines) > 1


def test_a_fault_of_an_evaluation_s_call_is_named(random_pipeline: Path) -> None:
    path = f"model.path={random_pipeline}"
    [fault] = check(load_recipe("mixgrpo_guard", [path, "evaluate.call={guidance_scal: 2}"])).texts("fault")
    assert fault.startswith("evaluate.call.guidance_scal: ")
    assert "did you mean 'guidance_scale'" in fault
    [fault] = check(load_recipe("mixgrpo_guard", [path, "evaluate.call={height: 33}"])).texts("fault")
    assert fault.startswith("evaluate.call.height")


@pytest.mark.slow
def test_evaluations_may_show_a_picture_of_their_own(tmp_path: Path) -> None:
    """The picture of all evaluations is read before the run, and held-out prompts are evaluated with it."""
    tiny = TINY["FluxKontextPipeline"]
    tiny.fresh().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a star\na dot\n")
    image = Image.effect_noise((64, 64), 60).convert("RGB")
    image.save(tmp_path / "shown.png")
    call = {name: value for name, value in tiny.call.items() if isinstance(value, (int, float))}
    words = [
        f"model.path={tmp_path / 'model'}", f"model.call={json.dumps(call)}", f"data.train={tmp_path}/prompts.txt",
        f"data.heldout={tmp_path}/prompts.txt", "evaluate={prompts: 2, rewards: null}", "sampler.steps=3",
        "sampler.plan.window={name: frozen, size: 1, start: 0}", "rollout={prompts: 1, group: 2, batch: 2}",
        "rewards=[{name: jpeg_compressibility}]",
    ]  # fmt: skip
    [fault] = check(load_recipe("mixgrpo_guard", [*words, "evaluate.call={image: gone.png}"])).texts("fault")
    assert fault.startswith("evaluate.call.image: the picture gone.png does not exist")
    own, plain = (
        trainer_of(tmp_path / name, *words, *more)
        for name, more in (("own", [f"evaluate.call={{image: {tmp_path}/shown.png}}"]), ("plain", []))
    )
    assert not torch.equal(shown(own), shown(plain))
    assert torch.equal(own.collect(0)[1].samples, plain.collect(0)[1].samples)
    # The reference and a teacher may be shown a picture, too. Then they differ from the model from the start.
    kl = "penalties=[{name: kl, weight: 0.1}]"
    [fault] = check(load_recipe("mixgrpo_guard", [*words, kl, "model.reference_call={image: gone.png}"])).texts("fault")
    assert fault.startswith("model.reference_call.image: the picture gone.png does not exist")
    reference = [kl, f"model.reference_call={{image: {tmp_path}/shown.png}}"]
    assert trainer_of(tmp_path / "reference", *words, *reference).iterate(0)["kl"] > 0
    taught = ["objective=visited", "penalties=[{name: taught, weight: 1.0}]", "sampler.plan={name: ode, window: all}"]
    taught += [f"model.teachers=[{{call: {{image: {tmp_path}/shown.png}}}}]"]
    assert trainer_of(tmp_path / "taught", *words, *taught).iterate(0)["taught"] > 0


def test_outside_a_run_images_are_made_as_in_its_evaluations(small, random_pipeline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    words = [*small, "model.call={guidance_scale: 1.0, max_sequence_length: 16}", "evaluate.call={guidance_scale: 3}"]
    (run / "config.yaml").write_text(dump_recipe(load_recipe("mixgrpo_guard", words)))
    for found in (image_recipe(str(run)), evaluation_recipe(str(run), None, [])):
        assert found.model.call == {"guidance_scale": 3, "max_sequence_length": 16}
        assert found.evaluate.call == {}
    # What a command line asks for comes first, in either section.
    for word in ("model.call.guidance_scale=2", "evaluate.call.guidance_scale=2"):
        assert image_recipe(str(run), [word]).model.call == {"guidance_scale": 2, "max_sequence_length": 16}
    assert image_recipe(str(run), ["model.call={guidance_scale: 2}"]).model.call == {"guidance_scale": 2}
    word = f"model={{path: {random_pipeline}, call: {{guidance_scale: 2}}}}"
    assert image_recipe(str(run), [word]).model.call == {"guidance_scale": 2}


def test_prompts_and_rewards_of_another_recipe_are_shown_as_the_run_shows_its_own(small, tmp_path: Path) -> None:
    """The guidance and the steps of the run's evaluations stay, unless the other recipe names its own."""
    run = tmp_path / "run"
    run.mkdir()
    words = [*small, "model.call={guidance_scale: 1.0}", "evaluate={call: {guidance_scale: 3}, steps: 7}"]
    (run / "config.yaml").write_text(dump_recipe(load_recipe("mixgrpo_guard", words)))
    for more, call, steps in (
        ([], {"guidance_scale": 3}, 7),
        (["evaluate.call={max_sequence_length: 8}"], {"guidance_scale": 3, "max_sequence_length": 8}, 7),
        (["evaluate={call: {guidance_scale: 2}, steps: 9}"], {"guidance_scale": 2}, 9),
        (["model.call.guidance_scale=4"], {"guidance_scale": 4}, 7),
    ):
        found = evaluation_recipe(str(run), "default", ["evaluate.steps=null", *more, "evaluate.seeds=2"])
        assert (found.model.call, found.evaluate.call, steps_of(found, evaluation=True)) == (call, {}, steps)
        assert found.evaluate.seeds == 2


def test_the_card_shows_the_call_of_evaluations(random_pipeline: Path) -> None:
    words = [f"model.path={random_pipeline}", "model.call={guidance_scale: 1.0}", "evaluate.call={guidance_scale: 3.0}"]
    assert _call(load_recipe("mixgrpo_guard", words))["guidance_scale"] == 3.0


def test_a_recipe_whose_evaluations_call_alike_is_itself() -> None:
    recipe = load_image_recipe("mixgrpo_guard")
    assert recipe.as_evaluated is recipe
    words = ["evaluate.call={guidance_scale: 3.0}", "model.reference_call={guidance_scale: 3.0}"]
    assert load_image_recipe("mixgrpo_guard", words).other_calls == [{"guidance_scale": 3.0}]
