"""Questions about schedules: noise levels, windows, trees, pruned edges, and how an average of the weights rises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.releases.asking import Names, Question, drawn
from tests.releases.sources import AWM, BRANCHGRPO, DANCE_GRPO, DGPO, FLOW_FACTORY, G2RPO, MIXGRPO, NFT


def levels(names: Names) -> dict[str, Any]:
    """Tables of noise levels with the shift of 3 that the scripts for FLUX have."""
    lengths = (12, 16, 20, 25)
    return {
        "shift": 3.0,
        "tables": [names["sd3_time_shift"](3.0, torch.linspace(1, 0, length + 1)) for length in lengths],
    }


def flash_tables(names: Names) -> dict[str, Any]:
    """Tables with fewer levels after a window of four steps, as MixGRPO-Flash and MixGRPO-Flash* have them."""
    length, found = 25, []
    table = names["sd3_time_shift"](3.0, torch.linspace(1, 0, length + 1))
    for ratio in (0.4, 0.2):
        for first in (0, 5, 10, 15, 18):
            made = names["run"](
                last_false_index=first + 3, sigma_schedule=table, z=torch.zeros(1),
                args=SimpleNamespace(dpm_post_compress_ratio=ratio, shift=3.0),
            )  # fmt: skip
            found.append({"ratio": ratio, "last": first + 3, "sigmas": made["sigma_schedule"]})
    return {"steps": length, "shift": 3.0, "tables": found}


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


SPLITS, LENGTH = (0, 3, 6, 9), 20


def grown(names: Names) -> tuple[Any, list[Any]]:
    """A tree of the released settings, with a model that predicts 0: its root and its edges."""
    args = SimpleNamespace(tree_split_points=",".join(map(str, SPLITS)), eta=0.3, tree_split_noise_scale=4.0)
    names["dist"] = SimpleNamespace(get_rank=lambda: 0)
    *_, leaves, _ = names["run_tree_sample_step"](
        args, torch.zeros(1, 1, 1), range(LENGTH), torch.linspace(1, 0, LENGTH + 1),
        _Still(), torch.zeros(1, 1, 1), torch.zeros(1, 1),
        torch.zeros(1, 3), torch.zeros(1, 3), True, 2 ** len(SPLITS), len(SPLITS),
    )  # fmt: skip
    root = leaves[0].get_path_from_root()[0]
    found: list[Any] = []

    def collect(node: Any) -> None:
        for child in node.children:
            found.append((node, child))
            collect(child)

    collect(root)
    return root, found


class _Still:
    """A denoiser that predicts 0."""

    def eval(self) -> None:
        """Nothing changes."""

    def __call__(self, *, hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        return (torch.zeros_like(hidden_states),)


def tree_edges(names: Names) -> dict[str, Any]:
    """How many edges each step of a released tree has."""
    _, edges = grown(names)
    counts = [sum(parent.step == step for parent, _ in edges) for step in range(LENGTH)]
    return {"steps": LENGTH, "splits": SPLITS, "edges": counts}


def depths(names: Names) -> dict[str, Any]:
    """Depths that are pruned, by iteration; the depth of an edge is the number of its step plus 1."""
    args = SimpleNamespace(
        depth_pruning="15,16,17,18", depth_pruning_slide=True, sampling_steps=LENGTH, depth_pruning_slide_interval=30,
        depth_pruning_stop_depth=9, tree_split_points=",".join(map(str, SPLITS)),
    )  # fmt: skip
    found = []
    for iteration in range(0, 300, 15):
        edges = [{"child_depth": depth} for depth in range(1, LENGTH + 1)]
        made = names["run"](args=args, should_prune=True, training_samples=edges, original_sample_count=LENGTH,
                            current_step=iteration)  # fmt: skip
        kept = {edge["child_depth"] for edge in made["training_samples"]}
        found.append({"iteration": iteration, "pruned": sorted(set(range(1, LENGTH + 1)) - kept)})
    return {"interval": 30, "stop": 9, "first": 15, "size": 4, "windows": found}


def widths(names: Names) -> dict[str, Any]:
    """Which steps each leaf keeps under the width modes of the release, when leaves have different rewards."""
    root, edges = grown(names)
    leaves = root.get_all_leaf_descendants()
    rewards = torch.randn(len(leaves), generator=torch.Generator().manual_seed(5))
    nodes, by_depth = names["compute_node_rewards_from_leaves"](root, rewards, leaves)
    advantages = names["compute_hierarchical_advantages_by_depth"](by_depth)
    found = []
    for mode in (1, 2):
        samples = [
            {"step": parent.step, "parent_id": parent.node_id, "child_id": child.node_id,
             "advantage": advantages[child.node_id]}
            for parent, child in edges
        ]  # fmt: skip
        made = names["run"](
            args=SimpleNamespace(width_pruning_mode=mode, sampling_steps=LENGTH,
                                 tree_split_points=",".join(map(str, SPLITS))),
            should_prune=True, training_samples=samples, original_sample_count=len(samples), all_nodes=nodes,
        )  # fmt: skip
        kept = {one["child_id"] for one in made["training_samples"]}
        steps = [[node.step - 1 for node in leaf.get_path_from_root()[1:] if node.node_id in kept] for leaf in leaves]
        found.append({"mode": mode, "kept": steps})
    return {"steps": LENGTH, "splits": SPLITS, "rewards": rewards, "modes": found}


def tree_updates(names: Names) -> dict[str, Any]:
    """How many edges each optimizer step of one process takes, for two trees of the released size."""
    trees, edges = 2, 218
    weight, sizes = torch.zeros(1, requires_grad=True), []

    def made(*_: Any) -> Tensor:
        return weight

    def stepped() -> None:
        assert weight.grad is not None
        # Each edge has the gradient -1 over the accumulation and the edges of a tree.
        sizes.append(-weight.grad.item() * 12 * edges)
        weight.grad = None

    sample = {
        **dict.fromkeys(("latent", "next_latent"), weight), "step": 0, "batch_idx": 0,
        "log_prob": torch.zeros(1), "advantage": torch.tensor(1.0),
    }  # fmt: skip
    names["run"](
        args=SimpleNamespace(clip_range=1e-3, adv_clip_max=5.0, gradient_accumulation_steps=12),
        training_samples=[dict(sample) for _ in range(trees * edges)], root_nodes=[None] * trees, device="cpu",
        sigma_schedule=torch.ones(1), image_ids=None, grpo_one_step=made, total_log_loss=0.0, grad_norm=None,
        max_grad_norm=1.0, lr_scheduler=SimpleNamespace(step=lambda: None),
        transformer=SimpleNamespace(clip_grad_norm_=lambda _: torch.tensor(1.0)),
        optimizer=SimpleNamespace(step=stepped, zero_grad=lambda: None),
        dist=SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(AVG=0), get_rank=lambda: 1),
        **dict.fromkeys(("encoder_hidden_states", "pooled_prompt_embeds", "text_ids"), torch.zeros(2, 1)),
    )  # fmt: skip
    return {"trees": trees, "edges": edges, "accumulation": 12, "sizes": sizes}


class _Sloping:
    """A denoiser whose velocity is a multiple of the state; it remembers the times at which it was called."""

    slope = 0.4

    def __init__(self) -> None:
        self.times: list[float] = []

    def eval(self) -> None:
        """Nothing changes."""

    def __call__(self, *, hidden_states: Tensor, timestep: Tensor, **_: Any) -> tuple[Tensor]:
        self.times.append(float(timestep))
        return (self.slope * hidden_states,)


def completions(names: Names) -> dict[str, Any]:
    """How each branch of the released settings is finished: the times of the model's calls, and the image."""
    length, rows = 16, []
    table, start = names["sd3_time_shift"](3.0, torch.linspace(1, 0, length + 1)), drawn(11, 1, 4, 3)
    for split in range(8):
        for stride in (1, 2):
            model, given = _Sloping(), torch.zeros(1, 1)
            made = names["run"](
                args=None, eta_step=split, g=stride, j=stride - 1, sigma_schedule=table, input_ode_latents=start,
                transformer=model, batch_encoder_hidden_states=given, batch_pooled_prompt_embeds=given,
                batch_text_ids=given, image_ids=given, grpo_sample=True, tqdm=lambda steps, desc: steps,
            )  # fmt: skip
            rows.append({"split": split, "stride": stride, "times": model.times, "image": made["latents_j"]})
    return {"sigmas": table, "start": start, "slope": _Sloping.slope, "branches": rows}


