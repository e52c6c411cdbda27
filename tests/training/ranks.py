"""Runs commands of flowgrpo, each in one or several processes as a launcher starts them: `run_all(JOBS)`.

A job has the `words` of the command, the `count` of processes and a `log`, the stem of the files for what each prints;
`environment` holds what its launcher sets beside, and `folder` is where they are started.
The statuses with which they ended are written to `LOG.json`. This file is started once as a program, which imports the
libraries and forks for every job that it reads, a list a line; it ends with the tests.
"""

import gc
import json
import multiprocessing
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

# What a command imports when it trains or evaluates. A process that imports all this itself needs a second for it.
LOADED = (
    "peft", "diffusers.pipelines.stable_diffusion_3", "diffusers.guiders", "diffusers.pipelines.onnx_utils",
    "flowgrpo.cli.app", "flowgrpo.cli.plan", "flowgrpo.training.session", "flowgrpo.training.folder.changing",
    "flowgrpo.training.losses.objectives_by_name", "flowgrpo.training.text.text_task",
    "flowgrpo.training.masked.masked_task", "flowgrpo.training.reporting.progress", "flowgrpo.gallery.build",
    "flowgrpo.worlds.scenes.gold", "flowgrpo.worlds.arithmetic.problems",
)  # fmt: skip


@cache
def launcher() -> "subprocess.Popen[str]":
    """The program, with one thread for all it starts: with another number of threads sums round differently.

    A fork of a process that knows a GPU cannot use it, so the program sees none.
    """
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def run_all(jobs: Sequence[dict[str, Any]], patience: float = 1500) -> None:
    """Run these jobs one after the other."""
    asked = launcher()
    assert asked.stdin is not None
    assert asked.stdout is not None
    asked.stdin.write(json.dumps(list(jobs)) + "\n")
    asked.stdin.flush()
    answers = select.select([asked.stdout], [], [], patience)[0]
    if not answers or asked.stdout.readline() != "done\n":
        asked.kill()
        launcher.cache_clear()
        raise RuntimeError("the launcher of processes did not get to the end of its jobs")


def entry(job: dict[str, Any], rank: int, port: int) -> None:
    """One process of a job, as the installed script would be run in it."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["count"]),
        "LOCAL_WORLD_SIZE": str(job["count"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true", **job.get("environment", {}),
    }  # fmt: skip
    os.chdir(job.get("folder", "."))
    log = os.open(f"{job['log']}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["flowgrpo", *job["words"]]

    from flowgrpo.cli.app import main

    main()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(job: dict[str, Any]) -> None:
    port, context = free_port(), multiprocessing.get_context("fork")
    started = [context.Process(target=entry, args=(job, rank, port)) for rank in range(job["count"])]
    for process in started:
        process.start()
    for process in started:
        process.join()
    Path(f"{job['log']}.json").write_text(json.dumps([process.exitcode for process in started]))


if __name__ == "__main__":
    from PIL import Image

    from flowgrpo.training.model_paths import embedded_pipeline
    from flowgrpo.weights.pipeline_folders import check_pipeline_folder

    for name in LOADED:
        import_module(name)
    # These keep what they find, and are slow.
    check_pipeline_folder(embedded_pipeline())
    Image.init()
    # What is imported stays: the collectors of garbage of the processes need not look through it, nor copy it.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        for one in json.loads(line):
            run(one)
        print("done", flush=True)
