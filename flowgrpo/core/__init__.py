"""Pure tensor functions shared by images and text: advantages, objectives, trees, diagnostics.

Shape legend: B rows (images, edges of a tree, or completions), T columns (trained denoising steps or tokens),
K rewards, N nodes of a tree or entries of a flat list. Nothing here knows a model, a file or a configuration.
"""

from .advantages import group_advantages, multi_reward_advantages
from .baselines import anchor_state_advantages, beta_advantages, stratified_advantages, virtual_maximum_advantages
from .bounded_terms import bounded_shaping, positive_only_advantages, unlikeliness_rewards
from .combination import (
    coherent_rewards,
    constrained_advantages,
    contrastive_signs,
    gated_rewards,
    group_gated_rewards,
    uncertainty_weighted_rewards,
    worst_case_rewards,
)
from .comparisons import win_rates
from .diagnostics import degenerate_groups, step_statistics, summarise
from .objectives import gaussian_kl, kl, policy_loss
from .outcomes import consistency_advantages, outcome_entropy, quantile_advantages, semantic_entropy_weights
from .part_credit import later_returns, part_advantages
from .prefix_tree import anchor_prefix_advantages, prefix_tree_advantages, prefix_values
from .surrogates import cispo, clip, dro, gmpo, reinforce, sapo, vespo
from .surrogates_by_name import SURROGATES
from .trackers import smoothed_advantages
from .trees import anchor_tree_advantages, depth_advantages, node_values
from .verifiers import corrected_rewards, forward_weights
from .worst_step import minimum_returns, minimum_weighted_rewards

__all__ = [
    "SURROGATES",
    "anchor_prefix_advantages",
    "anchor_state_advantages",
    "anchor_tree_advantages",
    "beta_advantages",
    "bounded_shaping",
    "cispo",
    "clip",
    "coherent_rewards",
    "consistency_advantages",
    "constrained_advantages",
    "contrastive_signs",
    "corrected_rewards",
    "degenerate_groups",
    "depth_advantages",
    "dro",
    "forward_weights",
    "gated_rewards",
    "gaussian_kl",
    "gmpo",
    "group_advantages",
    "group_gated_rewards",
    "kl",
    "later_returns",
    "minimum_returns",
    "minimum_weighted_rewards",
    "multi_reward_advantages",
    "node_values",
    "outcome_entropy",
    "part_advantages",
    "policy_loss",
    "positive_only_advantages",
    "prefix_tree_advantages",
    "prefix_values",
    "quantile_advantages",
    "reinforce",
    "sapo",
    "semantic_entropy_weights",
    "smoothed_advantages",
    "step_statistics",
    "stratified_advantages",
    "summarise",
    "uncertainty_weighted_rewards",
    "unlikeliness_rewards",
    "vespo",
    "virtual_maximum_advantages",
    "win_rates",
    "worst_case_rewards",
]
