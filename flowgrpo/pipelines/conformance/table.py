"""The table of what works: as JSON, and as a page of the documentation."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from ..adapters import ADAPTERS
from .run import TINY, Result

_EDITS = "between its steps it pastes the known part of the picture in, which a rollout does not"
_CHUNKS = "makes its video chunk after chunk, each denoised with those before it in view: several chains of states"
_FRAME_LEVELS = "a noise level of its own for each frame"
_ONE_LIST = "its `encode_prompt` takes all texts as one list `prompts`, which the cache of embeddings cannot take apart"
_NO_FLOW = "its noise levels go up to 80 (EDM), where the kernels of flow matching do not hold"

# Why a class is not there yet; the reasons of the others are found by the checks, or nobody has tried them.
REASONS: dict[str, str] = {
    "CosmosTextToWorldPipeline": _NO_FLOW,
    "CosmosVideoToWorldPipeline": _NO_FLOW,
    "Cosmos2TextToImagePipeline": _NO_FLOW,
    "Cosmos2VideoToWorldPipeline": _NO_FLOW,
    "FluxInpaintPipeline": _EDITS,
    "FluxKontextInpaintPipeline": _EDITS,
    "StableDiffusion3InpaintPipeline": _EDITS,
    "QwenImageInpaintPipeline": _EDITS,
    "ZImageInpaintPipeline": _EDITS,
    "ChromaInpaintPipeline": "its own call fails: it reads a field that its transformer's configuration lacks",
    "SanaSprintPipeline": "TrigFlow: its time is an angle, and its step returns two states; needs a kernel of its own",
    "SanaSprintImg2ImgPipeline": "TrigFlow, as SanaSprintPipeline",
    "LTX2Pipeline": "two states, picture and sound, and two steps at each noise level",
    "SkyReelsV2DiffusionForcingPipeline": _FRAME_LEVELS,
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": _FRAME_LEVELS,
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": _FRAME_LEVELS,
    "AnyFlowPipeline": "a flow map, whose prediction depends on the noise level it steps to; and it turns what "
    "`prepare_latents` drew, so that no way of evaluating fits its state",
    "AnyFlowFARPipeline": _CHUNKS,
    "HeliosPipeline": _CHUNKS,
    "HeliosPyramidPipeline": f"{_CHUNKS}, at several resolutions",
    "DreamLitePipeline": _ONE_LIST,
    "DreamLiteMobilePipeline": _ONE_LIST,
    "GlmImagePipeline": "draws its prior tokens from the global random state in each call, in an order that depends on "
    "the batch",
}

# Flow-matching classes whose files name another scheduler, which the library has for other models too.
_OTHERWISE = (
    "Cosmos2_5_TransferPipeline",
    "Cosmos3OmniPipeline",
    "MotifVideoImage2VideoPipeline",
    "MotifVideoPipeline",
    "SanaControlNetPipeline",
    "WanAnimatePipeline",
)


def class_of(name: str) -> str:
    """`WanPipeline` of `WanPipeline, 2.2 5B`."""
    return name.partition(",")[0]


def flow_classes() -> list[str]:
    """Names of the pipeline classes of the installed diffusers whose file names a flow-matching scheduler."""
    found = []
    root = Path(next(iter(importlib.util.find_spec("diffusers").submodule_search_locations)))  # type: ignore
    for path in sorted((root / "pipelines").rglob("pipeline_*.py")):
        source = path.read_text(encoding="utf-8")
        if "FlowMatch" in source or "flow_prediction" in source:
            tree = ast.parse(source)
            found += [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    # Asking for an attribute would import its module, and with it every one.
    exported = set(dir(diffusers))
    return sorted(name for name in set(found) if name.endswith("Pipeline") and name in exported)


def versions() -> dict[str, str]:
    """Of the libraries that the table depends on."""
    return {module.__name__: module.__version__ for module in (diffusers, transformers, torch)}


def expected(name: str) -> bool:
    """Whether a tiny instance should pass: it has no reason not to."""
    return class_of(name) not in REASONS


def as_json(results: Sequence[Result]) -> str:
    """The results, one object each, and the versions they hold for."""
    rows: list[dict[str, Any]] = []
    for result in results:
        row = {**asdict(result), "verdict": result.verdict}
        row.pop("seconds")
        rows.append(row)
    return json.dumps({"versions": versions(), "results": rows}, indent=1, ensure_ascii=False) + "\n"


def as_markdown(rows: Sequence[dict[str, Any]], made_with: dict[str, str], others: Sequence[str]) -> str:
    """The page's table.

    Args:
        rows: `results` of `as_json`.
        made_with: `versions` of `as_json`.
        others: flow-matching classes without a tiny instance.
    """
    count = {verdict: len({class_of(row["name"]) for row in rows if row["verdict"] == verdict}) for verdict in
             ("unmodified", "adapter", "not yet")}  # fmt: skip
    lines = [
        "Checked with " + ", ".join(f"{name} {version}" for name, version in made_with.items()) + ", on the CPU in "
        f"float32. {count['unmodified']} classes work unmodified, {count['adapter']} with an entry in "
        f"`pipelines/adapters.py`, {count['not yet']} of those checked not yet.",
        "",
        "| class | verdict | states are evaluated | adapter, or what is missing |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(f"| {row['name']} | {row['verdict']} | {row['variant'] or ''} | {_remark(row)} |")
    lines += ["", "Flow-matching classes without a tiny instance, so not checked:", ""]
    lines += [f"- {name}: {REASONS.get(name, 'nobody has tried it')}" for name in others]
    return "\n".join(lines) + "\n"


def _remark(row: dict[str, Any]) -> str:
    parts = [row["why"] if row["verdict"] == "adapter" else "", row["notes"]]
    if row["verdict"] == "not yet":
        failed = [f"{o['check']}: {o['detail']}" for o in row["outcomes"] if o["status"] == "fail"]
        parts.append(REASONS.get(class_of(row["name"]), "; ".join(failed)))
    if recompute := getattr(ADAPTERS.get(class_of(row["name"])), "recompute", ""):
        parts.append(recompute)
    return "; ".join(part for part in parts if part).replace("|", "\\|")


def unchecked() -> list[str]:
    """Flow-matching classes of the installed diffusers without a tiny instance."""
    known = {class_of(name) for name in TINY}
    named = {*REASONS, *_OTHERWISE} & set(dir(diffusers))
    return sorted({*flow_classes(), *named} - known)
