"""The losses of verl-omni as plan, kernel, objective, comparison and penalties of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .conversion import Conversion
from .flow_grpo_scripts import model_word
from .foreign_settings import named
from .verl_omni_keys import ACTOR, ALGO, LOSS, MODEL, PIPELINE, ROLLOUT

KERNELS = {"sde": "flow_sde", "cps": "cps", "dance_sde": "dance_sde"}
EPS = 1e-4
"""What they add to a standard deviation."""
DECAYS = {"copy": (0, 0.0, 0.0), "linear_to_0_5": (0, 0.001, 0.5), "delayed_linear_to_0_999": (75, 0.0075, 0.999)}
"""The share of the past in their old policy: the iteration after which it rises, its rise, and its end."""
TRANSFORMS = {
    "continuous": None, "positive_only": "positive", "negative_only": "negative", "one_only": "one", "binary": "sign",
}  # fmt: skip
"""Their mode of the advantages of DiffusionNFT -> transform of a recipe."""
PER_LATENT = "the mean over the numbers of a latent, there too"


def loss_mode(conversion: Conversion) -> str:
    """The name of their loss; if the script names none, the algorithm's own."""
    settings = conversion.settings
    key = f"{LOSS}loss_mode"
    return settings.text(key) or settings.text(f"{MODEL}algorithm") or "flow_grpo"


def method(conversion: Conversion, updates: int) -> None:
    """The objective and what belongs to it.

    Args:
        conversion: with model, batches and call.
        updates: optimizer steps of an iteration.

    Raises:
        ValueError: the loss has no counterpart here.
    """
    settings, mode = conversion.settings, loss_mode(conversion)
    if settings.text(f"{MODEL}algorithm") == "dual_grpo":
        raise ValueError(
            f"{settings.place}: {MODEL}algorithm is dual_grpo, whose text encoder writes text before the image is "
            "drawn, which has no counterpart here. Write flow_grpo in a copy of the script, and convert the copy"
        )
    if mode not in METHODS:
        raise ValueError(
            f"{settings.place}: {LOSS}loss_mode is {named(mode)}, which has no counterpart here; these have one: "
            f"{', '.join(METHODS)}. Change it in a copy of the script, and convert the copy"
        )
    make, conversion.bases = METHODS[mode]
    conversion.used(f"{LOSS}loss_mode", f"{MODEL}algorithm")
    make(conversion, updates)
    if settings.flag(f"{ACTOR}use_distill_loss"):
        conversion.lose(f"{ACTOR}use_distill_loss", "a teacher beside rewards is penalty taught: see docs/recipes.md")
    conversion.used(f"{ACTOR}use_distill_loss", f"{ACTOR}use_kl_loss", f"{ACTOR}kl_loss_coef")


def _keys(conversion: Conversion, *more: str) -> list[str]:
    settings = conversion.settings
    found = [key for key in (f"{LOSS}loss_mode", f"{MODEL}algorithm") if settings.has(key)][:1]
    return [*(found or [f"{MODEL}algorithm"]), *(f"{LOSS}{key}" for key in more)]


def _noise(conversion: Conversion) -> str:
    """The stochastic steps; returns the kernel."""
    settings = conversion.settings
    kind = settings.text(f"{ALGO}sde_type")
    if kind not in KERNELS:
        raise settings.wrong(f"{ALGO}sde_type", ", ".join(KERNELS))
    kernel = {"name": KERNELS[kind], "eta": settings.number(f"{ALGO}noise_level")}
    conversion.carry([f"{ALGO}sde_type", f"{ALGO}noise_level"], "sampler.kernel", kernel)
    conversion.follow("a window in one noise of each sample", "sampler.plan.name", "window")
    conversion.follow("a noise of its own", "sampler.plan.shared_noise", False)
    steps = settings.count(f"{PIPELINE}num_inference_steps")
    size = settings.whole(f"{ALGO}sde_window_size")
    keys = [f"{ALGO}sde_window_size", f"{ALGO}sde_window_range"]
    conversion.used(f"{ALGO}sde_contiguous", f"{ALGO}sample_strategy", f"{ALGO}iters_per_group")
    if size is None:
        conversion.carry(keys[0], "sampler.plan.window", {"name": "all"}, "all steps but the last, there too")
        conversion.used(*keys)
        return KERNELS[kind]
    first, last = settings.pair(keys[1]) or (0.0, 5.0)
    start, stop = max(int(first), 0), min(int(last), steps - 1)
    window: dict[str, Any] = {"name": "random", "size": size, "interval": 1, "start": start, "stop": stop}
    notes = ["drawn once for all samples; there once for each request"]
    slides = settings.text(f"{MODEL}algorithm") == "mix_grpo"
    if slides:
        conversion.bases = ("mixgrpo@published", "mixgrpo")
        notes = []
    if slides and settings.text(f"{ALGO}sample_strategy") == "progressive":
        keys += [f"{ALGO}sample_strategy", f"{ALGO}iters_per_group"]
        window |= {"name": "progressive", "stride": size, "interval": settings.count(f"{ALGO}iters_per_group")}
        text = "the window begins again when it has reached the end, and there it stays at the end"
        conversion.lose(f"{ALGO}sample_strategy", text)
    elif not settings.flag(f"{ALGO}sde_contiguous"):
        keys.append(f"{ALGO}sde_contiguous")
        window["name"] = "subset"
    if stop < int(last):
        notes.append("the last step is never trained here")
    conversion.carry(keys, "sampler.plan.window", window, "; ".join(notes))
    return KERNELS[kind]


