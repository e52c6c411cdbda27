"""Arguments of a pipeline's call by its signature, however the signature is written."""

import inspect
import json
from pathlib import Path
from typing import Any, List, Optional, Union  # noqa: UP035

import pytest
import torch

from flowgrpo.pipelines.arguments import argument_faults, frames_unit, refuse_other_size, size_faults
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.training.model_paths import embedded_pipeline


def call(
    prompt: Any,
    height: Optional[int] = None,  # noqa: UP045
    width: "int | None" = None,
    scale: float = 1.0,
    texts: Union[str, List[str], None] = None,  # noqa: UP006, UP007
    listed: "str | list[str]" = "",
    flag: bool = False,
    anything: "torch.Tensor | None" = None,
    sigmas: Any = None,
) -> None:
    """A pipeline's."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"height": 64, "width": 64, "scale": 2, "texts": ["a"], "listed": "b", "flag": True, "anything": "x"}, None),
        ({"height": None, "width": None}, None),
        ({"height": "64"}, "height is '64'; give a whole number"),
        ({"width": 64.0}, "width is 64.0; give a whole number"),
        ({"width": True}, "width is true; give a whole number"),
        ({"scale": "4"}, "scale is '4'; give a number"),
        ({"scale": float("inf")}, "scale is inf; give a finite number"),
        ({"anything": float("nan")}, "anything is nan; give a finite number"),
        ({"texts": 3}, "texts is 3; give a text or a list"),
        ({"listed": 3}, "listed is 3; give a text or a list"),
        ({"flag": 1}, "flag is 1; give true or false"),
        ({"hieght": 1}, "did you mean 'height'?"),
        ({"prompt": "x"}, "is set for each evaluation"),
        ({"sigmas": [1]}, "set sampler.sigmas"),
    ],
)
def test_values_are_judged_by_the_signature(given: dict[str, Any], said: str | None):
    found = list(argument_faults(inspect.signature(call).parameters, given, "", "the pipeline"))
    assert len(found) == (0 if said is None else 1), found
    assert said is None or said in found[0]


def test_a_call_that_takes_anything_refuses_no_name():
    def free(**anything: Any) -> None:
        """A pipeline's."""

    assert list(argument_faults(inspect.signature(free).parameters, {"x": 1}, "", "the pipeline")) == []


def test_a_picture_of_another_size_than_asked_for_is_refused():
    refuse_other_size({"height": 48, "width": None}, 48, 64)
    with pytest.raises(ValueError, match="height is 50, but the pipeline makes 48; write height: 48"):
        refuse_other_size({"height": 50}, 48, 48)
    # The pipeline makes 32 here, and with width 32 it would make 16.
    with pytest.raises(ValueError, match="width is 64, but the pipeline makes 32; leave width out, or give"):
        refuse_other_size({"height": 32, "width": 64}, 32, 32)
    refuse_other_size({"num_frames": 9}, 48, 64, 9)
    refuse_other_size({"num_frames": 9}, 48, 64)
    with pytest.raises(ValueError, match="num_frames is 10, but the pipeline makes 9; write num_frames: 9"):
        refuse_other_size({"num_frames": 10}, 48, 64, 9)


WAN = {"_class_name": "AutoencoderKLWan", "temperal_downsample": [False, True, True]}
LTX = {"_class_name": "AutoencoderKLLTXVideo", "spatio_temporal_scaling": [True, True, True, False]}


@pytest.mark.parametrize(
    ("vae", "frames", "said"),
    [
        (WAN, 5, None),
        (WAN, 1, None),
        (WAN, 6, "model.call.num_frames is 6, but this pipeline makes only 1 more than a multiple of 4; write 5 or 9"),
        (WAN, 3, "write 5"),
        (WAN, 0, "model.call.num_frames is 0; give a number above 0, 1 more than a multiple of 4"),
        (WAN, -3, "give a number above 0"),
        ({**WAN, "scale_factor_temporal": 8}, 13, "write 9 or 17"),
        (LTX, 8, "multiple of 8; write 9"),
        ({**LTX, "temporal_compression_ratio": 4}, 13, None),
        ({**LTX, "patch_size_t": 2}, 9, "multiple of 16; write 17"),
        ({"_class_name": "AutoencoderKLHunyuanVideo15", "temporal_compression_ratio": 4}, 8, "write 5 or 9"),
        ({"_class_name": "AutoencoderKLMochi", "temporal_expansions": [1, 2, 3]}, 8, "write 7 or 13"),
        # This class can make an even number of frames too.
        ({"_class_name": "AutoencoderKLCogVideoX", "temporal_compression_ratio": 4}, 8, None),
        ({"_class_name": "AutoencoderKLCogVideoX", "temporal_compression_ratio": 4}, 0, "is 0; give a number above 0"),
        ({}, 8, None),
    ],
)
def test_a_number_of_frames_that_cannot_be_made_is_found_in_the_configurations(
    vae: dict[str, Any], frames: int, said: str | None, tmp_path: Path
):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps(vae))
    found = list(size_faults(tmp_path, {"num_frames": frames}, "model.call."))
    assert len(found) == (0 if said is None else 1), found
    assert said is None or said in found[0]


def test_a_side_for_which_the_pipeline_has_no_positions_is_told():
    folder = embedded_pipeline()
    assert not list(size_faults(folder, {"height": 64, "width": 64}, "model.call."))
    (found,) = size_faults(folder, {"height": 72, "width": 64}, "model.call.")
    assert found == "model.call.height is 72, but this pipeline makes at most 64 pixels a side; write 64 or less"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["WanPipeline", "HunyuanVideoPipeline", "HunyuanVideo15Pipeline", "LTXPipeline", "MochiPipeline"]
)
def test_the_frames_of_a_configuration_are_those_that_the_pipeline_makes(name: str, tmp_path: Path):
    tiny = TINY[name]
    pipe = tiny.fresh()
    if tiny.adjust is not None:
        tiny.adjust(pipe)
    pipe.vae.save_pretrained(tmp_path / "vae")
    unit = frames_unit(tmp_path)
    assert unit is not None
    made = {}
    for frames in (unit + 1, 2 * unit, 2 * unit + 1):
        d = Denoiser(pipe, num_steps=tiny.steps, call={**tiny.call, "num_frames": frames})
        latents = d.initial_noise([torch.Generator().manual_seed(0)])
        if not list(size_faults(tmp_path, {"num_frames": frames}, "")):
            made[frames] = d.decode(latents, ["x"]).shape[1]
        else:
            with pytest.raises(ValueError, match=f"num_frames is {frames}, but the pipeline makes"):
                d.decode(latents, ["x"])
    assert made == {unit + 1: unit + 1, 2 * unit + 1: 2 * unit + 1}
