"""Instances of the built-in rewards, and the material to try them on; for make_kit_table.py.

A reward that needs weights gets a tiny model of its real class with random weights, made by the helpers of the tests. A
reward that asks a server gets a server on this machine.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageStat

import flowgrpo
from flowgrpo.kit.drawn_sounds import drawn_sounds
from flowgrpo.kit.material import Material, arithmetic_samples, scene_samples
from flowgrpo.rewards.person import person
from flowgrpo.rewards.registry import BUILTIN
from flowgrpo.worlds.scenes.draw import SHAPES, draw
from flowgrpo.worlds.scenes.scene_prompts import compose, disturb, ground_colour, split
from tests.rewards import test_hpsv3, test_imagereward, test_videoalign
from tests.rewards.marking import Marker
from tests.rewards.served import Served
from tests.rewards.stub_server import Reply, StubServer, question_of, said
from tests.rewards.test_ocr import page as lines_of_text
from tests.rewards.test_reactions import PROMPTS, marks_of
from tests.rewards.test_sql import REFERENCE, SCHEMA
from tests.rewards.votes_on_disk import choice_by_gold, gold, scene_pairs, vote_on
from tests.tiny_rewards import (
    random_weights,
    save_clap,
    save_classifier,
    save_clip,
    save_mask2former,
    save_open_clip,
    save_qwen2_vl,
    save_siglip,
)

NONE, SHIPPED, PACKAGE, RANDOM, STUB = "none", "shipped", "of its package", "tiny random", "stub server"
STARS = [{"class": "star", "count": 4, "color": "red"}]
BRIGHT = {"question": "Is it bright?", "choices": ["yes", "no"], "answer": "yes"}
SHORT = ("a cat", "a dog")
PAIRS = 60
REFERENCE_PICTURE = str(Path(__file__).with_name("images") / "before-after.png")
TARGET_PICTURE = str(min((Path(flowgrpo.__file__).parent / "worlds" / "scenes" / "pairs" / "images").iterdir()))


@dataclass(frozen=True)
class Case:
    """A reward, and the material that it is tried on.

    Attributes:
        name: name of the built-in reward.
        weights: where its weights come from, in a word or two.
        material: key of the material.
        options: options of the reward.
    """

    name: str
    weights: str
    material: str = "scenes"
    options: Mapping[str, Any] = field(default_factory=dict)


# -- material ----------------------------------------------------------------------------------------------------------


def all_material() -> dict[str, Material]:
    """All material, by a short name."""
    scenes = scene_samples("scenes:heldout", 4, 6)
    few = scenes.take([row for group in range(2) for row in range(6 * group, 6 * group + 4)])
    short = replace(few.asked([SHORT[row // 4] for row in range(8)]), source="8 samples of the embedded scenes model")
    videos = torch.stack([short.images.roll(step, -1) for step in range(4)], 1)
    return {
        "scenes": scenes,
        "drawn": _drawn(),
        "sounds": drawn_sounds(None, 4, 6),
        "scenes, red stars": replace(scenes, columns={"include": [STARS] * len(scenes)}),
        "scenes, short prompts": short,
        "scenes, as if given": replace(
            scenes, columns={"given_place": [row % 6 for row in range(24)], "given_places": [6] * 24}
        ),
        "scenes, with a reference": replace(scenes, columns={"image": [REFERENCE_PICTURE] * len(scenes)}),
        "scenes, with a target": replace(scenes, columns={"target_image": [TARGET_PICTURE] * len(scenes)}),
        "scenes, with questions": replace(scenes, columns={"questions": [[BRIGHT]] * len(scenes)}),
        "videos": replace(short.changed(videos), source="8 videos of 4 frames"),
        "pages": _pages(),
        "sums": arithmetic_samples("arithmetic:heldout", 4, 6),
        "answers": _written(
            {
                "Count to 3.": ["1 2 3", "one two three", "1, 2 and 3", "123"],
                "Which year?": ["1969", "in 1969", "nineteen sixty-nine", "196 9"],
            },
        ),
        "stated": _written(
            {
                "12+7=?": [
                    f"<answer>{n}</answer><confidence>{c}</confidence>" for n, c in ((19, 9), (18, 9), (19, 2), (9, 1))
                ],
                "6*7=?": [f"<answer>{n}</answer><confidence>{c}</confidence>" for n, c in ((42, 7), (41, 8), (42, 10))]
                + ["42, and I am sure"],
            },
            "answer",
            ["19", "42"],
        ),
        "worked": _written(
            {
                "12 + 7 * 2?": ["7 * 2 = 14\n12 + 14 = 26", "12 + 7 = 19\n19 * 2 = 38", "7 * 2 = 12\nso 26", "26"],
                "A third of 10, in hundredths?": ["10 / 3 = 3.33", "10 / 3 = 3", "10/3 ≈ 3.33\nAnswer: 3.33", "3.3"],
            },
            "answer",
            ["26", "3.33"],
        ),
        "called": _written(
            {
                "12 + 7 * 2?": ["c7*2=14 c12+14=26", "c12+7=19 c19*2=38", "c7*2=14 26", "26"],
                "Half of 10 less 1?": ["c10-1=9 5", "4", "c1=1 c10-1=9", "c5-1=4"],
            },
            "calls",
            [["7*2", "12+14"], ["5-1"]],
        ),
        "programs": _written(
            {
                "Double x.": ["def f(x):\n    return 2 * x", "def f(x):\n    return x", "def f(x): return x * x", "f("],
                "Negate x.": ["def f(x):\n    return -x", "def f(x):\n    return x", "def f(x): return abs(x)", "no"],
            },
            "tests",
            ["assert f(2) == 4\nassert f(3) == 6\nassert f(0) == 0", "assert f(2) == -2\nassert f(0) == 0"],
        ),
        "objects": _written(
            {
                "Two fields.": ['{"a": 1, "b": 2}', '{"a": 1}', 'Here: {"a": 1, "b": 3}', "none"],
                "A list.": ["[1, 2]", "[1]", "```json\n[1, 2]\n```", "[1, 2"],
            },
            "expected",
            [{"a": 1, "b": 2}, [1, 2]],
        ),
        "rewritten": _written(
            {
                "red star": ["a red star", "a picture of a red star", "red star", "a star"],
                "two circles": ["two circles", "a photo of two circles", "circles", ""],
            },
        ),
        "queries": _written(
            {
                "Who is older than 35?": [
                    REFERENCE,
                    "SELECT name FROM people",
                    "SELECT age FROM people",
                    "DROP people",
                ],
                "How many pets?": ["SELECT count(*) FROM pets", "SELECT 3", "SELECT kind FROM pets", "SELECT"],
            },
            "query",
            [REFERENCE, "SELECT count(*) FROM pets"],
            schema=[SCHEMA] * 8,
        ),
    }


def _drawn() -> Material:
    """Drawn scenes as in the tests of the kit: every second picture shows something else than it should."""
    dice, prompts = np.random.default_rng(7), split(heldout=True, per_skill=1)[2:6]
    pictures = [
        torch.from_numpy(
            draw(compose(disturb(prompt.items, dice) if k % 2 else prompt.items, dice), ground_colour(dice))
        )
        for prompt in prompts
        for k in range(6)
    ]
    rows = [prompt for prompt in prompts for _ in range(6)]
    columns = {"include": [prompt.as_record()["include"] for prompt in rows]}
    images = torch.stack(pictures).permute(0, 3, 1, 2).float()
    groups = [row // 6 for row in range(24)]
    return Material(images, [prompt.text for prompt in rows], columns, groups, [str(k) for k in range(24)], "24 scenes")


def _pages() -> Material:
    written = {"Open": ["Open", "Opan", "Closed", ""], "Hello": ["Hello", "Helo", "Jello", "Hello you"]}
    texts = [(word, text) for word, found in written.items() for text in found]
    images = torch.stack([lines_of_text(text, size=(256, 96)) for _, text in texts])
    labels = [text or "empty" for _, text in texts]
    prompts = [f'a sign that says "{word}"' for word, _ in texts]
    return Material(images, prompts, {}, [k // 4 for k in range(8)], labels, "8 drawn pages")


def _written(
    completions: Mapping[str, list[str]], column: str = "number", values: Sequence[Any] = (1, 2), **columns: list[Any]
) -> Material:
    rows = [(number, prompt, text) for number, (prompt, own) in enumerate(completions.items()) for text in own]
    return Material(
        [text for _, _, text in rows],
        [prompt for _, prompt, _ in rows],
        {column: [values[number] for number, _, _ in rows], **columns},
        [number for number, _, _ in rows],
        [f"row {k + 1}" for k in range(len(rows))],
        f"{len(rows)} written completions",
    )


# -- rewards -----------------------------------------------------------------------------------------------------------

Maker = Callable[[Path, ExitStack], Case]


def makers() -> dict[str, Maker]:
    """For each built-in reward, a function that makes its case.

    The function gets an empty folder, and a stack for whatever must be closed after the check.
    """
    plain = [
        Case("answer", NONE, "sums"),
        Case("code", NONE, "programs"),
        Case("confidence", NONE, "stated", {"correct": "answer"}),
        Case("digit_share", NONE, "answers"),
        Case("equations", NONE, "worked"),
        Case("given", NONE, "scenes, as if given"),
        Case("gold", NONE, options={"dense": True}),
        Case("image_similarity", SHIPPED, "scenes, with a target", {"features": "scenes"}),
        Case("jpeg_compressibility", NONE),
        Case("jpeg_incompressibility", NONE),
        Case("json_output", NONE, "objects"),
        Case("length", NONE, "answers", {"limit": 20, "buffer": 18}),
        Case("loudness", NONE, "sounds"),
        Case("majority", NONE, "sums"),
        Case("math", NONE, "sums"),
        # Without this option, the engine enlarges each page to 736 pixels, which takes minutes.
        Case("ocr", PACKAGE, "pages", {"engine": {"Det.limit_side_len": 96}}),
        Case("paint", NONE),
        Case("proxy", SHIPPED),
        Case("psnr", NONE, "scenes, with a target"),
        Case("relative", SHIPPED, options={"reward": "proxy", "liked": ["red"], "disliked": ["blue"]}),
        Case("rendered", SHIPPED, "rewritten", {"reward": "proxy", "model": "scenes", "set": ["evaluate.steps=4"]}),
        Case("ssim", NONE, "scenes, with a target"),
        Case("sql", NONE, "queries"),
        Case("text_format", NONE, "answers", {"pattern": r"[\d ]+"}),
        Case("tool_match", NONE, "called", {"begin": "c", "end": "="}),
        Case("tool_thrift", NONE, "sums", {"begin": "", "end": "-"}),
        Case("win_rate", SHIPPED, options={"judge": "proxy"}),
    ]
    simple: dict[str, Maker] = {case.name: lambda folder, ending, case=case: case for case in plain}  # type: ignore[misc]
    return {name: {**simple, **_MADE}[name] for name in BUILTIN}


def _random(name: str, options: Mapping[str, Any], material: str = "scenes") -> Case:
    return Case(name, RANDOM, material, options)


def _clap(folder: Path, ending: ExitStack) -> Case:
    return _random("clap", {"model": str(save_clap(folder))}, "sounds")


def _clip_score(folder: Path, ending: ExitStack) -> Case:
    return _random("clip_score", {"model": str(save_clip(folder))})


def _pickscore(folder: Path, ending: ExitStack) -> Case:
    return _random("pickscore", {"model": str(save_clip(folder))})


def _siglip(folder: Path, ending: ExitStack) -> Case:
    return _random("siglip", {"model": str(save_siglip(folder))})


def _aesthetic(folder: Path, ending: ExitStack) -> Case:
    weight = torch.randn(1, 16, generator=torch.Generator().manual_seed(4))
    torch.save({"layers.0.weight": weight, "layers.0.bias": torch.zeros(1)}, folder / "head.pth")
    return _random("aesthetic", {"head": str(folder / "head.pth"), "model": str(save_clip(folder / "clip"))})


def _hpsv2(folder: Path, ending: ExitStack) -> Case:
    architecture, weights = save_open_clip(folder, "tiny-hpsv2-kit")
    torch.save({"state_dict": torch.load(weights, weights_only=True)}, folder / "HPS.pt")
    return _random("hpsv2", {"checkpoint": str(folder / "HPS.pt"), "model": str(architecture)})


def _hpsv3(folder: Path, ending: ExitStack) -> Case:
    from safetensors.torch import save_file

    save_file(test_hpsv3.Original(folder / "base").state(), folder / "HPSv3.safetensors")
    save_qwen2_vl(folder / "base")
    (folder / "rubric.txt").write_text(test_hpsv3.TEXT)
    paths = {"rubric": "rubric.txt", "checkpoint": "HPSv3.safetensors", "base": "base"}
    options: dict[str, Any] = {key: str(folder / path) for key, path in paths.items()}
    return _random("hpsv3", {**options, "batch_size": 2}, "scenes, short prompts")


def _videoalign(folder: Path, ending: ExitStack) -> Case:
    (folder / "checkpoint-10").mkdir()
    torch.save(test_videoalign.Original(folder / "base").state(), folder / "checkpoint-10" / "model.pth")
    save_qwen2_vl(folder / "base")
    settings = {"peft_lora_config": {"lora_r": 4, "lora_alpha": 8}, "inference_config": test_videoalign.STATISTICS}
    (folder / "model_config.json").write_text(json.dumps(settings))
    (folder / "rubric.txt").write_text(test_videoalign.TEXT)
    options = {"folder": str(folder), "rubric": str(folder / "rubric.txt"), "base": str(folder / "base")}
    return _random("videoalign", options, "videos")


def _vqascore(folder: Path, ending: ExitStack) -> Case:
    from transformers import Qwen2VLForConditionalGeneration

    random_weights(Qwen2VLForConditionalGeneration, save_qwen2_vl(folder)).save_pretrained(folder)
    return _random("vqascore", {"model": str(folder), "batch_size": 2}, "scenes, short prompts")


def _imagereward(folder: Path, ending: ExitStack) -> Case:
    from transformers import BertTokenizerFast

    torch.save(test_imagereward.Original().state(), folder / "ImageReward.pt")
    (folder / "vocab.txt").write_text("\n".join(test_imagereward._LETTERS) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")
    return _random(
        "imagereward", {"checkpoint": str(folder / "ImageReward.pt"), "tokenizer": str(folder / "tokenizer")}
    )


def _geneval(folder: Path, ending: ExitStack) -> Case:
    from transformers import Mask2FormerForUniversalSegmentation

    detector = save_mask2former(folder / "detector", list(SHAPES))
    model = Mask2FormerForUniversalSegmentation.from_pretrained(detector)
    # The class "no object" is switched off; otherwise no object would be found, and every score would be 0.
    model.class_predictor.bias.data[-1] = -100.0
    model.save_pretrained(detector)
    options = {"detector": str(detector), "clip": str(save_clip(folder / "clip", length=64)), "resolution": 64}
    return _random("geneval", options, "scenes, red stars")


def _image_classifier(folder: Path, ending: ExitStack) -> Case:
    model = save_classifier(folder, ["plain", "drawing", "photo"])
    return _random("image_classifier", {"model": str(model), "labels": {"drawing": 2.0, "photo": -1.0}})


def _safety(folder: Path, ending: ExitStack) -> Case:
    return _random("safety", {"model": str(save_classifier(folder, ["normal", "nsfw"]))})


def _choices(folder: Path, ending: ExitStack) -> Case:
    for number, (prompt, pictures) in enumerate(scene_pairs(PAIRS, seed=1)):
        vote_on(folder, number, prompt.text, pictures, choice_by_gold(prompt, pictures))
    return Case("choices", f"shipped, {PAIRS} votes by `gold`", options={"votes": str(folder)})


def _reactions(folder: Path, ending: ExitStack) -> Case:
    marks, run = marks_of(folder, lambda prompt, picture: gold(prompt, picture) == 1.0)
    options = {"marks": str(marks), "runs": str(run), "regularisation": 10.0}
    return Case("reactions", f"shipped, marks on {PROMPTS} prompts by `gold`", options=options)


def _remote(folder: Path, ending: ExitStack) -> Case:
    served = Served("proxy")
    ending.callback(served.close)
    return Case("remote", "served `proxy`", options={"url": served.url})


def _asked(name: str, answer: Callable[[float], Reply], **options: Any) -> Maker:
    def make(folder: Path, ending: ExitStack) -> Case:
        server = StubServer(lambda request, number: answer(brightness_of(request)))
        ending.callback(server.stop)
        given = {"server": {"url": server.url, "model": "m", "concurrency": 4}, **options}
        return Case(name, STUB, options=given)

    return make


def brightness_of(request: Mapping[str, Any]) -> float:
    """Mean brightness, from 0 to 1, of the last picture that a judge is shown."""
    content = request["body"]["messages"][-1]["content"]
    url = [part["image_url"]["url"] for part in content if part["type"] == "image_url"][-1]
    return _brightness(base64.b64decode(url.partition(",")[2]))


def _brightness(content: bytes) -> float:
    return sum(ImageStat.Stat(Image.open(io.BytesIO(content)).convert("RGB")).mean) / 3 / 255


def _person(folder: Path, ending: ExitStack) -> Case:
    """A program in the place of the person, which marks bright pictures."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        person, "announce", lambda url: Marker(url, lambda samples: [int(_brightness(s) > 0.88) for s in samples])
    )
    ending.callback(patch.undo)
    return Case("person", "a program", options={"answers": str(folder / "marks.jsonl")})


