"""The trained weights make a share of the steps, and the model before training makes the last ones."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from flowgrpo.configs.load import load_image_recipe
from flowgrpo.core.addressing import address
from flowgrpo.inference.evaluation import evaluate_model, evaluate_shares, summaries
from flowgrpo.inference.image_samples import sample_images
from flowgrpo.inference.model_recipes import evaluation_recipe, image_recipe
from flowgrpo.inference.opening import open_images
from flowgrpo.inference.shares import share_lines
from flowgrpo.parts.traits import keeps_base
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.training.evaluating import Scored
from flowgrpo.training.planning import base_from
from flowgrpo.training.recipe_launches import check_shards
from tests.conftest import Command
from tests.inference.test_inference import shown
from tests.training.family_runs import PROMPTS, load_as_the_kit_does, scores_of, trained
from tests.training.test_lora_start import adapter_file, lora


def means(found: dict[str, tuple[float, float, int]]) -> dict[str, float]:
    return {name: mean for name, (mean, _, _) in found.items()}


def own_recipe(run: Path) -> Any:
    return evaluation_recipe(str(run), None, [])


def require_ends(run: Path, **options: Any) -> None:
    """Share 1 is the trained model and share 0 the model before training, to the last bit. A half is neither."""
    recipe = own_recipe(run)
    whole, half, none = (means(summaries(one)) for one in evaluate_shares(str(run), recipe, [1, 0.5, 0], **options))
    assert whole == means(evaluate_model(str(run), recipe, **options))
    assert none == means(evaluate_model(str(run), recipe, base=True))
    assert len({*whole.values(), *half.values(), *none.values()}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train"),
    [("QwenImagePipeline", "full"), ("WanPipeline, 2.2 with two experts", "lora")],
)
def test_all_steps_and_no_step_are_the_two_models(
    name: str, train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_as_the_kit_does(name, monkeypatch)
    run = trained(name, tmp_path, train)
    require_ends(run, checkpoint="latest")
    if train == "full":
        # The result is a whole pipeline, and a checkpoint is loaded into the base.
        require_ends(run)


@pytest.mark.slow
def test_after_another_lora_the_last_steps_are_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_the_kit_does("FluxPipeline", monkeypatch)
    run = trained("FluxPipeline", tmp_path, "lora", lora(adapter_file(tmp_path / "start")))
    require_ends(run)
    shutil.rmtree(tmp_path / "start")
    evaluate_shares(str(run), own_recipe(run), [1])
    with pytest.raises(ValueError, match=r"the model before training, .*start.*, makes the last steps, and cannot be"):
        evaluate_shares(str(run), own_recipe(run), [1, 0.5])


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_share_is_that_of_plain_diffusers(train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_the_kit_does("FluxPipeline", monkeypatch)
    run, tiny = trained("FluxPipeline", tmp_path, train), TINY["FluxPipeline"]
    share = 1 / tiny.steps
    words = [f"evaluate.trained_share={share}"]
    [path] = sample_images(str(run), ["a star"], tmp_path / "samples", seed=4, overrides=words)
    shape = open_images(str(run), image_recipe(str(run))).evaluator(PROMPTS).policy.denoiser.probe.latent_shape
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "pipeline" if train == "lora" else run / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    if train == "lora":
        pipe.load_lora_weights(run / "lora")
    base = DiffusionPipeline.from_pretrained(tmp_path / "pipeline").transformer

    def switch(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0 and train == "lora":
            pipe.disable_lora()
        elif step == 0:
            pipe.transformer = base
        return tensors

    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(address(4, 0)))
    call = {"prompt": ["a star"], "latents": latents, "num_inference_steps": tiny.steps, "output_type": "np"}
    plain = pipe(**call, callback_on_step_end=switch, **tiny.call)[0]
    made = shown(path).astype(int)
    assert abs((plain[0] * 255).round().astype(int) - made).max() <= 1
    [whole] = sample_images(str(run), ["a star"], tmp_path / "whole", seed=4)
    assert not np.array_equal(shown(whole), made)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_run_evaluates_by_the_share_of_its_recipe(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With averaged weights too; the base is the model before training, whatever penalties compare with."""
    load_as_the_kit_does("FluxPipeline", monkeypatch)
    changes = (
        "evaluate.trained_share=0.5", "optimizer.ema={decay: 0.5}", "penalties.kl.weight=0.5", "reference={decay: 0}",
    )  # fmt: skip
    run = trained("FluxPipeline", tmp_path, train, *changes)
    half = means(evaluate_model(str(run), own_recipe(run)))
    assert half == scores_of(run)
    [whole] = evaluate_shares(str(run), own_recipe(run), [1])
    assert means(summaries(whole)) != half
    # The base alone has no share, and its first evaluation is the same as without one.
    assert means(evaluate_model(str(run), own_recipe(run), base=True)) == scores_of(run, 0)
    # Another recipe says how images are made only where it has the key.
    assert evaluation_recipe(str(run), "default", []).evaluate.trained_share == 0.5
    assert evaluation_recipe(str(run), "default", ["evaluate.trained_share=1"]).evaluate.trained_share == 1


@pytest.mark.slow
def test_the_base_of_whole_weights_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_the_kit_does("FluxPipeline", monkeypatch)
    run = trained("FluxPipeline", tmp_path, "full")
    shutil.rmtree(tmp_path / "pipeline")
    evaluate_shares(str(run), own_recipe(run), [1])
    with pytest.raises(ValueError, match=r"the model before training, .*, makes the last steps, and cannot be loaded"):
        evaluate_shares(str(run), own_recipe(run), [1, 0.5])


