"""The algorithms of Flow-Factory as plan, kernel, objective and penalties of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .conversion import Conversion

KERNELS = {"Flow-SDE": "flow_sde", "Dance-SDE": "dance_sde", "CPS": "cps"}
NOISY = ("grpo", "grpo-guard")


def steps_of(conversion: Conversion) -> None:
    """The stochastic steps: some of a list, drawn anew in every iteration. All other steps are deterministic.

    Raises:
        ValueError: the dynamics are unknown, or an algorithm needs noise and there is none.
    """
    settings = conversion.settings
    kind = settings.text("scheduler.dynamics_type")
    if kind == "ODE":
        if settings.text("train.trainer_type") in NOISY:
            raise settings.wrong("scheduler.dynamics_type", "Flow-SDE, Dance-SDE or CPS with this algorithm")
        conversion.carry("scheduler.dynamics_type", "sampler.plan", {"name": "ode"})
        return
    if kind not in KERNELS:
        raise settings.wrong("scheduler.dynamics_type", "Flow-SDE, Dance-SDE, CPS or ODE")
    eta = settings.number("scheduler.noise_level")
    kernel = {"name": KERNELS[kind], "eta": 0.7 if eta is None else eta}
    conversion.carry(["scheduler.dynamics_type", "scheduler.noise_level"], "sampler.kernel", kernel)
    last = settings.count("train.num_inference_steps") - 1
    listed = settings.value("scheduler.sde_steps")
    pool = sorted({step for step in listed if type(step) is int and step >= 0}) if isinstance(listed, list) else []
    pool = pool or list(range(last))
    first, stop = pool[0], min(pool[-1] + 1, last)
    size = min(settings.whole("scheduler.num_sde_steps") or len(pool), len(pool))
    notes = ["drawn once for all processes"] if size < len(pool) else []
    if pool[-1] >= last:
        notes.append("the last step is never trained here")
    if pool != list(range(first, pool[-1] + 1)):
        conversion.lose("scheduler.sde_steps", f"steps are drawn from a range: {first} to {stop - 1} is taken")
    window: dict[str, Any] = {"name": "subset", "size": size, "interval": 1, "start": first, "stop": stop}
    if size >= stop - first:
        window = {"name": "frozen", "size": stop - first, "start": first} if stop - first < last else {"name": "all"}
    keys = ["scheduler.num_sde_steps", "scheduler.sde_steps"]
    conversion.carry(
        keys, "sampler.plan", {"name": "window", "shared_noise": False, "window": window}, "; ".join(notes)
    )


def guidance_name(conversion: Conversion) -> str:
    """The argument of the pipeline's call that is their scale of guidance."""
    qwen = str(conversion.settings.value("model.model_type")).lower().startswith("qwen")
    return "true_cfg_scale" if qwen else "guidance_scale"


def method(conversion: Conversion, updates: int) -> None:
    """The objective and the penalties.

    Raises:
        ValueError: the algorithm has no counterpart here.
    """
    settings = conversion.settings
    kind = settings.text("train.trainer_type") or ""
    if kind not in METHODS:
        raise ValueError(
            f"{settings.place}: train.trainer_type is {kind!r:.60}, which has no counterpart here; these have one: "
            f"{', '.join(METHODS)}. Change it in a copy of the file, and convert the copy"
        )
    make, conversion.bases = METHODS[kind]
    make(conversion, updates)
    _kl(conversion, kind, updates)


def _clip(conversion: Conversion) -> dict[str, Any]:
    low, high = conversion.settings.pair("train.clip_range") or (-1e-4, 1e-4)
    return {"name": "clip", "low": abs(low), "high": high}


def _grpo(conversion: Conversion, updates: int) -> None:
    kernel = conversion.recipe["sampler"]["kernel"]["name"]
    ratio = "cps_released" if kernel == "cps" else "gaussian"
    note = "the ratio of their log-probability, which is not a density" if kernel == "cps" else ""
    objective = {"name": "transition", "ratio": ratio, "weight": "none", "surrogate": _clip(conversion)}
    conversion.carry(["train.trainer_type", "train.clip_range"], "objective", objective, note)


