"""A run begins from an existing LoRA: the reference is that model, and the result holds the LoRA and the training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.model_recipes import image_recipe
from flowgrpo.inference.opening import open_images
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.lora_start import with_start
from flowgrpo.training.session import Session, start
from flowgrpo.weights.adapter_files import read_start
from tests.inference.test_inference import shown
from tests.training.family_runs import PROMPTS, evaluations, load_as_the_kit_does, overrides, scores_of, trained
from tests.training.test_resuming import resumed

NAME = "FluxPipeline"
KL = "penalties.kl.weight=0.5"
TINY_TARGETS = ["to_q", "to_v"]


def adapter_file(folder: Path, name: str = NAME, rank: int = 3, alpha: float = 12.0) -> Path:
    """A LoRA that plain diffusers has written, with B far from zero."""
    pipe = TINY[name].fresh()
    module = pipe.transformer
    module.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=TINY_TARGETS), adapter_name="mine")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for key, parameter in module.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    module.save_lora_adapter(folder, adapter_name="mine", weight_name="pytorch_lora_weights.safetensors")
    return folder / "pytorch_lora_weights.safetensors"


def file_of_kohya(file: Path) -> Path:
    """A LoRA in the names of sd-scripts, of two ranks and with two scales."""
    state = {}
    width = TINY[NAME].fresh().transformer.get_submodule("transformer_blocks.0.attn.to_out.0").in_features
    noise = torch.Generator().manual_seed(3)
    for rank, part in ((3, "img"), (5, "txt")):
        stem = f"lora_unet_double_blocks_0_{part}_attn_proj"
        state[f"{stem}.lora_down.weight"] = torch.randn(rank, width, generator=noise) * 0.3
        state[f"{stem}.lora_up.weight"] = torch.randn(width, rank, generator=noise) * 0.3
        state[f"{stem}.alpha"] = torch.tensor(4.0)
    save_file(state, file)
    return file


def lora(path: Path) -> str:
    return f"model.lora={{start: '{path}'}}"


def first_line(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_begins_with_the_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    load_as_the_kit_does(NAME, monkeypatch)
    file = adapter_file(tmp_path / "start")
    run = trained(NAME, tmp_path, "lora", lora(file), KL, f"model.dtype={dtype}", "optimizer.updates=2")
    written = load_recipe(run / "config.yaml").model.lora
    assert (written.rank, written.alpha, written.start) == (3, 12.0, str(file))
    first = first_line(run)
    assert first["ratio/first_error"] == 0.0
    state, given = load_file(run / "lora" / "pytorch_lora_weights.safetensors"), load_file(file)
    given = {f"transformer.{key.removeprefix('transformer.')}": value for key, value in given.items()}
    assert state.keys() == given.keys()
    assert all(not torch.equal(state[key], given[key]) for key in state)
    # Two steps of Adam move a number by 0.02 each at most; the numbers of the start are of size 0.3.
    assert max(float((state[key] - given[key]).abs().max()) for key in state) < 0.1
    for base, line in ((True, 0), (False, -1)):
        found = evaluate_model(str(run), load_recipe(run / "config.yaml"), base=base)
        assert {name: mean for name, (mean, _, _) in found.items()} == scores_of(run, line)
    plain = trained(NAME, folder_beside(tmp_path), "lora", f"model.dtype={dtype}")
    assert scores_of(plain, 0) != scores_of(run, 0)


def folder_beside(folder: Path) -> Path:
    (folder / "beside").mkdir()
    return folder / "beside"


@pytest.mark.slow
def test_the_reference_is_the_model_with_the_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_the_kit_does(NAME, monkeypatch)
    file = adapter_file(tmp_path / "start")
    recipe = load_recipe("mixgrpo_flash_guard", [*overrides(NAME, tmp_path, "lora"), lora(file), KL])
    weights = Session(recipe).task.weights
    before = weights.state_dict()
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(1.0)
    weights.write()
    moved = weights.state_dict()
    with weights.reference():
        assert all(torch.equal(value, before[key]) for key, value in weights.state_dict().items())
    assert all(torch.equal(value, moved[key]) for key, value in weights.state_dict().items())
    assert all(torch.equal(before[key] + 1, moved[key]) for key in before)
    # With one update an iteration, the first penalty is the distance of the model from itself.
    run = trained(NAME, folder_beside(tmp_path), "lora", lora(file), KL)
    assert first_line(run)["kl"] == 0.0
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[1])["kl"] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["file", "folder", "run", "kohya"])
def test_plain_diffusers_makes_the_pictures_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    load_as_the_kit_does(NAME, monkeypatch)
    if form == "run":
        (tmp_path / "first").mkdir()
        source = trained(NAME, tmp_path / "first", "lora", "run.iterations=1")
        file = source / "lora" / "pytorch_lora_weights.safetensors"
    elif form == "kohya":
        source = file = file_of_kohya(tmp_path / "x.safetensors")
    else:
        file = adapter_file(tmp_path / "start")
        source = file if form == "file" else file.parent
    (tmp_path / "second").mkdir()
    run = trained(NAME, tmp_path / "second", "lora", lora(source))
    shape = open_images(str(run), image_recipe(str(run))).evaluator(PROMPTS).policy.denoiser.probe.latent_shape
    for iteration, adapter in ((0, file), (2, run / "lora")):
        pipe = DiffusionPipeline.from_pretrained(tmp_path / "second" / "pipeline")
        pipe.set_progress_bar_config(disable=True)
        if adapter == file and form in ("file", "folder"):
            pipe.transformer.load_lora_adapter(file.parent, weight_name=file.name, prefix=None)
        else:
            pipe.load_lora_weights(adapter)
        record = evaluations(run, iteration)[0]
        found = picture(pipe, record["prompt"], record["noise"], shape)
        own = evaluations_picture(run, record)
        assert int((found - own).abs().max()) <= 1
        pipe.unload_lora_weights()
        assert int((picture(pipe, record["prompt"], record["noise"], shape) - own).abs().max()) > 1


def picture(pipe: Any, prompt: str, noise: int, shape: tuple[int, ...]) -> torch.Tensor:
    tiny = TINY[NAME]
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(noise))
    made = pipe(prompt=[prompt], latents=latents, num_inference_steps=tiny.steps, output_type="np", **tiny.call)[0][0]
    return torch.from_numpy((made * 255).round()).int()


def evaluations_picture(run: Path, record: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(shown(run / "samples" / record["image"]).astype("int32"))


@pytest.mark.slow
def test_a_run_from_a_lora_resumes_to_the_last_bit(tmp_path: Path, small_text: list[str]) -> None:
    words = [*small_text, "optimizer.ema={decay: 0.5, every: 1}", "penalties=[{name: kl, weight: 0.1}]"]
    first = tmp_path / "first"
    start(load_recipe("text", words), first).trainer(Silent()).train()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    words += [f"model.lora={{start: '{first}'}}", "run.keep=5"]
    for run in (whole, broken):
        start(load_recipe("text", words), run).trainer(Silent()).train()
        assert first_line(run)["ratio/first_error"] == 0.0
    assert first_line(whole)["kl"] == 0.0
    folder = RunFolder.open(broken)
    for name in ("iter-000004", "iter-000003"):
        folder.set_aside(folder.checkpoints / name)
    for name in folder.checkpoints.glob("damaged-*"):
        name.rename(broken / name.name)
    resumed(broken)
    assert contents(broken) == contents(whole)
    found = evaluate_model(str(whole), load_recipe(whole / "config.yaml"), base=True)
    assert {name: mean for name, (mean, _, _) in found.items()} == scores_of(whole, 0)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of rank 2 and alpha 4 on two layers."""
    file = tmp_path_factory.mktemp("lora") / "pytorch_lora_weights.safetensors"
    save_file(tensors(), file, metadata={"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 4})})
    return file


def tensors(rank: int = 2, prefix: str = "transformer.") -> dict[str, torch.Tensor]:
    shapes = {"a.to_q.lora_A.weight": (rank, 6), "a.to_q.lora_B.weight": (5, rank)}
    shapes |= {"b.to_q.lora_A.weight": (rank, 6), "b.to_q.lora_B.weight": (5, rank)}
    return {f"{prefix}{key}": torch.ones(shape) for key, shape in shapes.items()}


def test_rank_alpha_and_layers_are_the_loras_own(plain: Path) -> None:
    found = read_start(str(plain))
    assert (found.rank, found.alpha, found.layers, found.files) == (2, 4.0, ("a.to_q", "b.to_q"), (plain,))
    assert read_start(str(plain.parent)) == found
    recipe = with_start(load_recipe("flow_grpo", [lora(plain)]))
    own = recipe.model.lora
    assert (own.rank, own.alpha, own.targets) == (2, 4.0, ["^a.to_q", "^b.to_q"])
    assert with_start(recipe) == recipe
    same = [f"model.lora={{start: '{plain}', rank: 2, alpha: 4, targets: [to_q]}}"]
    assert with_start(load_recipe("flow_grpo", same)).model.lora.targets == ["to_q"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rank: 4", r"model\.lora\.rank is 4, and .* has 2; write rank: 2, or leave it out"),
        ("alpha: 8", r"model\.lora\.alpha is 8, and .* has 4"),
        ("targets: [to_k]", r"targets does not name a\.to_q, which .* adapts"),
    ],
)
def test_another_rank_than_the_loras_is_refused(plain: Path, words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_start(load_recipe("flow_grpo", [f"model.lora={{start: '{plain}', {words}}}"]))


@pytest.mark.parametrize(
    ("words", "said"), [("init: default", "start brings all numbers"), ("", "full trains no LoRA")]
)
def test_what_has_no_effect_is_refused(plain: Path, words: str, said: str) -> None:
    full = [] if words else ["model.train=full"]
    with pytest.raises(ValueError, match=said):
        load_recipe("flow_grpo", [f"model.lora={{start: '{plain}', {words}}}", *full])


CASES: dict[str, tuple[Any, dict[str, str], str]] = {
    "kohya": ({"lora_unet_a.lora_down.weight": torch.ones(2, 6)}, {}, "is no name of a LoRA of a language model"),
    "half": ({"transformer.a.lora_A.weight": torch.ones(2, 6)}, {}, "lacks pairs of lora_A and lora_B"),
    "text encoder": (tensors() | tensors(prefix="text_encoder."), {}, "is not a LoRA of linear layers of one denoiser"),
    "DoRA": (tensors() | {"transformer.a.to_q.lora_magnitude_vector": torch.ones(5)}, {}, "is a DoRA .*magnitude"),
    "shapes": (tensors() | {"transformer.a.to_q.lora_B.weight": torch.ones(5, 3)}, {}, "and no rank"),
    "scales": (tensors(), {"lora_adapter_metadata": '{"transformer.alpha_pattern": {"(a+)+": 2}}'}, "only whole names"),
    "alpha": (tensors(), {"lora_adapter_metadata": '{"transformer.lora_alpha": "NaN"}'}, "not a number above 0"),
    "deep": (tensors(), {"lora_adapter_metadata": "[" * 100_000}, "levels deep"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_is_no_plain_lora_is_refused(tmp_path: Path, case: str) -> None:
    state, metadata, said = CASES[case]
    save_file(state, tmp_path / "x.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match=said):
        read_start(str(tmp_path / "x.safetensors"))


def test_what_is_no_lora_at_all_is_refused(tmp_path: Path, plain: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "x.bin").write_bytes(b"")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: x\n")
    (tmp_path / "run" / "checkpoints" / "iter-000150").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "iter-000150" / "config.yaml").write_text("name: x\n")
    for path, said in (
        ("x.safetensors", "cannot be read"),
        ("x.bin", "is not a .safetensors file"),
        ("nothing", "does not exist"),
        (".", "holds neither pytorch_lora_weights.safetensors nor adapter_model.safetensors"),
        ("run", "is a run without `lora`.*flowgrpo export .*--checkpoint latest"),
        ("run/checkpoints/iter-000150", r"is a checkpoint .*`flowgrpo export \S+/run --checkpoint 150 --out FOLDER`"),
    ):
        with pytest.raises(ValueError, match=said):
            read_start(str(tmp_path / path))
    (tmp_path / "run" / "pipeline").mkdir()
    with pytest.raises(ValueError, match=r"trained all weights; begin with its result: model\.path: .*pipeline"):
        read_start(str(tmp_path / "run"))
    (tmp_path / "run" / "lora").symlink_to(plain.parent)
    with pytest.raises(ValueError, match="links that lead out of it"):
        read_start(str(tmp_path / "run"))


def test_without_a_word_on_alpha_the_scale_is_one(tmp_path: Path) -> None:
    save_file(tensors(3), tmp_path / "plain.safetensors")
    assert read_start(str(tmp_path / "plain.safetensors")).alpha == 3.0
    save_file(tensors(3, "base_model.model."), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 7, "use_dora": false}')
    found = read_start(str(tmp_path))
    assert (found.alpha, found.layers) == (7.0, ("a.to_q", "b.to_q"))
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 7, "use_rslora": true}')
    assert read_start(str(tmp_path)).alpha == pytest.approx(7 * 3**0.5)
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 7, "use_dora": true}')
    with pytest.raises(ValueError, match="has use_dora"):
        read_start(str(tmp_path))


@pytest.mark.slow
def test_a_lora_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Path) -> None:
    load_as_the_kit_does(NAME, monkeypatch)
    with pytest.raises(ValueError, match=r"no linear layer named a\.to_q"):
        Session(load_recipe("mixgrpo_flash_guard", [*overrides(NAME, tmp_path, "lora"), lora(plain)]))
    file = adapter_file(tmp_path / "start")
    state = load_file(file)
    key = next(key for key in state if "lora_A" in key)
    state[key] = torch.ones(3, 7)
    save_file(state, file)
    with pytest.raises(ValueError, match=r"does not fit transformer .* is \[3, 7\] in the file"):
        Session(load_recipe("mixgrpo_flash_guard", [*overrides(NAME, tmp_path, "lora"), lora(file)]))
