"""Each walkthrough leads from an empty folder to what it promises, by its own commands in their order."""

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from flowgrpo.gallery.vote_server import VoteServer
from flowgrpo.media.sound import read_sound
from flowgrpo.media.video import can_encode
from flowgrpo.pipelines.conformance.conditioned import CONDITIONED
from flowgrpo.pipelines.conformance.images import sd3_parts
from flowgrpo.pipelines.conformance.tiny import Tiny
from flowgrpo.pipelines.conformance.videos import VIDEOS
from flowgrpo.votes.file import read_votes
from tests.conftest import Command
from tests.doc_commands_read import WALKTHROUGHS
from tests.gallery.voting import Client
from tests.walkthrough import Walker, scripts

PAGES = {page.stem: page for page in WALKTHROUGHS}
SD35, WAN = "stabilityai/stable-diffusion-3.5-medium", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
WAN_I2V = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
SHORT = (
    "evaluate.steps=4", "evaluate.every=1", "rollout.prompts=2", "rollout.group=4", "run.iterations=2",
)  # fmt: skip
# With so few iterations, only a high rate and no average change a picture.
OF_SD35 = (
    *SHORT,
    "optimizer.learning_rate=0.02",
    "optimizer.ema=null",
    "model.dtype=float32",
    "model.call.height=16",
    "model.call.width=16",
)
SWAPS_OF_SD35 = {"height=512": "height=16", "width=512": "width=16", "steps=40": "steps=4", '"cuda"': '"cpu"'}


