"""UniRL: references within its file, windows of steps, its algorithms as objectives, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flowgrpo.configs.load import load_recipe
from flowgrpo.convert.converting import convert_file
from flowgrpo.convert.unirl_models import FAMILIES
from flowgrpo.convert.yaml_references import References
from flowgrpo.core.advantages import anchored_advantages
from flowgrpo.parts.choice import value_at
from tests.convert.samples_of_tools import UNIRL

NFT = {
    "algorithm": {"_target_": "unirl.algorithms.diffusionnft.DiffusionNFT", "beta": 0.5, "params": "${sampling}"},
    "backend.ema_lora_cfg": {
        "_target_": "unirl.train.configs.EmaLoraConfig", "rank": 16, "alpha": 32, "target_modules": ["attn.to_q"],
        "ema_decay_type": "warmup", "ema_uprate": 0.002, "ema_uphold": 0.4,
    },
    "backend.lora_cfg": ...,
    "stack.num_updates_per_batch": 1,
}  # fmt: skip
TEXT = {
    "bundle": {
        "_target_": "unirl.models.qwen3.bundle.Qwen3Bundle.from_config",
        "config": {"pretrained_model_ckpt_path": "Qwen/Qwen3-4B-Base", "model_precision": "fp32",
                   "autocast_precision": "bf16", "use_gradient_checkpointing": True},
    },
    "pipeline": {"_target_": "unirl.models.qwen3.pipeline.Qwen3Pipeline.from_bundle", "enable_thinking": True},
    "backend.lora_cfg": ...,
    "algorithm": {
        "_target_": "unirl.algorithms.drpo.DRPO", "stage_attr": "ar", "drpo_epsilon": 12.5,
        "loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 1024, "sampling_temperature": 0.9,
    },
    "sampling": {
        "_target_": "unirl.types.sampling.ARSamplingParams", "samples_per_prompt": 8, "temperature": 0.9,
        "top_p": 1.0, "top_k": 0, "max_new_tokens": 1024,
    },
    "reward": {
        "truncated_reward": "keep", "backend": {"_target_": "unirl.reward.local.mathverify.MathVerifyRewardScorer"},
    },
    "normalize_adv_by_std": False,
    "eval_interval": 10,
}  # fmt: skip


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The small configuration with changes of dotted keys; `...` takes a key out."""
    given = yaml.safe_load(UNIRL)
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        place = given
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is ...:
            place.pop(last, None)
        else:
            place[last] = value
    return given


def converted(folder: Path, changes: dict[str, Any] | None = None) -> tuple[Any, list[str]]:
    """The recipe of the small configuration with changes, and the lists of the conversion."""
    (folder / "theirs.yaml").write_text(yaml.safe_dump(changed(changes or {})), encoding="utf-8")
    found = convert_file(str(folder / "theirs.yaml"))
    assert found.tool == "unirl"
    (folder / "ours.yaml").write_text(found.recipe, encoding="utf-8")
    return load_recipe(folder / "ours.yaml"), found.lines


def test_values_worked_out_by_hand(tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path)
    assert recipe.name == "mine"
    assert (recipe.rollout.prompts, recipe.rollout.group, recipe.rollout.batch) == (24, 8, 2)
    assert (recipe.rollout.decode_batch, recipe.optimizer.updates, recipe.run.iterations) == (8, 2, 300)
    assert recipe.model.call == {"height": 384, "width": 512, "guidance_scale": 4.5}
    assert (recipe.model.lora.rank, recipe.model.lora.alpha, recipe.model.lora.init) == (16, 32.0, "default")
    assert (recipe.model.dtype, recipe.model.gradient_checkpointing) == ("bfloat16", True)
    assert (recipe.sampler.steps, recipe.sampler.shift) == (12, 3.0)
    assert (recipe.sampler.kernel.name, dict(recipe.sampler.kernel.options)) == ("flow_sde", {"eta": 0.8})
    # A quarter to three quarters of 12 steps.
    window = recipe.sampler.plan["window"]
    assert (window.name, dict(window.options)) == ("subset", {"size": 3, "interval": 1, "start": 3, "stop": 9})
    assert recipe.sampler.plan["shared_noise"] is True
    surrogate = recipe.objective["surrogate"]
    assert (surrogate.name, surrogate["low"], surrogate["high"]) == ("clip", 2e-4, 2e-4)
    assert (value_at(recipe, "objective.ratio"), value_at(recipe, "objective.weight")) == ("gaussian", "none")
    assert (value_at(recipe, "advantage.scale"), value_at(recipe, "advantage.ddof")) == ("batch", 1)
    assert (value_at(recipe, "advantage.eps"), recipe.clamp, recipe.optimizer.ema) == (1e-8, None, None)
    assert (recipe.optimizer.betas, recipe.optimizer.max_grad_norm, recipe.run.seed) == ((0.9, 0.99), 0.5, 7)
    assert (recipe.data.train, recipe.data.heldout) == ("prompts/mine/train.txt", None)
    assert [(one.name, dict(one.options)) for one in recipe.rewards] == [
        ("pickscore", {"device": "cuda", "batch_size": 4})
    ]
    # What was assumed of the environment is said.
    assert any("'stabilityai/stable-diffusion-3.5-medium', the default of ${PRETRAINED_MODEL}" in one for one in lines)


