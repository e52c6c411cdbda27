"""Runs commands of docs/benchmarks/gpu.md one after another in one process, because imports alone can take a minute.

    python docs/measure_gpu.py                       # lists the commands
    python docs/measure_gpu.py 3 12-14 --out figures # runs some of them, by their numbers
    python docs/measure_gpu.py llada adapter_speed   # runs the commands that contain one of these words

With `--out FOLDER` the figures are written there, and not over the figures of the page. With `--minutes N` no command
begins after N minutes. A command that fails is reported, and the next one begins.
"""

from __future__ import annotations

import argparse
import gc
import re
import runpy
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(page: Path = PAGE) -> list[list[str]]:
    """The commands of a page that measure something, in its order."""
    lines = [line for block in FENCE.findall(page.read_text(encoding="utf-8")) for line in block.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words[:2] == ["flowgrpo", "bench"] or words[:1] == ["python"]]


def chosen(every: Sequence[list[str]], asked: Sequence[str]) -> list[int]:
    """Places of the commands that are asked for, by number from 1, by a range such as 3-5, or by a word in them.

    Raises:
        ValueError: a number is too large, or a word is in no command.
    """
    found: list[int] = []
    for word in asked:
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if ends is not None:
            numbers = range(int(ends[1]), int(ends[2] or ends[1]) + 1)
            places = [number - 1 for number in numbers if 1 <= number <= len(every)]
            whole = len(places) == len(numbers) > 0
        else:
            places = [place for place, words in enumerate(every) if any(word in part for part in words)]
            whole = bool(places)
        if not whole:
            raise ValueError(f"{word!r} is no command of the page; it has the numbers 1 to {len(every)}")
        found += [place for place in places if place not in found]
    return found


def run(words: Sequence[str], out: Path | None) -> None:
    """Run one command in this process; its figures go to `out` if a folder is given."""
    words = list(words)
    if out is not None and "--out" in words:
        place = words.index("--out") + 1
        words[place] = str(out / Path(words[place]).name)
    if words[0] == "flowgrpo":
        from flowgrpo.cli.app import app

        app(args=words[1:], standalone_mode=False)
        return
    before, sys.argv = sys.argv, words[1:]
    try:
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    finally:
        sys.argv = before


def main(arguments: Sequence[str] | None = None) -> int:
    """List the commands, or run some; returns the number of commands that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("asked", nargs="*", metavar="NUMBER or WORD")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    given = parser.parse_args(arguments)
    every = commands()
    if not given.asked:
        for number, words in enumerate(every, 1):
            print(f"{number:>3}  {shlex.join(words)}")
        return 0
    try:
        places = chosen(every, given.asked)
    except ValueError as error:
        parser.error(str(error))
    sys.path.insert(0, str(ROOT))  # the scripts in tests import one another
    import torch

    began, failed, left = time.perf_counter(), list[int](), list[int]()
    for place in places:
        if time.perf_counter() - began > 60 * given.minutes:
            left.append(place + 1)
            continue
        print(f"\n{place + 1}: {shlex.join(every[place])}", flush=True)
        start = time.perf_counter()
        try:
            run(every[place], given.out)
        except (Exception, SystemExit):
            traceback.print_exc()
            failed.append(place + 1)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # compiled blocks hold the models of their commands
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print(f"{place + 1} took {time.perf_counter() - start:.0f} s", flush=True)
    for what, numbers in (("failed", failed), ("not begun for lack of time", left)):
        if numbers:
            print(f"{what}: {', '.join(map(str, numbers))}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
