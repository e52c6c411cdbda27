"""From the scores of the samples to an advantage for every step that led to them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..configs.sections import AdvantageConfig, RewardConfig
from ..configs.soundness import REMEMBERING
from ..core.advantages import anchored_advantages, group_advantages, multi_reward_advantages
from ..core.minima import minimum_weighted_rewards
from ..core.prefix_tree import prefix_tree_advantages
from ..core.process import future_rewards, turning_point_rewards
from ..core.registry import SELECTIONS, advantage_of
from ..core.shaping import positive_only_advantages
from ..core.subsets import degenerate_rows
from ..pipelines.policy import Experience
from ..rewards.runner import RewardBatch
from ..samplers.records import Rollout
from .combining import counted_rewards, total_reward
from .critic import Critic
from .part_credit import least_returns, minimum_credit, parts_credit

if TYPE_CHECKING:
    from .text_policy import Completions

BETWEEN = ("anchored", "consistency")
"""Estimators that compare groups with each other within a batch."""

Credit = Callable[..., Tensor]
"""`credit(experience, scores, settings, critic, **options) -> [N]`: an advantage for each node, or [N, T] by token."""


def leaf_advantages(
    scores: RewardBatch, experience: Any, settings: AdvantageConfig, rewards: Sequence[RewardConfig] = ()
) -> Tensor:
    """[L] advantages of the samples within their groups.

    Args:
        scores: [L, K], combined.
        experience: for `groups` and `outcomes`, and where the settings ask them, `lengths` and `strata`.
        settings: how to compare.
        rewards: the recipe's, for those that are compared apart.
    """
    if any(reward.gate is not None and reward.gate.apart for reward in counted_rewards(rewards)):
        return _apart(scores, experience, settings, rewards)
    if settings.estimator != "group":
        total = total_reward(scores, experience, between=settings.estimator in BETWEEN)
        others = [] if settings.stratum is None else [experience.strata]
        return advantage_of(settings.estimator, settings.estimator_options)(total, experience.groups, *others)
    options: dict[str, Any] = {
        "eps": settings.eps,
        "ddof": settings.ddof,
        "scale": settings.scale,
        "baseline": settings.baseline,
    }
    if settings.baseline == "length":
        options["lengths"] = experience.lengths
    values = scores.values.masked_fill(~experience.outcomes[:, None], torch.nan)
    # An ensemble is one reward by now.
    how = "gdpo" if settings.how == "gdpo" else "sum"
    return multi_reward_advantages(values, experience.groups, scores.weights, how=how, **options)


def _apart(scores: RewardBatch, experience: Any, settings: AdvantageConfig, rewards: Sequence[RewardConfig]) -> Tensor:
    """DRPO's decoupling: one reward compared among the successes of another, the rest with all samples."""
    columns = counted_rewards(rewards)
    [own] = [k for k, reward in enumerate(columns) if reward.gate is not None and reward.gate.apart]
    others = [k for k in range(len(columns)) if k != own]
    values = scores.values.masked_fill(~experience.outcomes[:, None], torch.nan)
    rest = replace(scores, values=values[:, others], weights=scores.weights[others])
    # Behind a closed gate it is NaN. A success to which it does not apply is changed by it as little as a failure.
    return positive_only_advantages(
        total_reward(rest, experience), values[:, own], ~values[:, own].isnan(), experience.groups,
        weight=float(scores.weights[own]), eps=settings.eps, ddof=settings.ddof,
    )  # fmt: skip


def _leaf(experience: Any, scores: RewardBatch, settings: AdvantageConfig, critic: Critic | None) -> Tensor:
    """The mean advantage of the samples below a node."""
    return experience.node_advantages(leaf_advantages(scores, experience, settings))


def _depth(
    experience: Experience, scores: RewardBatch, settings: AdvantageConfig, critic: Critic | None, *, beta: float = 1.0
) -> Tensor:
    """BranchGRPO (2509.06040): rewards fused up the tree, standardised by depth; `beta` is of the fusion `path`."""
    return experience.node_advantages(total_reward(scores, experience), "depth", settings.fusion, beta)


def _turning(
    experience: Experience,
    scores: RewardBatch,
    settings: AdvantageConfig,
    critic: Critic | None,
    *,
    main: str = "step",
) -> Tensor:
    """TP-GRPO (2602.06422): each step's gain over its state's deterministic completion, compared within a step."""
    nodes, rewards = step_rewards(experience.rollout, total_reward(scores, experience, previews=True))
    # The deterministic steps before the first stochastic one gain nothing, and are no trend that could turn.
    first = experience.plan.first_stochastic or 0
    values = torch.nn.functional.pad(turning_point_rewards(rewards[:, first:], main=main), (first, 0))
    prompt = experience.rollout.prompt[nodes[:, 0]]
    options: dict[str, Any] = {"eps": settings.eps, "ddof": settings.ddof, "scale": settings.scale}
    return _scatter(experience, nodes, group_advantages(values, prompt, **options))