@pytest.mark.parametrize(
    ("scheduler", "name", "options"),
    [
        # All of a half, which ends before the last step.
        ({"timestep_fraction": 0.5}, "frozen", {"size": 6, "start": 0}),
        ({"timestep_fraction": [0.5, 1.0]}, "frozen", {"size": 5, "start": 6}),
        ({}, "all", {}),
        ({"num_sde_steps": 4}, "subset", {"size": 4, "interval": 1, "start": 0, "stop": 11}),
    ],
)
def test_windows_of_all_steps(scheduler: dict[str, Any], name: str, options: dict[str, Any], tmp_path: Path) -> None:
    target = {"_target_": "unirl.utils.scheduler_utils.AllSDEScheduler", "num_timesteps": 12}
    recipe, _ = converted(tmp_path, {"sampling.scheduler": target | scheduler})
    window = recipe.sampler.plan["window"]
    assert (window.name, dict(window.options)) == (name, options)


def test_a_sliding_window_slides_by_what_does_not_overlap(tmp_path: Path) -> None:
    config = {"strategy": "progressive", "window_size": 4, "overlap_size": 1, "iters_per_window": 25, "roll_back": True}
    scheduler = {"_target_": "unirl.utils.scheduler_utils.WindowScheduler", "config": config}
    recipe, lines = converted(tmp_path, {"sampling.scheduler": scheduler})
    window = recipe.sampler.plan["window"]
    assert (window.name, dict(window.options)) == (
        "progressive", {"size": 4, "stride": 3, "interval": 25, "start": 0, "stop": None},
    )  # fmt: skip
    assert not any("roll_back" in line for line in lines[lines.index("not carried over:") :])
    config["roll_back"] = False
    _, lines = converted(tmp_path, {"sampling.scheduler": scheduler})
    assert any("roll_back False: the window begins again" in line for line in lines)


def test_steps_that_are_listed(tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, {"sampling.sde_indices": [2, 3, 4]})
    assert dict(recipe.sampler.plan["window"].options) == {"size": 3, "start": 2}
    _, lines = converted(tmp_path, {"sampling.sde_indices": [2, 4]})
    assert any("a window has no gaps: 2 to 4 is taken" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"pipeline.strategy": ...}, "sampler.kernel", "cps"),
        ({"pipeline.strategy._target_": "unirl.sde.kernels.DanceSDEStrategy"}, "sampler.kernel", "dance_sde"),
        ({"pipeline.strategy._target_": "unirl.sde.kernels.CPSSDEStrategy"}, "objective.ratio", "cps_released"),
        ({"adv_use_global_std": False}, "advantage.ddof", 0),
        ({"pipeline.shift": 2.0}, "sampler.shift", 2.0),
        ({"num_rollouts": ...}, "run.iterations", 100),
        ({"backend.scheduler_cfg.type": "cosine"}, "optimizer.schedule", "cosine"),
        ({"backend.lora_cfg": ...}, "model.train", "full"),
        ({"save_interval": 0}, "run.checkpoint_every", 25),
        ({"stack.num_updates_per_batch": ...}, "optimizer.updates", 1),
        ({"data_source.args.algorithm.prompts_per_rollout": 6}, "rollout.prompts", 6),
    ],
)
def test_single_settings(changes: dict[str, Any], key: str, value: Any, tmp_path: Path) -> None:
    assert value_at(converted(tmp_path, changes)[0], key) == value


def test_the_bound_of_a_divergence_is_of_a_whole_latent(tmp_path: Path) -> None:
    algorithm = {"_target_": "unirl.algorithms.flowdppo.FlowDPPO", "kl_mask_threshold": 1e-5}
    recipe, _ = converted(tmp_path, {"algorithm": algorithm})
    # 16 channels of 48 × 64 numbers.
    assert recipe.objective["trust_nats"] == pytest.approx(1e-5 * 16 * 48 * 64)
    assert recipe.objective["surrogate"]["high"] == float("inf")


@pytest.mark.parametrize(
    ("name", "elements"),
    [("sd3", 65_536), ("flux2_klein", 131_072), ("wan21", 2 * 65_536), ("hunyuan_video15", 2 * 32_768)],
)
def test_numbers_of_a_latent(name: str, elements: int) -> None:
    assert FAMILIES[name].elements(512, 512, 5) == elements


