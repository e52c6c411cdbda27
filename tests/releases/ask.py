"""Asks released code for numbers: `python tests/releases/ask.py CLONES [NAME ...]`.

CLONES is a folder with a git clone of each repository, `CLONES/NAME` for `https://github.com/OWNER/NAME`. Functions and
classes are taken by name from a file of one commit, and run on seeded inputs. Inputs and outputs are written to
`numbers/NAME.json`, with the repository, the commit, the file and the names, so that the tests compare without a
network. Only numbers are kept, never text of a release.
"""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
import textwrap
import typing
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUMBERS = Path(__file__).parent / "numbers"
SHAPE = (2, 3, 2, 2)
STEPS, SHIFT = 8, 3.0

Names = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """What is asked of a release.

    Attributes:
        repository: OWNER/NAME.
        commit: of the repository.
        file: in the repository.
        names: functions and classes that are taken from the file.
        ask: called with the names; returns inputs and outputs by name.
        lines: first and last line of statements within a function, which the name `run` runs on given names.
    """

    repository: str
    commit: str
    file: str
    names: tuple[str, ...]
    ask: Callable[[Names], dict[str, Any]]
    lines: tuple[int, int] | None = None

    @property
    def source(self) -> dict[str, Any]:
        """The place of what is asked, as it stands beside the numbers."""
        found: dict[str, Any] = {"repository": self.repository, "commit": self.commit, "file": self.file}
        return found | ({"names": list(self.names)} if self.lines is None else {"lines": list(self.lines)})


def drawn(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed))


def table() -> Tensor:
    """A shifted table of noise levels, as DanceGRPO and MixGRPO make it: float32, from 1 to 0."""
    times = torch.linspace(1, 0, STEPS + 1)
    return SHIFT * times / (1 + (SHIFT - 1) * times)


def plain(value: Any) -> Any:
    """A value as JSON has it; a float32 is written so that it reads back to the last bit."""
    if isinstance(value, Tensor):
        return value.detach().double().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


Stepped = Callable[[Tensor, Tensor, int, Tensor | None], tuple[Tensor, Tensor]]


def transitions(step: Stepped, eta: float, indices: range) -> dict[str, Any]:
    """Sampled steps, and their log-probs under the prediction that sampled and under another one.

    Args:
        step: `(velocity, x, index, x_next) -> (x_next, log_prob)`; draws if `x_next` is None.
        eta: noise level.
        indices: steps of the table.
    """
    rows = []
    for index in indices:
        x, old, new = drawn(1 + index), drawn(101 + index), drawn(201 + index)
        # A policy that has moved a little, as it does in a run.
        new = old + 0.01 * new
        torch.manual_seed(301 + index)
        x_next, log_prob = step(old, x, index, None)
        _, moved = step(new, x, index, x_next)
        rows.append({"index": index, "x": x, "velocity": old, "moved": new, "x_next": x_next,
                     "log_prob": log_prob, "moved_log_prob": moved})  # fmt: skip
    return {"sigmas": table(), "eta": eta, "steps": rows}


def flow_grpo_steps(names: Names) -> dict[str, Any]:
    """Flow-GRPO's step, by the scheduler's table; the step from 1 has the next level in its denominator."""
    sigmas, eta = table(), 0.7
    scheduler = SimpleNamespace(sigmas=sigmas, index_for_timestep=int)

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, log_prob, *_ = names["sde_step_with_logprob"](
            scheduler, velocity, [index] * len(x), x, noise_level=eta, prev_sample=x_next
        )
        return made, log_prob

    return transitions(step, eta, range(STEPS - 1))


def dance_grpo_steps(names: Names) -> dict[str, Any]:
    """DanceGRPO's step for FLUX."""
    sigmas, eta = table(), 0.3

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, _, log_prob = names["flux_step"](velocity, x, eta, sigmas, index, x_next, grpo=True, sde_solver=True)
        return made, log_prob

    return transitions(step, eta, range(STEPS - 1))


