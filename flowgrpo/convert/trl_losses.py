"""The losses of TRL's GRPO trainer as an objective, a comparison and penalties of a recipe."""

from __future__ import annotations

from typing import Any

from .conversion import Conversion

REDUCE: dict[str, dict[str, Any]] = {
    "grpo": {"reduce": "sequence"},
    "sapo": {"reduce": "sequence"},
    "bnpo": {"reduce": "token"},
    "dapo": {"reduce": "token"},
    "cispo": {"reduce": "token"},
    "vespo": {"reduce": "token"},
    "dr_grpo": {"reduce": "sum", "constant": True},
    "luspo": {"reduce": "sum"},
}
"""Their loss -> what our loss is a mean of."""
ENTROPY_IS_BELOW = 1_000.0
"""A target in nats that no entropy reaches, so that a coefficient stays at its highest."""


def objective(conversion: Conversion) -> None:
    """The surrogate, the level of the ratio, the mean, and what else the loss has.

    Raises:
        ValueError: the loss or a choice is unknown.
    """
    settings = conversion.settings
    kind = settings.text("loss_type")
    if kind not in REDUCE:
        raise settings.wrong("loss_type", f"one of {', '.join(REDUCE)}")
    level = settings.text("importance_sampling_level")
    if level not in ("token", "sequence"):
        raise settings.wrong("importance_sampling_level", "token or sequence")
    reduce, note = dict(REDUCE[kind]), ""
    if kind == "bnpo" and settings.count("per_device_train_batch_size") == 1:
        reduce, note = {"reduce": "sequence"}, "with one completion a device, it is their loss grpo"
    elif kind == "bnpo":
        note = "the mean is over the tokens of an update here, and of a device's batch there"
    found = {"name": "tokens", "surrogate": _surrogate(conversion, kind), **reduce, "level": level}
    keys = ["loss_type", "importance_sampling_level", *_bounds(conversion, kind)]
    if settings.flag("mask_truncated_completions"):
        found["drop_truncated"] = True
        keys.append("mask_truncated_completions")
    conversion.used("mask_truncated_completions")
    if (threshold := settings.number("off_policy_mask_threshold")) is not None and _moves(conversion):
        found["off_policy"] = threshold
        keys.append("off_policy_mask_threshold")
    elif threshold is not None:
        conversion.ignore("off_policy_mask_threshold", "with one update of a generation, no answer is off-policy")
    conversion.carry(keys, "objective", found, note)
    coefficient = settings.number("entropy_coef") or 0.0
    if coefficient > 0 and not settings.flag("use_adaptive_entropy"):
        entropy = {"target": ENTROPY_IS_BELOW, "value": coefficient, "high": coefficient}
        note = "a target that is never reached keeps the coefficient"
        note += (
            ""
            if reduce == {"reduce": "token"}
            else "; here the loss says what the mean is over, there it is over tokens"
        )
        conversion.carry("entropy_coef", "objective.entropy", entropy, note)
    conversion.used("entropy_coef")
    _kl(conversion)


def _bounds(conversion: Conversion, kind: str) -> list[str]:
    names = {"cispo": ["epsilon_high"], "sapo": ["sapo_temperature_pos", "sapo_temperature_neg"]}
    names["vespo"] = [f"vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")]
    listed = names.get(kind, ["epsilon", "epsilon_high", "delta"])
    conversion.used("epsilon_high", "delta", *listed)
    return [name for name in listed if conversion.settings.value(name) is not None]


def _surrogate(conversion: Conversion, kind: str) -> dict[str, Any]:
    settings = conversion.settings
    low = settings.number("epsilon")
    high = settings.number("epsilon_high")
    if kind == "sapo":
        return {
            "name": "sapo", "tau_pos": settings.number("sapo_temperature_pos"),
            "tau_neg": settings.number("sapo_temperature_neg"),
        }  # fmt: skip
    if kind == "vespo":
        parts = {"k_pos": "k_pos", "lam_pos": "lambda_pos", "k_neg": "k_neg", "lam_neg": "lambda_neg"}
        return {"name": "vespo", **{ours: settings.number(f"vespo_{theirs}") for ours, theirs in parts.items()}}
    if kind == "cispo":
        if high is None:
            conversion.want(
                "their epsilon_high is missing, and a bound of 0.2 on the weight itself is small; 5.0 is usual"
            )
        return {"name": "cispo", "high": low if high is None else high}
    found = {"name": "clip", "low": low, "high": low if high is None else high}
    if (dual := settings.number("delta")) is not None:
        found["dual"] = dual
    return found


def _moves(conversion: Conversion) -> bool:
    """Whether the policy that is trained may differ from the one that sampled."""
    made = conversion.recipe.get("optimizer", {})
    steps = made.get("updates", 1) * made.get("epochs", 1)
    return steps > 1 or conversion.settings.flag("use_vllm")


def _kl(conversion: Conversion) -> None:
    beta = conversion.settings.number("beta") or 0.0
    corrected = conversion.settings.flag("use_bias_correction_kl")
    conversion.used("use_bias_correction_kl")
    if beta > 0 and corrected:
        whole = conversion.settings.text("importance_sampling_level") == "sequence"
        note = "the ratio of the token here, and of the whole completion there" if whole else ""
        penalty = {"name": "kl", "weight": beta, "kind": "k3r"}
        conversion.carry(["beta", "use_bias_correction_kl"], "penalties", [penalty], note)
    elif beta > 0:
        note = "the same estimate, with the exact gradient; theirs has the gradient of the reverse KL"
        conversion.carry("beta", "penalties", [{"name": "kl", "weight": beta, "kind": "k3+"}], note)
    else:
        conversion.carry("beta", "penalties", [])


def comparison(conversion: Conversion) -> None:
    """The advantage. TRL bounds no advantage.

    Raises:
        ValueError: a choice is unknown.
    """
    settings = conversion.settings
    scale = settings.value("scale_rewards")
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    if scale not in ("group", "batch", "none"):
        raise settings.wrong("scale_rewards", "group, batch or none")
    kind = settings.text("multi_objective_aggregation")
    advantage: dict[str, Any] = {"name": "group", "scale": scale, "ddof": 1, "eps": 1e-4}
    if kind == "normalize_then_sum":
        advantage |= {"name": "gdpo", "scale": "group"}
    elif kind != "sum_then_normalize":
        raise settings.wrong("multi_objective_aggregation", "sum_then_normalize or normalize_then_sum")
    if advantage.get("scale") == "none":
        del advantage["eps"], advantage["ddof"]
    conversion.carry(["scale_rewards", "multi_objective_aggregation"], "advantage", advantage)
    conversion.follow("no bound", "clamp", None)