def test_qwen_image_has_the_levels_of_its_resolution(tmp_path: Path) -> None:
    bundle = {
        "_target_": "unirl.models.qwen_image.bundle.QwenImageBundle.from_config",
        "config": {"pretrained_model_ckpt_path": "Qwen/Qwen-Image"},
    }
    recipe, _ = converted(tmp_path, {"bundle": bundle, "pipeline.shift": 3.0})
    # 24 × 32 = 768 tokens: exp(0.5 + 0.65 / 3840 × 512).
    assert recipe.sampler.shift == pytest.approx(1.7980, abs=1e-4)
    assert recipe.model.call["true_cfg_scale"] == 4.5
    assert recipe.model.call["negative_prompt"] == " "


@pytest.mark.parametrize(("flat", "numbers"), [(0, (0, 0.002)), (1, (0, 0.0)), (5, (4, 0.0))])
def test_nft_samples_with_its_average(flat: int, numbers: tuple[int, float], tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, NFT | {"backend.ema_lora_cfg.ema_flat_steps": flat})
    objective = recipe.objective
    assert (recipe.sampler.plan.name, objective.name, objective["noise"]) == ("ode", "forward", "image")
    assert dict(objective["loss"].options) == {"beta": 0.5, "bound": 5.0}
    assert recipe.rollout.batch == 8
    old = objective["old"]
    assert (old.decay, old.every, old.rise, old.after, old.first) == (0.4, 1, 0.002, *numbers)
    # Their share after rollout n counts n steps. Our share has counted n - 1 of these steps before.
    for step in range(12):
        theirs = 0.0 if step + 1 < flat else min((step + 1 - flat) * 0.002, 0.4)
        ours = min(old.first + old.rise * max(step - old.after, 0), old.decay)
        assert ours == pytest.approx(theirs)


def test_nft_of_another_engine_only_compares_with_its_average(tmp_path: Path) -> None:
    engine = {"_target_": "unirl.rollout.engine.sglang.engine.SGLangRolloutEngine"}
    recipe, _ = converted(tmp_path, NFT | {"rollout": engine, "algorithm.training_timestep_fraction": 0.5})
    assert recipe.objective["old"] is None
    assert recipe.objective["compared"].decay == 0.4
    assert recipe.objective["levels"] == 6


def test_text(tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, TEXT)
    assert (recipe.task, recipe.model.dtype, recipe.model.train) == ("text", "bfloat16", "full")
    assert recipe.model.chat_template_kwargs == {"enable_thinking": True}
    assert (recipe.generation.max_tokens, recipe.generation.temperature) == (1024, 0.9)
    assert (recipe.generation.top_p, recipe.generation.top_k) == (None, None)
    surrogate = recipe.objective["surrogate"]
    assert (surrogate.name, surrogate["epsilon"], surrogate["by"]) == ("spo", 12.5, "probability")
    assert (recipe.objective["reduce"], recipe.objective["constant"]) == ("sum", True)
    assert (value_at(recipe, "advantage.scale"), recipe.clamp) == ("none", None)
    assert (recipe.evaluate.every, recipe.evaluate.prompts, recipe.evaluate.seeds) == (10, 60, 16)
    assert (recipe.evaluate.take, recipe.evaluate.temperature) == ("first", 1.0)
    assert [one.name for one in recipe.rewards] == ["math"]
    assert recipe.data.heldout == "prompts/mine/test.txt"
    soft = {
        "reward.truncated_reward": "soft",
        "reward.overlong_buffer_len": 256,
        "algorithm.penalty_mu_weighted": False,
    }
    recipe, _ = converted(tmp_path, TEXT | soft)
    assert dict(recipe.rewards[1].options)["buffer"] == 256
    assert recipe.objective["surrogate"]["by"] == "ratio"


@pytest.mark.parametrize(
    ("mode", "reduce"),
    [("token-mean", "token"), ("seq-mean-token-mean", "sequence"), ("seq-mean-token-sum-norm", "sum")],
)
def test_grpo_of_text(mode: str, reduce: str, tmp_path: Path) -> None:
    algorithm = {"_target_": "unirl.algorithms.grpo.GRPO", "clip_range": 0.2, "clip_range_high": 0.28}
    recipe, _ = converted(tmp_path, TEXT | {"algorithm": algorithm | {"loss_agg_mode": mode}})
    surrogate = recipe.objective["surrogate"]
    assert (surrogate["low"], surrogate["high"], recipe.objective["reduce"]) == (0.2, 0.28, reduce)