def branchgrpo_steps(names: Names) -> dict[str, Any]:
    """BranchGRPO's step without a split."""
    sigmas, eta = table(), 0.3

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, _, log_prob = names["flux_step_with_split"](
            velocity, x, eta, sigmas, index, x_next, grpo=True, sde_solver=True
        )
        return made, log_prob

    return transitions(step, eta, range(STEPS - 1))


def mixgrpo_steps(names: Names) -> dict[str, Any]:
    """MixGRPO's step in its window."""
    sigmas, eta = table(), 0.7

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, _, log_prob, *_ = names["flow_grpo_step"](velocity, x, eta, sigmas, index, x_next)
        return made, log_prob

    return transitions(step, eta, range(STEPS - 1))


def mixgrpo_solver(names: Names) -> dict[str, Any]:
    """DPM-Solver++ of second order over the whole table, without noise, from given predictions."""
    sigmas, x = table(), drawn(1)
    args = SimpleNamespace(dpm_algorithm_type="dpmsolver++", dpm_solver_order=2, dpm_solver_type="midpoint")
    state, states, velocities = names["DPMState"](order=2), [], []
    # From the second level on: at sigma 1 the released half log-SNR is infinite.
    for index in range(1, STEPS):
        velocity = drawn(101 + index)
        made, *_ = names["dpm_step"](
            args, velocity, x if not states else states[-1], index, sigmas[:-1], sigmas, dpm_state=state
        )
        velocities.append(velocity)
        states.append(made)
    return {"sigmas": sigmas, "first": 1, "x": x, "velocities": velocities, "states": states}


def mixgrpo_windows(names: Names) -> dict[str, Any]:
    """Windows by iteration, until one has reached the end of the schedule."""
    schedules = []
    for strategy, overlap, interval in (
        ("progressive", True, 3), ("progressive", False, 3), ("decay", True, 8), ("exp_decay", True, 6),
    ):  # fmt: skip
        options = {
            "iters_per_group": interval, "group_size": 4, "max_timesteps": 24, "sample_strategy": strategy,
            "prog_overlap": overlap,
        }  # fmt: skip
        states, windows = names["GRPOTrainingStates"](**options), []
        while len(window := states.get_current_timesteps()) == 4:
            windows.append(window)
            states.update_iteration()
        schedules.append({**options, "windows": windows})
    return {"schedules": schedules}


def flow_grpo_advantages(names: Names) -> dict[str, Any]:
    """Advantages within prompts, by the deviation of the prompt and by the deviation of all samples."""
    prompts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    rewards = drawn(7, 12).double().numpy()
    found = {
        scale: names["PerPromptStatTracker"](global_std=scale == "batch").update(prompts, rewards)
        for scale in ("group", "batch")
    }
    return {"prompts": prompts, "rewards": rewards, "advantages": found}


def branchgrpo_advantages(names: Names) -> dict[str, Any]:
    """Rewards of all nodes of a tree of three binary splits, and advantages among the nodes of a depth."""
    node = names["TreeNode"]
    root = node("0", torch.zeros(1))
    parents, level, log_probs = [-1], [(0, root)], drawn(9, 14)
    leaves: list[Any] = []
    order = [root]
    for depth in range(3):
        following = []
        for number, parent in level:
            for _ in range(2):
                child = node(str(len(order)), torch.zeros(1), parent=parent, step=depth + 1)
                child.log_prob = log_probs[len(order) - 1]
                parent.add_child(child)
                parents.append(number)
                following.append((len(order), child))
                order.append(child)
        level = following
    leaves = [child for _, child in level]
    rewards, found = drawn(8, len(leaves)), {}
    for weighted in (False, True):
        _, by_depth = names["compute_node_rewards_from_leaves"](root, rewards, leaves, use_prob_weighted=weighted)
        names["compute_hierarchical_advantages_by_depth"](by_depth)
        found["path" if weighted else "mean"] = {
            "values": [float(one.reward) for one in order], "advantages": [float(one.advantage) for one in order],
        }  # fmt: skip
    return {"parents": parents, "rewards": rewards, "log_probs": log_probs, "found": found}