@pytest.mark.slow
def test_the_command_prints_a_table(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_the_kit_does("FluxPipeline", monkeypatch)
    run = trained("FluxPipeline", tmp_path)
    words = ("evaluate", str(run), "--trust", "--trained-share", "1,0.5,0", "--out", "kept")
    status, output, errors = command(*words)
    assert status == 0, errors
    lines = output.splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith("share"))
    assert [line.split()[:4] for line in lines[head + 1 : head + 4]] == [
        ["1", "3", "of", "3"], ["0.5", "2", "of", "3"], ["0", "0", "of", "3"]
    ]  # fmt: skip
    assert lines[-2:] == ["in brackets: the difference from share 1", "written to kept"]
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"trained-1", "trained-0.5", "trained-0"}
    assert len((tmp_path / "kept" / "trained-0.5" / "index.jsonl").read_text().splitlines()) == 6
    status, _, errors = command(*words[:-1], str(run))
    assert (status, "so it is a run folder" in " ".join(errors.split())) == (1, True)
    assert not list(run.glob("trained-*"))
    status, output, _ = command("sample", "a star", "--model", str(run), "--trust", "--trained-share", "0.5")
    assert (status, "3 steps, the first 2 by the trained weights, batch 4" in output) == (0, True)
    status, _, errors = command("sample", "a star", "--model", str(run), "--base", "--trained-share", "0.5")
    assert (status, "write --trained-share 0, or leave --base out" in " ".join(errors.split())) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evaluate", "scenes", "--trained-share", "0.5"), "scenes is not a run; leave --trained-share or"),
        (("evaluate", "scenes", "--trained-share", "0.5;1"), "write numbers from 0 to 1 with commas between them"),
        (("evaluate", "scenes", "--trained-share", "80"), "write numbers from 0 to 1 with commas between them"),
        (("evaluate", "scenes", "--trained-share", "nan"), "write numbers from 0 to 1 with commas between them"),
        (("evaluate", "scenes", "--trained-share", "1,0.5,1"), "--trained-share has 1 more than once"),
        (
            ("evaluate", "scenes", "--trained-share", "0.1234567,0.1234568"),
            "--trained-share has 0.123457 more than once",
        ),
        (("evaluate", "scenes", "--trained-share", "0,-0"), "--trained-share has 0 more than once"),
        (("evaluate", "scenes", "evaluate={trained_share: 0.5}"), "scenes is not a run; leave --trained-share or"),
        (("evaluate", "scenes", "evaluate.trained_share=0.5"), "scenes is not a run; leave --trained-share or"),
        (("sample", "a star", "--set", "evaluate.trained_share=0.5"), "scenes is not a run; leave --trained-share or"),
        (("sample", "a star", "--trained-share", "0.5"), "scenes is not a run; leave --trained-share or"),
        (("sample", "1+1=", "--model", "arithmetic", "--trained-share", "1"), "--trained-share is not for text"),
    ],
)
def test_a_share_without_two_models_is_refused(command: Command, words: tuple[str, ...], said: str) -> None:
    status, _, errors = command(*words)
    assert (status, said in " ".join(errors.split())) == (1, True), errors


def test_the_difference_is_of_the_same_samples() -> None:
    """Two prompts of two samples each. The second reward does not apply to the second prompt."""
    owners, recipe = torch.tensor([0, 0, 1, 1]), load_image_recipe("mixgrpo", [])
    first = Scored(("a", "b"), owners, torch.tensor([[1.0, 1.0], [3.0, 1.0], [5.0, math.nan], [7.0, math.nan]]))
    other = Scored(("a", "b"), owners, torch.tensor([[2.0, 2.0], [4.0, 4.0], [8.0, math.nan], [10.0, math.nan]]))
    head, *lines = share_lines(recipe, [1, 0.75], [first, other])
    assert head.split() == ["share", "steps", "a", "b"]
    # Means of prompts: 2, 6 and 3, 9, which differ by 1 and 3: 4 ± 2, 6 ± 3, and 2 ± 1.
    assert lines == [
        "1      10 of 10  4.0000 ± 2.0000                     1.0000 ± –",
        "0.75   8 of 10   6.0000 ± 3.0000 (+2.0000 ± 1.0000)  3.0000 ± – (+2.0000 ± –)",
        "in brackets: the difference from share 1",
    ]


def test_the_share_is_a_whole_number_of_steps() -> None:
    def first(*words: str) -> int | None:
        return base_from(load_image_recipe("mixgrpo", list(words)))

    assert first() is None
    assert [first(f"evaluate.trained_share={share}", "evaluate.steps=25") for share in (0, 0.1, 0.8, 0.99)] == [
        0, 2, 20, 25
    ]  # fmt: skip
    for share in ("1.5", "-0.1", ".nan"):
        with pytest.raises(ValueError, match=r"evaluate\.trained_share"):
            first(f"evaluate.trained_share={share}")


def test_evaluations_of_a_share_keep_the_base() -> None:
    words = ["model.train=full", "penalties=[]", "evaluate.trained_share=0.8"]
    assert not keeps_base(load_image_recipe("mixgrpo", words[:2]))
    assert keeps_base(load_image_recipe("mixgrpo", words))
    with pytest.raises(
        ValueError, match=r"sharded weights cannot be the base's.*flowgrpo evaluate RUN --trained-share"
    ):
        check_shards(load_image_recipe("mixgrpo", words))
    check_shards(load_image_recipe("mixgrpo", [*words, "optimizer.ema=null"]))
