"""The look at a model's folder: hub ids that cannot be read, and the length that a weight file gives itself."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flowgrpo.pipelines.architectures import architecture_of
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.weights import pipeline_folders as folders
from flowgrpo.weights.pipeline_folders import check_pipeline_folder, from_hub, parts_of, weight_faults
from tests.tiny_pipelines import require


def test_a_hub_id_that_cannot_be_read_is_named_without_a_stacktrace_that_is_not_there():
    def load() -> None:
        try:
            raise ConnectionError("Name or service not known")
        except ConnectionError as error:
            raise OSError("Cannot load model. Please check out the root cause in the stacktrace above.") from error

    with (
        pytest.raises(ValueError, match="'somebody/something' is not a local folder") as caught,
        from_hub("somebody/something"),
    ):
        load()
    assert "Name or service not known" in str(caught.value)
    assert "stacktrace" not in str(caught.value)


def test_an_error_of_a_folder_is_left_as_it_is(tmp_path: Path):
    with pytest.raises(OSError, match="disk"), from_hub(str(tmp_path)):
        raise OSError("disk")


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 0.999))
def test_weights_that_are_cut_anywhere_are_refused(share: float, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("weights")
    file = folder / "model.safetensors"
    save_file({"a": torch.zeros(5, 7), "b": torch.ones(3)}, file)
    assert list(weight_faults(folder)) == []
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    assert [str(file) in fault and "cut" in fault for fault in weight_faults(folder)] == [True]


@pytest.mark.slow
def test_a_denoiser_whose_input_a_class_does_not_make_is_refused(tmp_path: Path) -> None:
    """diffusers says it at the first call; the class of the folder itself takes any number."""
    TINY["StableDiffusion3InpaintPipeline"].fresh().save_pretrained(tmp_path)
    config = tmp_path / "transformer" / "config.json"
    for channels, chosen, refused in (
        (16, "StableDiffusion3InpaintPipeline", False),
        (33, "StableDiffusion3InpaintPipeline", False),
        (8, "StableDiffusion3InpaintPipeline", True),
        (8, "StableDiffusion3Pipeline", False),
    ):
        config.write_text(json.dumps({**json.loads(config.read_text()), "in_channels": channels}))
        if refused:
            with pytest.raises(ValueError, match=rf"config\.json: in_channels is 8, and {chosen} takes 16 or 33; name"):
                check_pipeline_folder(tmp_path, chosen)
        else:
            check_pipeline_folder(tmp_path, chosen)


@pytest.mark.slow
def test_a_part_with_a_config_of_its_own_name_is_none_that_lacks_its_weights(tmp_path: Path) -> None:
    """A guider has `guider_config.json`; a model without `config.json` is named."""
    folder = tmp_path / "pipeline"
    TINY["HunyuanVideo15ImageToVideoPipeline"].fresh().save_pretrained(folder)
    assert check_pipeline_folder(folder) is not None
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"transformer.config\.json cannot be read"):
        check_pipeline_folder(folder)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [[1, 2], ["a", "b"], [4], [], "four"])
def test_a_setting_is_no_part_whatever_it_looks_like(setting: object, tmp_path: Path) -> None:
    """Krea 2 lists the layers of its text encoder that it reads."""
    require("Krea2Pipeline")
    TINY["Krea2Pipeline"].fresh().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["text_encoder_select_layers"] == [1, 2]
    index["text_encoder_select_layers"] = setting
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert check_pipeline_folder(tmp_path) is diffusers.Krea2Pipeline

    for faulty in ([1, 2], ["diffusers"], "AutoencoderKL"):
        (tmp_path / "model_index.json").write_text(json.dumps({**index, "vae": faulty}))
        with pytest.raises(ValueError, match=r"vae is .* must be a list of library and class"):
            check_pipeline_folder(tmp_path)


def test_the_parts_of_an_index_are_those_that_diffusers_loads() -> None:
    """A text encoder that may be left out has a default, as a setting has."""
    index = {"_class_name": "X", "transformer": ["d", "T"], "text_encoder": [None, None], "expand_timesteps": [1, 2]}
    kind = diffusers.WanPipeline
    assert set(parts_of(index, kind)) == {"transformer", "text_encoder"}
    assert set(parts_of({**index, "transformer_2": ["d", "T"]}, kind)) - set(parts_of(index, kind)) == {"transformer_2"}
    assert set(parts_of(index, None)) == {"transformer", "text_encoder", "expand_timesteps"}


@pytest.mark.slow
def test_a_list_among_the_settings_is_nothing_to_the_shapes(tmp_path: Path) -> None:
    TINY["StableDiffusion3Pipeline"].fresh().save_pretrained(tmp_path)
    shapes = architecture_of(str(tmp_path))
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "layers": ["mid"], "none": []}))
    assert architecture_of(str(tmp_path)) == shapes


@pytest.mark.slow
def test_a_class_that_a_pipeline_adds_to_transformers_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PRX does so on its import, which may come after the classes of transformers have been listed."""
    TINY["PRXPipeline"].fresh().save_pretrained(tmp_path)
    listed = folders._names
    before = {"transformers": (listed("transformers")[0], listed("transformers")[1] - {"T5GemmaEncoder"})}
    monkeypatch.setattr(folders, "_names", lambda library: before.get(library) or listed(library))
    assert check_pipeline_folder(tmp_path) is diffusers.PRXPipeline
    index = (tmp_path / "model_index.json").read_text().replace("T5GemmaEncoder", "T5GemmaEncodr")
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(ValueError, match="text_encoder is of class 'T5GemmaEncodr', which transformers"):
        check_pipeline_folder(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Cosmos3OmniPipeline", "LTX2Pipeline", "MotifVideoImage2VideoPipeline"])
def test_parts_of_unusual_names_and_libraries_are_accepted(name: str, tmp_path: Path) -> None:
    require(name)
    TINY[name].fresh().save_pretrained(tmp_path / "pipeline")
    assert check_pipeline_folder(tmp_path / "pipeline") is getattr(diffusers, name)


@pytest.mark.slow
def test_a_tokenizer_belongs_under_a_name_of_a_tokenizer_unless_it_is_a_model_of_diffusers(tmp_path: Path) -> None:
    require("Cosmos3OmniPipeline")
    folder = tmp_path / "pipeline"
    TINY["Cosmos3OmniPipeline"].fresh().save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    kind = "Cosmos3AVAEAudioTokenizer"
    index["vae"] = index["text_tokenizer"]
    index["sound_tokenizer"] = ["diffusers", kind]
    (folder / "sound_tokenizer").mkdir()
    (folder / "sound_tokenizer" / "config.json").write_text(json.dumps({"_class_name": kind}), encoding="utf-8")
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ValueError, match="name a model") as error:
        check_pipeline_folder(folder)
    sound, vae = str(error.value).splitlines()
    assert "vae is of class" in vae
    assert "sound_tokenizer holds no weights" in sound
