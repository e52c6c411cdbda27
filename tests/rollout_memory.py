"""Prints the memory of the states that a rollout keeps: `python tests/rollout_memory.py [--chunk N] [--dtype NAME]`.

A velocity of one product takes the place of a model. So the command runs at real sizes without an accelerator, and on
two commits it compares what they keep. The peak is the growth of resident memory over the whole rollout (Linux).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flowgrpo.samplers.kernels import Kernel
from flowgrpo.samplers.plans import window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.samplers.transitions import Rollout, chunks_of, join_rollouts


def held(rollout: Rollout) -> int:
    """Bytes of the memory behind the states and the velocities of a rollout; memory in several places counts once."""
    tensors = [rollout.x, *(x for t in rollout.transitions for x in (t.x, t.velocity, t.x_next))]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def status(field: str) -> int:
    """A field of this process's status in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(words: Sequence[str] | None = None) -> None:
    """Roll out chains whose steps are all trained but the last, and print what is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"prompts": 16, "group": 24, "steps": 10, "channels": 16, "size": 64, "chunk": None}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    asked = parser.parse_args(words)
    dtype = getattr(torch, asked.dtype)

    def velocity(x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        # As a pipeline's prediction: computed in the type of the model, and handed over in float32.
        return (x.to(dtype) * 0.6).float()

    plan = window_plan(
        shifted_sigmas(asked.steps, 3.0), range(asked.steps - 1), Kernel("flow_sde", 0.7),
        samples=asked.group, shared_noise=False,
    )  # fmt: skip
    runner = RolloutRunner(velocity, plan, (asked.channels, asked.size, asked.size), dtype=dtype, batch=32)
    before = status("VmRSS")
    chunks = chunks_of(asked.prompts, asked.chunk)
    rollout = join_rollouts([runner.run(range(asked.prompts)[chunk], chunk.start) for chunk in chunks])
    peak = status("VmHWM") - before
    print(f"{asked.dtype}, chunk {asked.chunk}: kept {held(rollout) / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