def _guard(conversion: Conversion, updates: int) -> None:
    """The objective of GRPO-Guard.

    Raises:
        ValueError: the steps are those of CPS. Their ratio is then none of a density, and its scale differs by step.
    """
    if conversion.recipe["sampler"]["kernel"]["name"] == "cps":
        raise ValueError(
            f"{conversion.settings.place}: train.trainer_type grpo-guard with scheduler.dynamics_type CPS has no "
            "counterpart here: its ratio has another scale at every step. Write scheduler.dynamics_type: Flow-SDE or "
            "Dance-SDE, or train.trainer_type: grpo, into a copy of the file, and convert the copy"
        )
    # Their loss has no weight of a step, unlike the paper's.
    objective = {"name": "transition", "ratio": "guard", "weight": "none", "surrogate": _clip(conversion)}
    conversion.carry(["train.trainer_type", "train.clip_range"], "objective", objective)


def _nft(conversion: Conversion, updates: int) -> None:
    loss = {
        "name": "diffusion_nft", "beta": conversion.settings.number("train.nft_beta"), "bound": _bound(conversion),
    }  # fmt: skip
    conversion.carry(
        ["train.trainer_type", "train.nft_beta"], "objective", {"name": "forward", "loss": loss, "noise": "image"}
    )
    _levels(conversion)
    _sampling_policy(conversion, updates)


def _awm(conversion: Conversion, updates: int) -> None:
    settings = conversion.settings
    weighting = settings.text("train.awm_weighting") or "Uniform"
    power = {"ghuber": settings.number("train.ghuber_power"), "t": 1.0, "huber": 0.5}.get(weighting)
    if power is None:
        conversion.lose("train.awm_weighting", "the error is weighted by the noise level, their `t`")
    note = "twice their log-probability" if weighting == "huber" else ""
    loss = {"name": "awm", "power": power or 1.0, "surrogate": _clip(conversion)}
    keys = [f"train.{key}" for key in ("trainer_type", "awm_weighting", "clip_range")]
    keys += ["train.ghuber_power"] if weighting == "ghuber" else []
    conversion.carry(keys, "objective", {"name": "forward", "loss": loss, "noise": "image"}, note)
    _levels(conversion)
    _sampling_policy(conversion, updates)


def _dgpo(conversion: Conversion, updates: int) -> None:
    settings = conversion.settings
    loss = {"name": "dgpo", "beta": settings.number("train.dpo_beta"), "surrogate": _clip(conversion)}
    noise = "prompt" if settings.flag("train.use_shared_noise") else "image"
    keys = [f"train.{key}" for key in ("trainer_type", "dpo_beta", "clip_range", "use_shared_noise")]
    conversion.carry(keys, "objective", {"name": "forward", "loss": loss, "noise": noise})
    _levels(conversion)
    if settings.flag("train.clip_dsm"):
        rise = settings.number("train.ema_ref_ramp_rate")
        old = {"decay": settings.number("train.ema_ref_max_decay"), "every": 1, "rise": rise}
        keys = [f"train.{key}" for key in ("clip_dsm", "ema_ref_max_decay", "ema_ref_ramp_rate")]
        conversion.carry(keys, "objective.old", old, "the lagging policy also samples, from the start")
    else:
        conversion.lose("train.clip_dsm", "without objective.old every ratio is 1, and the clip does nothing")
    if (settings.number("train.guidance_scale") or 1.0) > 1.0:
        conversion.want(
            "DGPO samples with guidance there and trains without it; here both have the guidance of model.call"
        )
    if settings.flag("train.off_policy"):
        conversion.lose("train.off_policy", "objective.old samples from the start")


DECAYS: dict[str, tuple[float, float, float, float]] = {
    "0": (0, 0.0, 0.0, 0.0), "1": (0, 0.0, 0.001, 0.5), "2": (75, 0.0, 0.0075, 0.999), "3": (0, 1.0, 0.0, 1.0),
    "4": (0, 0.0, 0.02, 0.99), "5": (0, 0.0, 0.01, 0.5), "6": (0, 0.0, 0.0075, 0.999),
    "none": (0, 0.0, 0.0, 0.0), "slow": (0, 0.0, 0.001, 0.5), "medium": (75, 0.0, 0.0075, 0.999),
    "offline": (0, 1.0, 0.0, 1.0), "fast": (0, 0.0, 0.02, 0.99), "moderate": (0, 0.0, 0.01, 0.5),
}  # fmt: skip
"""CRD's decays by name: the step after which the share of the past rises, the share before, its rise, and its end."""


