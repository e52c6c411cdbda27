"""Writes docs/methods.md: the published methods, how to choose them, and an entry for each paper with a recipe.

Run it from anywhere: `python docs/make_method_index.py`. The tables come from method_rows.py, which checks what they
claim. In the entries, lines of code are counted from the source, and figures are read from docs/benchmarks/claims.json
if it exists.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from method_rows import code_lines, tables, wrapped

from flowgrpo.configs.load import recipe_names
from flowgrpo.core import (
    advantages,
    directions,
    nearby_targets,
    nearest_images,
    neighbours,
    overrating,
    penalties,
    process,
    selection,
    trees,
)  # fmt: skip
from flowgrpo.core import forward_process as forward
from flowgrpo.pipelines import policy, scored_edges
from flowgrpo.rewards import relative, win_rate
from flowgrpo.samplers import kernels, plan_parts, plans, schedules, solvers, transitions, windows
from flowgrpo.training import anchor, planning, teachers
from flowgrpo.training.credit import step_credits
from flowgrpo.training.extensions import novelty, suspects
from flowgrpo.training.images import critic, images_beside, scouting
from flowgrpo.training.losses import direct_align, directed, neighbour, reward_gradient, reward_targets, transition

PAGE = Path(__file__).resolve().with_name("methods.md")
CLAIMS = Path(__file__).resolve().parent / "benchmarks" / "claims.json"


@dataclass(frozen=True)
class Method:
    """A paper: its recipes, the code that no other method needs, and the differences from the released code."""

    title: str
    arxiv: str
    recipes: tuple[str, ...]
    differs: str
    own: tuple[Any, ...] = ()
    claims: tuple[str, ...] = field(default=())


METHODS = (
    Method(
        "Flow-GRPO", "2505.05470", ("flow_grpo", "flow_grpo_fast", "flow_grpo_fast_branch"),
        "The last step is never trained. The KL is the exact KL of the Gaussians. The released KL lacks a division by "
        "Δ: it is Δ times the exact KL, so a released β is β · Δ here. The weight here is 0.01, also in the published "
        "form; the released 0.04 would be about 0.004. Windows are drawn once for all ranks and never hold the last "
        "step. At σ = 1 the denominator is continuous in σ; the released code tests for equality.",
        (kernels.flow_sde,),
    ),
    Method(
        "DanceGRPO", "2505.07818", ("dance_grpo", "dance_grpo_best_of_n"),
        "Trained steps are drawn for the iteration, not for each sample. The last step is deterministic; this equals "
        "the released decoding from the clean prediction. Best-of-n takes n images also if n is odd.",
        (kernels.dance_sde, selection.select),
    ),
    Method(
        "MixGRPO and Flash", "2507.21802", (
            "mixgrpo", "mixgrpo_guard", "mixgrpo_flash", "mixgrpo_flash_star", "mixgrpo_flash_guard",
        ),
        "Windows are never empty. The released progressive window is empty for a whole interval when it reaches the "
        "end. When a window has reached the end, it starts over, as in the release; the paper's Algorithm 1 stops. "
        "Windows are drawn once for all ranks. An update has whole groups; a released update has three of the twelve "
        "images of each prompt. Flash always ends at σ = 0; the released schedule stops before σ = 0 if one step is "
        "left. Flash* keeps a quarter of the steps after its window, which makes the paper's 8 evaluations; the "
        "released fifth makes 7.",
        (windows.progressive, windows.frozen, schedules.compress_tail, solvers.dpmpp_2m), ("mixgrpo", "mixgrpo-flash"),
    ),
    Method(
        "TempFlow-GRPO", "2508.04324", ("tempflow_grpo",),
        "The weights are computed so that their mean is 1. Each released constant holds for one schedule and one noise "
        "level. The published form compares 24 branches of a step, six of each of four seeds. The embedded form has "
        "two seeds.",
        (plans.spine_plan,), ("tempflow",),
    ),
    Method(
        "BranchGRPO", "2509.06040", ("branchgrpo", "branchgrpo_depth", "branchgrpo_width", "branchgrpo_mix"),
        "Branch noise has unit variance and correlation 1/(1 + s²), as in the paper. The released code multiplies the "
        "noise by 4, and scores it without this factor. States are rounded before they are scored, so ratios begin at "
        "1. The last step is not trained. Depth pruning moves towards later steps, as in the paper's text; in the "
        "released code it moves towards earlier ones. An update has 96 random edges of all trees, as released. Width "
        "pruning trains the better child of the last splits, as in the paper. Its published form is the released mode "
        "1, which sorts edges of equal advantage and so keeps the first five later steps of every branch.",
        (plans.branch_plan, trees.node_values, trees.depth_advantages), ("branchgrpo", "branchgrpo-mix"),
    ),
    Method(
        "Flow-CPS", "2509.05952", ("flow_cps", "flow_cps_released"),
        "`flow_cps` has the transition's true density. The released log-probability lacks the division by 2 s²; "
        "`flow_cps_released` lacks it too.",
        (kernels.cps,),
    ),
    Method(
        "G²RPO", "2510.01982", ("g2rpo",),
        "The advantage is the mean over the granularities; the released code takes their sum. The difference is a "
        "factor in the learning rate, and in what the bound of the advantage cuts. Strides begin with the "
        "second step after the branch, as released. Every branch ends at σ = 0; some of the "
        "released tables end above it.",
    ),
    Method(
        "TP-GRPO", "2602.06422", ("tp_grpo",),
        "The main reward is a step's own gain, as in the abstract. The default of the released configurations is the "
        "gain of the whole trajectory (`credit.main: total`). The released scripts, and the published form, replace "
        "the gain of a turning point by the gain from its step to the image (`credit.main: rest`). The scripts also "
        "keep as many positive as negative turning points of a batch, which this package does not.",
        (process.turning_point_rewards, step_credits.step_rewards),
    ),
    Method(
        "Neighbor GRPO", "", ("neighbor_grpo",),
        "Distances are means over the latent, in units of the group's spread, so the same clip fits all sizes. Four "
        "samples of a group are anchors; they are drawn anew at every step.",
        (neighbours.neighbour_log_ratio, neighbours.quasi_norm, neighbour.NeighbourObjective),
    ),
    Method(
        "DenseGRPO", "2601.20218", ("dense_grpo",),
        "Every step has Flow-GRPO's noise level; the paper calibrates the noise before training. A step's gains "
        "are divided by their standard deviation in the group. The embedded form trains four of ten steps.",
        (process.turning_point_rewards,),
    ),
    Method(
        "Flash-GRPO", "2605.15980", ("flash_grpo",),
        "All prompts of an iteration share the step that is trained; in the released code only the images of a prompt "
        "do. The factors are divided by their mean over the steps that may be drawn, and in the released code by their "
        "mean over a batch. The size of a group is Flow-GRPO's; the paper's could not be read.",
        (policy.FlowPolicy.step_weight,),
    ),
    Method(
        "SAGE-GRPO", "2603.21872", ("sage_grpo",),
        "The variance is bounded below by 0; the released variance can be negative. The coefficients of the two KL "
        "terms are fixed at 1e-5 and 1e-6; the released code adapts the first within 1e-7 to 1e-5, and the second is a "
        "tenth of it. The last step is not trained. The published form has the proportions of the release on FLUX; the "
        "release trains HunyuanVideo 1.5.",
        (kernels.sage,), ("sage",),
    ),
    Method(
        "GRPO-Guard", "2510.22319", ("grpo_guard",),
        "Each sample has its own bias. The released code averages the bias over the micro-batch; its author confirmed "
        "that this is a bug. The step weight is 1/|∂μ/∂v|. For Flow-SDE this is the paper's 1/Δ, and it is exact for "
        "the other kernels too.",
        (kernels.guard_weight,), ("guard-ratio", "guard-reward", "guard-gradient"),
    ),
    Method(
        "Flow-DPPO", "2606.11025", ("flow_dppo",), "The limit is in nats of the whole latent.",
        (transition.TransitionObjective._trusted,),
    ),
    Method(
        "LOOP", "2503.00897", ("loop_diffusion",),
        "The transitions are Flow-GRPO's; the paper has a DDPM's.", (), ("loop",),
    ),
    Method(
        "VGPO", "2512.12387", ("vgpo",),
        "The equations are not public. The recipe is the plainest form of the abstract: discounted rewards of the "
        "projections that follow a step, and a comparison among all groups where the comparison within a group fades. "
        "Reviews tell of a weight ω = Q / mean Q on the first five steps; it is left out, because its equation is not "
        "public.",
        (process.future_rewards, advantages.anchored_advantages), ("vgpo",),
    ),
    Method(
        "Pref-GRPO", "2508.20751", ("pref_grpo",),
        "The judge is asked about each pair in both orders, so a preference for a position cancels. The released code "
        "asks once about each pair. The embedded form trains a window of two steps; the published form trains 14 of 25 "
        "stochastic steps, as released.",
        (win_rate.WinRate,), ("pref-grpo",),
    ),
    Method(
        "AC-Flow", "2510.18072", ("ac_flow",),
        "The equations are not public. The recipe is the plainest form of the abstract: a critic that is trained "
        "before it is used, rewards in units of their spread, clipped advantages, and the 2-Wasserstein distance of a "
        "step.",
        (critic.Critic, critic._Network),
    ),
    Method(
        "Euphonium", "", ("euphonium",),
        "The process reward is the critic of AC-Flow; the paper has a trained video model. The drift is a share of the "
        "step's noise; the paper adds a multiple of the unit gradient.",
        (critic.Critic.guide,),
    ),
    Method(
        "DiffusionNFT", "2509.16117", ("diffusion_nft", "default"),
        "The noise levels are the rollout's; the published form has all but the last, and the released code leaves out "
        "a random one of ten for each image. The embedded form draws three levels and one noise for a prompt, which "
        "lowers the variance of the gradient: 1.2 times its squared mean, and 1.7 times with noise for each image. The "
        "published form draws noise for each image (`objective.noise: image`). `transform` has the other modes by "
        "which the released code makes advantages numbers in [0, 1]. The recipe `default` is "
        "another form: its old policy lags behind by several updates, and it trains the best and the worst images "
        "only, at the noisier levels of short rollouts.",
        (forward.diffusion_nft,), ("diffusion-nft",),
    ),
    Method(
        "Sol-RL", "2604.06916", ("sol_rl",),
        "The scouts are computed with the weights of the policy as they are, and not in 4 bits (NVFP4). The rest is "
        "the recipe of DiffusionNFT.",
        (scouting.Scouts, scouting.seeds_to_sample, planning.scouting_plan),
    ),
    Method(
        "AWM", "2509.25050", ("awm",),
        "The noise levels are the rollout's. One level is drawn from each of several ranges, and pure noise is not "
        "among them, as released. The images of a prompt share their noise, which lowers the variance of the gradient; "
        "the released code and the published form have noise for each image. There is no pull to the average of the "
        "weights: the released average forgets at least 70 % at every update. Advantages are not divided by 5, so the "
        "KL has five times the released weight.",
        (forward.awm,),
    ),
    Method(
        "DGPO", "2510.08425", ("dgpo",),
        "Four of the five noisiest levels are drawn for a rollout, as released. The average of the weights with which "
        "the ratio compares samples from the start; in the released code it samples after 500 steps. In the embedded "
        "form it lags in full from the fourth update; in the released code and the published form it lags more with "
        "every step. There is no guidance; one released configuration samples with guidance, trains without it, and "
        "guides the reference. The reference alone can be guided here too, with `model.reference_call`.",
        (forward.dgpo,),
    ),
    Method(
        "CRD", "2603.14128", ("crd",),
        "There is no code of the paper's authors that we could read; the recipe follows the code in Flow-Factory. That "
        "code centres over all images that are trained at once; the recipe centres over the images of a prompt, as the "
        "paper says. The embedded form draws three noise levels and one noise for a prompt; the published form takes "
        "all levels of the rollout but the last, with noise for each image, where the code draws 20 of them. The base "
        "is guided by 1.8 in the embedded form, with which it is best, and by 4.5 in the published form. The averages "
        "of the weights rise as in the code, for the rendering of text.",
        (forward.crd, penalties.adaptive_kl),
    ),
    Method(
        "RAM", "2605.10759", ("ram",),
        "The paper and its code could not be read. Two programs of others that follow the paper agree on its loss. One "
        "of them draws noise levels as this recipe does, on the line through the levels of the rollout. The recipe "
        "divides the loss by η, which changes no step of AdamW but for its ε. The embedded form draws one noise for a "
        "prompt.",
        (),
    ),
    Method(
        "DiffusionOPD", "2605.15055", ("diffusion_opd",),
        "We could not read the code of the paper's authors; the recipe follows the code in UniRL, Flow-Factory and "
        "verl-omni. Teachers are LoRAs of the model, whole models with the same inputs and latents, or the model "
        "itself with another call. All prompts of "
        "an iteration make one optimizer step; a published step has a batch of each teacher. Targets other than the "
        "step and the velocity, and their division by the mean distance, are not here. With noise in the steps the "
        "loss is mode `gkd` of Flow-OPD (2605.08063); its other mode, which takes the distance as an advantage, is "
        "not here. With `of: velocity` and a window of one late step it is the loss of DanceOPD (2606.27377). The "
        "embedded form has one teacher, the model with guidance.",
        (penalties.taught,),
    ),
    Method(
        "D-OPSD", "2605.05204", ("d_opsd",),
        "We could not read the code of the paper's authors. The recipe follows the project's page, reports of the "
        "paper and the names of its runs: 4 steps, a batch of 4, a learning rate of 1e-4 and an average of decay "
        "0.9999. The teacher's picture goes into the pipeline's own call, as with FLUX.2 klein. In the embedded form "
        "the teacher reads other words, and the average has a decay of 0.99.",
        (teachers.contexts_of, scored_edges.to_teacher),
    ),
    Method(
        "FDFO", "2603.12893", ("fdfo",),
        "The images of a pair begin with one noise; in the released code they also have a little noise of their own at "
        "the start. The last step is not trained. The released code shuffles the states of all processes; here each "
        "process shuffles its own. The released code also has noise that depends on the step, which is not here. The "
        "embedded form has more noise (eta 0.3; the published form 0.045).",
        (directions.directions, directions.log_ratio_along, directed.DirectedObjective),
    ),
    Method(
        "DRaFT", "2309.17400", ("draft",),
        "We know the paper's algorithm, and no code of its authors. The paper's sampler is DDIM; here it is the ODE of "
        "the pipeline. The gradient goes through the last K steps. Each step has a graph of its own, and hands its "
        "gradient to the step before. DRaFT-LV is option `renoised`, with a window of the last step: the image is "
        "noised again several times, and the gradients of the last step are averaged. On the embedded pipeline this "
        "does not lower the variance: with 1, 2 or 8 more noises it is 0.999 to 1.001 times the variance of DRaFT-1. "
        "There the gradient differs from image to image, and hardly with the noise of the last step.",
        (reward_gradient.RewardGradientObjective, reward_gradient.differentiated),
    ),
    Method(
        "ReFL", "2304.05977", ("refl",),
        "The paper bounds the reward by a hinge, multiplies it by a small number, and trains on pairs of images and "
        "texts beside it. Here the reward itself counts, and penalty `data` can take the place of the pairs. One late "
        "step is drawn for all images of an iteration, of the last half of ten; in the paper, of the last quarter of "
        "forty.",
        (reward_gradient.RewardGradientObjective,),
    ),
    Method(
        "DRTune", "2405.00760", ("drtune",),
        "The paper trains K steps at equal distances, and may end the sampler early, at the clean image of a state. "
        "Window `spaced` and `sampler.plan.earliest` do this. In the paper, a step after the end is not trained; here "
        "the window is of the steps up to the end, so K steps are always trained. The recipe draws K random steps for "
        "all images of an iteration, and scores the finished image.",
        (reward_gradient.RewardGradientObjective, windows.spaced, plan_parts.ode),
    ),
    Method(
        "SRPO", "2509.06942", ("direct_align",),
        "We read the released code. Its range of noise levels and its leap are the defaults, for steps with a shift of "
        "3. Its leaps are shorter near the ends of the range; here a level is drawn where both leaps fit. The relative "
        "preference is the reward `relative`, for rewards that know styles; the embedded scorer knows none. Each "
        "prompt keeps its two words, where the code takes the next words in every iteration. The code starts all "
        "images of an iteration from one noise, rolls out with a guidance of 1 and trains with 3.5, and bounds the "
        "reward by a hinge; here each image has its own noise, one call does both, and there is no bound.",
        (direct_align.DirectAlignObjective, direct_align.recovered, relative.Relative),
    ),
    Method(
        "DiffusionOPSD", "", ("diffusion_opsd",),
        "We read the released code. It has no number of arXiv yet. Its solver is DPM2, and here steps are Euler's. It "
        "trains the state whose noise level is nearest to 0.278, of ten with a shift; here step 7 of ten, whose level "
        "is 0.3. Its option that accepts a target only if the reward of the finished image rises is off in its runs, "
        "and is not here.",
        (reward_targets.RewardTargetsObjective, nearby_targets.targets, nearby_targets.target_loss),
    ),
    Method(
        "DDRL", "2512.04332", ("ddrl",),
        "We read the released code and the abstract, not the paper. The images come from a source of their own; in the "
        "released code the prompts of the rollout are their captions. The samples of a prompt share one image, noised "
        "once for each trained step; in the released code each sample noises the image by itself, with the noise from "
        "which the sample began. Here a step is of first order, and its noise comes after it. The released solver is "
        "of second order, and adds noise before each step; its distances are of latents that are not scaled down with "
        "the noise. The published form trains ten random steps in the place of every second step. The transform "
        "−exp(−A) of advantages is `transform: exponential`; the released settings leave it off.",
        (penalties.data, images_beside.drawn, images_beside.read_beside, policy.FlowPolicy.beside,
         scored_edges.data_error),
    ),
    Method(
        "GARDO", "2512.24138", ("gardo",),
        "We read the released code and the abstract, not the whole paper. The released code ranks the best image "
        "first, so its gate opens for images that the light rewards like better than the trained one; here it opens "
        "for images that the trained reward likes better. Equal scores share a rank; in the released code their order "
        "is left to chance. The KL is a mean over the suspect images of an iteration, and in the released code over "
        "those of a batch of nine. The released KL lacks a division by the step size, so its weight of 0.07 is about "
        "0.007 here, and its bound of 3e-4 about 3e-3. The released weight of a step, s over its mean, is 1, because a "
        "batch has one step; it is left out. The released code leaves images of undecided groups out. The embedded "
        "form compares images by the scorer of the scenes, the published form by DINOv3.",
        (overrating.rank_shares, overrating.overrating, overrating.suspects, penalties.gated_kl,
         nearest_images.nearest_distances, nearest_images.novelty_factors, suspects.Suspects, novelty.Novelty,
         anchor.Anchor),
    ),
    Method(
        "Flow-DPO", "2501.13918", ("flow_dpo",),
        "Pairs are images of the present policy, the best and the worst of each group, and only these are trained. The "
        "strength is constant. The reference is the base model; the online form of Flow-GRPO's code has the policy "
        "that samples as its reference. That code draws a noise level for each pair; here three levels of the rollout "
        "are drawn for all pairs.",
        (forward.flow_dpo,),
    ),
    Method(
        "Diffusion-DPO", "2311.12908", ("diffusion_dpo",),
        "Pairs are given by the data. The error is the error of the velocity, as in Flow-DPO, and not of the noise. As "
        "in the released code, the images of a pair share noise and noise level. That code draws one of 1,000 levels "
        "for each pair; here three of the rollout's levels are drawn for all pairs of an iteration. The latents are "
        "the mode of what the VAE encodes; the released code draws them. The released strength of 5,000 is for the "
        "error of the noise and for all weights of SDXL. On the embedded pipeline 100, 500 and 2,000 were tried with "
        "two learning rates, and 10 and 30 with one.",
        (plans.given_plan, transitions.given_rollout),
    ),
)  # fmt: skip

HEAD = """\
# Methods