def test_a_global_advantage_takes_no_notice_of_groups(tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, TEXT | {"adv_normalization_scope": "global", "normalize_adv_by_std": True})
    assert recipe.advantage.name == "anchored"
    rewards = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.25])
    options = dict(recipe.advantage.options)
    found = anchored_advantages(rewards, torch.tensor([0, 0, 1, 1, 2, 2]), **options)
    torch.testing.assert_close(found, (rewards - rewards.mean()) / (rewards.std() + 1e-8), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm._target_": "unirl.algorithms.mine.Mine"}, "algorithm._target_ is Mine, which has no counterpart"),
        ({"bundle._target_": "unirl.models.bagel.bundle.BagelBundle.from_config"}, "names BAGEL"),
        ({"bundle._target_": "unirl.models.hunyuan_image3.bundle.B.from_config"}, "names HunyuanImage 3"),
        ({"bundle._target_": "unirl.models.other.bundle.B.from_config"}, "whose pipeline is not known here"),
        ({"bundle": ..., "pipeline.shift": 1.0}, "no section `bundle`"),
        ({"bundle": ..., "pipeline.shift": 1.0, "ar": {"a": 1}, "diffusion": {"b": 1}}, "prompt enhancement"),
        ({"pipeline.strategy._target_": "unirl.sde.kernels.DPM2Strategy"}, "this algorithm needs noise"),
        ({"pipeline.shift": "${nothing.here}"}, "refers to nothing.here, and the file has no such key"),
        ({"pipeline.shift": "${now:%Y}"}, "is not known here"),
        ({"a": "${b}", "b": "${a}"}, "references lead on and on"),
        ({"a": "${b.c}", "b": "${b}"}, "a refers to b.c, and the file has no such key"),
        ({"a": ["${stack}"]}, "puts a section of the file into a text or a list"),
        ({"a": "x ${stack}"}, "puts a section of the file into a text or a list"),
        ({"sampling.height": "tall"}, "sampling.height is 'tall'; write a number"),
        ({"adv_use_global_std": 2}, "write true or false"),
    ],
)
def test_what_cannot_be_converted_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        converted(tmp_path, changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm.clip_schedule": "linear_decay"}, "the bounds of the ratio stay as they are"),
        ({"data_source.args.run.data_path": "${oc.env:DATA_PATH}"}, "an environment variable names the file there"),
        ({"backend.lora_cfg.rank": "${oc.env:RANK}"}, "the environment variable RANK says it there"),
        ({"algorithm.params": {"eta": 0.1}}, "algorithm.params.eta 0.1: the loss has the settings of sampling here"),
        ({}, "logging.report_to_wandb True, the default of ${REPORT}: write run.trackers"),
        ({"sampling.sampler_kwargs": {"a": 1}}, "sampling.sampler_kwargs.a 1"),
        ({"one.two": 3}, "one.two 3: this key is not known here"),
    ],
)
def test_what_is_not_carried_over_is_said(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    lines = converted(tmp_path, changes)[1]
    assert any(says in line for line in lines[lines.index("not carried over:") :])


def test_the_environment_is_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETRAINED_MODEL", "secret/model")
    assert "secret" not in " ".join(converted(tmp_path)[1])


def test_references() -> None:
    tree = {
        "a": {"b": {"c": 3, "same": "${.c}", "up": "${..other}"}, "other": "${top}"},
        "top": "x",
        "text": "${top}:${a.b.c}",
        "copy": "${a.b}",
        "default": "${oc.env:ONE,${oc.env:TWO,7}}",
        "none": "${oc.env:ONE,null}",
        "flag": "${oc.decode:${oc.env:ONE,true}}",
        "unsaid": "${oc.env:ONE}",
        "part": "http://${oc.env:HOST}:80",
        "listed": ["${top}", 1],
        "through": "${copy.c}",
    }
    found = References(tree, "here")
    assert {key: value for key, value in found.values.items() if key not in ("unsaid", "part")} == {
        "a.b.c": 3, "a.b.same": 3, "a.b.up": "x", "a.other": "x", "top": "x", "text": "x:3", "copy.c": 3,
        "copy.same": 3, "copy.up": "x", "default": "7", "none": None, "flag": True, "listed": ["x", 1], "through": 3,
    }  # fmt: skip
    assert {key: value.told for key, value in found.missing().items()} == {"unsaid": "ONE", "part": "HOST"}
    assert found.assumed["default"] == {"ONE", "TWO"}


def test_references_that_multiply_are_refused() -> None:
    tree: dict[str, Any] = {f"s{k}": {"a": f"${{s{k + 1}}}", "b": f"${{s{k + 1}}}"} for k in range(18)}
    tree["s18"] = {"a": 1}
    with pytest.raises(ValueError, match="more than 10,000 keys"):
        References(tree, "here")