def _value(
    experience: Experience,
    scores: RewardBatch,
    settings: AdvantageConfig,
    critic: Critic | None,
    *,
    gamma: float = 0.9,
    k: float = 1.0,
) -> Tensor:
    """VGPO (2512.12387): discounted future rewards of a step's projections, anchored by their level in the batch."""
    total = total_reward(scores, experience, previews=True, between=True)
    nodes, rewards = step_rewards(experience.rollout, total)
    values = future_rewards(rewards, gamma=gamma)
    prompt = experience.rollout.prompt[nodes[:, 0]]
    return _scatter(experience, nodes, anchored_advantages(values, prompt, k=k, eps=settings.eps, ddof=settings.ddof))


def _critic(experience: Experience, scores: RewardBatch, settings: AdvantageConfig, critic: Critic | None) -> Tensor:
    """AC-Flow (2510.18072): the reward, less what a critic expected in the state before the step."""
    assert critic is not None
    found = _leaf(experience, scores, settings, critic)
    if not critic.ready:
        return found
    returns = experience.node_advantages(critic.standardise(total_reward(scores, experience)))
    for t in experience.rollout.transitions:
        expected = critic.values(experience, t.x, t.coefficients.sigma, t.prompt)
        found[t.node] = returns[t.node] - expected[t.state].cpu()
    return found


def _process(
    experience: Experience,
    scores: RewardBatch,
    settings: AdvantageConfig,
    critic: Critic | None,
    *,
    weight: float = 0.5,
) -> Tensor:
    """Euphonium's dual reward: the image's advantage, and `weight` times that of the critic's value after the step."""
    assert critic is not None
    found = _leaf(experience, scores, settings, critic)
    if not critic.ready:
        return found
    for t in experience.rollout.transitions:
        prompts = tuple(t.prompt[s] for s in t.state.tolist())
        reached = critic.values(experience, t.x_next, t.coefficients.sigma_next, prompts).cpu()
        within = group_advantages(reached, torch.tensor(prompts), eps=settings.eps, ddof=settings.ddof)
        found[t.node] += weight * within
    return found


def _prefix(
    experience: Completions,
    scores: RewardBatch,
    settings: AdvantageConfig,
    critic: Critic | None,
    *,
    root: bool = False,
) -> Tensor:
    """TEMPO (2509.18314): of completions, the group's advantage and what a token gained where they part; [N, T].

    With `root` their first tokens are such a place too.
    """
    total = total_reward(scores, experience)
    return prefix_tree_advantages(
        experience.sampled.ids, total, experience.groups, root=root, eps=settings.eps, ddof=settings.ddof
    )


def _minimum(
    experience: Any,
    scores: RewardBatch,
    settings: AdvantageConfig,
    critic: Critic | None,
    *,
    temperature: float = 0.0,
) -> Tensor:
    """PURE (2504.15275): the least reward from a step on, within a step; of completions, the least score of a part.

    With a `temperature` above 0 it is soft: the sum of softmin-weighted rewards from the step on.
    """
    if not isinstance(experience, Experience):
        return minimum_credit(experience, scores, settings, temperature=temperature)
    nodes, rewards = step_rewards(experience.rollout, total_reward(scores, experience, previews=True))
    prompt = experience.rollout.prompt[nodes[:, 0]]
    values = least_returns(rewards[:, 1:], temperature)
    options: dict[str, Any] = {"eps": settings.eps, "ddof": settings.ddof, "scale": settings.scale}
    return _scatter(experience, nodes, group_advantages(values, prompt, **options))


def _anchor(
    experience: Any,
    scores: RewardBatch,
    settings: AdvantageConfig,
    critic: Critic | None,
    *,
    omega: float = 1.0,
    gamma: float = 1.0,
) -> Tensor:
    """GiGPO (2505.10978): the sample's advantage, and `omega` times a step's among those from the same state.

    A step is of a tree of images, or a token after a prefix; a reward is worth `gamma` times less a step earlier.
    """
    total = total_reward(scores, experience)
    found: Tensor = experience.anchored(
        total, leaf_advantages(scores, experience, settings), weight=omega, discount=gamma, scale=settings.scale,
        eps=settings.eps, ddof=settings.ddof,
    )  # fmt: skip
    return found


