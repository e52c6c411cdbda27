"""Lists the files and functions of the package that an iteration calls: `python tests/trace_iteration.py [RECIPE ...]`.

The second iteration of a run is traced, because the first also makes objects that later iterations reuse.
Comprehensions and lambdas count as part of the function that contains them. Without a recipe, the script traces
`mixgrpo_flash_guard` and `text`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import flowgrpo
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.session import start

ROOT = Path(flowgrpo.__file__).parent


def traced(recipe: str, folder: Path, words: list[str]) -> dict[str, dict[str, int]]:
    """File -> function -> calls, in one iteration of a recipe."""
    silent = ["data.heldout=null", "run.checkpoint_minutes=null", "run.sample_every=1000000"]
    session = start(load_recipe(recipe, [*silent, *words]), folder / "run")
    trainer = session.trainer(Silent())
    trainer.iterate(0)
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            name = getattr(code, "co_qualname", code.co_name)
            found[str(Path(code.co_filename).relative_to(ROOT))][name] += 1

    threading.setprofile(called)
    sys.setprofile(called)
    try:
        trainer.iterate(1)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def main() -> None:
    """Print the numbers of each recipe, and with `--list` every file with its functions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=["mixgrpo_flash_guard", "text"])
    parser.add_argument("--list", action="store_true", help="name every function, with how often it is called")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the recipes, such as run.seed=1")
    given = parser.parse_args()
    for recipe in given.recipes:
        with tempfile.TemporaryDirectory() as folder:
            found = traced(recipe, Path(folder), given.set)
        print(f"{recipe}: {len(found)} files, {sum(map(len, found.values()))} functions")
        for file in sorted(found):
            names = f": {', '.join(f'{name} {count}' for name, count in found[file].items())}" if given.list else ""
            print(f"  {file} ({len(found[file])}){names}")


if __name__ == "__main__":
    main()