def _comparison(conversion: Conversion, clamped: bool = True) -> None:
    settings = conversion.settings
    keys = ["algorithm.norm_adv_by_std_in_grpo", "algorithm.global_std"]
    advantage: dict[str, Any] = {"name": "group", "scale": "none"}
    if settings.flag(keys[0]):
        scale = "batch" if settings.flag(keys[1]) else "group"
        advantage = {"name": "group", "scale": scale, "ddof": 1, "eps": EPS}
    conversion.carry(keys, "advantage", advantage)
    bound = settings.number(f"{LOSS}adv_clip_max") if clamped else None
    if clamped:
        conversion.carry(f"{LOSS}adv_clip_max", "clamp", bound)
    else:
        conversion.follow("their loss bounds no advantage", "clamp", None)


def _penalty(conversion: Conversion, kernel: str) -> None:
    """The KL of the steps. The KL of Flow-SDE lacks a division by the step size, as in flow_grpo."""
    settings = conversion.settings
    keys = [f"{ACTOR}use_kl_loss", f"{ACTOR}kl_loss_coef"]
    weight = settings.number(keys[1]) or 0.0
    if not settings.flag(keys[0]) or weight <= 0:
        conversion.carry(keys[0], "penalties", [])
        return
    steps = settings.count(f"{PIPELINE}num_inference_steps")
    note = ""
    if kernel == "flow_sde":
        weight = float(f"{weight / steps:.6g}")
        note = f"divided by {steps}: their KL lacks a division by the step size, 1/{steps} on average"
    conversion.carry(keys, "penalties", [{"name": "kl", "weight": weight}], note)


def _flow_grpo(conversion: Conversion, updates: int) -> None:
    kernel = _noise(conversion)
    clip = conversion.settings.number(f"{LOSS}clip_ratio")
    ratio = "cps_released" if kernel == "cps" else "gaussian"
    note = "the ratio of their log-probability, which is not a density" if kernel == "cps" else PER_LATENT
    surrogate = {"name": "clip", "low": clip, "high": clip}
    objective = {"name": "transition", "ratio": ratio, "weight": "none", "surrogate": surrogate}
    conversion.carry(_keys(conversion, "clip_ratio"), "objective", objective, note)
    if kernel == "dance_sde":
        conversion.bases = ("dance_grpo@published", "dance_grpo")
    elif kernel == "cps":
        conversion.bases = ("flow_cps_released@published", "flow_cps_released")
    _comparison(conversion)
    _penalty(conversion, kernel)


def _guard(conversion: Conversion, updates: int) -> None:
    kernel = _noise(conversion)
    if kernel == "cps":
        raise ValueError(
            f"{conversion.settings.place}: loss_mode grpo_guard with sde_type cps has no counterpart here: its ratio "
            "has another scale at every step. Write sde_type sde into a copy of the script, and convert the copy"
        )
    clip = conversion.settings.number(f"{LOSS}clip_ratio")
    surrogate = {"name": "clip", "low": clip, "high": clip}
    objective = {"name": "transition", "ratio": "guard", "weight": "guard", "surrogate": surrogate}
    note = "the weight of a step is 1 over its Jacobian; there it is 1 over its size"
    conversion.carry(_keys(conversion, "clip_ratio"), "objective", objective, note)
    _comparison(conversion)
    _penalty(conversion, kernel)


