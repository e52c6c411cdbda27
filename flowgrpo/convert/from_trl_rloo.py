"""What an RLOOConfig of TRL has in place of a GRPOConfig's comparison and loss."""

from __future__ import annotations

from typing import Any

from .conversion import Conversion
from .from_trl import TrlTrainer, reward_settings
from .trl_keys import DEFAULTS

_OF_GRPO = ("scale_rewards", "loss_type", "importance_sampling_level", "multi_objective_aggregation")
OF_RLOO = {
    **{key: value for key, value in DEFAULTS.items() if key not in _OF_GRPO},
    "num_generations": 2, "beta": 0.05, "normalize_advantages": False,
}  # fmt: skip
"""What an RLOOConfig takes where the file says nothing (version 1.16)."""
KEYS = ("normalize_advantages", "reward_clip_range")
"""Settings that only an RLOOConfig has."""


def _method(conversion: Conversion) -> None:
    settings = conversion.settings
    advantage: dict[str, Any] = {"name": "group", "baseline": "loo", "scale": "none"}
    note = ""
    if settings.flag("normalize_advantages"):
        advantage |= {"scale": "batch", "ddof": 1, "eps": 1e-4}
        note = "the scale is the deviation of the rewards here, and of the advantages there"
    conversion.carry("normalize_advantages", "advantage", advantage, note)
    conversion.follow("no bound", "clamp", None)
    if settings.value("reward_clip_range") is not None:
        conversion.lose("reward_clip_range", "bound the value in the reward itself")
    low, high = settings.number("epsilon"), settings.number("epsilon_high")
    surrogate = {"name": "clip", "low": low, "high": low if high is None else high}
    found: dict[str, Any] = {"name": "tokens", "surrogate": surrogate, "level": "token", "reduce": "sum"}
    keys = ["epsilon", *(["epsilon_high"] if high is not None else [])]
    conversion.used("epsilon_high")
    if settings.flag("mask_truncated_completions"):
        found["drop_truncated"] = True
        keys.append("mask_truncated_completions")
    conversion.used("mask_truncated_completions")
    if settings.flag("use_vllm"):
        # Their trainer has no weight for the difference of the engines, and ours has one unless the recipe says so.
        found["correction"] = "none"
        keys.append("use_vllm")
    made = conversion.recipe["optimizer"]
    several = made.get("updates", 1) * made.get("epochs", 1) > 1
    note = "the ratio of each token is clipped here, and of the whole completion there" if several else ""
    conversion.carry(keys, "objective", found, note)
    beta = settings.number("beta") or 0.0
    penalties = [{"name": "kl", "weight": beta, "kind": "k2"}] if beta > 0 else []
    note = "added to the loss of each token; there it is taken from the reward of the completion" if beta > 0 else ""
    conversion.carry("beta", "penalties", penalties, note)
    reward_settings(conversion)


RLOO = TrlTrainer("an RLOOConfig", OF_RLOO, ("text",), _method, {})
"""An RLOOConfig."""
