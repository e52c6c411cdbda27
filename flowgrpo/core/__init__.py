"""Pure tensor functions shared by images and text: advantages, objectives, trees, diagnostics.

Shape legend: B rows (images, edges of a tree, or completions), T columns (trained denoising steps or tokens),
K rewards, N nodes of a tree or entries of a flat list. Nothing here knows a model, a file or a configuration.
"""

from .advantages import group_advantages, multi_reward_advantages
from .diagnostics import degenerate_groups, step_statistics, summarise
from .objectives import gaussian_kl, kl, policy_loss
from .surrogates import SURROGATES, cispo, clip, dro, gmpo, reinforce, sapo, vespo
from .trees import depth_advantages, node_values

__all__ = [
    "SURROGATES",
    "cispo",
    "clip",
    "degenerate_groups",
    "depth_advantages",
    "dro",
    "gaussian_kl",
    "gmpo",
    "group_advantages",
    "kl",
    "multi_reward_advantages",
    "node_values",
    "policy_loss",
    "reinforce",
    "sapo",
    "step_statistics",
    "summarise",
    "vespo",
]
