"""Configurations of TRL's other trainers that sample: RLOO and distillation, and which trainer a file is for."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flowgrpo.configs.load import load_recipe
from flowgrpo.convert.converting import convert_file

SIZES = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "dataset_name": "prompts/sums.jsonl", "max_steps": 300,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "max_completion_length": 256,
}  # fmt: skip
RLOO = {**SIZES, "num_generations": 4, "normalize_advantages": False, "reward_funcs": ["think_format_reward"]}
TAUGHT = {**SIZES, "teacher_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct"}


def converted(folder: Path, theirs: dict[str, Any], gpus: int | None = 2) -> tuple[Any, list[str], str]:
    """The recipe of a configuration (None takes a key out), the lists, and the recipe as text."""
    (folder / "theirs.yaml").write_text(yaml.safe_dump({k: v for k, v in theirs.items() if v is not None}))
    found = convert_file(str(folder / "theirs.yaml"), None, gpus)
    assert found.tool == "trl"
    (folder / "ours.yaml").write_text(found.recipe, encoding="utf-8")
    return load_recipe(folder / "ours.yaml"), found.lines, found.recipe


def lost(lines: list[str]) -> str:
    return "\n".join(lines[lines.index("not carried over:") :]) if "not carried over:" in lines else ""


def test_rloo_by_hand(tmp_path: Path) -> None:
    recipe, lines, _ = converted(tmp_path, RLOO)
    # 4 completions of a device, in 8 batches on 2 devices, are 16 groups of 4.
    assert (recipe.rollout.prompts, recipe.rollout.group, recipe.optimizer.updates) == (16, 4, 1)
    advantage, objective = recipe.advantage, recipe.objective
    assert (advantage.name, advantage["baseline"], advantage["scale"]) == ("group", "loo", "none")
    assert (objective.name, objective["level"], objective["reduce"]) == ("tokens", "token", "sum")
    assert (objective["surrogate"]["low"], objective["surrogate"]["high"]) == (0.2, 0.2)
    [penalty] = recipe.penalties
    assert (penalty.name, penalty["weight"], penalty["kind"]) == ("kl", 0.05, "k2")
    assert recipe.clamp is None
    assert not lost(lines)


def test_rloo_with_more(tmp_path: Path) -> None:
    more = {"normalize_advantages": True, "beta": 0.0, "epsilon_high": 0.3, "mask_truncated_completions": True}
    recipe, lines, _ = converted(tmp_path, {**RLOO, **more, "reward_clip_range": [-1, 1], "num_iterations": 2})
    advantage, objective = recipe.advantage, recipe.objective
    assert (advantage["scale"], advantage["ddof"], advantage["eps"]) == ("batch", 1, 1e-4)
    assert (objective["surrogate"]["high"], objective["drop_truncated"]) == (0.3, True)
    assert (recipe.penalties, recipe.optimizer.epochs) == ([], 2)
    assert "reward_clip_range [-1, 1]: bound the value in the reward itself" in lost(lines)
    assert any("of the whole completion there" in line for line in lines)


@pytest.mark.parametrize(
    ("beta", "direction", "mixture"), [(None, "reverse", None), (0.0, "forward", None), (0.3, "jsd", 0.3)]
)
def test_distillation_by_hand(tmp_path: Path, beta: float | None, direction: str, mixture: float | None) -> None:
    recipe, lines, text = converted(tmp_path, {**TAUGHT, "beta": beta})
    assert (recipe.rollout.prompts, recipe.rollout.group, recipe.generation.max_tokens) == (64, 1, 256)
    assert [teacher.path for teacher in recipe.model.teachers] == ["Qwen/Qwen2.5-7B-Instruct"]
    objective = recipe.objective
    assert (objective.name, objective["others"], objective["both"]) == ("distilled", "none", False)
    assert (objective["direction"], objective["beta"], objective["top"]) == (direction, mixture, 100)
    assert (recipe.penalties, recipe.optimizer.learning_rate, recipe.run.iterations) == ([], 1e-6, 300)
    assert [reward.name for reward in recipe.rewards] == ["length"]
    assert "\nbase: text_opd\n" in text
    assert not lost(lines)


def test_gkd_has_other_defaults_and_data_of_its_own(tmp_path: Path) -> None:
    recipe, lines, _ = converted(tmp_path, {**TAUGHT, "max_completion_length": None, "lmbda": 0.25, "seq_kd": True})
    assert (recipe.generation.max_tokens, recipe.generation.temperature) == (128, 0.9)
    assert (recipe.objective["direction"], recipe.objective["beta"]) == ("jsd", 0.5)
    assert recipe.optimizer.learning_rate == 2e-5
    assert "lmbda 0.25: all completions are the policy's own here" in lost(lines)
    assert "seq_kd True: write the teacher's completions into a column" in lost(lines)
    recipe, lines, _ = converted(
        tmp_path, {**TAUGHT, "max_completion_length": None, "max_new_tokens": 64, "lmbda": 1.0}
    )
    assert recipe.generation.max_tokens == 64
    assert not lost(lines)


def test_the_list_says_for_which_trainer_a_file_was_read(tmp_path: Path) -> None:
    """Short files of several trainers have the same keys, and other defaults."""
    short = {**RLOO, "normalize_advantages": None}
    read = {
        "a GRPOConfig": short, "an RLOOConfig": RLOO, "a DistillationConfig": TAUGHT,
        "a GKDConfig": {**TAUGHT, "max_completion_length": None, "lmbda": 1.0},
        "a GOLDConfig": {**TAUGHT, "use_uld_loss": False},
    }  # fmt: skip
    for what, theirs in read.items():
        _, lines, _ = converted(tmp_path, theirs)
        assert lines[1].startswith(f"  (read as {what}) → task: text")
    assert "an RLOOConfig has normalize_advantages" in converted(tmp_path, short)[1][1]


def test_several_completions_of_a_prompt_stay_several(tmp_path: Path) -> None:
    """Earlier versions have the key. Prompts are fewer by this number, so completions must be as many more."""
    recipe, _, _ = converted(tmp_path, {**TAUGHT, "num_generations": 4})
    assert (recipe.rollout.prompts, recipe.rollout.group) == (16, 4)


def test_rloo_has_no_weight_for_the_difference_of_engines(tmp_path: Path) -> None:
    recipe, _, _ = converted(tmp_path, {**RLOO, "use_vllm": True})
    assert (recipe.generation.engine, recipe.objective["correction"].name) == ("vllm", "none")


def test_settings_that_gkd_has_from_sft_have_no_effect(tmp_path: Path) -> None:
    of_sft = {"packing": False, "loss_type": "nll", "truncation_mode": "keep_start", "max_length": 1024}
    of_gkd = {**TAUGHT, "max_completion_length": None, "max_new_tokens": 64, "lmbda": 1.0}
    _, lines, _ = converted(tmp_path, {**of_gkd, **of_sft})
    assert not lost(lines)
    idle = "\n".join(lines[lines.index("without effect here:") :])
    assert "loss_type 'nll', truncation_mode 'keep_start': a GKDConfig has it from SFTConfig" in idle
    assert "max_length 1024: generation.max_prompt_tokens and generation.max_tokens are the bounds" in idle


def test_gold_is_gkd_with_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    gold = {**TAUGHT, "max_completion_length": 2048, "lmbda": 1.0, "seq_kd": False, "uld_student_temperature": 1.0}
    recipe, lines, _ = converted(tmp_path, {**gold, "use_uld_loss": False})
    assert (recipe.generation.max_tokens, recipe.generation.top_p, recipe.objective["beta"]) == (2048, 0.95, 0.5)
    assert not lost(lines)
    _, lines, _ = converted(tmp_path, {**gold, "use_uld_loss": True})
    assert "use_uld_loss True: a teacher has the tokenizer of the model here; use such a teacher" in lost(lines)


def test_weights_of_early_tokens_are_carried_over(tmp_path: Path) -> None:
    given = {key: value for key, value in TAUGHT.items() if key != "beta"}
    more = {"distillation_objective": "iw_opd", "iw_opd_gamma": 0.7, "lmbda": 1.0, "max_completion_length": 256}
    recipe, lines, _ = converted(tmp_path, {**given, **more})
    assert (recipe.objective["early"], recipe.objective["direction"]) == (0.7, "reverse")
    assert (recipe.generation.max_tokens, recipe.generation.top_p) == (256, 0.95)
    assert not lost(lines)
    more |= {"loss_top_k": 1, "max_length": 512}
    recipe, lines, _ = converted(tmp_path, {**given, **more})
    assert not lost(lines)
    recipe, lines, _ = converted(tmp_path, {**given, **more, "distillation_objective": "jsd", "beta": 0.3})
    assert (recipe.objective["early"], recipe.objective["direction"], recipe.objective["beta"]) == (0.0, "jsd", 0.3)
    assert "loss_top_k 1: the divergence is over the objective.top tokens" in lost(lines)


def test_a_teacher_on_a_server_is_no_reason_to_read_a_file_for_grpo(tmp_path: Path) -> None:
    recipe, lines, _ = converted(tmp_path, {**SIZES, "teacher_model_server_url": "http://localhost:8001"})
    assert recipe.objective.name == "distilled"
    assert "a teacher is loaded here, and no server is asked" in lost(lines)
    assert "the file does not name the teacher" in lost(lines)


def test_a_teacher_that_the_file_does_not_name_is_asked_for(tmp_path: Path) -> None:
    recipe, lines, _ = converted(tmp_path, {**SIZES, "seq_kd": False, "lmbda": 1.0})
    assert recipe.model.teachers[0].path == "TEACHER_FOLDER"
    assert "the file does not name the teacher: write model.teachers" in lost(lines)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"packing": True, "dataset_text_field": "text"}, "packing, dataset_text_field, so it is an SFTConfig"),
        ({"center_rewards_coefficient": 0.01}, "so it is a RewardConfig"),
        ({"packing_strategy": "bfd", "max_length": 512}, "so it is an SFTConfig"),
        ({"step_separator": "\n", "max_length": 512}, "so it is a PRMConfig"),
        (
            {"min_density_ratio": 0.5, "desirable_weight": 1.0},
            "so it is a BCOConfig; convert takes a GRPOConfig, an RLOOConfig, a DPOConfig, a KTOConfig, a CPOConfig, a "
            "TPOConfig, a DistillationConfig or a GKDConfig; docs/given_samples.md has what trains on given answers",
        ),
        ({"reward_model_path": "a/b", "loss_type": "sigmoid"}, "objective.loss: dpo, which compares sampled answers"),
    ],
)
def test_other_trainers_are_not_taken_for_grpo(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match="convert takes a GRPOConfig, an RLOOConfig") as caught:
        converted(tmp_path, {**SIZES, **changes})
    assert what in str(caught.value)


@pytest.mark.parametrize("beta", [-0.1, 1.5])
def test_a_beta_that_is_no_share_is_refused(tmp_path: Path, beta: float) -> None:
    with pytest.raises(ValueError, match=r"beta is .*a number from 0 \(the forward KL\) to 1 \(the reverse KL\)"):
        converted(tmp_path, {**TAUGHT, "beta": beta})