<!-- Written by docs/make_method_index.py from docs/methods.yaml and the code. Change those, not this page. -->

This page lists published methods, paper by paper. First come tables: what is here, and how to choose it. Then comes
[an entry for every paper with a recipe](#recipes-for-images) for images. All methods run on one executor, one core and
one loop, so their parts combine: a window of a branching tree, with win rates and GRPO-Guard's ratio, is a recipe of a
few lines. `flowgrpo plan` refuses an unsound combination, and says why.

"""

ENTRIES = """\
## Recipes for images

Each paper has an entry: the recipe that runs the method (`flowgrpo train NAME`), how the recipe differs from the
released code, and how much code it takes. `NAME@published` has the published settings for the published model.

Only lines with statements are counted, not blank lines, comments or docstrings. "Own code" is code that only this
method needs so far. Other methods share everything else that it uses.

The figures for the embedded pipeline come from [benchmarks/claims.md](benchmarks/claims.md), which `flowgrpo bench
claims` writes. There are three figures. The first two are of forms in the papers' proportions, for the methods whose
papers' claims need them: the time of an iteration as in the papers' codes, divided by the time of an iteration of the
paper's baseline, and the gain of the reward `paint` on test prompts, as a mean over the seeds. The third is of the
embedded recipe: the change of the files' kilobytes over a few iterations with small files as the reward, ± its standard
error.
"""


def recipe_lines(name: str) -> int:
    """Number of lines of a recipe, without comments, the keys `paper` and `published`, and empty lines."""
    text = (resources.files("flowgrpo.configs") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    kept, inside = 0, False
    for line in text.splitlines():
        if line.strip() and not line.startswith(("#", " ")):
            inside = line.startswith(("paper", "published"))
        kept += bool(line.strip()) and not line.lstrip().startswith("#") and not inside
    return kept


def _where(part: Callable[..., Any]) -> str:
    module = part.__module__.removeprefix("flowgrpo.").replace(".", "/")
    return f"`{module}.py` {part.__qualname__}"


def _measured(claim: dict[str, Any]) -> str:
    """The verdict and findings of one claim in the report of `flowgrpo bench claims`."""
    return " ".join([f"Measured here: {claim['verdict']}.", *(finding["text"] for finding in claim["findings"])])


def _figures(found: dict[str, Any], recipes: tuple[str, ...]) -> list[str]:
    """A table of the report's figures for some recipes; empty if the report has none."""
    rows = []
    for name in recipes:
        run, rise = found["runs"].get(name, {}), found["rises"].get(name, {})
        gain, share = run.get("paint_gain"), _share(found["times"], name)
        cells = [
            share,
            ", ".join(map(str, run["seeds"])) if run else "",
            f"{gain['mean']:+.3f}" if gain else "",
            f"{rise['after'] - rise['before']:+.3f} ± {rise['error']:.3f}" if "after" in rise else "",
        ]
        if any(cells):
            rows.append(f"| `{name}` | {' | '.join(cells)} |".replace("-", "−"))
    head = "| measured | time of an iteration / the baseline's | run seeds | paint | kilobytes |"
    return [head, "| --- | --- | --- | --- | --- |", *rows, ""] if rows else []


def _share(times: dict[str, Any], name: str) -> str:
    """Seconds of an iteration divided by the baseline's, as in the papers' codes; empty if the form was not timed."""
    for family, timed in times.items():
        seconds = timed["seconds"]
        if family.endswith("-again") and name in seconds:
            return f"{sum(seconds[name]) / sum(next(iter(seconds.values()))):.2f}"
    return ""


def entry(method: Method, found: dict[str, Any]) -> str:
    """One section of the page."""
    names = ", ".join(f"`{name}`" for name in method.recipes)
    paper = f" ([{method.arxiv}](https://arxiv.org/abs/{method.arxiv}))" if method.arxiv else ""
    parts = [(_where(part), code_lines(inspect.getsource(part))) for part in method.own]
    lines = [f"### {method.title}{paper}", "", f"Recipes: {names}.", "", wrapped(method.differs), ""]
    code = "; ".join(f"{where} ({count} lines)" for where, count in parts) or "none"
    yaml_lines = " + ".join(str(recipe_lines(name)) for name in method.recipes)
    lines += [wrapped(f"Own code: {code}. Recipe: {yaml_lines} lines."), ""]
    if found:
        measured = {claim["name"]: _measured(claim) for claim in found["claims"]}
        lines += _figures(found, method.recipes)
        lines += [line for claim in method.claims for line in (wrapped(measured[claim]), "")]
    return "\n".join(lines)


def page() -> str:
    """The whole page.

    Raises:
        ValueError: a recipe has no entry, or a claim of the tables does not hold.
    """
    found = json.loads(CLAIMS.read_text(encoding="utf-8")) if CLAIMS.is_file() else {}
    listed = {name for method in METHODS for name in method.recipes}
    missing = sorted(set(recipe_names("images")) - listed)
    if missing:
        raise ValueError(f"no entry for {', '.join(missing)}; add one to METHODS")
    entries = "\n".join(entry(method, found) for method in METHODS)
    return f"{HEAD}{tables()}\n{ENTRIES}\n{entries}"


if __name__ == "__main__":
    PAGE.write_text(page().rstrip() + "\n", encoding="utf-8")
