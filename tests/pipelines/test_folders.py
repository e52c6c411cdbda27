"""The look at a model's folder: hub ids that cannot be read, and the length that a weight file gives itself."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flowgrpo.pipelines.conformance.run import TINY
from flowgrpo.pipelines.folders import check_pipeline_folder, from_hub, weight_faults


def test_a_hub_id_that_cannot_be_read_is_named_without_a_stacktrace_that_is_not_there():
    def load() -> None:
        try:
            raise ConnectionError("Name or service not known")
        except ConnectionError as error:
            raise OSError("Cannot load model. Please check out the root cause in the stacktrace above.") from error

    with (
        pytest.raises(ValueError, match="'somebody/something' is no folder here") as caught,
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


def test_a_part_with_a_config_of_its_own_name_is_none_that_lacks_its_weights(tmp_path: Path) -> None:
    """A guider has `guider_config.json`; a model without `config.json` is named."""
    folder = tmp_path / "pipeline"
    TINY["HunyuanVideo15ImageToVideoPipeline"].fresh().save_pretrained(folder)
    assert check_pipeline_folder(folder) is not None
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"transformer.config\.json cannot be read"):
        check_pipeline_folder(folder)
