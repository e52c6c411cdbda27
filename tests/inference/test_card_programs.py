"""The program in a model card, run as it stands, loads the result and makes a sample with the trained weights."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, QwenImageTransformer2DModel
from PIL import Image

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.inference.exporting import export_weights
from flowgrpo.inference.text_inference import open_language_model
from flowgrpo.pipelines.conformance.conditioned import picture
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.training.folder.model_card import CARD, FORMER, former_card, placed_card
from flowgrpo.training.session import start
from tests.training import family_runs
from tests.training.test_changing import resumed

pytestmark = pytest.mark.slow

IMAGES = [
    "rollout={prompts: 2, group: 4, batch: 8, decode_batch: 8}", "sampler.steps=4",
    "evaluate={prompts: 3, seeds: 1, steps: 4}", "optimizer.learning_rate=0.02",
    "run={iterations: 2, checkpoint_every: 1, keep: 3}",
]  # fmt: skip


def trained(recipe: str, folder: Path, *words: str) -> Path:
    start(load_recipe(recipe, list(words)), folder).trainer(Silent()).train()
    return folder


def performed(folder: Path, monkeypatch: pytest.MonkeyPatch, place: Path | None = None) -> dict[str, Any]:
    """The names that the card's program leaves behind, run as it stands: in the folder of the result, or in `place`."""
    found = re.search(r"```python\n(.*?)```", (folder / CARD).read_text(), re.DOTALL)
    assert found is not None
    monkeypatch.chdir(place or folder)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(found[1], "card", "exec"), names)
    return names


def without_the_adapter(pipe: DiffusionPipeline, like: Image.Image, **call: Any) -> bool:
    """Whether the same call of the pipeline without its adapter makes another image."""
    pipe.unload_lora_weights()
    torch.manual_seed(0)
    return pipe(prompt="a prompt", **call).images[0].tobytes() != like.tobytes()


def test_of_a_lora_of_the_embedded_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained("default", tmp_path / "run", *IMAGES, "model.train=lora")
    names = performed(run / "lora", monkeypatch)
    saved = Image.open(run / "lora" / "sample.png")
    assert saved.tobytes() == names["sample"].tobytes()
    call = {"height": 64, "width": 64, "guidance_scale": 1.0, "max_sequence_length": 0, "num_inference_steps": 4}
    assert without_the_adapter(names["pipe"], names["sample"], **call)


def test_of_a_lora_of_a_folder(random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"model.path={random_pipeline}", *IMAGES, "objective.times=1", "model.train=lora"]
    run = trained("default", tmp_path / "run", *words)
    card = (run / "lora" / CARD).read_text()
    assert f'BASE = "{random_pipeline}"  # the folder of the base model' in card
    names = performed(run / "lora", monkeypatch, random_pipeline.parent)
    assert names["sample"].size == (64, 64)