def pref_grpo_kl(names: Names) -> dict[str, Any]:
    """The Gaussian KL between two steps of one noise."""
    old, new, std = drawn(1), drawn(2), torch.tensor(0.37)
    return {"mean": new, "reference": old, "std": std, "kl": names["compute_kl_loss"](new, old, std)}


SIGMA = 0.6


def noised() -> dict[str, Any]:
    """Six finished images of two groups, their noise, and predictions of three policies at one noise level."""
    rows = (6, 3, 2, 2)
    old = drawn(3, *rows)
    return {
        "x0": drawn(1, *rows), "noise": drawn(2, *rows), "sigma": SIGMA, "old": old,
        "velocity": old + 0.05 * drawn(4, *rows), "reference": old + 0.05 * drawn(5, *rows),
        "advantage": 2.0 * drawn(6, 6), "group": [0, 0, 0, 1, 1, 1],
    }  # fmt: skip


def diffusion_nft_loss(names: Names) -> dict[str, Any]:
    """The loss of DiffusionNFT and its gradient."""
    given, beta, bound = noised(), 0.5, 1.5
    velocity = given["velocity"].clone().requires_grad_(True)
    made = names["run"](
        config=SimpleNamespace(beta=beta, train=SimpleNamespace(adv_clip_max=bound)),
        train_sample_batch={"advantages": given["advantage"][:, None]}, j_idx=0,
        x0=given["x0"], xt=(1 - SIGMA) * given["x0"] + SIGMA * given["noise"], t_expanded=torch.tensor(SIGMA),
        forward_prediction=velocity, old_prediction=given["old"],
    )  # fmt: skip
    made["loss"].backward()
    return {**given, "beta": beta, "bound": bound, "loss": made["loss"], "gradient": velocity.grad}


def awm_log_prob(names: Names) -> dict[str, Any]:
    """The log-prob of AWM with its generalised Huber weighting, and its gradient."""
    given, power = noised(), 0.25
    velocity = given["velocity"].clone().requires_grad_(True)
    made = names["run"](
        model_output=velocity, random_noise=given["noise"], clean_latents=given["x0"], timestep=torch.tensor(SIGMA),
        weighting="ghuber", config=SimpleNamespace(train=SimpleNamespace(ghuber_power=power)),
    )  # fmt: skip
    made["log_prob"].sum().backward()
    return {**given, "power": power, "log_prob": made["log_prob"], "gradient": velocity.grad}


def dgpo_loss(names: Names) -> dict[str, Any]:
    """The gradient of DGPO's loss, of one process and without its clip."""
    given, beta = noised(), 100.0
    velocity = given["velocity"].clone().requires_grad_(True)
    names["dist"] = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(SUM=None))
    groups = {"local_group_indices": torch.tensor(given["group"]), "num_groups": 2}
    loss = names["compute_group_dgpo_loss_allreduce"](
        velocity, given["reference"], given["noise"] - given["x0"], given["advantage"], groups, None, beta,
        group_size=3,
    )  # fmt: skip
    loss.backward()
    return {**given, "beta": beta, "gradient": velocity.grad}


FLOW_GRPO = ("yifan123/flow_grpo", "ac4c86e8cae021841f1fde853d340e0db67690dd")
DANCE_GRPO = ("XueZeyue/DanceGRPO", "15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344")
MIXGRPO = ("Tencent-Hunyuan/MixGRPO", "e5cdd6a427778d8c8b2e7a48ce16972141adbe7c")
BRANCHGRPO = ("Fredreic1849/BranchGRPO", "19fbb9fc92ad1857212f3b664d6e9ff80c8b3804")
NFT = ("NVlabs/DiffusionNFT", "24af5554898d85e93efa492f42b5e9cdf4156e9b")
AWM = ("scxue/advantage_weighted_matching", "be5137232e33a21b449ed65a533211d0deb97ed8")
DGPO = ("Luo-Yihong/DGPO", "01ceb4b83c0bbc55d96246fe1b6d9a3d4749ebd6")
PREF_GRPO = ("CodeGoat24/Pref-GRPO", "3e787f6dd5a3051b40d61f07e9578468ac26130a")