def _flow_dppo(conversion: Conversion, updates: int) -> None:
    settings = conversion.settings
    kernel = _noise(conversion)
    height, width = settings.count(f"{PIPELINE}height"), settings.count(f"{PIPELINE}width")
    elements = 16 * (height // 8) * (width // 8)
    limit = settings.number(f"{LOSS}kl_mask_threshold") or 0.0
    objective = {
        "name": "transition", "ratio": "gaussian", "weight": "none",
        "surrogate": {"name": "clip", "low": float("inf"), "high": float("inf")},
        "trust_nats": float(f"{limit * elements:.6g}"),
    }  # fmt: skip
    note = f"times {elements:,}, the numbers of a latent of 16 channels"
    conversion.carry(_keys(conversion, "kl_mask_threshold"), "objective", objective, note)
    key = f"{LOSS}add_kl_coefficient"
    if not settings.flag(key) or kernel != "flow_sde":
        conversion.lose(key, "the divergence is divided by the variance of the step here")
    conversion.used(key)
    _comparison(conversion, clamped=False)
    _penalty(conversion, kernel)


def _no_noise(conversion: Conversion) -> None:
    conversion.follow("a rollout without noise", "sampler.plan", {"name": "ode"})


def _nft(conversion: Conversion, updates: int) -> None:
    settings = conversion.settings
    _no_noise(conversion)
    loss = {
        "name": "diffusion_nft", "beta": settings.number(f"{LOSS}mix_beta"),
        "bound": settings.number(f"{LOSS}adv_clip_max"),
    }  # fmt: skip
    objective = {"name": "forward", "loss": loss, "noise": "image"}
    conversion.carry(_keys(conversion, "mix_beta", "adv_clip_max"), "objective", objective)
    _whole_groups(conversion)
    steps, share = (
        settings.count(f"{PIPELINE}num_inference_steps"),
        settings.number("algorithm.timestep_fraction") or 1.0,
    )
    times = max(int(steps * share), 1)
    note = "the same levels for all images, and never the level of the last step; there each image has its own"
    conversion.carry("algorithm.timestep_fraction", "objective.times", times if times < steps - 1 else None, note)
    mode = settings.text("algorithm.adv_mode")
    if mode not in TRANSFORMS:
        raise settings.wrong("algorithm.adv_mode", ", ".join(TRANSFORMS))
    conversion.carry("algorithm.adv_mode", "transform", TRANSFORMS[mode])
    _comparison(conversion, clamped=False)
    weight = settings.number(f"{LOSS}ref_kl_coef") or 0.0
    penalties = [{"name": "kl", "weight": weight}] if weight > 0 else []
    conversion.carry(f"{LOSS}ref_kl_coef", "penalties", penalties, "the squared distance of the velocities")
    old_policy(conversion, updates)


def old_policy(conversion: Conversion, updates: int) -> None:
    """The old policy of DiffusionNFT, an average that moves every few iterations of `updates` optimizer steps."""
    settings = conversion.settings
    fixed, kind = settings.number("algorithm.old_policy_decay"), settings.text("algorithm.old_policy_decay_schedule")
    keys = ["algorithm.old_policy_update_interval"]
    if kind not in DECAYS:
        raise settings.wrong("algorithm.old_policy_decay_schedule", ", ".join(DECAYS))
    steps = updates * settings.count(f"{ACTOR}ppo_epochs")
    every = settings.count(keys[0]) * steps
    flat, rise, most = DECAYS[kind]
    made: dict[str, Any] = {"decay": most, "every": every}
    if fixed is not None:
        keys.append("algorithm.old_policy_decay")
        made = {"decay": min(fixed, 0.999), "every": every, "rise": 1.0, "first": min(fixed, 0.999)}
        if fixed >= 1:
            text = "an average that never moves is the base here; 0.999 is taken"
            conversion.lose("algorithm.old_policy_decay", text)
    else:
        keys.append("algorithm.old_policy_decay_schedule")
        if rise > 0:
            # Theirs counts iterations, and the one that has just ended too.
            made |= {"rise": float(f"{rise / steps:.6g}"), "after": max(flat * steps - 1, 0)}
        if rise > 0 and not flat:
            made["first"] = made["rise"]
    found = None if made == {"decay": 0.0, "every": steps} else made
    samples = settings.text(f"{ROLLOUT}rollout_adapter") == "old"
    conversion.carry(
        [*keys, f"{ROLLOUT}rollout_adapter"], "objective.old" if samples else "objective.compared", found,
        "the average samples" if samples else "the trained weights sample",
    )  # fmt: skip


def _whole_groups(conversion: Conversion) -> None:
    """A loss of the forward process takes whole groups in a call."""
    settings = conversion.settings
    key, group = f"{ACTOR}ppo_micro_batch_size_per_gpu", settings.count(f"{ROLLOUT}n")
    if settings.value(key) is not None and settings.count(key) < group:
        conversion.carry(key, "rollout.batch", group, "a loss of the forward process takes whole groups")


def _dpo(conversion: Conversion, updates: int) -> None:
    settings = conversion.settings
    loss = {"name": "flow_dpo", "beta": settings.number(f"{LOSS}dpo_beta")}
    objective = {"name": "forward", "loss": loss, "noise": "prompt", "times": 1, "draw": "between"}
    note = "along the rollout's levels; one level for all pairs here, and one for each pair there"
    conversion.carry(_keys(conversion, "dpo_beta"), "objective", objective | {"density": "logit_normal"}, note)
    if settings.text("algorithm.sample_source") == "offline":
        _given_pairs(conversion)
    else:
        _no_noise(conversion)
        conversion.follow("the best and the worst image of a prompt", "select", [{"name": "extremes", "keep": 2}])
    _whole_groups(conversion)
    conversion.follow("a pair is compared by its rewards alone", "advantage", {"name": "group", "scale": "none"})
    conversion.follow("no penalty", "penalties", [])
    conversion.used("algorithm.sample_source")


def _given_pairs(conversion: Conversion) -> None:
    conversion.bases = ("diffusion_dpo",)
    conversion.carry("algorithm.sample_source", "sampler.plan", {"name": "given"})
    conversion.recipe["rollout"]["group"] = 2
    conversion.carried = [row for row in conversion.carried if row.ours != "rollout.group"]
    conversion.follow("a better and a worse image", "rollout.group", 2)
    name = conversion.settings.text(f"{MODEL}path") or ""
    if model_word(name, ["stable-diffusion"]):
        conversion.want(
            "guidance belongs to sampling: the loss of given images is best without, see docs/given_samples.md"
        )
    conversion.want(
        "data.train is a file with columns `prompt`, `chosen` and `rejected`, the last two with paths of images; "
        "docs/given_samples.md says what else it may have"
    )


def _distilled(conversion: Conversion, updates: int) -> None:
    """A teacher on the states of the policy; rewards are only reported."""
    settings = conversion.settings
    kernel = _noise(conversion)
    key = "distillation.teacher_models.teacher_model.model_path"
    path = settings.text(key)
    if path is None:
        conversion.follow("not in the script", "model.teachers", [{"path": "OWNER/TEACHER"}])
        conversion.want("write model.teachers: [{path: FOLDER}], the folder of the frozen teacher")
    else:
        conversion.carry(key, "model.teachers", [{"path": path}])
    conversion.carry(_keys(conversion), "objective", "visited")
    steps = settings.count(f"{PIPELINE}num_inference_steps")
    weight, note = 1.0, ""
    if kernel == "flow_sde":
        weight = float(f"{1 / steps:.6g}")
        note = f"their KL lacks a division by the step size, 1/{steps} on average"
    conversion.follow("the loss is the KL alone", "penalties", [{"name": "taught", "weight": weight}], note)
    conversion.used("distillation.enabled")


Make = Callable[[Conversion, int], None]
FLOW_GRPO = ("flow_grpo_fast@published", "flow_grpo@published", "flow_grpo")
METHODS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "flow_grpo": (_flow_grpo, FLOW_GRPO),
    "mix_grpo": (_flow_grpo, FLOW_GRPO),
    "dance_grpo": (_flow_grpo, FLOW_GRPO),
    "grpo_guard": (_guard, ("grpo_guard@published", "grpo_guard")),
    "flow_dppo": (_flow_dppo, ("flow_dppo@published", "flow_dppo")),
    "diffusion_nft": (_nft, ("diffusion_nft@published", "diffusion_nft")),
    "dpo": (_dpo, ("flow_dpo",)),
    "distill_kl": (_distilled, ("diffusion_opd@published", "diffusion_opd")),
}
"""Their loss -> function that makes the objective, and recipes of the same method."""
