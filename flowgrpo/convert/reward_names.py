"""Rewards of other tools by the names of ours, and what differs. Code of other tools is never named in a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .conversion import Conversion
from .foreign_settings import named


@dataclass(frozen=True)
class Counterpart:
    """Our reward for a reward of another tool.

    Attributes:
        name: name of our reward.
        options: its options.
        scale: factor of its weight, where their score has another unit.
        note: what differs; empty if nothing does.
        needs: what you must still give; empty if nothing.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    note: str = ""
    needs: str = ""


ON_GPU = {"device": "cuda"}
CLIP = {"model": "openai/clip-vit-large-patch14", "backend": "transformers", **ON_GPU}
NEEDS_A_SERVER = "`options.server` is a placeholder: write the url and the model of your server"
SERVER = {"server": {"url": "http://localhost:8000/v1", "model": "MODEL"}}
READS_DIFFERENTLY = "RapidOCR reads the images here, PaddleOCR there"

OF_FLOW_GRPO: dict[str, Counterpart] = {
    "aesthetic": Counterpart(
        "aesthetic", {"head": "sac+logos+ava1-l14-linearMSE.pth", **ON_GPU},
        needs="`options.head` is the file flow_grpo/assets/sac+logos+ava1-l14-linearMSE.pth of their repository",
    ),
    "clipscore": Counterpart(
        "clip_score", {**CLIP, "logit_scaled": True}, scale=1 / 30, note="their score is the logit divided by 30"
    ),
    "geneval": Counterpart("geneval", ON_GPU, note="a detector in this process, where they ask a server"),
    "imagereward": Counterpart("imagereward", ON_GPU),
    "jpeg_compressibility": Counterpart("jpeg_compressibility"),
    "jpeg_incompressibility": Counterpart("jpeg_incompressibility"),
    "ocr": Counterpart("ocr", note=READS_DIFFERENTLY),
    "pickscore": Counterpart("pickscore", ON_GPU),
    "unifiedreward": Counterpart(
        "unified_reward", {**SERVER, "form": "final", "scale": None}, scale=1 / 5,
        note="their score is the model's score divided by 5", needs=NEEDS_A_SERVER,
    ),
    "video_ocr": Counterpart("ocr", note=READS_DIFFERENTLY),
}  # fmt: skip
OF_FLOW_FACTORY: dict[str, Counterpart] = {
    "clip": Counterpart("clip_score", CLIP),
    "ocr": Counterpart("ocr", note=READS_DIFFERENTLY),
    "pickscore": Counterpart("pickscore", ON_GPU),
    "vllm_evaluate": Counterpart(
        "judge_logprob", SERVER, note="the share of `Yes`, as there, but the question is VQAScore's",
        needs=NEEDS_A_SERVER,
    ),
}  # fmt: skip
THINK = r"<think>(?!.*<think>).*?</think>.*"
OF_TRL: dict[str, Counterpart] = {
    "accuracy_reward": Counterpart(
        "math", needs="the column of right answers is `answer` here and `solution` there: rename it in the prompt file",
        note="an answer without a box counts too",
    ),
    "think_format_reward": Counterpart("text_format", {"pattern": THINK}, note="white space around it does not matter"),
    "get_soft_overlong_punishment": Counterpart(
        "length", {"limit": 1280, "buffer": 256, "unit": "tokens"},
        note="the limit is fixed at 1280 in their script",
    ),
}  # fmt: skip


def placeholder(name: str) -> str:
    """The name of a reward that is still to be written, for a reward that has no counterpart."""
    word = re.sub(r"\W+", "_", name.rpartition(".")[2].rpartition(":")[2], flags=re.ASCII).strip("_").lower()[:40]
    return f"my_rewards.py:{word if word and not word[0].isdigit() else 'reward'}"


def entry_of(
    conversion: Conversion, name: str, known: Counterpart | None, weight: float, notes: list[str]
) -> dict[str, Any]:
    """An entry of `rewards`. What is still to be done for it is said in the conversion.

    Args:
        conversion: of the configuration.
        name: their name of the reward.
        known: our reward; None if there is none.
        weight: their weight.
        notes: gets what differs.
    """
    if known is None:
        text = conversion.recipe.get("task") == "text"
        conversion.want(f"reward {named(name)}: {to_write(name, text)}")
        return _entry(placeholder(name), weight, {})
    if known.needs:
        conversion.want(f"reward {named(name)}: {known.needs}")
    if known.note:
        notes.append(f"{named(name)}: {known.note}")
    return _entry(known.name, weight * known.scale, known.options)


def _entry(name: str, weight: float, options: Mapping[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name}
    if weight != 1.0:
        entry["weight"] = float(f"{weight:.6g}")
    return entry | ({"options": dict(options)} if options else {})


def to_write(name: str, text: bool) -> str:
    """What to do about a reward that has no counterpart."""
    made, function = placeholder(name).split(":")
    takes = "completions" if text else "images"
    return (
        f"no reward here does this; write `def {function}({takes}, prompts, **columns)`, which returns a number for "
        f"each of the {takes}, into {made}, as docs/rewards.md shows, or name another reward of `flowgrpo rewards`"
    )