def _crd(conversion: Conversion, updates: int) -> None:
    settings = conversion.settings
    match = {"mse": "squares", "bce": "logistic"}.get(settings.text("train.crd_loss_type") or "")
    if match is None:
        raise settings.wrong("train.crd_loss_type", "mse or bce")
    loss: dict[str, Any] = {"name": "crd", "beta": settings.number("train.crd_beta"), "bound": _bound(conversion)}
    loss |= {"relative": settings.flag("train.adaptive_logp"), "match": match}
    heat = settings.number("train.weight_temp") or 0.0
    if heat > 0:
        loss["temperature"] = heat
    keys = [f"train.{key}" for key in ("trainer_type", "crd_beta", "crd_loss_type", "adaptive_logp", "weight_temp")]
    note = "their means are over all images that are trained at once, and not over the images of a prompt"
    conversion.carry(keys, "objective", {"name": "forward", "loss": loss, "noise": "image"}, note)
    if heat == 0:
        conversion.lose("train.weight_temp", "the means are plain; objective.loss.temperature weighs them")
    _levels(conversion)
    if not settings.flag("train.use_old_for_loss"):
        conversion.lose("train.use_old_for_loss", "the loss compares with objective.compared, and not with the base")
    for key, ours in (("old_model_decay", "compared"), ("sampling_model_decay", "old")):
        conversion.carry(f"train.{key}", f"objective.{ours}", _decay(conversion, f"train.{key}", updates))
    conversion.used("train.use_old_for_loss")


def _decay(conversion: Conversion, key: str, updates: int) -> dict[str, Any] | None:
    """An average of CRD as our section has it; None if it is a copy of the weights. Theirs moves once an iteration.

    Raises:
        ValueError: the text is none of their decays.
    """
    settings = conversion.settings
    text = str(settings.value(key))
    numbers = DECAYS.get(text)
    if numbers is None:
        try:
            after, first, rise, end = (float(word) for word in text.split("-"))
        except ValueError:
            raise settings.wrong(
                key, f"START_STEP-START_VALUE-SLOPE-END_VALUE, or one of {', '.join(DECAYS)}"
            ) from None
        numbers = after, first, rise, end
    after, first, rise, end = numbers
    if first >= 1 or end >= 1:
        conversion.lose(key, "an average that never moves is the base here; a decay of 0.999 is the slowest")
        first, end = min(first, 0.999), min(end, 0.999)
    if end <= 0 or (first <= 0 and rise <= 0):
        return None
    if rise <= 0:
        return {"decay": min(first, end), "every": updates, "rise": 1.0, "first": min(first, end)}
    return {"decay": end, "every": updates, "rise": rise, "first": min(first, end), "after": int(after)}


def _bound(conversion: Conversion) -> float:
    """The advantage at which an image counts as wholly good."""
    return (conversion.settings.pair("train.adv_clip_range") or (-5.0, 5.0))[1]


def _dpo(conversion: Conversion, updates: int) -> None:
    settings = conversion.settings
    loss = {"name": "flow_dpo", "beta": settings.number("train.beta")}
    note = "the loss is a mean over all images here, and over pairs there"
    conversion.carry(
        ["train.trainer_type", "train.beta"], "objective", {"name": "forward", "loss": loss, "noise": "image"}, note
    )
    if settings.has("train.weighting_scheme"):
        conversion.lose("train.weighting_scheme", "the rollout gives the noise levels, and all count alike")
    _levels(conversion)


def _levels(conversion: Conversion) -> None:
    """The noise levels that an image gets, and how many."""
    settings = conversion.settings
    steps = settings.count("train.num_inference_steps")
    bounds = settings.pair("train.timestep_range") or (0.0, 0.9)
    # One number there is a range from 0.
    low, high = max(bounds[0], 0.0), bounds[1]
    given = max(settings.whole("train.num_train_timesteps") or int(steps * (high - low)), 1)
    key = "train.time_sampling_strategy"
    strategy = settings.text(key)
    between = strategy in ("uniform", "logit_normal")
    some = between or given < steps - 1
    conversion.carry("train.num_train_timesteps", "objective.times", given if some else None)
    if low > 0 or high < 0.9:
        text = "all levels of the rollout" + ("" if between else " but the last") + " are taken; how many are in this "
        text += "range depends on the model's shift: write their number as objective.levels"
        conversion.lose("train.timestep_range", text)
    if between:
        conversion.carry(
            key, "objective.draw", "between", "along the rollout's own levels, which have the model's shift"
        )
        if strategy == "logit_normal":
            conversion.carry(key, "objective.density", "logit_normal")
    elif strategy in ("discrete", "discrete_wo_init"):
        if strategy == "discrete_wo_init":
            conversion.carry(key, "objective.skip", 1)
        if some:
            conversion.carry(key, "objective.draw", "ranges")
    else:
        conversion.lose(key, "noise levels are drawn from the levels of the rollout, all alike")
    conversion.used("train.timestep_range", "train.time_sampling_strategy")


