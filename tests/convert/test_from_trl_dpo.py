"""A DPOConfig of TRL: pairs of an optimizer step, the losses, lengths, and what there is no counterpart of."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flowgrpo.configs.load import load_recipe
from flowgrpo.convert.converting import convert_file

THEIRS = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "dataset_name": "trl-lib/ultrafeedback_binarized",
    "learning_rate": "5e-6", "max_steps": 300, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_length": 512, "beta": 0.2,
    "use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_target_modules": "all-linear", "lora_dropout": 0.0,
}  # fmt: skip


def converted(folder: Path, gpus: int | None = 4, **changes: Any) -> tuple[Any, list[str], str]:
    """The recipe of a small configuration with changes (None takes a key out), the lists, and the recipe as text."""
    given = {key: value for key, value in (THEIRS | changes).items() if value is not None}
    (folder / "theirs.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    found = convert_file(str(folder / "theirs.yaml"), "trl", gpus)
    (folder / "ours.yaml").write_text(found.recipe, encoding="utf-8")
    return load_recipe(folder / "ours.yaml"), found.lines, found.recipe


def lost(lines: list[str]) -> list[str]:
    return lines[lines.index("not carried over:") :]


def test_values_worked_out_by_hand(tmp_path: Path) -> None:
    recipe, lines, text = converted(tmp_path)
    assert (recipe.rollout.prompts, recipe.rollout.group, recipe.rollout.form.name) == (64, 2, "given")
    assert recipe.rollout.form["columns"] == ("chosen", "rejected")
    assert (recipe.run.iterations, recipe.optimizer.warmup, recipe.optimizer.schedule) == (300, 30, "cosine")
    assert (recipe.optimizer.learning_rate, recipe.optimizer.ema, recipe.optimizer.weight_decay) == (5e-6, None, 0.0)
    assert (recipe.objective.name, recipe.objective["loss"].name) == ("answers", "dpo")
    assert (recipe.objective["loss"]["beta"], recipe.objective["loss"]["smoothing"]) == (0.2, 0.0)
    assert (recipe.model.train, recipe.model.lora.rank, recipe.model.dtype) == ("lora", 8, "bfloat16")
    assert (recipe.generation.max_tokens, recipe.generation.max_prompt_tokens) == (512, 512)
    # Two pairs of a device, each with two answers of at most 512 tokens with their prompt.
    assert (recipe.rollout.tokens, recipe.generation.long_prompts) == (2048, "drop")
    assert recipe.data.train == "hub:trl-lib/ultrafeedback_binarized?split=train"
    assert recipe.data.heldout is None
    assert [one.name for one in recipe.rewards] == ["given"]
    assert "\nbase: text_dpo\n" in text
    assert lost(lines)[1:] == [
        "  evaluations sample answers here: name held-out prompts as data.heldout, and a reward in evaluate.rewards"
    ]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [2.0, 0.5]}, {"name": "rpo", "beta": 0.2, "alpha": 0.25}),
        ({"loss_type": ["sigmoid", "sft"]}, {"name": "rpo", "beta": 0.2, "alpha": 1.0}),
        ({"rpo_alpha": 0.7}, {"name": "rpo", "beta": 0.2, "alpha": 0.7}),
        ({"loss_type": "sigmoid", "label_smoothing": 0.1}, {"name": "dpo", "beta": 0.2, "smoothing": 0.0}),
        ({"beta": None}, {"name": "dpo", "beta": 0.1}),
        ({"loss_type": "sft"}, {"name": "likelihood"}),
    ],
)
def test_losses(changes: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    recipe, lines, _ = converted(tmp_path, **changes)
    loss = recipe.objective["loss"]
    assert loss.name == wanted.pop("name")
    assert {key: loss[key] for key in wanted} == wanted
    assert not any("loss_type" in line for line in lost(lines))
    if loss.name == "likelihood":
        assert (recipe.rollout.group, recipe.rollout.form["columns"]) == (1, ("chosen",))
        assert (recipe.advantage["baseline"], recipe.advantage["scale"]) == ("none", "none")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"loss_type": "robust", "label_smoothing": 0.1},
            "there is no such loss here; write {name: dpo, smoothing: …}",
        ),
        ({"loss_type": ["ipo", "sft"]}, "there is no such loss here; write {name: contrastive, beta: …}"),
        ({"loss_type": "hinge"}, "there is no such loss here; dpo, rpo, simpo, inpo and contrastive are there"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [0, 1]}, "write loss_type: sft alone in the file"),
        ({"f_divergence_type": "forward_kl"}, "losses have the reverse KL"),
        ({"ld_alpha": 0.5}, "no loss weighs the tokens beyond the shorter answer otherwise"),
        ({"use_weighting": True}, "pairs are not weighted by how likely they are"),
        ({"sync_ref_model": True}, "the reference is the base model here"),
        ({"max_steps": None, "num_train_epochs": 2}, "write run.iterations: 2 × the number of training prompts / 64"),
        ({"dataset_name": "pairs"}, "write pairs into prompts/train.jsonl, with columns prompt, chosen and rejected"),
    ],
)
def test_what_is_not_carried_over_is_said(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    assert any(says in line for line in lost(converted(tmp_path, **changes)[1]))


def test_lengths_of_older_versions_are_of_prompt_and_answer(tmp_path: Path) -> None:
    recipe, _, _ = converted(tmp_path, max_prompt_length=300, max_completion_length=200)
    assert (recipe.generation.max_prompt_tokens, recipe.generation.max_tokens) == (300, 200)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "sigmoid"}, {"label_smoothing": 0.1}, {"truncation_mode": "keep_start"}, {"max_length": 256},
    ],
)  # fmt: skip
def test_a_file_of_dpo_is_known_by_its_keys(changes: dict[str, Any], tmp_path: Path) -> None:
    assert converted(tmp_path, **({"max_length": None} | changes))[0].rollout.form.name == "given"


def test_weights_that_do_not_fit_the_losses_are_told(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"loss_weights is \[1\.0\]; write a list of 2 numbers, one for each loss_type"
    ):
        converted(tmp_path, loss_type=["sigmoid", "sft"], loss_weights=[1.0])


def test_the_padding_token_has_no_effect(tmp_path: Path) -> None:
    """The JSON of every DPOConfig has it, hidden as a secret."""
    _, lines, _ = converted(tmp_path, pad_token="<PAD_TOKEN>")
    assert not any("pad_token" in line for line in lost(lines))
    assert any("pad_token" in line for line in lines)