COUNTED = (0, 1, 2, 50, 74, 75, 76, 100, 299, 300, 301, 500, 700, 2000)


def nft_decay(names: Names) -> dict[str, Any]:
    """The decay of the sampling policy by the number of updates made so far, for the two kinds of decay in use."""
    return {"updates": COUNTED, "decays": {str(k): [names["return_decay"](n, k) for n in COUNTED] for k in (1, 2)}}


def dgpo_decay(names: Names) -> dict[str, Any]:
    """The decay of the old policy, by the number of updates made before this one."""
    return {"updates": COUNTED, "decays": [names["run"](global_step=n)["ema_ref_decay"] for n in COUNTED]}


def crd_decays(names: Names) -> dict[str, Any]:
    """The decays of CRD's two averages, by the number of updates made before this one."""
    names["_DECAY_PRESETS"] = {}
    kinds = {"compared": "0-0.25-0.005-0.999", "sampling": "75-0.0-0.0075-0.999"}
    decays = {name: [names["compute_decay"](n, kind) for n in COUNTED] for name, kind in kinds.items()}
    return {"updates": COUNTED, "decays": decays}


def awm_decay(names: Names) -> dict[str, Any]:
    """The decay of the average that the trust term pulls to, by the number of updates made so far."""
    config = SimpleNamespace(train=SimpleNamespace(kl_ema_decay_type="linear", kl_ema_decay=0.3))
    return {"updates": COUNTED, "decays": [names["run"](config=config, global_step=n)["decay"] for n in COUNTED]}


