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

ON_GIVEN = "docs/given_samples.md has what trains on given answers"
SAMPLED = (
    "write base: text, objective.name: answers and objective.loss: dpo, which compares sampled answers (docs/text.md)"
)
OTHERS: dict[str, tuple[tuple[str, ...], str]] = {
    "an SFTConfig": (
        (
            "assistant_only_loss", "completion_only_loss", "packing", "packing_strategy", "eval_packing",
            "dataset_text_field",
        ),
        f"{ON_GIVEN}, among it supervised fine-tuning with loss likelihood",
    ),
    "a RewardConfig": (("center_rewards_coefficient",), ON_GIVEN),
    "a PRMConfig": (("step_separator", "train_on_last_step_only"), ON_GIVEN),
    "a BCOConfig": (("prompt_sample_size", "min_density_ratio", "max_density_ratio"), f"{ON_GIVEN}, among it KTO"),
    "an OnlineDPOConfig or a PPOConfig": (("reward_model_path", "missing_eos_penalty"), SAMPLED),
    "a NashMDConfig": (("mixture_coef",), SAMPLED),
}  # fmt: skip
"""Configurations that are not converted, the settings that no other configuration has, and what is there instead."""


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
    for what, (keys, instead) in OTHERS.items():
        found = [key for key in keys if key in given]
        if found:
            raise ValueError(
                f"{path} has {', '.join(found)}, so it is {what}; convert takes a GRPOConfig, an RLOOConfig, a "
                f"DPOConfig, a KTOConfig, a CPOConfig, a TPOConfig, a DistillationConfig or a GKDConfig; {instead}"
            )
    if (trainer := answer_trainer_of(given)) is not None:
        return from_trl_dpo(path, given, gpus, trainer)
    return from_trl(path, given, gpus, rloo.RLOO if any(key in given for key in rloo.KEYS) else GRPO)
