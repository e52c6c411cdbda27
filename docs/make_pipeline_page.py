"""Writes the table of docs/pipelines.md from docs/pipelines.json.

Run it from anywhere: `python docs/make_pipeline_page.py`. The results come from
`flowgrpo pipelines check --all --out docs/pipelines.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

from flowgrpo.pipelines.conformance.table import as_markdown, unchecked

PAGE = Path(__file__).resolve().with_name("pipelines.md")
RESULTS = PAGE.with_suffix(".json")
HEADING = "## The table\n"


def page(text: str) -> str:
    """The page with a new table; the text before the heading does not change."""
    before, heading, _ = text.partition(HEADING)
    if not heading:
        raise SystemExit(f"{PAGE} has no line {HEADING.strip()!r}")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return before + heading + "\n" + as_markdown(found["results"], found["versions"], unchecked())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