def _critique(folder: Path, ending: ExitStack) -> Case:
    """A server that finds a step wrong if it has an odd number of characters."""

    def answer(request: Mapping[str, Any], number: int) -> Reply:
        steps = re.findall(r"^Step (\d+): (.*)$", question_of(dict(request)), re.MULTILINE)
        return said(json.dumps({"wrong": [int(step) for step, text in steps if len(text) % 2]}))

    server = StubServer(answer)
    ending.callback(server.stop)
    return Case("critique", STUB, "worked", {"server": {"url": server.url, "model": "m", "concurrency": 4}})


def _checklist(folder: Path, ending: ExitStack) -> Case:
    """A server that says of each criterion whether the last picture is brighter than the criterion's number."""

    def answer(request: Mapping[str, Any], number: int) -> Reply:
        bar = float(re.findall(r"than ([\d.]+)\n", question_of(dict(request)))[-1])
        return said("Yes" if brightness_of(request) > bar else "No")

    server = StubServer(answer)
    ending.callback(server.stop)
    given = {"server": {"url": server.url, "model": "m", "concurrency": 4}}
    criteria = [f"It is brighter than {bar}" for bar in (0.86, 0.88, 0.9)]
    return Case("checklist", STUB, "scenes, with a reference", {**given, "criteria": criteria})