@pytest.fixture
def sd35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion 3.5 Medium: its first blocks attend twice, as those of the real one."""

    def build() -> Any:
        parts = sd3_parts()
        config = parts["transformer"].config
        parts["transformer"] = type(parts["transformer"]).from_config(config, dual_attention_layers=(0,))
        return diffusers.StableDiffusion3Pipeline(**parts)

    folder = tmp_path_factory.mktemp("model") / "sd35"
    Tiny(build).fresh().save_pretrained(folder)
    return folder


@pytest.fixture
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "wan"
    VIDEOS["WanPipeline"].fresh().save_pretrained(folder)
    return folder


@pytest.fixture
def animator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "animator"
    CONDITIONED["WanImageToVideoPipeline"].fresh().save_pretrained(folder)
    return folder


def test_every_walkthrough_is_followed() -> None:
    assert set(PAGES) == {"own_reward", "video", "full_weights", "votes", "prompt_writer", "sound"}
    (page, body) = "a\n\nb <<'END'\nflowgrpo\n\nEND\nc\n", "b <<'END'\nflowgrpo\n\nEND"
    assert list(scripts(page)) == ["a", body, "c"]
    assert list(scripts("a \\\n  b\nc\n")) == ["a b", "c"]


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        return image.size


def frames_in(path: Path) -> int:
    import av

    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


def more_colourful(left: bytes, right: bytes) -> str:
    """The side of the picture with the larger spread of colours."""
    pictures = (pil_to_tensor(Image.open(io.BytesIO(side))).float() for side in (left, right))
    values = [(picture.amax(0) - picture.amin(0)).mean().item() for picture in pictures]
    return "left" if values[0] > values[1] else "right"


def people(patch: pytest.MonkeyPatch, choose: Callable[[bytes, bytes], str]) -> None:
    """Let somebody vote on every pair as soon as a page of votes is served, and then press Ctrl-C."""
    serve = VoteServer.serve_forever

    def voted(server: VoteServer) -> None:
        answering = threading.Thread(target=serve, args=(server, 0.05))
        answering.start()
        try:
            client = Client(server)
            for number in range(client.json("progress")["total"]):
                pair = client.json(f"pairs/{number}")
                sides = [client.get(next(iter(pair[side].values())))[1] for side in ("left", "right")]
                assert client.vote(number, choose(*sides))[0] == 200
        finally:
            server.shutdown()
            answering.join()
        raise KeyboardInterrupt

    patch.setattr(VoteServer, "serve_forever", voted)


@pytest.mark.slow
def test_a_lora_for_a_reward_of_ones_own(tmp_path: Path, command: Command, sd35: Path) -> None:
    swaps = {**SWAPS_OF_SD35, SD35: str(sd35), "float16": "float32"}
    Walker(tmp_path, command, swaps, {"colourful.yaml": (*OF_SD35, f"model.path={sd35}")}).follow(PAGES["own_reward"])
    assert size_of(tmp_path / "colourful.png")[0] > 400
    before, after = (pil_to_tensor(Image.open(tmp_path / name / "000-0.png")) for name in ("before", "after"))
    assert before.shape == after.shape == (3, 16, 16)
    assert not torch.equal(before, after)
    assert size_of(tmp_path / "lighthouse.png") == (16, 16)
    assert (tmp_path / "colourful.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not can_encode(), reason="the package av is not installed")
def test_a_video_model(
    tmp_path: Path, command: Command, wan: Path, animator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"height=240": "height=32", "width=416": "width=32", "num_frames=33": "num_frames=9", "steps=50": "steps=4"}
    small = [
        "optimizer.ema=null",
        "optimizer.learning_rate=0.02",
        *SHORT,
        *(f"model.call.{word}" for word in list(sizes.values())[:3]),
    ]
    # In 16 bits, a tiny model of random weights rounds as much as the check allows, or a little more.
    swaps = {**sizes, WAN: str(wan), WAN_I2V: str(animator), '"cuda"': '"cpu"', "bfloat16": "float32"}
    recipes = {
        "steady.yaml": [f"model.path={wan}", *small],
        "balls.yaml": [f"model.path={animator}", *small],
    }
    walker = Walker(tmp_path, command, swaps, recipes)
    people(monkeypatch, lambda left, right: "left" if len(left) > len(right) else "right")
    walker.follow(PAGES["video"])
    assert frames_in(tmp_path / "steady.mp4") == frames_in(tmp_path / "boat" / "boat.mp4") == 9
    assert b"video/webm" in (tmp_path / "steady.html").read_bytes()
    assert size_of(tmp_path / "boat.gif") == (32, 32)
    assert list((tmp_path / "runs" / "steady" / "gallery").glob("videos/*/*.webm"))
    assert len(read_votes(tmp_path / "runs" / "steady" / "votes.jsonl")[0]) == 4
    assert frames_in(tmp_path / "ball" / "ball.mp4") == 9
    assert (tmp_path / "runs" / "balls" / "lora" / "pytorch_lora_weights.safetensors").is_file()
    assert list((tmp_path / "runs" / "balls" / "samples" / "prompts").glob("*.webp"))


@pytest.mark.slow
def test_full_weights_on_several_processes(tmp_path: Path, command: Command, sd35: Path) -> None:
    small = {
        "full.yaml": ("rollout.group=4", "run.iterations=2", "evaluate={every: 2, prompts: 6, quick: null}"),
        "full-sd35.yaml": (*OF_SD35, f"model.path={sd35}"),
    }
    Walker(tmp_path, command, {**SWAPS_OF_SD35, "bfloat16": "float32"}, small).follow(PAGES["full_weights"])
    for name, words in (
        ("full", "2 processes on cpu"),
        ("full-sd35", "2 processes on cpu, full weights in shards by FSDP2"),
    ):
        log = (tmp_path / "runs" / name / "run.log").read_text(encoding="utf-8").splitlines()
        assert any(line.endswith(words) for line in log), log[:4]
    assert size_of(tmp_path / "full.png")[0] > 400
    assert size_of(tmp_path / "circle-and-square.png") == (64, 64)
    assert size_of(tmp_path / "lighthouse.png") == (16, 16)


@pytest.mark.slow
def test_from_votes_to_a_model(tmp_path: Path, command: Command, sd35: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "": ("rollout.prompts=2", "evaluate.prompts=40", "evaluate.seeds=2", "evaluate.quick=null"),
        "chosen.yaml": ("evaluate.prompts=12", "evaluate.every=4", "run.iterations=4", "evaluate.quick=null"),
        "chosen-sd35.yaml": (*OF_SD35, f"model.path={sd35}", "run.iterations=1"),
    }
    files = {name: tmp_path / "runs" / name / "votes.jsonl" for name in ("before", "chosen", "before-sd35")}
    people(monkeypatch, more_colourful)
    Walker(tmp_path, command, {}, small).follow(PAGES["votes"])
    votes = read_votes(files["before"])[0]
    assert len(votes) == 40
    assert {(vote.left.iteration, vote.right.iteration) for vote in votes} == {(0, 0)}
    assert {frozenset({vote.left.iteration, vote.right.iteration}) for vote in read_votes(files["chosen"])[0]} == {
        frozenset({0, 4})
    }
    assert len(read_votes(files["before-sd35"])[0]) == 4 * 6  # six pairs of four pictures, for four prompts
    rows = (tmp_path / "runs" / "chosen" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first, last = json.loads(rows[0]), json.loads(rows[-1])
    assert last["eval/choices"] > first["eval/choices"]
    assert size_of(tmp_path / "chosen.png")[0] > 400


@pytest.mark.slow
def test_a_writer_of_prompts(tmp_path: Path, command: Command) -> None:
    small = {
        "first.yaml": ("run.iterations=30", "run.checkpoint_every=30", "run.sample_every=30", "rollout.prompts=32"),
        "writer.yaml": (
            "run.iterations=2", "run.checkpoint_every=2", "run.sample_every=2", "rollout.prompts=2", "rollout.group=4",
            "generation.max_tokens=8", "evaluate.every=2", "evaluate.prompts=3",
        ),
    }  # fmt: skip
    Walker(tmp_path, command, {}, small).follow(PAGES["prompt_writer"])
    lines = [json.loads(line) for line in (tmp_path / "after" / "index.jsonl").read_text().splitlines()]
    assert all({"plain", "gain"} <= set(line["sub_scores"]["rendered"]) for line in lines)
    assert len(list((tmp_path / "pictures").glob("*.png"))) == len(lines)
    assert len((tmp_path / "first.jsonl").read_text().splitlines()) == 3160


@pytest.mark.slow
def test_a_model_of_sounds(tmp_path: Path, command: Command) -> None:
    small = {"low.yaml": ("run.iterations=3", "evaluate.every=3", "rollout.prompts=2", "rollout.group=4")}
    Walker(tmp_path, command, {}, small).follow(PAGES["sound"])
    lines = [json.loads(line) for line in (tmp_path / "low" / "samples" / "index.jsonl").read_text().splitlines()]
    before, after = (
        [one["rewards"]["low"] for one in lines if one["iteration"] == at and one["phase"] == "eval"] for at in (0, 3)
    )
    assert sum(after) > sum(before)
    heard, rate = read_sound(tmp_path / "waterfall" / "000-1.wav")
    assert (heard.shape, rate) == ((1, 2000), 4000)
    assert size_of(tmp_path / "scored" / "eval-0003.png") == (384, 128)
    assert list((tmp_path / "low" / "gallery" / "thumbs").rglob("*.webp"))
