"""What travels between `remote` and a server, and what a server says of its reward."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowgrpo.rewards import RewardSpec, Scores, build
from flowgrpo.rewards.inputs import Inputs
from flowgrpo.rewards.scores import InvalidScores, normalise
from flowgrpo.rewards.serving import wire
from flowgrpo.rewards.serving.declaration import Declaration
from flowgrpo.rewards.serving.wire import WireLimits
from tests.rewards.served import REWARDS


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    path = tmp_path / "served_rewards.py"
    path.write_text(REWARDS)
    return str(path)


# -- the form of requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (0, 3, 4, 5), (2, 3, 3, 1, 7)])
def test_images_travel_bit_for_bit(shape: tuple[int, ...]):
    samples = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    columns = {
        "c": [{"x": [1, 2.5, None, True, "\ud800 ü"]}, float("inf")][: shape[0]],
        "spaced name": [1, 2][: shape[0]],
    }
    sent = Inputs(samples, ["p", "{q}"][: shape[0]], columns, [4, 4][: shape[0]])
    found, serves = wire.unpack(wire.pack(sent, "abc"), WireLimits())
    assert serves == "abc"
    assert found.samples.dtype == torch.float32
    assert found.samples.numpy().tobytes() == samples.numpy().tobytes()
    assert (found.prompts, found.columns, found.groups) == (sent.prompts, sent.columns, sent.groups)
    # A reward may write into its images.
    found.samples.zero_()


@pytest.mark.parametrize("encoding", ["uint8", "png"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 3, 2, 7)])
def test_pictures_come_back_at_their_256_levels(encoding: str, shape: tuple[int, ...]):
    levels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
    found, _ = wire.unpack(wire.pack(Inputs(levels / 255, ["p"] * 2, {}, None), "", encoding), WireLimits())
    assert torch.equal(found.samples, levels.float() / 255)


def test_completions_and_scores_travel():
    sent = Inputs(["a\u2028", "\ud83d"], ["p", "q"], {}, None)
    assert wire.unpack(wire.pack(sent, ""), WireLimits())[0] == sent
    scores = Scores(torch.tensor([0.1, float("nan"), -0.0]), {"s": [1e-45, float("nan"), 3.0]}, ["a", "", "\ud800"])
    found = wire.unpack_scores(wire.pack_scores(scores))
    assert torch.equal(torch.tensor(found.values[::2]), scores.values[::2])
    assert found.values[1] is None
    assert (found.sub_scores["s"][0], found.sub_scores["s"][1], list(found.notes)) == (1e-45, None, ["a", "", "\ud800"])


def packed(header: Any, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "big") + text + payload


def header(**changes: Any) -> dict[str, Any]:
    samples = {"kind": "images", "encoding": "uint8", "shape": [1, 3, 2, 2], **changes.pop("samples", {})}
    return {"version": 1, "serves": "", "prompts": ["p"], "columns": {}, "groups": None, "samples": samples, **changes}


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side: int) -> bytes:
    """A PNG file of a few hundred bytes that says it is a huge picture."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def picture(mode: str = "RGB", form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (2, 2)).save(buffer, format=form)
    return buffer.getvalue()


def of_png(file: bytes) -> bytes:
    return packed(header(samples={"encoding": "png", "sizes": [len(file)]}), file)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity", "-Infinity"])
