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
    "loss_type": "sigmoid",
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
        ({"loss_type": "exo_pair"}, {"name": "exo", "beta": 0.2, "smoothing": 1e-3}),
        ({"f_divergence_type": "alpha_divergence"}, {"name": "f_dpo", "divergence": "alpha", "alpha": 0.5}),
        ({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}, {"name": "dpo", "beta": 0.2}),
        ({"beta": None}, {"name": "dpo", "beta": 0.1}),
        ({"loss_type": "sft"}, {"name": "likelihood"}),
        ({"loss_type": "hinge"}, {"name": "hinge", "beta": 0.2}),
        ({"loss_type": ["ipo"]}, {"name": "ipo", "beta": 0.2, "mean": True}),
        ({"loss_type": "exo_pair", "label_smoothing": 0.01}, {"name": "exo", "beta": 0.2, "smoothing": 0.01}),
        ({"loss_type": "robust", "label_smoothing": 0.1}, {"name": "robust", "beta": 0.2, "smoothing": 0.1}),
        ({"loss_type": "nca_pair"}, {"name": "nca", "beta": 0.2}),
        ({"loss_type": "bco_pair"}, {"name": "bco", "beta": 0.2}),
        ({"loss_type": "sppo_hard"}, {"name": "sppo", "beta": 0.2}),
        ({"loss_type": "apo_zero"}, {"name": "apo", "beta": 0.2, "anchor": "zero"}),
        ({"loss_type": "apo_down"}, {"name": "apo", "beta": 0.2, "anchor": "down"}),
        ({"loss_type": "discopop", "discopop_tau": 0.1}, {"name": "discopop", "beta": 0.2, "tau": 0.1}),
        ({"loss_type": "sigmoid_norm", "beta": 5.0}, {"name": "dpo_norm", "beta": 5.0}),
        ({"f_divergence_type": "forward_kl"}, {"name": "f_dpo", "beta": 0.2, "divergence": "forward"}),
        (
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.4},
            {"name": "f_dpo", "divergence": "alpha", "alpha": 0.4},
        ),
        (
            {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
            {"name": "mpo", "beta": 0.2, "preference": 0.8, "quality": 0.2, "alpha": 1.0},
        ),
        ({"cpo_alpha": 0.5}, {"name": "cpo", "beta": 0.2, "alpha": 0.5, "smoothing": 0.0}),
        (
            {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.3},
            {"name": "simpo", "beta": 0.2, "margin": 0.3, "alpha": 0.0},
        ),
        ({"loss_type": "alphapo", "alpha": 0.25}, {"name": "simpo", "beta": 0.2, "margin": 0.5, "alpha": 0.25}),
        ({"tpo_alpha": 0.5, "beta": None}, {"name": "tpo", "beta": 0.01, "alpha": 0.5, "mean": False}),
        ({"loss_type": "tpo-l"}, {"name": "tpo", "beta": 0.2, "alpha": 1.0, "mean": True, "margin": 0.5}),
        (
            {"undesirable_weight": 1.3, "loss_type": None},
            {"name": "kto", "beta": 0.2, "desirable": 1.0, "undesirable": 1.3},
        ),
    ],
)
def test_losses(changes: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    recipe, lines, _ = converted(tmp_path, **changes)
    loss = recipe.objective["loss"]
    assert loss.name == wanted.pop("name")
    assert {key: loss[key] for key in wanted} == wanted
    given_only = (
        "  evaluations sample answers here: name held-out prompts as data.heldout, and a reward in evaluate.rewards"
    )
    assert lost(lines)[1:] == [given_only]
    columns = {"tpo": ("reference", "chosen", "rejected"), "kto": ("completion",)}
    if loss.name in columns:
        assert recipe.rollout.form["columns"] == columns[loss.name]
        assert recipe.rollout.tokens == len(columns[loss.name]) * 2 * 512
    if loss.name == "kto":
        assert (recipe.rollout.group, recipe.rewards[0].options) == (1, {"scores": ["label"]})
        assert (recipe.advantage["baseline"], recipe.advantage["scale"]) == ("none", "none")
    if loss.name == "likelihood":
        assert (recipe.rollout.group, recipe.rollout.form["columns"]) == (1, ("chosen",))
        assert (recipe.advantage["baseline"], recipe.advantage["scale"]) == ("none", "none")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"loss_type": ["ipo", "sft"]},
            "there is no such loss here; no other mixtures of losses are here than rpo and",
        ),
        ({"loss_type": "aot"}, "there is no such loss here; it sorts the pairs of a batch, so it depends on the batch"),
        (
            {"label_smoothing": 0.1},
            "earlier versions of TRL train conservative DPO with it; for that, write objective.loss.smoothing",
        ),
        ({"loss_type": "aot", "label_smoothing": 0.1}, "the loss of this file does not read it; leave it out"),
        ({"loss_type": "simpo", "label_smoothing": 0.1}, "loss simpo takes a preference as certain; cpo has smoothing"),
        (
            {"loss_type": None, "truncation_mode": "keep_start"},
            "nothing in the file says which trainer it is for, and it was read as a DPOConfig",
        ),
        ({"loss_type": "simpo"}, "loss simpo has no term of fine-tuning; cpo and orpo have one"),
        ({"cpo_alpha": 1.0, "loss_type": "ipo"}, "without a reference, cpo, simpo and orpo are here"),
        ({"cpo_alpha": 1.0, "alpha": 0.2}, "only loss simpo has the reward of AlphaPO"),
        ({"tpo_alpha": 1.0, "loss_type": "hinge"}, "loss tpo has the forms sigmoid and tpo-l"),
        ({"tpo_alpha": 1.0, "label_smoothing": 0.1}, "loss tpo takes a preference as certain"),
        ({"loss_type": "apo_zero_unpaired"}, "answers without pairs have loss kto; apo is a loss of pairs"),
        ({"desirable_weight": 1.0, "dataset_name": "labels"}, "with columns prompt, completion, and label"),
        ({"loss_type": "ipo", "f_divergence_type": "forward_kl"}, "loss f_dpo alone has another divergence"),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [0, 1]}, "write loss_type: sft alone in the file"),
        ({"loss_type": "hinge", "rpo_alpha": 1.0}, "rpo_alpha 1.0: beside loss_type sigmoid alone, loss rpo has"),
        ({"loss_type": ["sigmoid", "sft"], "rpo_alpha": 1.0}, "rpo_alpha 1.0: beside loss_type sigmoid alone"),
        ({"rpo_alpha": 1.0, "f_divergence_type": "forward_kl"}, "loss rpo has the reverse KL alone"),
        (
            {"loss_type": ["robust", "sft"], "loss_weights": [1, 0.5], "label_smoothing": 0.2},
            "loss_type ['robust', 'sft'], loss_weights [1, 0.5], label_smoothing 0.2: there is no such loss here",
        ),
        ({"ld_alpha": 0.5}, "no loss weighs the tokens beyond the shorter answer otherwise"),
        ({"use_weighting": True}, "pairs are not weighted by how likely they are"),
        ({"sync_ref_model": True}, "the reference is the base model here"),
        ({"max_steps": None, "num_train_epochs": 2}, "write run.iterations: 2 × the number of training prompts / 64"),
        (
            {"dataset_name": "pairs"},
            "write the data into prompts/train.jsonl, with columns prompt, chosen, rejected, or without",
        ),
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
