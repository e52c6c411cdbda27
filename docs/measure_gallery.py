"""Measures a gallery of many images: time and memory to build it, size on disk, time to the first picture in a browser.

    python docs/measure_gallery.py --images 10000

The script makes a run folder of drawn scenes in a temporary folder, and builds its gallery with the command. It opens
the gallery from disk in headless Chromium three times, each time with a new profile. It prints a table, and with --out
it also writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from flowgrpo.worlds.scenes.scene_prompts import sample_scenes

SEEDS, EVALUATIONS, SIDE = 4, 4, 512
FIRST = "[...document.images].some(i => i.complete && i.naturalWidth && i.getBoundingClientRect().top < innerHeight)"


def write_run(run: Path, images: int) -> int:
    """Write a finished run whose evaluations have about `images` images; returns the exact number of images."""
    prompts = images // (SEEDS * EVALUATIONS)
    drawn = list(sample_scenes(prompts, np.random.default_rng(0)))
    rows = []
    for at in range(EVALUATIONS):
        (run / "samples" / f"iter-{at:06d}").mkdir(parents=True)
        for number, (prompt, _, picture) in enumerate(drawn):
            for seed in range(SEEDS):
                name = f"iter-{at:06d}/eval-{number:05d}-{seed}.png"
                turned = Image.fromarray(np.rot90(picture, seed)).resize((SIDE, SIDE))
                turned.save(run / "samples" / name, compress_level=1)
                gold = float((number + seed + at) % 3 > 0)
                rows.append({
                    "phase": "eval", "iteration": at, "prompt": prompt.text, "prompt_id": number, "seed": seed,
                    "sample": 0, "image": name, "rewards": {"gold": gold}, "sub_scores": {"gold": {"partial": gold}},
                    "notes": {"gold": "found what was asked for"}, "columns": {"tag": prompt.skill},
                })  # fmt: skip
    (run / "samples" / "index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (run / "config.yaml").write_text(f"name: large\nrun: {{iterations: {EVALUATIONS - 1}}}\n", encoding="utf-8")
    lines = ({"iteration": at, "reward/gold": 0.5, "eval/gold": 0.5} for at in range(EVALUATIONS))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return len(rows)


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


class Browser:
    """Headless Chromium with a new profile, controlled through its pipe."""

    def __init__(self, program: str, profile: Path) -> None:
        commands, self._commands = os.pipe()
        answers, told = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        start = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        words = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
            "--remote-debugging-pipe", "--window-size=1200,900", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", "-c", start, str(commands), str(told), *words],
            pass_fds=(commands, told), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(told)
        self._answers, self._last = os.fdopen(answers, "rb"), 0
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._page = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]

    def call(self, method: str, session: str | None = None, **options: Any) -> dict[str, Any]:
        """The answer to a command of the DevTools protocol."""
        self._last += 1
        asked = {"id": self._last, "method": method, "params": options} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(asked).encode() + b"\0")
        while True:
            text = bytearray()
            while (byte := self._answers.read(1)) != b"\0":
                if not byte:
                    raise RuntimeError("Chromium ended")
                text += byte
            answer = json.loads(text)
            if answer.get("id") == self._last:
                return dict(answer["result"])

    def first_picture(self, address: str) -> float:
        """Seconds from the request for a page until one of its pictures is loaded and in view."""
        began = time.perf_counter()
        self.call("Page.navigate", self._page, url=address)
        while True:
            found = self.call("Runtime.evaluate", self._page, expression=FIRST, returnByValue=True)
            if found["result"].get("value"):
                return time.perf_counter() - began
            time.sleep(0.01)

    def heap(self) -> int:
        """Bytes of the page's JavaScript heap in use."""
        return int(self.call("Runtime.getHeapUsage", self._page)["usedSize"])

    def close(self) -> None:
        """End the browser."""
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="JSON file")
    given = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no Chromium was found; install it to measure a page")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        count = write_run(run, given.images)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "flowgrpo", "gallery", str(run)], check=True)
        built, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        times, heaps = [], []
        for attempt in range(3):
            browser = Browser(program, Path(folder) / f"profile{attempt}")
            times.append(browser.first_picture((run / "gallery" / "index.html").as_uri()))
            heaps.append(browser.heap())
            browser.close()
        found = {
            "images": count,
            "side": SIDE,
            "build_seconds": round(built, 1),
            "build_cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
            "build_peak_mb": round(used.ru_maxrss / 1024),
            "samples_mb": round(size_of(run / "samples") / 1e6, 1),
            "gallery_mb": round(size_of(run / "gallery") / 1e6, 1),
            "first_picture_seconds": round(median(times), 2),
            "page_heap_mb": round(median(heaps) / 1e6, 1),
        }
    print("\n".join(f"{name:24} {value}" for name, value in found.items()))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