def _verifier(folder: Path, ending: ExitStack) -> Case:
    """A server that judges a step and the outcome by the brightness of the picture."""

    def answer(request: Mapping[str, Any], number: int) -> Reply:
        outcome = "Judge the outcome alone" in question_of(dict(request))
        met = brightness_of(request) > (0.89 if outcome else 0.86)
        verdicts = [{"number": 1, "met": met, "reason": "so"}]
        step = {"shows": "a picture", "failure": "none", "verdicts": verdicts}
        return said(json.dumps(verdicts if outcome else step))

    server = StubServer(answer)
    ending.callback(server.stop)
    given = {"server": {"url": server.url, "model": "m", "concurrency": 4}}
    return Case("verifier", STUB, options={**given, "process": ["It is bright."], "outcome": ["It is very bright."]})


def _quiz(folder: Path, ending: ExitStack) -> Case:
    """A server that answers A for a bright picture, and B for another; A is right."""
    server = StubServer(lambda request, number: said("A" if brightness_of(request) > 0.87 else "B"))
    ending.callback(server.stop)
    given = {"server": {"url": server.url, "model": "m", "concurrency": 4}}
    return Case("quiz", STUB, "scenes, with questions", given)


def _token(brightness: float) -> Reply:
    share = min(max(brightness, 0.01), 0.99)
    listed = [{"token": word, "logprob": math.log(p)} for word, p in (("Yes", share), ("No", 1 - share))]
    return said("Yes", finish_reason="length", logprobs={"content": [{**listed[0], "top_logprobs": listed}]})


