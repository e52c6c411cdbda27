"""Runs commands of flowgrpo, each in one or several processes as a launcher starts them: `python ranks.py JOBS.json`.

A job has the `words` of the command, the `count` of processes and a `log`, the stem of the files for what each prints;
`environment` holds what its launcher sets beside.
The statuses with which they ended are written to `LOG.json`. Libraries are imported once, and processes forked.
"""

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any


def entry(job: dict[str, Any], rank: int, port: int) -> None:
    """One process of a job, as the installed script would be run in it."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["count"]),
        "LOCAL_WORLD_SIZE": str(job["count"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true", **job.get("environment", {}),
    }  # fmt: skip
    log = os.open(f"{job['log']}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["flowgrpo", *job["words"]]

    from flowgrpo.cli import main

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
    import peft  # noqa: F401
    from diffusers import StableDiffusion3Pipeline  # noqa: F401

    import flowgrpo.gallery.build
    import flowgrpo.training.session  # noqa: F401

    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one)
