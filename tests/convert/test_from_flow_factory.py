"""Flow-Factory: prompts as it rounds them up, averages by iteration, and its algorithms as objectives."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flowgrpo.configs.load import load_recipe
from flowgrpo.convert.converting import convert_file
from flowgrpo.parts.choice import value_at
from tests.convert.samples_of_tools import FLOW_FACTORY


def converted(folder: Path, **changes: Any) -> tuple[Any, list[str]]:
    """The recipe of the small configuration with `section_key` changed, and the lists of the conversion."""
    given = yaml.safe_load(FLOW_FACTORY)
    for name, value in changes.items():
        section, _, key = name.partition("_")
        if isinstance(given.get(section), dict) and key:
            given[section] |= {key: value}
        else:
            given[name] = value
    (folder / "theirs.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    found = convert_file(str(folder / "theirs.yaml"))
    (folder / "ours.yaml").write_text(found.recipe, encoding="utf-8")
    return load_recipe(folder / "ours.yaml"), found.lines


def test_values_worked_out_by_hand(tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path)
    # 4 processes × 8 images are 32. Groups of 24 come out even after 32 / gcd(24, 32) = 4 prompts, two updates after 8,
    # and 8 is a multiple of the 4 processes: 47 becomes 48.
    assert (recipe.rollout.prompts, recipe.rollout.group, recipe.rollout.batch) == (48, 24, 8)
    assert recipe.optimizer.updates == 2
    # An average every 4 iterations of 2 updates.
    assert (recipe.optimizer.ema.decay, recipe.optimizer.ema.every, recipe.optimizer.ema.rise) == (0.99, 8, None)
    assert (recipe.model.lora.rank, recipe.model.lora.alpha, recipe.model.lora.targets) == (16, 32.0, None)
    assert recipe.model.call == {"height": 384, "width": 512, "guidance_scale": 4.5}
    window = recipe.sampler.plan["window"]
    assert (window.name, dict(window.options)) == ("subset", {"size": 2, "interval": 1, "start": 1, "stop": 6})
    assert dict(recipe.sampler.kernel.options) == {"eta": 0.8}
    surrogate = recipe.objective["surrogate"]
    assert (surrogate.name, surrogate["low"], surrogate["high"]) == ("clip", 2e-4, 2e-4)
    assert (value_at(recipe, "objective.ratio"), value_at(recipe, "objective.weight")) == ("gaussian", "none")
    # `x-based` is the squared distance of the means.
    assert [(one.name, one["weight"]) for one in recipe.penalties] == [("w2", 0.01)]
    assert (value_at(recipe, "advantage"), value_at(recipe, "advantage.scale")) == ("group", "batch")
    assert [(reward.name, reward.weight) for reward in recipe.rewards] == [
        ("pickscore", 1.0),
        ("my_rewards.py:nice", 0.25),
    ]
    assert (recipe.run.iterations, recipe.evaluate.every, recipe.evaluate.steps) == (50, 10, 40)


@pytest.mark.parametrize(
    ("processes", "batch", "group", "asked", "updates", "prompts"),
    [
        (8, 8, 24, 48, 2, 48),
        (8, 8, 18, 64, 2, 64),
        (8, 8, 18, 60, 2, 64),
        (1, 1, 16, 5, 1, 5),
        (3, 2, 4, 10, 1, 12),
    ],
)
def test_prompts_are_rounded_up_as_there(
    processes: int, batch: int, group: int, asked: int, updates: int, prompts: int, tmp_path: Path
) -> None:
    recipe, _ = converted(
        tmp_path,
        num_processes=processes,
        train_per_device_batch_size=batch,
        train_group_size=group,
        train_unique_sample_num_per_epoch=asked,
        train_gradient_step_per_epoch=updates,
    )
    assert recipe.rollout.prompts == prompts


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"train_advantage_aggregation": "gdpo"}, "advantage", "gdpo"),
        ({"train_global_std": False}, "advantage.scale", "group"),
        ({"train_adv_clip_range": [-3.0, 3.0]}, "clamp", 3.0),
        ({"train_ema_decay": 0}, "optimizer.ema", None),
        ({"train_max_epochs": None}, "run.iterations", 1000),
        ({"eval_eval_freq": 0}, "data.heldout", None),
        ({"train_offload_samples_to_cpu": True}, "rollout.store", "host"),
        ({"scheduler_flow_shift": 3.0}, "sampler.shift", 3.0),
        ({"scheduler_dynamics_type": "Dance-SDE"}, "sampler.kernel", "dance_sde"),
        ({"scheduler_dynamics_type": "CPS"}, "objective.ratio", "cps_released"),
        ({"scheduler_num_sde_steps": None, "scheduler_sde_steps": None}, "sampler.plan.window", "all"),
        ({"scheduler_num_sde_steps": 5}, "sampler.plan.window", "frozen"),
        ({"train_trainer_type": "grpo-guard"}, "objective.ratio", "guard"),
        ({"train_num_frames": 5}, "model.call.num_frames", 5),
        ({"model_target_modules": ["to_q", "to_k"]}, "model.lora.targets", ["to_q", "to_k"]),
        ({"model_finetune_type": "full"}, "model.train", "full"),
        ({"model_attn_backend": "native"}, "model.attention", "native"),
        ({"train_gradient_accumulation_steps": 18}, "optimizer.updates", 4),
        ({"log_run_name": None}, "name", "theirs"),
    ],
)
def test_single_settings(changes: dict[str, Any], key: str, value: Any, tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, **changes)
    call = key.removeprefix("model.call.")
    assert (recipe.model.call[call] if call != key else value_at(recipe, key)) == value


def test_an_algorithm_in_capitals_is_the_same(tmp_path: Path) -> None:
    sizes = {"train_per_device_batch_size": 4, "train_group_size": 24}
    lower, _ = converted(tmp_path, train_trainer_type="grpo", **sizes)
    upper, _ = converted(tmp_path, train_trainer_type="GRPO", **sizes)
    assert upper == lower
    assert upper.rollout.batch == 4


def test_nft_samples_with_its_average(tmp_path: Path) -> None:
    recipe, _ = converted(
        tmp_path, train_trainer_type="nft", train_nft_beta=0.1, train_off_policy=True, train_kl_beta=1e-4,
        train_ema_decay_schedule="piecewise_linear", train_ema_decay=0.5, train_ema_update_interval=1,
        train_ramp_rate=0.001, train_num_train_timesteps=4, scheduler_dynamics_type="ODE",
    )  # fmt: skip
    objective = recipe.objective
    assert (objective.name, objective["times"], objective["noise"]) == ("forward", 4, "image")
    assert (objective["draw"], objective["skip"]) == ("ranges", 0)
    assert dict(objective["loss"].options) == {"beta": 0.1, "bound": 5.0}
    # Their share grows by 0.001 in an iteration of 2 optimizer steps.
    assert (objective["old"].decay, objective["old"].every, objective["old"].rise) == (0.5, 2, 0.0005)
    assert [(one.name, one["weight"]) for one in recipe.penalties] == [("kl", 1e-4)]
    assert (recipe.sampler.plan.name, recipe.sampler.solver.name) == ("ode", "euler")
    # The loss takes whole groups in a call.
    assert recipe.rollout.batch == 24


@pytest.mark.parametrize(("weighting", "power"), [("ghuber", 0.25), ("t", 1.0), ("huber", 0.5)])
def test_awm_has_the_power_of_its_weighting(weighting: str, power: float, tmp_path: Path) -> None:
    changes = {"train_trainer_type": "awm", "train_awm_weighting": weighting, "scheduler_dynamics_type": "ODE"}
    recipe, _ = converted(tmp_path, **changes, train_kl_beta=0, train_ema_kl_beta=0.1)
    assert recipe.objective["loss"]["power"] == power
    # Their penalty to the average of the weights: a moving reference, every 4 iterations of 2 steps.
    assert [(one.name, one["weight"]) for one in recipe.penalties] == [("kl", 0.1)]
    assert (recipe.reference.decay, recipe.reference.every) == (0.99, 8)


def test_dgpo_and_dpo(tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path, train_trainer_type="dgpo", scheduler_dynamics_type="ODE", train_clip_range=1e-2)
    objective = recipe.objective
    assert (objective["loss"].name, objective["loss"]["beta"], objective["noise"]) == ("dgpo", 100.0, "prompt")
    assert (objective["old"].decay, objective["old"].rise, objective["times"]) == (0.3, 0.001, 6)
    assert any("samples with guidance there" in line for line in lines)
    recipe, _ = converted(tmp_path, train_trainer_type="dpo", train_beta=500.0, scheduler_dynamics_type="ODE")
    assert (recipe.objective["loss"].name, recipe.objective["loss"]["beta"]) == ("flow_dpo", 500.0)
    assert recipe.objective["times"] == 1


def test_crd_has_its_two_averages_and_its_guided_reference(tmp_path: Path) -> None:
    """As in their example of SD3.5 Medium, whose keys are mostly their defaults."""
    plain = {"train_trainer_type": "crd", "scheduler_dynamics_type": "ODE", "train_guidance_scale": 1.0}
    plain["train_kl_beta"] = 0.1
    recipe, lines = converted(tmp_path, **plain)
    objective = recipe.objective
    assert dict(objective["loss"].options) == {
        "beta": 1.0, "bound": 5.0, "relative": True, "temperature": None, "match": "squares",
    }  # fmt: skip
    assert (objective["loss"].name, objective["noise"], objective["times"]) == ("crd", "image", None)
    old, compared = objective["old"], objective["compared"]
    assert (old.decay, old.every, old.rise, old.first, old.after) == (0.999, 2, 0.0075, 0.0, 75)
    assert (compared.decay, compared.every, compared.rise, compared.first, compared.after) == (0.999, 2, 0.005, 0.25, 0)
    (penalty,) = recipe.penalties
    assert (penalty.name, penalty["weight"], penalty["bound"]) == ("adaptive_kl", 0.1, 5.0)
    assert penalty["least"] == pytest.approx(1e-3)
    assert (recipe.model.call["guidance_scale"], recipe.model.reference_call) == (1.0, {"guidance_scale": 4.5})
    assert any("not over the images of a prompt" in line for line in lines)
    recipe, lines = converted(
        tmp_path, **plain, train_weight_temp=0.5, train_crd_loss_type="bce", train_reward_adaptive_kl=False,
        train_sampling_model_decay=0, train_old_model_decay="offline", train_kl_cfg=1.0, train_use_old_for_loss=False,
    )  # fmt: skip
    objective = recipe.objective
    assert (objective["loss"]["temperature"], objective["loss"]["match"]) == (0.5, "logistic")
    assert objective["old"] is None
    assert (objective["compared"].decay, objective["compared"].first) == (0.999, 0.999)
    assert [(one.name, one["weight"]) for one in recipe.penalties] == [("kl", 0.1)]
    assert recipe.model.reference_call == {}
    assert any("never moves" in line for line in lines)
    assert any("not with the base" in line for line in lines)


@pytest.mark.parametrize(
    ("strategy", "draw", "skip", "density"),
    [
        ("discrete", "ranges", 0, "uniform"),
        ("discrete_wo_init", "ranges", 1, "uniform"),
        ("uniform", "between", 0, "uniform"),
        ("logit_normal", "between", 0, "logit_normal"),
        ("discrete_with_init", "any", 0, "uniform"),
    ],
)
def test_noise_levels_are_drawn_as_there(strategy: str, draw: str, skip: int, density: str, tmp_path: Path) -> None:
    recipe, lines = converted(
        tmp_path, train_trainer_type="awm", scheduler_dynamics_type="ODE", train_num_train_timesteps=4,
        train_time_sampling_strategy=strategy,
    )  # fmt: skip
    objective = recipe.objective
    assert (objective["draw"], objective["skip"], objective["density"]) == (draw, skip, density)
    assert any("noise levels are drawn from the levels of the rollout" in line for line in lines) == (draw == "any")


def test_more_levels_than_the_rollout_has_are_drawn_between_them(tmp_path: Path) -> None:
    for strategy, times in (("uniform", 40), ("discrete", None)):
        recipe, _ = converted(
            tmp_path, train_trainer_type="awm", scheduler_dynamics_type="ODE", train_num_train_timesteps=40,
            train_time_sampling_strategy=strategy,
        )  # fmt: skip
        assert recipe.objective["times"] == times


def test_evaluation_rewards_that_differ_only_in_their_batch_are_left_out(tmp_path: Path) -> None:
    one = [{"reward_model": "PickScore", "batch_size": 16}]
    other = [{"reward_model": "PickScore", "batch_size": 32}]
    recipe, _ = converted(tmp_path, rewards=one, eval=yaml.safe_load(FLOW_FACTORY)["eval"])
    assert recipe.evaluate.rewards is None
    given = yaml.safe_load(FLOW_FACTORY) | {"rewards": one, "eval_rewards": other}
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    assert "evaluate.rewards" not in " ".join(convert_file(str(tmp_path / "theirs.yaml")).lines)
    given["eval_rewards"] = [{"reward_model": "CLIP"}]
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    assert "evaluate.rewards: [{name: clip_score" in " ".join(convert_file(str(tmp_path / "theirs.yaml")).lines)


def test_the_prompt_files_that_are_there_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert converted(tmp_path)[0].data.train == "prompts/mine/train.txt"
    (tmp_path / "prompts" / "mine").mkdir(parents=True)
    (tmp_path / "prompts" / "mine" / "train.jsonl").touch()
    assert converted(tmp_path)[0].data.train == "prompts/mine/train.jsonl"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train_trainer_type": "crd", "scheduler_dynamics_type": "ODE", "train_old_model_decay": "0-1"}, "SLOPE-END"),
        ({"train_trainer_type": "crd", "scheduler_dynamics_type": "ODE", "train_crd_loss_type": "l1"}, "mse or bce"),
        ({"train_trainer_type": "my_package.args.Mine"}, "which has no counterpart here"),
        ({"scheduler_dynamics_type": "ODE"}, "scheduler.dynamics_type is 'ODE'; write Flow-SDE"),
        (
            {"scheduler_dynamics_type": "ODE", "train_trainer_type": "GRPO"},
            "scheduler.dynamics_type is 'ODE'; write Flow-SDE",
        ),
        ({"train_group_size": "many"}, "train.group_size is 'many'; write a number"),
        ({"train_learning_rate": [1]}, r"train.learning_rate is \[1\]; write a number"),
        ({"model_finetune_type": "qlora"}, "write lora or full"),
        ({"num_processes": 0}, "num_processes is 0; write a whole number of 1 or more"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        converted(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train_kl_type": "v-based"}, "train.kl_beta 0.01, train.kl_type 'v-based': their KL compares velocities"),
        ({"scheduler_sde_steps": [1, 3, 5]}, "scheduler.sde_steps [1, 3, 5]: steps are drawn from a range: 1 to 5"),
        ({"model_target_modules": "all"}, "the attention projections are taken"),
        ({"model_finetune_type": "full", "model_target_modules": "default"}, "there only these layers are trained"),
        ({"train_stg_scale": 1.0}, "train.stg_scale 1.0: this key is not known here"),
        ({"model_attn_backend": "_flash_3_hub"}, "it would run code that is fetched from the hub"),
        ({}, "data.max_dataset_size 100: cut the prompt file to this many lines"),
        ({}, "log.logging_backend 'wandb': write run.trackers"),
    ],
)
def test_what_is_not_carried_over_is_said(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    lines = converted(tmp_path, **changes)[1]
    assert any(says in line for line in lines[lines.index("not carried over:") :])


def test_the_call_of_evaluations_is_carried_over_where_it_is_another(tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path)
    assert recipe.evaluate.call == {"height": 1024, "width": 1024}
    recipe, lines = converted(tmp_path, eval_guidance_scale=7.0, eval_height=768, eval_max_sequence_length=256)
    assert recipe.evaluate.call == {
        "height": 768, "width": 1024, "guidance_scale": 7.0, "max_sequence_length": 256,
    }  # fmt: skip
    assert any("eval.guidance_scale 7.0 → evaluate.call.guidance_scale: 7.0" in line for line in lines)
    same = converted(tmp_path, eval_resolution=[384, 512], eval_guidance_scale=4.5)[0]
    assert same.evaluate.call == {}


def test_no_evaluation_and_no_interval_of_checkpoints_are_said_once(tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path, eval_eval_freq=0, log_save_freq=0)
    assert recipe.data.heldout is None
    assert [line for line in lines if "data.heldout" in line] == [
        "  eval.eval_freq 0 → data.heldout: null (no evaluation)"
    ]
    assert any(line.startswith("  log.save_freq 0: a run always keeps checkpoints") for line in lines)


def test_guard_with_the_steps_of_cps_is_refused_in_the_words_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"grpo-guard with scheduler.dynamics_type CPS has no .* Flow-SDE or Dance-SDE"
    ):
        converted(tmp_path, train_trainer_type="grpo-guard", scheduler_dynamics_type="CPS")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learning_rate": 1e-4}, "learning_rate 0.0001: this key is not known here; it stands outside the sections of "
         "the file; if it means train.learning_rate, move it there, and convert the file again"),
        ({"seed": 3}, "if it means scheduler.seed or train.seed or eval.seed, move"),
        ({"colour": 3}, "the sections are data, model, scheduler, train, eval, log, rewards, eval_rewards"),
        ({"data_colour": 3}, "data.colour 3: this key is not known here; look up what it does there"),
        ({"train_colour": 3}, "train.colour 3: this key is not known here; if it is an argument of the pipeline's"),
    ],
)  # fmt: skip
def test_a_key_that_is_not_known_gets_the_advice_of_its_place(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    [line] = [line for line in converted(tmp_path, **changes)[1] if "this key is not known" in line]
    assert says in line


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": 7}, r"train is 7; write a mapping of its keys, or take the key out"),
        ({"log": ["x"]}, r"log is \['x'\]; write a mapping of its keys"),
        ({"rewards": 3}, r"rewards is 3; write a list of rewards"),
        ({"eval_rewards": "PickScore"}, r"eval_rewards is 'PickScore'; write a list of rewards"),
    ],
)
def test_a_section_of_another_kind_is_named(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(yaml.safe_load(FLOW_FACTORY) | changes), encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        convert_file(str(tmp_path / "theirs.yaml"), "flow-factory")
