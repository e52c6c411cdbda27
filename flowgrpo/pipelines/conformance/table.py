"""The table of the pipeline classes that work, as JSON and as a page of the documentation."""

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

from ...weights.pipeline_classes import ADAPTERS
from .conform import TINY, Result
from .reasons import REASONS, reason


def class_of(name: str) -> str:
    """The class in the name of an instance: `WanPipeline` for `WanPipeline, 2.2 5B`."""
    return name.partition(",")[0]


def flow_classes() -> list[str]:
    """Names of the pipeline classes in the installed diffusers whose source file mentions flow matching."""
    found = []
    root = Path(next(iter(importlib.util.find_spec("diffusers").submodule_search_locations)))  # type: ignore
    for path in sorted((root / "pipelines").rglob("pipeline_*.py")):
        source = path.read_text(encoding="utf-8")
        if "FlowMatch" in source or "flow_prediction" in source:
            tree = ast.parse(source)
            found += [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    # `dir` imports nothing; `hasattr` would import the module of each class.
    exported = set(dir(diffusers))
    return sorted(name for name in set(found) if name.endswith("Pipeline") and name in exported)


def versions() -> dict[str, str]:
    """Versions of the libraries on which the table depends."""
    return {module.__name__: module.__version__ for module in (diffusers, transformers, torch)}


def expected(name: str) -> bool:
    """Whether a tiny instance should pass: its class is not in `REASONS`."""
    return class_of(name) not in REASONS


def as_json(results: Sequence[Result]) -> str:
    """The results as JSON, one object for each, with the versions of the libraries."""
    rows: list[dict[str, Any]] = []
    for result in results:
        row = {**asdict(result), "verdict": result.verdict}
        row.pop("seconds")
        rows.append(row)
    return json.dumps({"versions": versions(), "results": rows}, indent=1, ensure_ascii=False) + "\n"


def as_markdown(rows: Sequence[dict[str, Any]], made_with: dict[str, str], others: Sequence[str]) -> str:
    """The table of the page, in Markdown.

    Args:
        rows: `results` of `as_json`.
        made_with: `versions` of `as_json`.
        others: flow-matching classes without a tiny instance.
    """
    count = {verdict: len({class_of(row["name"]) for row in rows if row["verdict"] == verdict}) for verdict in
             ("unmodified", "adapter", "not yet")}  # fmt: skip
    lines = [
        "Checked with " + ", ".join(f"{name} {version}" for name, version in made_with.items()) + ", on the CPU in "
        f"float32. {count['unmodified']} classes work unmodified, and {count['adapter']} work with an entry in "
        f"`weights/pipeline_classes.py`. {count['not yet']} of the checked classes "
        f"{'does' if count['not yet'] == 1 else 'do'} not work yet.",
        "",
        "| class | verdict | way of evaluation | adapter, or what is missing |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(f"| {row['name']} | {row['verdict']} | {row['variant'] or ''} | {_remark(row)} |")
    lines += ["", "These flow-matching classes have no tiny instance, so they are not checked:", ""]
    lines += [f"- {name}: {reason(name)}" for name in others]
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
    # Some classes of flow matching are not found by `flow_classes`, because their files name another scheduler.
    named = set(REASONS) & set(dir(diffusers))
    return sorted({*flow_classes(), *named} - known)