@pytest.mark.parametrize("key", ["values", "sub_scores", "parts"])
def test_a_reply_without_finite_numbers_is_refused(number: str, key: str):
    """JSON has no infinity, but Python reads it, and reads numbers that are too large as infinity."""
    given = {"values": "[1]", "sub_scores": "{}", "parts": "[]"}
    given[key] = {"values": f"[{number}]", "sub_scores": f'{{"a": [{number}]}}', "parts": f"[[{number}]]"}[key]
    body = ", ".join(f'"{name}": {value}' for name, value in given.items())
    with pytest.raises(InvalidScores, match="infinite"):
        normalise(wire.unpack_scores(f'{{{body}, "notes": []}}'.encode()), 1, "r")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the header should have 0 bytes"),
        (b"\xff" * 8, "but the whole request has 8"),
        (packed(b"{"), "it is not JSON"),
        (packed(b"[" * 100_000), "it is not JSON"),
        (packed([1]), "a JSON list, not an object"),
        (packed(header(version=2)), "version 2"),
        (packed(header(prompts="p")), "`prompts` is not a list of texts"),
        (packed(header(prompts=[1])), "`prompts` is not a list of texts"),
        (packed(header(prompts=["p"] * 9)), "9 samples are more than 8"),
        (packed(header(columns=[])), "`columns` is not an object of lists"),
        (packed(header(columns={"a": "bc"})), "`columns` is not an object of lists"),
        (packed(header(groups=[True])), "`groups` is neither"),
        (packed(header(samples={"kind": "sounds"})), "kind images or completions"),
        (packed({**header(), "samples": None}), "kind images or completions"),
        (packed(header(samples={"kind": "completions", "texts": ["a"]}), b"x"), "1 bytes follow"),
        (packed(header(samples={"shape": [1, 3, 2]})), "images have shape"),
        (packed(header(samples={"shape": [1, 4, 2, 2]})), "images have shape"),
        (packed(header(samples={"shape": [1, 3, 0, 2]})), "images have shape"),
        (packed(header(samples={"shape": [1, 3, 2, -2]})), "`shape` is not a list of sizes"),
        (packed(header(samples={"shape": [1, 3, 2, 2.0]})), "`shape` is not a list of sizes"),
        (packed(header(samples={"shape": [1, 3, 2, 65]})), "65×2 pixels are more than 64"),
        (packed(header(samples={"shape": [1, 5, 3, 2, 2]})), "5 frames are more than 4"),
        (packed(header(samples={"shape": [10**9, 3, 64, 64]})), "too many for a limit"),
        (packed(header(samples={"encoding": "pickle"})), "the encoding is 'pickle'"),
        (packed(header(), b"x" * 11), "11 bytes do not fit"),
        (packed(header(samples={"encoding": "png", "sizes": [3, 4]}), b"x" * 7), "must be 1 sizes"),
        (packed(header(samples={"encoding": "png", "sizes": [6]}), b"x" * 7), "should have 6 bytes, but 7 were"),
        (of_png(b"no picture"), "frame 0 is not a PNG file as declared"),
        (of_png(picture()[:-30]), "frame 0 is not a PNG file as declared"),
        (of_png(picture("RGBA")), "it is RGBA of 2×2"),
        (of_png(picture(form="BMP")), "frame 0 is not a PNG file as declared"),
        (of_png(bomb(40_000)), "frame 0 is not a PNG file as declared"),
    ],
)
def test_malformed_requests_are_refused(body: bytes, message: str):
    limits = WireLimits(most_bytes=1 << 20, most_samples=8, most_frames=4, most_side=64)
    with pytest.raises(ValueError, match=message):
        wire.unpack(body, limits)


def test_limits_are_checked():
    with pytest.raises(ValueError, match="most_side is 0"):
        WireLimits(most_side=0)


# -- what is declared -------------------------------------------------------------------------------------------------


def test_a_declaration_says_how_the_reward_is_called(plugins: str):
    def of(name: str, **options: Any) -> Declaration:
        return Declaration.of(build(RewardSpec(name, options=options)), name, options)

    rich = of(f"{plugins}:rich")
    assert (rich.samples, rich.needed, rich.columns) == (
        ("images",),
        ("images", "prompts", "taste"),
        ("taste", "extra"),
    )
    ranked = of(f"{plugins}:Ranked")
    assert (ranked.whole_group, ranked.groups, ranked.columns) == (True, True, None)
    assert of("digit_share").samples == ("completions",)
    assert of(f"{plugins}:either").samples == ("images", "completions")
    level = of(f"{plugins}:level", gain=2.0)
    assert level.columns == ()
    assert level.fingerprint == of(f"{plugins}:level", gain=2.0).fingerprint
    assert level.fingerprint != of(f"{plugins}:level", gain=2.5).fingerprint
    assert "2.0" not in json.dumps(level.as_json())
    assert Declaration.from_json(json.loads(json.dumps(rich.as_json()))) == rich


def test_what_scores_nothing_is_not_served(tmp_path: Path):
    path = tmp_path / "odd.py"
    path.write_text("def by_prompt(prompts): return [1.0] * len(prompts)\ndef pair(first, second): return [1.0]\n")
    for name in ("by_prompt", "pair"):
        with pytest.raises(ValueError, match="takes `images` or `completions`"):
            Declaration.of(build(RewardSpec(f"{path}:{name}")), name, {})