def average_of(conversion: Conversion, updates: int) -> dict[str, Any] | None:
    """The average of the weights, as our sections have it; None if there is none. Their steps are whole iterations."""
    settings = conversion.settings
    decay = settings.number("train.ema_decay") or 0.0
    if decay <= 0:
        return None
    every = settings.count("train.ema_update_interval") * updates
    kind, found = settings.text("train.ema_decay_schedule"), {"decay": decay, "every": every}
    if kind == "piecewise_linear":
        found["rise"] = (settings.number("train.ramp_rate") or 0.001) / updates
        if settings.number("train.flat_steps"):
            conversion.lose("train.flat_steps", "the average begins to rise at once")
    elif kind == "linear" and not settings.number("train.initial_decay"):
        found["rise"] = decay / ((settings.number("train.warmup_steps") or 100) * updates)
    elif kind == "constant":
        found["rise"] = 1.0
    elif kind != "power":
        conversion.lose(
            "train.ema_decay_schedule", "the average rises as (1 + s) / (10 + s) here; `rise` makes it linear"
        )
    conversion.used(
        "train.ramp_rate", "train.flat_steps", "train.initial_decay", "train.warmup_steps", "train.total_steps"
    )
    return found


def _sampling_policy(conversion: Conversion, updates: int) -> None:
    """With `off_policy`, the average of the weights samples, and is the old policy of the loss."""
    found = average_of(conversion, updates) if conversion.settings.flag("train.off_policy") else None
    if found is not None:
        conversion.carry("train.off_policy", "objective.old", found, "the average of the weights samples")
    conversion.used("train.off_policy")


def _kl(conversion: Conversion, kind: str, updates: int) -> None:
    settings = conversion.settings
    beta, space = settings.number("train.kl_beta") or 0.0, settings.text("train.kl_type")
    penalties: list[dict[str, Any]] = []
    note = ""
    if beta > 0 and kind in NOISY and space == "v-based":
        text = "their KL compares velocities; a penalty of steps compares means: add penalties.kl.weight"
        conversion.lose(["train.kl_beta", "train.kl_type"], text)
    elif beta > 0:
        name = "w2" if kind in NOISY else "kl"
        note = "the squared distance of the means" if kind in NOISY else "the squared distance of the velocities"
        penalties = [{"name": name, "weight": beta}]
        if kind == "crd" and settings.flag("train.reward_adaptive_kl"):
            # Their bad images have a weight of 1e-4.
            least = min(1e-4 / beta, 1.0)
            penalties = [{"name": "adaptive_kl", "weight": beta, "bound": _bound(conversion), "least": least}]
    conversion.used("train.reward_adaptive_kl")
    guided = settings.number("train.kl_cfg") or 1.0
    if guided > 1 and penalties and kind not in NOISY:
        conversion.carry("train.kl_cfg", f"model.reference_call.{guidance_name(conversion)}", guided)
    lagging = settings.number("train.ema_kl_beta") or 0.0
    if kind == "awm" and lagging > 0 and not penalties and (average := average_of(conversion, updates)) is not None:
        conversion.carry("train.ema_kl_beta", "penalties", [{"name": "kl", "weight": lagging}])
        conversion.follow("to the average of the weights", "reference", average)
    elif beta <= 0 or penalties:
        conversion.carry(
            ["train.kl_beta", "train.kl_type"] if penalties else "train.kl_beta", "penalties", penalties, note
        )
        if kind == "awm" and lagging > 0:
            conversion.lose("train.ema_kl_beta", "there is one reference here, and train.kl_beta has it")
    conversion.used("train.kl_type", "train.kl_beta", "train.ema_kl_beta")


Make = Callable[[Conversion, int], None]
METHODS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "grpo": (_grpo, ("flow_grpo_fast@published", "flow_grpo@published", "flow_grpo")),
    "grpo-guard": (_guard, ("grpo_guard@published", "grpo_guard")),
    "nft": (_nft, ("diffusion_nft@published", "diffusion_nft")),
    "awm": (_awm, ("awm@published", "awm")),
    "dgpo": (_dgpo, ("dgpo@published", "dgpo")),
    "crd": (_crd, ("crd@published", "crd")),
    "dpo": (_dpo, ("flow_dpo",)),
}
"""Their algorithm -> function that makes the objective, and recipes of the same method."""
