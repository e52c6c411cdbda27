"""Checks that numbers stay the same, bit for bit: records short runs of every recipe and of rare parts, and compares.

    python tests/same_numbers.py record before.json           # on the commit before a change
    python tests/same_numbers.py compare before.json          # on the commit after it
    python tests/same_numbers.py compare before.json mixgrpo  # some runs

Use it for a change that should not alter results, such as a change of the language of recipes. A record has, for each
run, the metrics without times, the samples with checksums of their pictures, and checksums of the trained weights, of
their averages, of the optimizer's state and of the result. The rounding of sums depends on the build of torch and on
the processor. So run both commands on the same machine, and do not put a record into the repository. `record` with
names keeps the other runs of the file. The exit status of `compare` is 1 if anything differs.

`same_numbers.yaml` has the overrides that make recipes short, and the variants. Each run has its own processes, which
are forked after the imports and use one thread, so that earlier runs change nothing. The script forks, so it runs on
POSIX systems only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TWO = "mixgrpo_guard in two processes"
FEW = {"scenes.jsonl": ("scenes", 3), "sums.jsonl": ("arithmetic", 10)}
"""Prompt files of a run: file → a world, and how many of its first prompts the file has."""
REWARD = """
from flowgrpo.rewards import Scores

def nines(completions, prompts, parts):
    scores = [[float(part.count("9") - 0.1 * len(part)) for part in own] for own in parts]
    return Scores([sum(own) for own in scores], parts=scores)
"""


def runs() -> dict[str, tuple[str, list[str], int]]:
    """Name -> recipe, overrides, and number of processes."""
    from flowgrpo.configs.load import recipe_names
    from flowgrpo.configs.schema import SCHEMAS

    listed: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    task = {name: task for task in SCHEMAS for name in recipe_names(task)}

    def run(recipe: str, count: int = 1, **variant: Any) -> tuple[str, list[str], int]:
        layers = (listed[".short"][task[recipe]], listed[".own"].get(recipe, {}), variant)
        return recipe, [word for layer in layers for word in overrides(layer)], count

    found = {name: run(name) for name in task} | {TWO: run("mixgrpo_guard", 2)}
    variants = {name: body for name, body in listed.items() if not name.startswith(".")}
    return found | {name: run(body.pop("base"), **body) for name, body in variants.items()}


def overrides(layer: dict[str, Any]) -> Iterator[str]:
    """The overrides of a part of a recipe, one for each key; values are JSON, which is YAML without anchors."""
    for section, body in layer.items():
        keys = {f"{section}.{key}": value for key, value in body.items()} if isinstance(body, dict) else {section: body}
        yield from (f"{key}={json.dumps(value)}" for key, value in keys.items())


def write_inputs(folder: Path) -> None:
    """Write the files that runs read from the folder in which they train: a reward and short prompt files."""
    import flowgrpo

    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    for name, (world, prompts) in FEW.items():
        whole = (Path(flowgrpo.__file__).parent / "worlds" / world / "data" / "train.jsonl").read_text(encoding="utf-8")
        (folder / name).write_text("".join(whole.splitlines(keepends=True)[:prompts]), encoding="utf-8")


def trained(recipe: str, words: list[str], count: int, folder: Path) -> Path:
    """The run folder after training in `count` processes.

    Raises:
        RuntimeError: a process has failed; the message has the end of the log.
    """
    write_inputs(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    fork = multiprocessing.get_context("fork").Process
    started = [fork(target=_train, args=(recipe, words, rank, count, port, folder)) for rank in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        raise RuntimeError((folder / "log.txt").read_text()[-4000:])
    return folder / "run"


def _train(recipe: str, words: list[str], rank: int, count: int, port: int, folder: Path) -> None:
    """One process of a run, with the environment of a launcher if there are several processes."""
    import torch

    from flowgrpo.bench.measures import Silent
    from flowgrpo.configs.load import load_recipe
    from flowgrpo.training.session import start

    if count > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    torch.set_num_threads(1)
    start(load_recipe(recipe, words), Path("run")).trainer(Silent()).train()


def numbers_of(run: Path) -> dict[str, Any]:
    """Everything in a run folder that a change must not alter, without wall times and places of files."""

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]

    metrics = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines("metrics.jsonl")]
    samples = lines("samples/index.jsonl")
    for sample in samples:
        if "image" in sample:
            sample["image"] = _sum((run / "samples" / sample["image"]).read_bytes())
    return {"metrics": metrics, "samples": samples, "tensors": dict(_tensors(run))}


def _tensors(run: Path) -> Iterator[tuple[str, str]]:
    """Checksums of the tensors of the newest checkpoint and of the result; folders of files do not matter."""
    import torch
    from safetensors.torch import load_file

    newest = max((run / "checkpoints").glob("iter-*"))
    for file in sorted(newest.rglob("*.pt"), key=lambda file: file.name):
        if file.stem in ("optimizer", "ema", "anchor", "old"):
            yield from _leaves(file.stem, torch.load(file, map_location="cpu", weights_only=True))
    results = [file for name in ("lora", "pipeline", "model") for file in sorted((run / name).rglob("*.safetensors"))]
    for name, file in (("trained", newest / "trained.safetensors"), *((f"result/{f.parent.name}", f) for f in results)):
        yield from _leaves(name, load_file(file))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Checksums of the tensors in nested dictionaries, by their keys."""
    import torch

    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {_sum(raw)}"
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _leaves(f"{name}/{key}", inner)


def _sum(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def first_difference(before: Any, after: Any, place: str = "") -> str | None:
    """The first place where two records differ, with both values; None if they are equal, bit for bit."""
    keys: Any = ()
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        before, after = ({key: part.get(key, "nothing") for key in keys} for part in (before, after))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        keys = range(len(before))
    elif repr(before) != repr(after):  # compared as text, because 0.0 and -0.0 are equal numbers
        return f"{place}: before {before!r:.200}, after {after!r:.200}"
    found = (first_difference(before[key], after[key], f"{place}/{key}".strip("/")) for key in keys)
    return next((difference for difference in found if difference), None)


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", metavar="RUN")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # What every run needs is imported once.
    import peft  # noqa: F401
    from diffusers import StableDiffusion3Pipeline  # noqa: F401

    import flowgrpo.training.session  # noqa: F401

    known, record, comparing = runs(), dict[str, Any](), given.command == "compare"
    if comparing or (given.names and given.file.exists()):
        record = json.loads(given.file.read_text(encoding="utf-8"))
    if unknown := [name for name in given.names if name not in known and name not in record]:
        parser.error(f"there is no run {unknown[0]!r}; the runs are {', '.join(known)}")
    differ = 0
    for name in given.names or [*known, *(name for name in record if name not in known)]:
        begun = time.monotonic()
        if name not in known or (comparing and name not in record):
            said = "only in the record" if name in record else "not in the record"
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = numbers_of(trained(*known[name], Path(folder)))
            if comparing:
                said = first_difference(record[name], json.loads(json.dumps(found))) or "equal"
            else:
                record[name], said = found, "recorded"
                given.file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        differ += said not in ("equal", "recorded")
        print(f"{name}: {said} ({time.monotonic() - begun:.1f} s)", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
