"""TRL: completions of a generation and of an update, the losses with their means, schedules in optimizer steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowgrpo.configs.load import load_recipe
from flowgrpo.convert.converting import convert_file
from flowgrpo.parts.choice import value_at
from flowgrpo.rewards.text.text_format import TextFormat
from tests.convert.samples_of_tools import TRL


def converted(folder: Path, gpus: int | None = 2, **changes: Any) -> tuple[Any, list[str]]:
    """The recipe of the small configuration with changes (None takes a key out), and the lists of the conversion."""
    given = {key: value for key, value in (yaml.safe_load(TRL) | changes).items() if value is not None}
    (folder / "theirs.json").write_text(json.dumps(given), encoding="utf-8")
    found = convert_file(str(folder / "theirs.json"), gpus=gpus)
    (folder / "ours.yaml").write_text(found.recipe, encoding="utf-8")
    return load_recipe(folder / "ours.yaml"), found.lines


def test_values_worked_out_by_hand(tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path)
    # A generation: 4 completions × 16 batches × 2 GPUs = 128, in groups of 8. An update: 4 × 8 × 2 = 64.
    assert (recipe.rollout.prompts, recipe.rollout.group) == (16, 8)
    assert (recipe.optimizer.updates, recipe.optimizer.epochs) == (2, 2)
    # 4 optimizer steps in an iteration: 400 steps are 100 iterations, and evaluations come every 40 / 4.
    assert (recipe.run.iterations, recipe.evaluate.every, recipe.optimizer.warmup) == (100, 10, 40)
    assert recipe.optimizer.schedule == "cosine"
    assert recipe.optimizer.learning_rate == 1e-5  # YAML 1.1 reads 1e-5 as text
    assert (recipe.optimizer.weight_decay, recipe.optimizer.ema) == (0.0, None)
    assert (recipe.model.train, recipe.model.dtype, recipe.model.gradient_checkpointing) == ("full", "bfloat16", True)
    surrogate = recipe.objective["surrogate"]
    assert (surrogate.name, surrogate["low"], surrogate["high"], surrogate["dual"]) == ("clip", 0.2, 0.28, None)
    assert (recipe.objective["reduce"], recipe.objective["constant"]) == ("sum", True)
    assert (value_at(recipe, "advantage.scale"), recipe.clamp) == ("none", None)
    assert [(one.name, one["weight"], one["kind"]) for one in recipe.penalties] == [("kl", 0.001, "k3+")]
    assert (recipe.evaluate.temperature, recipe.evaluate.seeds) == (1.0, 8)
    assert [(one.name, one.weight) for one in recipe.rewards] == [("text_format", 1.0), ("length", 0.5)]
    assert recipe.rewards[1].options == {
        "limit": 1280, "buffer": 256, "unit": "tokens", "tokenizer": "Qwen/Qwen2.5-0.5B-Instruct",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "prompts", "updates"),
    [
        ({"steps_per_generation": None}, 8, 1),
        ({"steps_per_generation": None, "generation_batch_size": 192}, 24, 3),
        # Four generations for one update: the weights do not move between them.
        ({"steps_per_generation": 2, "num_iterations": 1}, 8, 1),
        ({"gradient_accumulation_steps": 1, "steps_per_generation": None}, 1, 1),
    ],
)
def test_completions_of_a_generation_and_of_an_update(
    changes: dict[str, Any], prompts: int, updates: int, tmp_path: Path
) -> None:
    recipe, _ = converted(tmp_path, **changes)
    assert (recipe.rollout.prompts, recipe.optimizer.updates) == (prompts, updates)


@pytest.mark.parametrize(
    ("loss", "changes", "surrogate", "options"),
    [
        ("grpo", {}, {"name": "clip", "low": 0.2, "high": 0.28}, {"reduce": "sequence", "level": "token"}),
        (
            "grpo",
            {"importance_sampling_level": "sequence"},
            {"name": "clip"},
            {"reduce": "sequence", "level": "sequence"},
        ),
        ("dapo", {"delta": 4.0}, {"name": "clip", "dual": 4.0}, {"reduce": "token", "constant": False}),
        ("dapo", {"epsilon_high": None}, {"name": "clip", "low": 0.2, "high": 0.2}, {"reduce": "token"}),
        ("bnpo", {}, {"name": "clip"}, {"reduce": "token"}),
        ("bnpo", {"per_device_train_batch_size": 1}, {"name": "clip"}, {"reduce": "sequence"}),
        ("cispo", {"epsilon_high": 5.0}, {"name": "cispo", "low": 1.0, "high": 5.0}, {"reduce": "token"}),
        ("sapo", {}, {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}, {"reduce": "sequence"}),
        ("vespo", {"vespo_k_pos": 2.5}, {"name": "vespo", "k_pos": 2.5, "lam_neg": 2.0}, {"reduce": "token"}),
        ("luspo", {"importance_sampling_level": "sequence"}, {"name": "clip"}, {"reduce": "sum", "constant": False}),
    ],
)
def test_losses(
    loss: str, changes: dict[str, Any], surrogate: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    recipe, _ = converted(tmp_path, loss_type=loss, **changes)
    found = recipe.objective["surrogate"]
    assert {"name": found.name, **{key: found.get(key) for key in surrogate if key != "name"}} == surrogate
    assert {key: recipe.objective[key] for key in options} == options


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"scale_rewards": True}, "advantage.scale", "group"),
        ({"scale_rewards": "batch"}, "advantage.scale", "batch"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "advantage", "gdpo"),
        ({"beta": 0.0}, "penalties", []),
        ({"beta": 0.0, "use_bias_correction_kl": True}, "penalties", []),
        ({"off_policy_mask_threshold": 0.5, "num_iterations": 2}, "objective.off_policy", 0.5),
        ({"off_policy_mask_threshold": 0.5, "use_vllm": True}, "objective.off_policy", 0.5),
        ({"top_p": 0.9}, "generation.top_p", 0.9),
        ({"min_p": 0.1}, "generation.min_p", 0.1),
        ({"min_p": 0.0}, "generation.min_p", None),
        (
            {"chat_template_kwargs": {"thinking": False}},
            "model.chat_template_kwargs",
            {"thinking": False},
        ),
        ({"top_k": 50}, "generation.top_k", 50),
        ({"fp16": True}, "model.dtype", "float16"),
        ({"optim": "paged_adamw_8bit"}, "optimizer.type", "adamw_8bit"),
        ({"optim": "adamw_torch_fused"}, "optimizer.type", "adamw"),
        ({"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "model.quantize", "nf4"),
        ({"use_peft": True, "load_in_8bit": True}, "model.quantize", "int8"),
        ({"use_peft": True, "load_in_8bit": True, "fp16": True}, "model.quantize", None),
        ({"use_peft": True, "load_in_4bit": True, "use_vllm": True}, "model.quantize", None),
        ({"bf16": False}, "model.dtype", "float32"),
        ({"warmup_ratio": None, "warmup_steps": 30}, "optimizer.warmup", 30),
        ({"warmup_ratio": None, "warmup_steps": 0.25}, "optimizer.warmup", 100),
        ({"lr_scheduler_type": "constant_with_warmup"}, "optimizer.schedule", "constant"),
        ({"mask_truncated_completions": True}, "objective.drop_truncated", True),
        ({"entropy_coef": 0.01}, "objective.entropy.high", 0.01),
        ({"eval_strategy": "no"}, "data.heldout", None),
        ({"dataset_name": "mine.jsonl"}, "data.train", "mine.jsonl"),
        ({}, "data.train", "hub:somebody/sums?split=train"),
        ({"eval_strategy": "steps", "dataset_test_split": "dev"}, "data.heldout", "hub:somebody/sums?split=dev"),
        # Keys of open-r1.
        ({"system_prompt": "Think first."}, "model.system", "Think first."),
        ({"dataset_prompt_column": "sum"}, "data.train", "hub:somebody/sums?split=train&column=sum"),
        ({"dataset_prompt_column": "sum"}, "data.heldout", "hub:somebody/sums?split=test&column=sum"),
        ({"dataset_prompt_column": "sum", "dataset_name": "m.csv"}, "data.train", "m.csv?column=sum"),
        ({"dataset_prompt_column": "prompt"}, "data.train", "hub:somebody/sums?split=train"),
        ({"dataset_config": "main"}, "data.train", "hub:somebody/sums?split=train&config=main"),
        ({"save_steps": 80}, "run.checkpoint_every", 20),
        # A number below 1 is a share of the 400 steps.
        ({"save_steps": 0.2}, "run.checkpoint_every", 20),
        ({"eval_steps": 0.05}, "evaluate.every", 5),
        # Without a number, an evaluation comes with every line of the log.
        ({"eval_steps": None, "logging_steps": 24}, "evaluate.every", 6),
        ({"use_vllm": True}, "objective.correction", "mask"),
        ({"use_vllm": True}, "generation.engine", "vllm"),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "objective.correction", "none"),
    ],
)
def test_single_settings(changes: dict[str, Any], key: str, value: Any, tmp_path: Path) -> None:
    assert value_at(converted(tmp_path, **changes)[0], key) == value


@pytest.mark.parametrize(
    ("key", "value", "title", "said"),
    [
        ("max_completion_length", None, "not carried over:", "write generation.max_tokens"),
        ("max_prompt_length", None, "without effect here:", "generation.max_prompt_tokens is the bound"),
        ("save_strategy", "no", "without effect here:", "a run always keeps checkpoints"),
        ("vllm_server_port", 8001, "not carried over:", "vLLM runs in the processes of the run here"),
        ("vllm_enable_sleep_mode", True, "without effect here:", "vLLM's own value"),
    ],
)
def test_every_key_of_the_file_is_in_a_list(key: str, value: Any, title: str, said: str, tmp_path: Path) -> None:
    given = yaml.safe_load(TRL) | {"use_vllm": True, "vllm_mode": "server", key: value}
    (tmp_path / "theirs.json").write_text(json.dumps(given), encoding="utf-8")
    lines = convert_file(str(tmp_path / "theirs.json")).lines
    (line,) = [line for line in lines if key in line]
    assert said in line
    assert [one for one in lines[: lines.index(line)] if not one.startswith(" ")][-1] == title


def test_vllm_gets_its_options_and_the_bounds_of_the_correction(tmp_path: Path) -> None:
    recipe, _ = converted(
        tmp_path, use_vllm=True, vllm_gpu_memory_utilization=0.4, vllm_tensor_parallel_size=2,
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.5,
    )  # fmt: skip
    assert recipe.generation.engine_options == {"gpu_memory_utilization": 0.4, "tensor_parallel_size": 2}
    correction = recipe.objective["correction"]
    assert (correction.name, dict(correction.options)) == ("truncate", {"level": "token", "cap": 2.5})


def test_an_adapter(tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path, use_peft=True, lora_r=16, lora_alpha=8, use_rslora=True)
    lora = recipe.model.lora
    # Alpha over the root of the rank is 8 / 4 = 2; alpha over the rank is the same with 32.
    assert (lora.rank, lora.alpha, lora.targets, lora.init) == (16, 32.0, None, "default")
    assert any("lora_dropout 0.05" in line for line in lines[lines.index("not carried over:") :])
    recipe, _ = converted(tmp_path, use_peft=True, lora_target_modules=["q_proj"], lora_dropout=0.0)
    assert recipe.model.lora.targets == ["q_proj"]


@pytest.mark.parametrize(
    ("level", "note"), [("token", ""), ("sequence", "the ratio of the token here, and of the whole completion there")]
)
def test_the_kl_times_the_ratio_stays_it(level: str, note: str, tmp_path: Path) -> None:
    changes = {"use_bias_correction_kl": True, "importance_sampling_level": level}
    recipe, lines = converted(tmp_path, **changes)
    assert [(one.name, one["weight"], one["kind"]) for one in recipe.penalties] == [("kl", 0.001, "k3r")]
    (told,) = [line for line in lines if "use_bias_correction_kl" in line]
    assert note in told


def test_a_mask_of_what_is_off_policy_needs_a_policy_that_moves(tmp_path: Path) -> None:
    once = {"steps_per_generation": None, "num_iterations": 1}
    recipe, lines = converted(tmp_path, off_policy_mask_threshold=0.5, **once)
    assert recipe.objective["off_policy"] is None
    assert any("with one update of a generation, no answer is off-policy" in line for line in lines)


def test_a_constant_bonus_of_entropy_stays_constant(tmp_path: Path) -> None:
    from flowgrpo.core.controllers import entropy_bonus

    section = converted(tmp_path, entropy_coef=0.01)[0].objective["entropy"]
    bonus = entropy_bonus(section.target, value=section.value, rate=section.rate, high=section.high)
    assert [bonus.update(entropy) for entropy in (0.0, 2.0, 11.0, 0.5)] == [0.01] * 4


def test_the_length_in_epochs_is_left_to_be_counted(tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path, max_steps=None, num_train_epochs=2, warmup_ratio=0.1)
    assert recipe.run.iterations == 1000
    assert any("write run.iterations: 2 × the number of training prompts / 16" in line for line in lines)
    assert any("write optimizer.warmup: 0.1 times" in line for line in lines)
    file = tmp_path / "null.yaml"
    file.write_text("model_name_or_path: mine\nreward_funcs: [think_format_reward]\nnum_train_epochs: null\n")
    lines = convert_file(str(file), tool="trl").lines
    assert any("write run.iterations: the number of epochs × the number" in line for line in lines)


def test_training_args_alone_need_a_model_and_rewards(tmp_path: Path) -> None:
    gone = {"model_name_or_path": None, "dataset_name": None, "reward_funcs": None, "reward_weights": None}
    recipe, lines = converted(tmp_path, gpus=None, **gone)
    assert (recipe.model.path, recipe.rewards[0].name) == ("MODEL_FOLDER", "my_rewards.py:reward")
    told = lines[lines.index("not carried over:") :]
    assert any("write model.path" in line for line in told)
    assert any("say it with --gpus" in line for line in told)


def test_weights_of_functions_that_only_the_program_names_are_kept(tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path, reward_funcs=None, reward_weights=[1.0, 0.5])
    assert [(reward.name, reward.weight) for reward in recipe.rewards] == [
        ("my_rewards.py:reward_1", 1.0),
        ("my_rewards.py:reward_2", 0.5),
    ]
    assert any("reward reward_2: no reward here does this; write `def reward_2(" in line for line in lines)


def test_a_file_of_prompts_is_no_data_set_of_the_hub(tmp_path: Path) -> None:
    name = "prompts/sums.jsonl"
    recipe, lines = converted(tmp_path, dataset_name=name)
    assert (recipe.data.train, recipe.data.heldout) == (name, "prompts/heldout.jsonl")
    assert any("write held-out prompts into prompts/heldout.jsonl" in line for line in lines)


def test_epochs_beside_a_number_of_steps_are_listed(tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path, num_train_epochs=3)
    assert recipe.run.iterations == 100
    assert "  num_train_epochs 3: max_steps sets the length, there too" in lines


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>\nwhy\n</think>\nthis", 1.0),
        ("<think>why</think>", 1.0),
        ("<think>why", 0.0),
        ("well <think>why</think> this", 0.0),
        ("<think>a<think>b</think>c", 0.0),
    ],
)
@pytest.mark.slow
def test_the_form_of_thinking_is_theirs(text: str, score: float, tmp_path: Path) -> None:
    reward = TextFormat(**converted(tmp_path)[0].rewards[0].options)
    assert list(reward([text], ["p"]).values) == [score]
    reward.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_type": "mystery"}, "loss_type is 'mystery'; write one of grpo"),
        ({"scale_rewards": "some"}, "write group, batch or none"),
        ({"importance_sampling_level": "row"}, "write token or sequence"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "row_mask"}, "write token or sequence, then"),
        ({"reward_weights": ["x", 1]}, "reward_weights is 'x'; write a number"),
        ({"reward_weights": 0.5}, "reward_weights is 0.5; write a list of 2 numbers, one for each reward"),
        ({"reward_weights": [1, 2, 3]}, r"reward_weights is \[1, 2, 3\]; write a list of 2 numbers"),
        ({"per_device_train_batch_size": 0}, "whole number of 1 or more"),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        converted(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile 0.2"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type 'polynomial': optimizer.schedule is"),
        ({"optim": "adafactor"}, "optim 'adafactor': AdamW moves the weights here"),
        ({"repetition_penalty": 1.1}, "repetition_penalty 1.1"),
        ({"load_in_4bit": True}, "load_in_4bit True: quantised weights are frozen, and all weights are trained"),
        ({"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "write model.quantize: nf4"),
        ({"made_up": 3}, "made_up 3: this key is not known here"),
        ({}, "report_to 'wandb': write run.trackers"),
        ({"dataset_name": "sums"}, "dataset_name 'sums': write its prompts into prompts/train.jsonl"),
        ({"datasets": [{"path": "somebody/sums"}]}, "write its prompts into prompts/train.jsonl"),
    ],
)
def test_what_is_not_carried_over_is_said(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    lines = converted(tmp_path, **changes)[1]
    assert any(says in line for line in lines[lines.index("not carried over:") :])


@pytest.mark.parametrize("changes", [{"min_p": 0}, {"repetition_penalty": 1}, {"optim": "adamw_torch_fused"}])
def test_what_does_nothing_there_is_not_reported(changes: dict[str, Any], tmp_path: Path) -> None:
    lines = converted(tmp_path, **changes)[1]
    (key,) = changes
    assert not any(line.startswith(f"  {key}") for line in lines[lines.index("not carried over:") :])
