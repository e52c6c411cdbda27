"""The algorithms of UniRL for images and videos as plan, kernel, objective and comparison of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .conversion import Conversion
from .foreign_settings import named
from .unirl_models import CPS, DANCE, FAMILIES, FLOW

KERNELS = {FLOW: "flow_sde", DANCE: "dance_sde", CPS: "cps"}
SCHEDULER = "sampling.scheduler."
EPS = 1e-8
"""What they add to a standard deviation."""


def strategy_of(conversion: Conversion, name: str) -> str:
    """The class of their SDE; the key is carried over or used."""
    settings = conversion.settings
    keys = [key for key in (f"{at}strategy._target_" for at in ("pipeline.", "rollout.", "")) if settings.has(key)]
    conversion.used(*keys)
    return (settings.text(keys[0]) or "").rpartition(".")[2] if keys else FAMILIES[name].strategy


def method(conversion: Conversion, name: str, updates: int) -> None:
    """The steps and the objective.

    Args:
        conversion: with model, batches and call.
        name: folder of the model's code.
        updates: optimizer steps of an iteration.

    Raises:
        ValueError: the algorithm has no counterpart here.
    """
    settings = conversion.settings
    kind = (settings.text("algorithm._target_") or "").rpartition(".")[2]
    if kind not in METHODS:
        raise ValueError(
            f"{settings.place}: algorithm._target_ is {named(kind)}, which has no counterpart here; for images these "
            f"have one: {', '.join(METHODS)}. Change it in a copy of the file, and convert the copy"
        )
    conversion.carry("sampling.num_inference_steps", "sampler.steps", settings.count("sampling.num_inference_steps"))
    make, conversion.bases = METHODS[kind]
    make(conversion, name, updates)
    conversion.follow("no KL", "penalties", [])


def _noise(conversion: Conversion, name: str) -> None:
    """The stochastic steps and their kernel.

    Raises:
        ValueError: the steps have no noise, or noise that is not known here.
    """
    settings, kind = conversion.settings, strategy_of(conversion, name)
    keys = [key for key in ("pipeline.strategy._target_", "strategy._target_") if settings.has(key)][:1]
    if kind not in KERNELS:
        raise ValueError(
            f"{settings.place}: the strategy of the pipeline is {named(kind)}, and this algorithm needs noise in its "
            f"steps; write {', '.join(KERNELS)}"
        )
    eta = settings.number("sampling.eta")
    kernel = {"name": KERNELS[kind], "eta": eta}
    note = "" if keys else f"{kind}, the pipeline's own"
    conversion.carry([*keys, "sampling.eta"], "sampler.kernel", kernel, note)
    shared = settings.flag("sampling.init_same_noise")
    conversion.follow("the stochastic steps are a window", "sampler.plan.name", "window")
    conversion.carry("sampling.init_same_noise", "sampler.plan.shared_noise", shared)
    window, keys, notes = _window(conversion)
    conversion.carry(keys, "sampler.plan.window", window, "; ".join(notes))


Window = tuple[dict[str, Any], list[str], list[str]]
LAST = "the last step is never trained here"


def _window(conversion: Conversion) -> Window:
    """The stochastic steps of a rollout: a window, the keys that it comes from, and what differs."""
    settings, steps = conversion.settings, conversion.settings.count("sampling.num_inference_steps")
    listed = settings.value("sampling.sde_indices")
    if listed is not None:
        if not isinstance(listed, list) or not listed or not all(type(k) is int and 0 <= k < steps for k in listed):
            raise settings.wrong("sampling.sde_indices", f"a list of steps from 0 to {steps - 1}")
        low, high = min(listed), max(listed) + 1
        if sorted(set(listed)) != list(range(low, high)):
            conversion.lose("sampling.sde_indices", f"a window has no gaps: {low} to {high - 1} is taken")
        return _stretch(low, high, steps, ["sampling.sde_indices"], [])
    kind = (settings.text(f"{SCHEDULER}_target_") or "").rpartition(".")[2]
    if kind == "WindowScheduler":
        return _sliding(conversion, steps)
    if kind not in ("AllSDEScheduler", ""):
        raise settings.wrong(f"{SCHEDULER}_target_", "…AllSDEScheduler or …WindowScheduler")
    if not kind:
        return _stretch(0, steps, steps, ["sampling.num_inference_steps"], [])
    share = settings.value(f"{SCHEDULER}timestep_fraction")
    first, last = settings.pair(f"{SCHEDULER}timestep_fraction") or (0.0, 1.0)
    # One number there is a range from 0.
    low, high = int(steps * (first if isinstance(share, list) else 0.0)), int(steps * last)
    keys = [f"{SCHEDULER}timestep_fraction", f"{SCHEDULER}num_sde_steps"]
    size = settings.whole(f"{SCHEDULER}num_sde_steps")
    if size is None or size >= high - low:
        return _stretch(low, high, steps, keys, [])
    stop = min(high, steps - 1)
    notes = [*([LAST] if stop < high else []), "drawn anew in every iteration"]
    if size > stop - low:
        return _stretch(low, high, steps, keys, [])
    return {"name": "subset", "size": size, "interval": 1, "start": low, "stop": stop}, keys, notes


def _stretch(low: int, high: int, steps: int, keys: list[str], notes: list[str]) -> Window:
    """All steps from `low` to before `high`."""
    stop = min(high, steps - 1)
    notes = [*notes, *([LAST] if stop < high else [])]
    if low == 0 and stop == steps - 1:
        return {"name": "all"}, keys, notes
    return {"name": "frozen", "size": max(stop - low, 1), "start": low}, keys, notes


def _sliding(conversion: Conversion, steps: int) -> Window:
    settings, at = conversion.settings, f"{SCHEDULER}config."
    kind = settings.text(f"{at}strategy")
    size, last = settings.count(f"{at}window_size"), steps - 1
    conversion.used(f"{at}_target_", *(f"{at}{key}" for key in ("exp_decay_threshold", "exp_decay_k")))
    for key in ("max_iters_per_window", "min_iters_per_window"):
        if settings.has(f"{at}{key}"):
            conversion.ignore(f"{at}{key}", "their windows all stay as long")
    if kind == "all":
        return _stretch(0, steps, steps, [f"{at}strategy"], [])
    if kind == "random":
        keys = [f"{at}strategy", f"{at}window_size"]
        for key in ("iters_per_window", "init_timestep", "overlap_size", "roll_back"):
            if settings.has(f"{at}{key}"):
                conversion.ignore(f"{at}{key}", "their random window does not read it")
        return {"name": "random", "size": min(size, last), "interval": 1}, keys, [LAST, "the others alike"]
    if kind != "progressive":
        raise settings.wrong(f"{at}strategy", "all, progressive or random")
    overlap, start = settings.whole(f"{at}overlap_size") or 0, settings.whole(f"{at}init_timestep") or 0
    if overlap >= size:
        raise settings.wrong(f"{at}overlap_size", "less than the window has steps")
    notes = ["the last window ends before the last step, which is never trained here"]
    if not settings.flag(f"{at}roll_back"):
        text = "the window begins again when it has reached the end, and there it stays at the end"
        conversion.lose(f"{at}roll_back", text)
    words = ("strategy", "window_size", "overlap_size", "iters_per_window", "init_timestep", "roll_back")
    window = {
        "name": "progressive", "size": size, "stride": size - overlap,
        "interval": settings.count(f"{at}iters_per_window"), "start": start,
    }  # fmt: skip
    return window, [f"{at}{word}" for word in words if settings.value(f"{at}{word}") is not None], notes


def old_log_probs(conversion: Conversion) -> None:
    """Say what becomes of `old_logp_source`: here the ratio is 1 until the weights move."""
    key, engine = "algorithm.old_logp_source", conversion.settings.text("rollout._target_") or ""
    text = "the ratio is 1 until the weights move, as with replay"
    if conversion.settings.text(key) == "rollout" and "trainside" not in engine:
        text += "; there it also has the difference between the engines"
    if conversion.settings.has(key):
        conversion.ignore(key, text)


def _clipped(conversion: Conversion) -> dict[str, Any]:
    settings, key = conversion.settings, "algorithm.clip_schedule"
    if settings.text(key) in ("linear_decay", "cosine_decay"):
        conversion.lose(key, "the bounds of the ratio stay as they are")
    conversion.used(key)
    clip = settings.number("algorithm.clip_range")
    return {"name": "clip", "low": clip, "high": clip}


def _flow_grpo(conversion: Conversion, name: str, updates: int) -> None:
    _noise(conversion, name)
    kernel = conversion.recipe["sampler"]["kernel"]["name"]
    ratio = "cps_released" if kernel == "cps" else "gaussian"
    note = "the ratio of their log-probability, which is not a density" if kernel == "cps" else ""
    objective = {"name": "transition", "ratio": ratio, "weight": "none", "surrogate": _clipped(conversion)}
    conversion.carry(["algorithm._target_", "algorithm.clip_range"], "objective", objective, note)
    if conversion.recipe["sampler"]["plan"]["window"]["name"] == "progressive":
        conversion.bases = ("mixgrpo@published", "mixgrpo")
    elif kernel == "dance_sde":
        conversion.bases = ("dance_grpo@published", "dance_grpo")
    old_log_probs(conversion)
    group_comparison(conversion)


def _flow_dppo(conversion: Conversion, name: str, updates: int) -> None:
    """Their threshold is a mean over the numbers of a latent; ours is of the whole latent."""
    settings = conversion.settings
    _noise(conversion, name)
    kernel = conversion.recipe["sampler"]["kernel"]["name"]
    frames = settings.count("sampling.num_frames") if FAMILIES[name].video else 1
    height, width = settings.count("sampling.height"), settings.count("sampling.width")
    elements = FAMILIES[name].elements(height, width, frames)
    limit = settings.number("algorithm.kl_mask_threshold") or 0.0
    objective = {
        "name": "transition", "ratio": "gaussian", "weight": "none",
        "surrogate": {"name": "clip", "low": float("inf"), "high": float("inf")},
        "trust_nats": float(f"{limit * elements:.6g}"),
    }  # fmt: skip
    note = f"times {elements:,}, the numbers of a latent"
    if kernel == "flow_sde":
        note += "; at the first step they divide the divergence by a larger variance than the step has"
    conversion.carry(["algorithm._target_", "algorithm.kl_mask_threshold"], "objective", objective, note)
    if not settings.flag("algorithm.add_kl_coefficient"):
        text = "the divergence is divided by the variance of the step here, so the same bound holds more steps back"
        conversion.lose("algorithm.add_kl_coefficient", text)
    elif kernel != "flow_sde":
        text = "they divide by the variance of a Flow-SDE step, whatever the strategy is; here by the step's own"
        conversion.lose("algorithm.add_kl_coefficient", text)
    conversion.used("algorithm.add_kl_coefficient")
    old_log_probs(conversion)
    group_comparison(conversion)


def _nft(conversion: Conversion, name: str, updates: int) -> None:
    settings, steps = conversion.settings, conversion.settings.count("sampling.num_inference_steps")
    strategy_of(conversion, name)
    conversion.follow("a rollout without noise", "sampler.plan", {"name": "ode"})
    keys = [key for key in settings.given if key.startswith(SCHEDULER) or key == "sampling.sde_indices"]
    for key in (*keys, "sampling.eta", "sampling.init_same_noise"):
        if settings.has(key) and not (key.endswith("init_same_noise") and settings.flag(key)):
            conversion.ignore(key, "the rollout has no noise in its steps")
    if settings.flag("sampling.init_same_noise"):
        conversion.lose("sampling.init_same_noise", "each image begins from a noise of its own with plan ode")
    loss = {
        "name": "diffusion_nft", "beta": settings.number("algorithm.beta"),
        "bound": settings.number("algorithm.adv_clip_max"),
    }  # fmt: skip
    conversion.carry(
        ["algorithm._target_", "algorithm.beta", "algorithm.adv_clip_max"], "objective",
        {"name": "forward", "loss": loss, "noise": "image"},
    )  # fmt: skip
    if not settings.flag("algorithm.use_adaptive_weight"):
        text = "an error is always divided by its mean size here, so the gradients have another scale"
        conversion.lose("algorithm.use_adaptive_weight", text)
    conversion.used("algorithm.use_adaptive_weight")
    _levels(conversion, steps)
    _averages(conversion, updates)
    group_comparison(conversion)


def _levels(conversion: Conversion, steps: int) -> None:
    settings = conversion.settings
    share = settings.number("algorithm.training_timestep_fraction") or 0.0
    keys = ["algorithm.train_timestep_mode", "algorithm.training_timestep_fraction"]
    if settings.text(keys[0]) == "random":
        times = conversion.settings.count("stack.micro_batch_size")
        conversion.carry([keys[0], "stack.micro_batch_size"], "objective.times", times)
        note = "along the rollout's levels, which have the model's shift; there all levels are alike"
        conversion.carry(keys, "objective.draw", "between", note)
    else:
        count = int(steps * share)
        note = "the level of the last step is never taken here" if count > steps - 1 else ""
        conversion.carry(keys, "objective.levels", min(count, steps - 1) if count < steps - 1 else None, note)
    if settings.has("algorithm.shuffle_train_timesteps"):
        conversion.ignore("algorithm.shuffle_train_timesteps", "the levels of an update are added up in any order")


def _averages(conversion: Conversion, updates: int) -> None:
    """The average of the LoRA that samples, or only compares where another engine samples."""
    settings, at = conversion.settings, "backend.ema_lora_cfg."
    if not settings.has(f"{at}_target_"):
        conversion.want("their DiffusionNFT needs backend.ema_lora_cfg; write objective.old, the policy that samples")
        return
    kind, flat = settings.text(f"{at}ema_decay_type"), settings.whole(f"{at}ema_flat_steps") or 0
    at_end = settings.text(f"{at}timing") == "rollout_end"
    words = ["ema_decay_type", "timing"]
    if kind in ("linear", "warmup"):
        rise, most = settings.number(f"{at}ema_uprate") or 0.0, settings.number(f"{at}ema_uphold") or 0.0
        words += ["ema_uprate", "ema_uphold", *(["ema_flat_steps"] if kind == "warmup" else [])]
        # At the end of a rollout they count its last optimizer step too.
        after = (flat if kind == "warmup" else 0) - at_end
        found = {"decay": most, "every": updates if at_end else 1, "rise": rise, "after": max(after, 0)}
        if after < 0:
            found["first"] = min(rise, most)
    else:
        most = settings.number(f"{at}ema_decay") or 0.0
        words.append("ema_decay")
        found = {"decay": most, "every": updates if at_end else 1, "rise": 1.0, "first": most}
    conversion.used(*(f"{at}{key}" for key in ("ema_decay", "ema_flat_steps", "ema_uprate", "ema_uphold")))
    here = "trainside" in (settings.text("rollout._target_") or "")
    note = "the average samples" if here else "the trained weights sample, because another engine does"
    place = "objective.old" if here else "objective.compared"
    conversion.carry([f"{at}{word}" for word in words], place, found, note)


def group_comparison(conversion: Conversion) -> None:
    """Advantages of images: within the group, by the standard deviation of the group or of all images."""
    key = "adv_use_global_std"
    if conversion.settings.flag(key):
        advantage: dict[str, Any] = {"name": "group", "scale": "batch", "ddof": 1, "eps": EPS}
        conversion.carry(key, "advantage", advantage)
    else:
        advantage = {"name": "group", "scale": "group", "ddof": 0, "eps": EPS}
        conversion.carry(key, "advantage", advantage, "they add 1e-8 to the variance")
    conversion.follow("advantages have no bound", "clamp", None)


Make = Callable[[Conversion, str, int], None]
METHODS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "FlowGRPO": (_flow_grpo, ("flow_grpo_fast@published", "flow_grpo@published", "flow_grpo")),
    "FlowDPPO": (_flow_dppo, ("flow_dppo@published", "flow_dppo")),
    "DiffusionNFT": (_nft, ("diffusion_nft@published", "diffusion_nft")),
}
"""Their algorithm -> function that makes the objective, and recipes of the same method."""