CREDITS: dict[str, Credit] = {
    "leaf": _leaf,
    "depth": _depth,
    "turning": _turning,
    "value": _value,
    "critic": _critic,
    "process": _process,
    "prefix": _prefix,
    "anchor": _anchor,
    "parts": parts_credit,
    "minimum": _minimum,
}


def credit_of(settings: AdvantageConfig) -> Credit:
    """The credit of a recipe with its hyper-parameters.

    Raises:
        ValueError: a hyper-parameter that it does not have, or a value it cannot take.
    """
    if settings.estimator in REMEMBERING:
        return CREDITS[settings.credit]
    if settings.estimator != "group":
        advantage_of(settings.estimator, settings.estimator_options)
    elif settings.estimator_options:
        raise ValueError(
            "advantage.estimator_options belong to another estimator than group, whose settings are baseline, scale, "
            "eps and ddof"
        )
    function = CREDITS[settings.credit]
    known = [n for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in settings.options:
        if name not in known:
            raise ValueError(
                f"advantage.options has {name!r}, which credit {settings.credit} does not take; it takes "
                f"{', '.join(known) or 'none'}"
            )
    if settings.credit == "turning":
        turning_point_rewards(torch.zeros(1, 2), **settings.options)  # type: ignore[arg-type]
    if settings.credit == "minimum" and settings.options.get("temperature"):
        minimum_weighted_rewards(torch.zeros(1, 1), temperature=float(settings.options["temperature"]))
    if settings.credit == "anchor":
        omega, share = (float(settings.options.get(name, 1.0)) for name in ("omega", "gamma"))
        if not (0 <= omega < math.inf and 0 < share <= 1):
            raise ValueError(
                f"advantage.options of credit anchor: omega is {omega:g} and gamma {share:g}; use a weight of 0 or "
                "more, and a share above 0 up to 1"
            )
    if settings.credit == "value":
        gamma, k = (settings.options.get(name, default) for name, default in (("gamma", 0.9), ("k", 1.0)))
        anchored_advantages(future_rewards(torch.zeros(1, 2), gamma=float(gamma)), [0], k=float(k))
    return partial(function, **settings.options)


def step_rewards(rollout: Rollout, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and rewards along each chain of a rollout with probes, both [B, T + 1].

    A state's reward is that of its probe; where a state has none because the steps after it are deterministic, it
    is that of the state it becomes, and in the end the image's own.

    Args:
        rollout: chains with probes (`window_plan(..., probe=...)`).
        rewards: [L].
    """
    main = rollout.branch == 0
    value = torch.full((len(rollout.parent),), torch.nan, dtype=torch.float32)
    for leaf, reward in zip(rollout.leaf.tolist(), rewards.tolist()):
        node = leaf
        while not main[node]:
            node = int(rollout.parent[node])
        value[node] = reward
    chains = rollout.leaf[main[rollout.leaf]]
    columns = [chains]
    while bool((rollout.parent[columns[-1]] >= 0).all()):
        columns.append(rollout.parent[columns[-1]])
    nodes = torch.stack(columns[::-1], dim=1)
    for t in range(nodes.shape[1] - 2, -1, -1):
        here, after = nodes[:, t], nodes[:, t + 1]
        follows = value[here].isnan() & (rollout.log_prob[after] == 0)
        value[here[follows]] = value[after[follows]]
    return nodes, value[nodes]


def _scatter(experience: Experience, nodes: Tensor, advantages: Tensor) -> Tensor:
    """[N] from advantages [B, T] of the steps that lead to `nodes` [B, T + 1]; 0 where nothing is trained."""
    found = torch.zeros(len(experience.rollout.parent), dtype=torch.float32)
    for t in experience.plan.trained_steps:
        found[nodes[:, t + 1]] = advantages[:, t].float()
    return found


def kept_nodes(experience: Any, scores: RewardBatch, settings: AdvantageConfig) -> Tensor | None:
    """[N] bool: nodes whose edges are trained; None for all."""
    chosen, skip = settings.select, settings.degenerate == "skip"
    if chosen is None and not skip:
        return None
    ranked = total_reward(scores, experience)
    mine = torch.ones(len(ranked), dtype=torch.bool)
    if chosen is not None:
        mine = SELECTIONS[chosen.choice](ranked, experience.siblings(chosen.among), chosen.keep)
    if skip:
        mine = mine & ~degenerate_rows(ranked, experience.groups)
    kept: Tensor = experience.kept(mine)
    return kept