SAMPLING = "fastvideo/utils/sampling_utils.py"
SOLVER = (
    "DPMState", "dpm_step", "convert_model_output", "dpm_solver_first_order_update",
    "multistep_dpm_solver_second_order_update", "_sigma_to_alpha_sigma_t",
)  # fmt: skip
TREE = ("TreeNode", "compute_node_rewards_from_leaves", "compute_hierarchical_advantages_by_depth")
TRAINING = "fastvideo/train_branchgrpo_flux.py"

QUESTIONS: dict[str, Question] = {
    "flow_grpo_steps": Question(
        *FLOW_GRPO, "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py", ("sde_step_with_logprob",), flow_grpo_steps
    ),
    "flow_grpo_advantages": Question(
        *FLOW_GRPO, "flow_grpo/stat_tracking.py", ("PerPromptStatTracker",), flow_grpo_advantages
    ),
    "dance_grpo_steps": Question(*DANCE_GRPO, "fastvideo/train_grpo_flux.py", ("flux_step",), dance_grpo_steps),
    "mixgrpo_steps": Question(*MIXGRPO, SAMPLING, ("flow_grpo_step",), mixgrpo_steps),
    "mixgrpo_solver": Question(*MIXGRPO, SAMPLING, SOLVER, mixgrpo_solver),
    "mixgrpo_windows": Question(*MIXGRPO, "fastvideo/utils/grpo_states.py", ("GRPOTrainingStates",), mixgrpo_windows),
    "branchgrpo_steps": Question(*BRANCHGRPO, TRAINING, ("flux_step_with_split",), branchgrpo_steps),
    "branchgrpo_advantages": Question(*BRANCHGRPO, TRAINING, TREE, branchgrpo_advantages),
    "diffusion_nft_loss": Question(*NFT, "scripts/train_nft_sd3.py", (), diffusion_nft_loss, (908, 962)),
    "awm_log_prob": Question(
        *AWM, "advantage_weighted_matching/scripts/train_sd3_awm.py", (), awm_log_prob, (238, 251)
    ),
    "dgpo_loss": Question(*DGPO, "scripts/train_sd3_dgpo.py", ("compute_group_dgpo_loss_allreduce",), dgpo_loss),
    "pref_grpo_kl": Question(*PREF_GRPO, "fastvideo/grpo/kl.py", ("compute_kl_loss",), pref_grpo_kl),
}


def taken(clone: Path, question: Question) -> Names:
    """The functions and classes of a question, made from the file of its commit."""
    shown = subprocess.run(
        ["git", "-C", str(clone), "show", f"{question.commit}:{question.file}"], check=True, capture_output=True
    )
    text = shown.stdout.decode()
    tree = ast.parse(text)
    tree.body = [one for one in tree.body if getattr(one, "name", None) in question.names]
    found = {one.name for one in tree.body}  # type: ignore[attr-defined]
    if missing := sorted(set(question.names) - found):
        raise SystemExit(f"{question.file} of {question.repository} has no {', '.join(missing)}")

    def randn_tensor(shape: Any, **options: Any) -> Tensor:
        return torch.randn(shape)

    names: Names = {
        **vars(typing), "torch": torch, "math": math, "np": np, "deque": deque, "dataclass": dataclass,
        "randn_tensor": randn_tensor, "FlowMatchEulerDiscreteScheduler": object, "main_print": lambda *words: None,
        "__name__": __name__,
    }  # fmt: skip
    exec(compile(tree, question.file, "exec"), names)
    if question.lines is not None:
        first, last = question.lines
        part = textwrap.dedent("".join(text.splitlines(keepends=True)[first - 1 : last]))

        def run(**given: Any) -> Names:
            exec(compile(part, question.file, "exec"), made := names | given)
            return made

        names["run"] = run
    return names


def main() -> None:
    """Ask all questions, or the named ones, and write the numbers."""
    clones, *chosen = sys.argv[1:]
    for name in chosen or QUESTIONS:
        question = QUESTIONS[name]
        numbers = question.ask(taken(Path(clones) / question.repository.partition("/")[2], question))
        text = json.dumps({"source": question.source, **plain(numbers)})
        (NUMBERS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {len(text)} bytes")


if __name__ == "__main__":
    main()