def _verdicts(brightness: float) -> Reply:
    met = [brightness > bar for bar in (0.86, 0.88, 0.9)]
    return said(json.dumps([{"number": k, "met": one, "reason": "so"} for k, one in enumerate(met, start=1)]))


def _artifacts(brightness: float) -> Reply:
    severity = "slight" if brightness > 0.88 else "clear" if brightness > 0.86 else "severe"
    return said(json.dumps([{"label": "surface", "severity": severity, "where": "everywhere"}]))


def _axes(brightness: float) -> Reply:
    axes = ("Alignment", "Coherence", "Style")
    return said("\n".join(f"{axis} Score (1-5): {1 + 4 * brightness:.3f}" for axis in axes))


_MADE: dict[str, Maker] = {
    "aesthetic": _aesthetic,
    "artifacts": _asked("artifacts", _artifacts),
    "checklist": _checklist,
    "clap": _clap,
    "choices": _choices,
    "clip_score": _clip_score,
    "critique": _critique,
    "geneval": _geneval,
    "hpsv2": _hpsv2,
    "hpsv3": _hpsv3,
    "image_classifier": _image_classifier,
    "imagereward": _imagereward,
    "judge": _asked("judge", lambda brightness: said(f"Score: {10 * brightness:.3f}")),
    "judge_logprob": _asked("judge_logprob", _token),
    "person": _person,
    "pickscore": _pickscore,
    "quiz": _quiz,
    "reactions": _reactions,
    "remote": _remote,
    "rubric": _asked("rubric", _verdicts, criteria=["It is bright.", "It is brighter.", "It is very bright."]),
    "safety": _safety,
    "siglip": _siglip,
    "unified_reward": _asked("unified_reward", _axes),
    "verifier": _verifier,
    "videoalign": _videoalign,
    "vqascore": _vqascore,
}