def test_of_relative_paths_it_runs_from_any_folder(
    random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(random_pipeline.parent)
    words = [f"model.path={random_pipeline.name}", *IMAGES, "objective.times=1", "model.train=lora"]
    run = trained("default", Path("run of today"), *words).resolve()
    export_weights("run of today", Path("mine"))
    (tmp_path / "elsewhere").mkdir()
    first = performed(run / "lora", monkeypatch, tmp_path / "elsewhere")["sample"]
    assert performed(random_pipeline.parent / "mine", monkeypatch, tmp_path)["sample"].tobytes() == first.tobytes()
    # The copy does not need the run.
    assert str(run) not in (random_pipeline.parent / "mine" / CARD).read_text()
    assert former_card(random_pipeline.parent / "mine") is None


def test_of_a_whole_pipeline(random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"model.path={random_pipeline}", *IMAGES, "optimizer.learning_rate=0.001"]
    run = trained("default", tmp_path / "run", *words)
    names = performed(run / "pipeline", monkeypatch)
    assert Image.open(run / "pipeline" / "sample.png").size == names["sample"].size == (64, 64)


@pytest.mark.parametrize("video", [True, False])
def test_a_card_says_whether_samples_are_videos(video: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "WanPipeline" if video else "FluxPipeline"
    family_runs.load_as_the_kit_does(name, monkeypatch)
    card = (family_runs.trained(name, tmp_path, "lora") / "lora" / CARD).read_text()
    assert f"pipeline_tag: text-to-{'video' if video else 'image'}\n" in card
    assert ("export_to_video" in card) == video


def test_of_a_class_whose_call_begins_with_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "WanImageToVideoPipeline"
    words = family_runs.overrides(name, tmp_path, "lora")
    picture(32).save(tmp_path / "picture.png")
    rows = [{"prompt": text, "image": "picture.png"} for text in family_runs.PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = {**TINY[name].call, "negative_prompt": "blue"}
    del call["image"]
    data = f"data={{train: {tmp_path / 'prompts.jsonl'}, heldout: {tmp_path / 'prompts.jsonl'}}}"
    run = trained("mixgrpo_flash_guard", tmp_path / "run", *words, data, f"model.call={json.dumps(call)}")
    own = (run / "lora" / CARD).read_text()
    export_weights(str(run), tmp_path / "early", checkpoint="latest")
    export_weights(str(run), tmp_path / "merged", merge=True)
    assert (tmp_path / "early" / CARD).read_text() == placed_card(own, str(tmp_path / "early"))
    for folder in (run / "lora", tmp_path / "merged"):
        card = (folder / CARD).read_text()
        assert "pipeline_tag: image-to-video\n" in card
        assert "The run had a `negative_prompt`" in card
        frames = performed(folder, monkeypatch, tmp_path)["sample"]
        assert np.asarray(frames).shape == (5, 32, 32, 3)


def test_of_a_class_that_guides_only_with_a_negative_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "QwenImagePipeline"
    call = {**TINY[name].call, "true_cfg_scale": 3.0, "negative_prompt": "a blue square"}
    words = [*family_runs.overrides(name, tmp_path, "lora"), f"model.call={json.dumps(call)}"]
    run = trained("mixgrpo_flash_guard", tmp_path / "run", *words)
    calls: list[Any] = []
    forward = QwenImageTransformer2DModel.forward
    monkeypatch.setattr(
        QwenImageTransformer2DModel, "forward", lambda *given, **named: calls.append(1) or forward(*given, **named)
    )
    names = performed(run / "lora", monkeypatch, tmp_path)
    # Two evaluations a step: with the prompt and with the negative prompt.
    assert len(calls) == 2 * TINY[name].steps
    assert "a blue square" not in (run / "lora" / CARD).read_text()
    guided = {**call, "negative_prompt": "", "num_inference_steps": TINY[name].steps}
    torch.manual_seed(0)
    assert names["pipe"](prompt="a prompt", **guided).images[0].tobytes() == names["sample"].tobytes()


@pytest.mark.parametrize(("train", "result"), [("lora", "lora"), ("full", "model")])
def test_of_text(train: str, result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = [
        f"model.train={train}", "rollout={prompts: 2, group: 4, batch: 8, tokens: 60}", "evaluate.prompts=3",
        "run={iterations: 2, checkpoint_every: 1}", "optimizer={learning_rate: 0.01, warmup: 0}",
    ]  # fmt: skip
    run = trained("text", tmp_path / "run", *words)
    capsys.readouterr()
    names = performed(run / result, monkeypatch)
    language = open_language_model(str(run), load_recipe(run / "config.yaml"))  # type: ignore[arg-type]
    inputs = {name: value.to(language.model.device) for name, value in names["inputs"].items()}
    expected = language.model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=6, do_sample=False
    )
    assert torch.equal(names["output"], expected.cpu())
    assert capsys.readouterr().out == names["tokenizer"].decode(expected[0, -6:], skip_special_tokens=True) + "\n"


def test_an_export_has_a_card_of_its_weights(small_text: list[str], tmp_path: Path) -> None:
    run = trained("text", tmp_path / "run", *small_text, "evaluate.every=2", "run.keep=9")
    result = (run / "lora" / CARD).read_text()
    export_weights(str(run), tmp_path / "result")
    export_weights(str(run), tmp_path / "last", checkpoint="latest")
    export_weights(str(run), tmp_path / "early", checkpoint="2")
    for name in ("result", "last"):
        assert (tmp_path / name / CARD).read_text() == placed_card(result, str(tmp_path / name))
    early = (tmp_path / "early" / CARD).read_text()
    assert "| iterations | 2 of 4" in early
    assert "| iterations | 4 of 4" in result
    # A run of an older version has no card.
    (run / "lora" / CARD).unlink()
    export_weights(str(run), tmp_path / "again")
    assert "| iterations | 4 of 4" in (tmp_path / "again" / CARD).read_text()
    assert not (run / "lora" / CARD).exists()


def test_a_card_says_which_weights_are_the_result(small_text: list[str], tmp_path: Path) -> None:
    # The scores of the tiny reward stay those of the untrained model, so its evaluation is the best.
    words = [*small_text, "evaluate={every: 2, prompts: 5, results: best}", "optimizer.learning_rate=1e-9"]
    run = trained("text", tmp_path / "run", *words)
    card = (run / "lora" / CARD).read_text()
    assert "| iterations | 0 of 4" in card
    (run / "lora" / CARD).unlink()
    export_weights(str(run), tmp_path / "out")
    assert (tmp_path / "out" / CARD).read_text() == placed_card(card, str(tmp_path / "out"))


@pytest.mark.parametrize("results", ["last", "best"])
def test_a_longer_run_keeps_what_a_person_wrote(small_text: list[str], tmp_path: Path, results: str) -> None:
    words = [*small_text, f"evaluate.results={results}", "run={iterations: 2, checkpoint_every: 1}"]
    run = trained("text", tmp_path / "run", *words)
    mine = (run / "lora" / CARD).read_text().replace("## Use", "My words.\n\n## Use")
    (run / "lora" / CARD).write_text(mine)
    for length in (3, 4):
        resumed(run, f"run.iterations={length}")
        assert (run / "lora" / FORMER).read_text() == mine
        assert f"of {length}, each with" in (run / "lora" / CARD).read_text()
        assert "My words" not in (run / "lora" / CARD).read_text()
