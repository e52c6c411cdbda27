"""TRL's trainers on given answers, and their losses as losses of whole answers: DPO, CPO, TPO and KTO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .conversion import Conversion
from .foreign_settings import ForeignSettings

PLAIN: dict[str, dict[str, Any]] = {
    "sigmoid": {"name": "dpo"},
    "hinge": {"name": "hinge"},
    "ipo": {"name": "ipo"},
    "exo_pair": {"name": "exo"},
    "nca_pair": {"name": "nca"},
    "robust": {"name": "robust"},
    "bco_pair": {"name": "bco"},
    "sppo_hard": {"name": "sppo"},
    "apo_zero": {"name": "apo", "anchor": "zero"},
    "apo_down": {"name": "apo", "anchor": "down"},
    "discopop": {"name": "discopop"},
    "sigmoid_norm": {"name": "dpo_norm"},
}
"""A loss of their DPO -> the loss here."""
SMOOTHED = ("exo_pair", "robust")
"""Losses of their DPO that read `label_smoothing`."""
DIVERGENCES = {"forward_kl": "forward", "js_divergence": "jsd", "alpha_divergence": "alpha"}
TUNED = "the term of fine-tuning is a mean for each answer"
SORTED = ("aot", "aot_unpaired")


def _dpo(conversion: Conversion) -> None:
    settings = conversion.settings
    kinds, beta = settings.texts("loss_type") or ["sigmoid"], settings.number("beta")
    if settings.number("label_smoothing") and not set(kinds) & set(SMOOTHED):
        conversion.lose("label_smoothing", _smoothed_before(kinds))
    share, divergence = _shares(settings, kinds), settings.text("f_divergence_type")
    conversion.used("f_divergence_type")
    if divergence != "reverse_kl" and (divergence not in DIVERGENCES or kinds != ["sigmoid"]):
        conversion.lose("f_divergence_type", "loss f_dpo alone has another divergence, and it is loss_type sigmoid")
    if kinds == ["sft"]:
        conversion.used("beta")
        conversion.carry(
            "loss_type", "objective.loss", "likelihood", "a mean for each answer, and there over all tokens"
        )
        conversion.follow("chosen answers alone", "rollout.form", {"name": "given", "columns": ["chosen"]})
        conversion.follow("chosen answers alone", "rollout.group", 1)
        for key in ("baseline", "scale"):
            conversion.follow("chosen answers alone", f"advantage.{key}", "none")
        return
    alpha = settings.number("rpo_alpha") or 0.0
    keys = ["loss_type", "beta", *(["loss_weights"] if settings.has("loss_weights") else [])]
    if alpha and kinds == ["sigmoid"]:
        keys.append("rpo_alpha")
        if divergence in DIVERGENCES:
            conversion.lose("f_divergence_type", "loss rpo has the reverse KL alone; leave rpo_alpha out for f_dpo")
    elif alpha:
        conversion.lose("rpo_alpha", "beside loss_type sigmoid alone, loss rpo has the term of fine-tuning")
        alpha = 0.0
    if set(kinds) <= {"sigmoid", "sft"} and share.get("sigmoid", 0.0) > 0:
        alpha = share["sft"] / share["sigmoid"] if "sft" in share else alpha
        found: dict[str, Any] = {"name": "dpo", "beta": beta}
        if alpha:
            found = {"name": "rpo", "beta": beta, "alpha": alpha}
        elif divergence in DIVERGENCES and kinds == ["sigmoid"]:
            keys.append("f_divergence_type")
            power = settings.number("f_alpha_divergence_coef") if divergence == "alpha_divergence" else None
            if power is not None:
                keys.append("f_alpha_divergence_coef")
            if power != 1:  # with 1 it is the reverse KL, which dpo has
                found = {"name": "f_dpo", "beta": beta, "divergence": DIVERGENCES[str(divergence)]}
                found |= {} if power is None else {"alpha": power}
        conversion.carry(keys, "objective.loss", found, TUNED if alpha else "")
        return
    if set(kinds) <= {"sigmoid", "bco_pair", "sft"} and "bco_pair" in kinds and len(kinds) > 1:
        weights = {
            "preference": share.get("sigmoid", 0.0), "quality": share["bco_pair"], "alpha": share.get("sft", 0.0),
        }  # fmt: skip
        conversion.carry(keys, "objective.loss", {"name": "mpo", "beta": beta, **weights}, TUNED)
        return
    if len(kinds) == 1 and kinds[0] in PLAIN:
        found, note = PLAIN[kinds[0]] | {"beta": beta}, ""
        if kinds[0] in SMOOTHED:
            keys.append("label_smoothing")
            found["smoothing"] = settings.number("label_smoothing")
            if kinds[0] == "exo_pair" and not found["smoothing"]:
                found["smoothing"], note = 1e-3, "the loss has the logarithm of label_smoothing, so it is not 0"
        if kinds[0] == "discopop":
            keys.append("discopop_tau")
            found["tau"] = settings.number("discopop_tau")
        conversion.carry(keys, "objective.loss", found, note)
        return
    other = next((kind for kind in kinds if kind not in ("sigmoid", "sft")), "sft")
    instead = "no other mixtures of losses are here than rpo and mpo: write one loss"
    if other in SORTED:
        instead = "it sorts the pairs of a batch, so it depends on the batch; dpo, ipo and apo are there"
    if other == "sft":
        instead = "write loss_type: sft alone in the file, and convert it again"
    smoothed = settings.number("label_smoothing") and set(kinds) & set(SMOOTHED)
    more = [
        key for key, there in (("loss_weights", settings.has("loss_weights")), ("label_smoothing", smoothed)) if there
    ]
    conversion.lose(["loss_type", *more], f"there is no such loss here; {instead}")
    conversion.carry("beta", "objective.loss", {"name": "dpo", "beta": beta}, "in the place of their loss")


def _smoothed_before(kinds: list[str]) -> str:
    """What to do about a `label_smoothing` that version 1 of TRL does not read for some losses."""
    if kinds == ["sigmoid"]:
        return (
            "earlier versions of TRL train conservative DPO with it; for that, write objective.loss.smoothing with "
            "this number"
        )
    return "the loss of this file does not read it; leave it out"


def _shares(settings: ForeignSettings, kinds: list[str]) -> dict[str, float]:
    """Each loss with its weight."""
    weights = settings.value("loss_weights")
    shares = [1.0] * len(kinds) if weights is None else weights
    if not isinstance(shares, list) or len(shares) != len(kinds):
        raise settings.wrong("loss_weights", f"a list of {len(kinds)} numbers, one for each loss_type")
    each = [ForeignSettings({"loss_weights": one}, {}, settings.place).number("loss_weights") or 0.0 for one in shares]
    return dict(zip(kinds, each))


def _cpo(conversion: Conversion) -> None:
    settings = conversion.settings
    kind, beta, tuned = settings.text("loss_type"), settings.number("beta"), settings.number("cpo_alpha")
    shape = settings.number("alpha")
    if kind in ("simpo", "alphapo"):
        found = {"name": "simpo", "beta": beta, "margin": settings.number("simpo_gamma"), "alpha": shape}
        conversion.carry(["loss_type", "beta", "simpo_gamma", "alpha"], "objective.loss", found)
        conversion.used("cpo_alpha")
        if settings.number("label_smoothing"):
            conversion.lose("label_smoothing", "loss simpo takes a preference as certain; cpo has smoothing")
        if kind == "simpo" and tuned:
            conversion.lose("cpo_alpha", "loss simpo has no term of fine-tuning; cpo and orpo have one")
        return
    if kind != "sigmoid":
        conversion.lose(
            "loss_type", "without a reference, cpo, simpo and orpo are here; ipo and hinge have a reference"
        )
    if shape:
        conversion.lose("alpha", "only loss simpo has the reward of AlphaPO")
    found = {"name": "cpo", "beta": beta, "alpha": tuned, "smoothing": settings.number("label_smoothing")}
    keys = ["beta", "cpo_alpha", "label_smoothing", *(["loss_type"] if kind == "sigmoid" else [])]
    conversion.carry(keys, "objective.loss", found, TUNED)


def _tpo(conversion: Conversion) -> None:
    settings = conversion.settings
    kind, alpha = settings.text("loss_type"), settings.number("tpo_alpha")
    found: dict[str, Any] = {"name": "tpo", "beta": settings.number("beta"), "alpha": alpha}
    keys = ["loss_type", "beta", "tpo_alpha"]
    if kind == "tpo-l":
        found |= {"mean": True, "margin": settings.number("tpo_l_gamma")}
        keys.append("tpo_l_gamma")
    elif kind != "sigmoid":
        conversion.lose("loss_type", "loss tpo has the forms sigmoid and tpo-l")
        keys.remove("loss_type")
    if settings.number("label_smoothing"):
        conversion.lose("label_smoothing", "loss tpo takes a preference as certain")
    conversion.carry(keys, "objective.loss", found, TUNED)


def _kto(conversion: Conversion) -> None:
    settings = conversion.settings
    kind, beta = settings.text("loss_type"), settings.number("beta")
    found = {"name": "kto", "beta": beta}
    found |= {ours: settings.number(f"{ours}_weight") for ours in ("desirable", "undesirable")}
    keys, note = ["beta", "desirable_weight", "undesirable_weight"], "the KL is measured on all answers of a step"
    if kind == "kto":
        keys.append("loss_type")
    else:
        conversion.lose("loss_type", "answers without pairs have loss kto; apo is a loss of pairs")
    conversion.carry(keys, "objective.loss", found, note)
    scored = {"name": "given", "options": {"scores": ["label"]}}
    conversion.follow("a label for each answer", "rewards", [scored])
    for key in ("baseline", "scale"):
        conversion.follow("a label for each answer", f"advantage.{key}", "none")


@dataclass(frozen=True)
class AnswerTrainer:
    """A trainer of TRL on given answers.

    Attributes:
        config: name of its configuration, with an article.
        keys: settings that only this configuration has.
        losses: values of `loss_type` that only this configuration has.
        columns: of the data, the best answer first.
        loss: carries the loss over.
        defaults: what it takes where the file says nothing.
    """

    config: str
    keys: tuple[str, ...]
    losses: tuple[str, ...]
    columns: tuple[str, ...]
    loss: Callable[[Conversion], None]
    defaults: dict[str, Any] = field(default_factory=dict)


DPO = AnswerTrainer(
    "a DPOConfig",
    (
        "label_smoothing", "loss_weights", "precompute_ref_log_probs", "reference_free", "rpo_alpha",
        "f_divergence_type", "truncation_mode", "ld_alpha", "discopop_tau", "use_weighting",
    ),
    (*PLAIN, *SORTED, "sft"),
    ("chosen", "rejected"),
    _dpo,
    {"loss_type": ["sigmoid"], "f_divergence_type": "reverse_kl", "label_smoothing": 0.0, "discopop_tau": 0.05,
     "f_alpha_divergence_coef": 0.5},
)  # fmt: skip
CPO = AnswerTrainer(
    "a CPOConfig", ("cpo_alpha", "simpo_gamma"), ("simpo", "alphapo"), ("chosen", "rejected"), _cpo,
    {"loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5, "alpha": 0.0, "label_smoothing": 0.0},
)  # fmt: skip
TPO = AnswerTrainer(
    "a TPOConfig", ("tpo_alpha", "tpo_l_gamma"), ("tpo-l",), ("reference", "chosen", "rejected"), _tpo,
    {
        "loss_type": "sigmoid", "beta": 0.01, "tpo_alpha": 1.0, "tpo_l_gamma": 0.5, "label_smoothing": 0.0,
        "learning_rate": 5e-7,
    },
)  # fmt: skip
KTO = AnswerTrainer(
    "a KTOConfig", ("desirable_weight", "undesirable_weight"), ("kto", "apo_zero_unpaired"), ("completion",), _kto,
    {"loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0},
)  # fmt: skip


def trainer_is_told(given: Mapping[str, Any]) -> bool:
    """Whether a loss or a setting of one trainer alone says whose file it is."""
    keys = {"loss_type", *(key for trainer in (KTO, TPO, CPO, DPO) for key in trainer.keys)} - {"truncation_mode"}
    return any(key in given for key in keys)  # an SFTConfig has truncation_mode too


def answer_trainer_of(given: Mapping[str, Any]) -> AnswerTrainer | None:
    """The trainer on given answers that the settings of a file are for; None if they are for another one."""
    losses = given.get("loss_type")
    kinds = losses if isinstance(losses, list) else [losses]
    for trainer in (KTO, TPO, CPO, DPO):
        if any(key in given for key in trainer.keys) or any(kind in trainer.losses for kind in kinds):
            return trainer
    return DPO if "max_length" in given and "reward_funcs" not in given else None
