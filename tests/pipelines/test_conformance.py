"""The conformance kit on a few classes that differ in how they are called; the command checks all of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MochiPipeline
from typer.testing import CliRunner

from flowgrpo.cli.app import app
from flowgrpo.pipelines.conformance import conform
from flowgrpo.pipelines.conformance.conditioned import picture
from flowgrpo.pipelines.conformance.conform import TINY, Result, check, check_folder, check_tiny
from flowgrpo.pipelines.conformance.reasons import REASONS, reason
from flowgrpo.pipelines.conformance.subject import CheckOutcome, Subject
from flowgrpo.pipelines.conformance.table import as_json, as_markdown, class_of, expected, flow_classes, unchecked
from flowgrpo.pipelines.conformance.tiny import installed
from flowgrpo.weights.pipeline_classes import ADAPTERS
from flowgrpo.weights.precision import in_dtype
from tests.tiny_pipelines import require

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE_OF = json.loads((DOCS / "pipelines.json").read_text(encoding="utf-8"))["versions"]["diffusers"]
# Reasons and the table are of the classes of one version.
of_the_page = pytest.mark.skipif(not installed(PAGE_OF), reason=f"the page is of diffusers {PAGE_OF}")
CHECKS = ["probe", "velocity", "replay", "ratio", "decode", "given", "memory", "gradient", "lora", "saved"]
# The state lacks the frame that is given, the video lacks the first frames, the state has more than the video, or the
# known part of a picture is pasted in.
WITHOUT_GIVEN = {
    "LTXImageToVideoPipeline", "SanaImageToVideoPipeline", "HunyuanVideoImageToVideoPipeline",
    "HunyuanImageRefinerPipeline", "LTX2Pipeline", "LTX2ImageToVideoPipeline", "FluxControlInpaintPipeline",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant", "verdict"),
    [
        ("Flux2KleinPipeline", "inject", "unmodified"),
        ("MochiPipeline", "relay", "unmodified"),
        ("QwenImage21Pipeline", "direct", "adapter"),
        ("BriaFibo2Pipeline", "direct", "unmodified"),
        ("MotifVideoPipeline", "direct", "unmodified"),
        ("Kandinsky6TI2VAPipeline", "inject", "unmodified"),
        ("ZImageOmniPipeline", "direct", "unmodified"),
        ("Flux2KleinKVPipeline", "inject", "unmodified"),
        ("DreamLitePipeline", "inject", "adapter"),
        ("DreamLiteMobilePipeline", "inject", "adapter"),
        ("WanPipeline, 2.2 with two experts", "direct", "unmodified"),
        ("HiDreamImagePipeline", "direct", "adapter"),
        ("LTXImageToVideoPipeline", "relay", "adapter"),
        ("StableDiffusionPipeline", "direct", "unmodified"),
        ("StableDiffusionPipeline, v-prediction", "direct", "unmodified"),
        ("StableDiffusionXLPipeline", "direct", "unmodified"),
        ("CogVideoXPipeline", "direct", "unmodified"),
        ("Krea2Pipeline", "direct", "unmodified"),
        ("Cosmos3OmniPipeline", "relay", "adapter"),
        ("LTX2Pipeline", "relay", "adapter"),
        ("LTX2ImageToVideoPipeline", "relay", "adapter"),
        ("SanaImageToVideoPipeline", "relay", "unmodified"),
        ("MotifVideoImage2VideoPipeline", "inject", "adapter"),
        ("HunyuanVideoImageToVideoPipeline", "inject", "adapter"),
        ("HunyuanImageRefinerPipeline", "inject", "adapter"),
        ("ZImageControlNetInpaintPipeline", "direct", "adapter"),
        ("BriaFiboEditPipeline", "direct", "unmodified"),
        ("FluxInpaintPipeline", "inject", "unmodified"),
        ("FluxControlInpaintPipeline", "inject", "adapter"),
        ("StableDiffusion3InpaintPipeline", "direct", "unmodified"),
        ("StableDiffusionXLInpaintPipeline", "direct", "unmodified"),
        ("ZImageInpaintPipeline", "direct", "unmodified"),
        ("LTXConditionPipeline, with a picture", "inject", "unmodified"),
        ("Cosmos3OmniPipeline, with a picture", "relay", "adapter"),
        ("Cosmos2VideoToWorldPipeline", "inject", "adapter"),
    ],
)
def test_a_class_passes_every_check(name: str, variant: str, verdict: str) -> None:
    require(name)
    seen: list[CheckOutcome] = []
    result = check_tiny(name, seen.append)

    wanted = dict.fromkeys(CHECKS, "pass")
    if name in WITHOUT_GIVEN:
        wanted["given"] = "not applicable"
    if name == "Cosmos2VideoToWorldPipeline" and not installed("0.39"):
        wanted["lora"] = "not applicable"  # its denoiser took no adapter yet
    assert {outcome.check: outcome.status for outcome in seen} == wanted, seen
    assert (result.variant, result.verdict) == (variant, verdict)
    assert list(result.outcomes) == seen


def test_a_class_that_the_installed_diffusers_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TINY, "TomorrowPipeline, with a picture", TINY["MochiPipeline"])
    with pytest.raises(ValueError, match=r"^diffusers [0-9.]+\S* has no TomorrowPipeline; install a newer one"):
        check_tiny("TomorrowPipeline, with a picture", lambda outcome: None)
    monkeypatch.setitem(TINY, "MochiPipeline", replace(TINY["MochiPipeline"], since="99.1"))
    needed = r"^MochiPipeline needs diffusers 99\.1 or later, and [0-9.]+\S* is installed; install a newer one"
    with pytest.raises(ValueError, match=needed):
        check_tiny("MochiPipeline", lambda outcome: None)


def test_classes_that_the_installed_diffusers_does_not_have_are_left_out_of_the_check_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conform, "TINY", {"TomorrowPipeline": TINY["MochiPipeline"]})
    done = CliRunner().invoke(app, ["pipelines", "check", "--all"])
    assert done.exit_code == 0, done.output
    assert re.fullmatch(r"not checked +TomorrowPipeline +diffusers \S+ has no TomorrowPipeline\n", done.output)


@pytest.mark.slow
def test_a_state_that_is_rounded_between_steps_is_kept_rounded(tmp_path: Path) -> None:
    """Mochi steps in float32 and rounds what comes back to the dtype of its weights."""
    tiny = TINY["MochiPipeline"]
    tiny.fresh().save_pretrained(tmp_path / "pipeline")

    def load(folder: str | Path) -> MochiPipeline:
        return MochiPipeline.from_pretrained(folder, **in_dtype(torch.bfloat16))

    subject = Subject(load, tmp_path / "pipeline", tiny.call, tiny.steps, tmp_path, dtype=torch.bfloat16, whole=False)
    result = check(subject, "MochiPipeline", lambda outcome: None)
    assert result.passed, result.outcomes
    assert subject.denoiser is not None
    assert subject.denoiser.probe.dtype is torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LTX2Pipeline", "LucyEditPipeline"])
def test_a_class_passes_in_16_bits(name: str, tmp_path: Path) -> None:
    """Rounding depends on the strides of LTX-2's first state; Lucy's VAE gets its video in float32."""
    tiny = TINY[name]
    tiny.fresh().save_pretrained(tmp_path / "pipeline")

    def load(folder: str | Path) -> Any:
        return tiny.loaded(folder, torch.bfloat16)

    subject = Subject(load, tmp_path / "pipeline", tiny.call, tiny.steps, tmp_path, dtype=torch.bfloat16, whole=False)
    result = check(subject, name, lambda outcome: None)
    assert result.passed, result.outcomes


@pytest.mark.slow
def test_a_class_whose_own_call_fails_is_not_there_yet() -> None:
    result = check_tiny("ChromaInpaintPipeline", lambda outcome: None)
    assert result.verdict == "not yet"
    assert [(o.check, o.status) for o in result.outcomes] == [("probe", "fail")]
    assert "AttributeError at pipeline_chroma_inpainting.py" in result.outcomes[0].detail


@pytest.mark.slow
def test_a_folder_is_checked_with_an_adapter(tmp_path: Path) -> None:
    tiny = TINY["StableDiffusion3Pipeline"]
    folder = tmp_path / "pipeline"
    tiny.fresh().save_pretrained(folder)
    words = [f"{key}={value}" for key, value in tiny.call.items()]
    done = CliRunner().invoke(app, ["pipelines", "check", str(folder), *words, "--steps", "3", "--device", "cpu"])

    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == CHECKS
    assert all(" pass " in line for line in lines[:-2])
    assert "saved     not applicable" in lines[-2]
    # A and B on 15 attention projections; nothing reads the answers to the last block's text queries.
    assert "28 parameters, 2 without effect" in next(line for line in lines if line.startswith("gradient"))
    assert f"{folder}: works" in lines[-1]


@pytest.mark.slow
def test_a_failed_check_ends_with_status_1(tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    TINY["StableDiffusion3Pipeline"].fresh().save_pretrained(folder)
    done = CliRunner().invoke(app, ["pipelines", "check", str(folder), "max_sequence_length=513", "--device", "cpu"])
    assert done.exit_code == 1
    assert re.search(r"probe +fail +ValueError at .*max_sequence_length", done.output)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["WanPipline"], "did you mean 'WanPipeline'"),
        ([], "or give --all"),
        (["WanPipeline", "height=3"], "its own arguments"),
        (["WanPipeline", "--all"], "leave 'WanPipeline' out"),
        (["WanPipeline", "--out", "x.json"], "for --all"),
        (["{folder}"], "no model_index.json"),
        (["hub/name", "height"], "not KEY=VALUE"),
        (
            ["hub/name", "image=cup.gif"],
            "'image=cup.gif' names no picture; write image=PICTURE, with the path of a file",
        ),
        (["hub/name", "image=cup.png"], "image: the picture cup.png does not exist"),
        (["hub/name", "--prompt", "one"], "give two or more"),
        (["hub/name", "--dtype", "float31"], "use float32, bfloat16 or float16"),
    ],
)
def test_what_cannot_be_checked_is_named(words: list[str], message: str, tmp_path: Path) -> None:
    given = [word.format(folder=tmp_path) for word in words]
    done = CliRunner().invoke(app, ["pipelines", "check", *given])
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)


VIDEO = ["height=32", "width=32", "num_frames=5", "max_sequence_length=16"]


@pytest.mark.slow
def test_a_class_that_needs_a_picture_asks_for_it_and_takes_it(tmp_path: Path) -> None:
    folder, cup = str(tmp_path / "pipeline"), tmp_path / "cup.PNG"
    TINY["WanImageToVideoPipeline"].fresh().save_pretrained(folder)
    done = CliRunner().invoke(app, ["pipelines", "check", folder, *VIDEO])
    assert isinstance(done.exception, ValueError)
    needed = (
        f"{folder}: WanImageToVideoPipeline needs a picture; write image=PICTURE, with the path of a file that ends"
    )
    assert str(done.exception).startswith(needed)
    picture(32).save(cup)
    done = CliRunner().invoke(app, ["pipelines", "check", folder, f"image={cup}", *VIDEO, "--steps", "2"])
    assert done.exit_code == 0, done.output
    assert f"{folder}: works" in done.output


@pytest.mark.slow
def test_a_class_that_may_need_pictures_names_them_when_its_call_fails(tmp_path: Path) -> None:
    TINY["QwenImageEditPipeline"].fresh().save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["pipelines", "check", str(tmp_path)])
    assert done.exit_code == 1
    assert "if the pipeline needs a picture, write image=PICTURE, with the path" in done.output


@pytest.mark.slow
def test_a_class_of_masks_asks_for_both_pictures_before_it_is_called(tmp_path: Path) -> None:
    TINY["FluxFillPipeline"].fresh().save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["pipelines", "check", str(tmp_path), "height=16", "width=16"])
    assert isinstance(done.exception, ValueError)
    needed = f"{tmp_path}: FluxFillPipeline needs a picture; write image=PICTURE mask_image=PICTURE, with the path"
    assert str(done.exception).startswith(needed)


def test_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="use 2 or more"):
        check_folder("hub/name", {}, lambda outcome: None, steps=1)


def test_the_list_names_every_tiny_instance() -> None:
    done = CliRunner().invoke(app, ["pipelines", "list"])
    assert done.exit_code == 0
    listed = [re.split(r" {2,}", line)[0] for line in done.output.splitlines()]
    assert listed == list(TINY)
    assert len({class_of(name) for name in TINY if expected(name)}) >= 50


@of_the_page
@pytest.mark.slow
def test_adapters_are_of_classes_that_exist_and_are_checked() -> None:
    assert set(ADAPTERS) <= {class_of(name) for name in TINY}
    assert set(REASONS) <= {class_of(name) for name in TINY} | set(unchecked())
    assert len(flow_classes()) > 100
    assert {"FluxPipeline", "WanPipeline", "LTX2Pipeline"} <= set(flow_classes())


def test_the_table_says_what_was_found() -> None:
    good = Result("WanPipeline, 2.2 5B", (CheckOutcome("probe", "pass", "state"),), "direct", "", "", 1.0)
    bent = Result("WanVACEPipeline", (CheckOutcome("probe", "pass", "state"),), "direct", "one | prompt", "a note", 1.0)
    bad = Result("OtherPipeline", (CheckOutcome("probe", "fail", "no table"),), None, "", "", 1.0)
    found = json.loads(as_json([good, bent, bad]))
    page = as_markdown(found["results"], found["versions"], ["LaterPipeline"])

    assert [row["verdict"] for row in found["results"]] == ["unmodified", "adapter", "not yet"]
    assert "| WanPipeline, 2.2 5B | unmodified | direct |  |" in page
    assert "| WanVACEPipeline | adapter | direct | one \\| prompt; a note |" in page
    assert "| OtherPipeline | not yet |  | probe: no table |" in page
    assert "- LaterPipeline: nobody has tried it" in page
    assert "1 classes work unmodified, and 1 work with an entry" in page


@of_the_page
def test_every_class_without_an_instance_has_a_reason() -> None:
    assert [name for name in unchecked() if reason(name) == "nobody has tried it"] == []
    assert reason("LTX2DFRPipeline").startswith("has two states, picture and sound, and takes two steps at each noise")
    assert reason("TomorrowPipeline") == "nobody has tried it"


@of_the_page
def test_the_page_is_that_of_the_results() -> None:
    found = json.loads((DOCS / "pipelines.json").read_text(encoding="utf-8"))
    page = (DOCS / "pipelines.md").read_text(encoding="utf-8")
    assert as_markdown(found["results"], found["versions"], unchecked()) in page
    assert [row["name"] for row in found["results"]] == list(TINY)
    assert all((row["verdict"] != "not yet") == expected(row["name"]) for row in found["results"])
    # A tiny instance that makes another size than its call asks for could not be trained.
    sizes = 0
    for row in found["results"]:
        for outcome in row["outcomes"]:
            if outcome["check"] == "decode" and outcome["status"] == "pass":
                made = json.loads(outcome["detail"].partition("]")[0] + "]")
                call = TINY[row["name"]].call
                assert (call.get("height", made[-2]), call.get("width", made[-1])) == tuple(made[-2:]), row["name"]
                sizes += 1
    assert sizes > 70
