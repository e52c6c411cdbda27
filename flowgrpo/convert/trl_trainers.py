"""Which trainer of TRL a configuration is for, by the settings that only this trainer has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import from_trl_distillation as distillation
from . import from_trl_rloo as rloo
from .conversion import Conversion
from .from_trl import GRPO, from_trl
from .from_trl_dpo import from_trl_dpo
from .trl_answer_losses import answer_trainer_of

OTHERS = {
    "an SFTConfig": ("assistant_only_loss", "completion_only_loss", "packing", "dataset_text_field"),
    "a RewardConfig": ("center_rewards_coefficient",),
}
"""Configurations that have no counterpart here, and settings that no other configuration has."""
INSTEAD = "docs/given_samples.md has what trains on given answers"


def convert_trl(path: Path, given: Mapping[str, Any], gpus: int | None) -> Conversion:
    """Convert a configuration of TRL, whichever trainer it is for.

    Args:
        path: of the file.
        given: what the file holds.
        gpus: number of their processes; None if it is not known.

    Raises:
        ValueError: a value has a wrong type, or the configuration is for a trainer that has no counterpart here.
    """
    if any(key in given for key in distillation.KEYS):
        return from_trl(path, given, gpus, distillation.trainer_of(given))
    for what, keys in OTHERS.items():
        found = [key for key in keys if key in given]
        if found:
            raise ValueError(
                f"{path} has {', '.join(found)}, so it is {what}; convert takes a GRPOConfig, an RLOOConfig, a "
                f"DPOConfig, a KTOConfig, a CPOConfig, a TPOConfig, a DistillationConfig or a GKDConfig, and {INSTEAD}"
            )
    if (trainer := answer_trainer_of(given)) is not None:
        return from_trl_dpo(path, given, gpus, trainer)
    return from_trl(path, given, gpus, rloo.RLOO if any(key in given for key in rloo.KEYS) else GRPO)