def awm_levels(names: Names) -> dict[str, Any]:
    """The ranges of the rollout's steps from which one noise level each is drawn; the end of a range is not in it."""
    settings, here, rows = SimpleNamespace(timestep_fraction=0.9), SimpleNamespace(device="cpu"), []
    for steps, times in ((14, 6), (14, 4), (10, 3), (20, 7)):
        settings.train_timesteps = times
        config = SimpleNamespace(sample=SimpleNamespace(num_steps=steps), train=settings)
        found = names["run"](config=config, accelerator=here)
        rows.append({"steps": steps, "times": times, "first": found["lower_bounds"], "end": found["upper_bounds"]})
    return {"ranges": rows}


TREE = "fastvideo/train_branchgrpo_flux.py"
PARTS = ("TreeNode", "parse_split_points", "flux_step_with_split", "run_tree_sample_step")
FUSED = ("compute_node_rewards_from_leaves", "compute_hierarchical_advantages_by_depth")
SAMPLING = "fastvideo/utils/sampling_utils.py"

SCHEDULES: dict[str, Question] = {
    "flux_levels": Question(*DANCE_GRPO, "fastvideo/train_grpo_flux.py", ("sd3_time_shift",), levels),
    "mixgrpo_windows": Question(*MIXGRPO, "fastvideo/utils/grpo_states.py", ("GRPOTrainingStates",), mixgrpo_windows),
    "mixgrpo_flash_tables": Question(*MIXGRPO, SAMPLING, ("sd3_time_shift",), flash_tables, (44, 54)),
    "branchgrpo_edges": Question(*BRANCHGRPO, TREE, PARTS, tree_edges),
    "branchgrpo_depths": Question(*BRANCHGRPO, TREE, ("parse_split_points",), depths, (1270, 1322)),
    "branchgrpo_widths": Question(*BRANCHGRPO, TREE, (*PARTS, *FUSED), widths, (1325, 1477)),
    "branchgrpo_updates": Question(*BRANCHGRPO, TREE, (), tree_updates, (1501, 1608)),
    "g2rpo_completions": Question(
        *G2RPO,
        "fastvideo/train_g2rpo_hps_clip.py",
        ("sd3_time_shift", "flow_grpo_step", "run_ode_sample_step"),
        completions,
        block=("sample_reference_model", "prefix", "latents_j"),
    ),
    "diffusion_nft_decay": Question(*NFT, "scripts/train_nft_sd3.py", ("return_decay",), nft_decay),
    "dgpo_decay": Question(*DGPO, "scripts/train_sd3_dgpo.py", (), dgpo_decay, (1176, 1176)),
    "crd_decays": Question(*FLOW_FACTORY, "src/flow_factory/trainers/crd.py", ("compute_decay",), crd_decays),
    "awm_decay": Question(*AWM, "advantage_weighted_matching/scripts/train_sd3_awm.py", (), awm_decay, (1410, 1413)),
    "awm_levels": Question(*AWM, "advantage_weighted_matching/scripts/train_sd3_awm.py", (), awm_levels, (1198, 1202)),
}
