"""verl-omni: the words of its scripts, its losses as objectives, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.convert.converting import convert_file
from flowgrpo.convert.shell_words import ShellScript
from flowgrpo.parts.choice import value_at
from tests.convert.samples_of_tools import VERL_OMNI

LOSS = "actor_rollout_ref.actor.diffusion_loss"
ROLLOUT = "actor_rollout_ref.rollout"
NFT = (
    f"{LOSS}.loss_mode=diffusion_nft", f"{LOSS}.mix_beta=0.1", f"{LOSS}.ref_kl_coef=0.0001",
    f"{ROLLOUT}.rollout_adapter=old", "algorithm.old_policy_update_interval=2",
)  # fmt: skip


def converted(folder: Path, *changes: str, text: str = VERL_OMNI) -> tuple[Any, list[str]]:
    """The recipe of the small script with more words behind the others, and the lists of the conversion."""
    words = "".join(f"    {change} \\\n" for change in changes)
    (folder / "theirs.sh").write_text(text.replace('    "$@"', f'{words}    "$@"'), encoding="utf-8")
    found = convert_file(str(folder / "theirs.sh"))
    assert found.tool == "verl-omni"
    (folder / "ours.yaml").write_text(found.recipe, encoding="utf-8")
    return load_recipe(folder / "ours.yaml"), found.lines


def test_values_worked_out_by_hand(tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path)
    assert recipe.name == "mine"
    # 4 × 4 / 2 prompts in mini batches of 4 prompts.
    assert (recipe.rollout.prompts, recipe.rollout.group, recipe.optimizer.updates) == (8, 8, 2)
    assert (recipe.rollout.batch, recipe.rollout.decode_batch, recipe.optimizer.epochs) == (8, 8, 1)
    assert recipe.model.call == {"height": 384, "width": 384, "max_sequence_length": 256, "guidance_scale": 4.5}
    assert (recipe.model.lora.rank, recipe.model.lora.alpha, recipe.model.lora.init) == (16, 32.0, "gaussian")
    assert (recipe.model.lora.targets, recipe.model.attention) == (["to_q", "to_k"], "native")
    assert (recipe.model.dtype, recipe.model.gradient_checkpointing) == ("bfloat16", True)
    assert (recipe.sampler.kernel.name, dict(recipe.sampler.kernel.options)) == ("flow_sde", {"eta": 0.8})
    window = recipe.sampler.plan["window"]
    assert (window.name, dict(window.options)) == ("random", {"size": 3, "interval": 1, "start": 0, "stop": 5})
    surrogate = recipe.objective["surrogate"]
    assert (surrogate.name, surrogate["low"], surrogate["high"]) == ("clip", 2e-5, 2e-5)
    assert (value_at(recipe, "objective.ratio"), value_at(recipe, "objective.weight")) == ("gaussian", "none")
    # Their KL lacks a division by the step size, a tenth on average.
    assert [(one.name, one["weight"]) for one in recipe.penalties] == [("kl", 0.004)]
    assert (value_at(recipe, "advantage.scale"), value_at(recipe, "advantage.ddof")) == ("batch", 1)
    assert (value_at(recipe, "advantage.eps"), recipe.clamp, recipe.optimizer.ema) == (1e-4, 5.0, None)
    assert (recipe.data.train, recipe.data.heldout) == ("prompts/mine/train.jsonl", "prompts/mine/test.jsonl")
    assert (recipe.evaluate.every, recipe.evaluate.steps, recipe.evaluate.prompts) == (20, 28, 32)
    assert (recipe.run.iterations, recipe.run.checkpoint_every, recipe.run.seed) == (100, 50, 42)
    assert [one.name for one in recipe.rewards] == ["pickscore"]
    assert any("'stabilityai/stable-diffusion-3.5-medium', the default of $MODEL_NAME" in line for line in lines)
    assert any("its column `prompt` holds conversations" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        (f"{ROLLOUT}.algo.sde_type=cps", "objective.ratio", "cps_released"),
        (f"{ROLLOUT}.algo.sde_type=dance_sde", "sampler.kernel", "dance_sde"),
        (f"{LOSS}.loss_mode=grpo_guard", "objective.ratio", "guard"),
        (f"{ROLLOUT}.algo.sde_contiguous=False", "sampler.plan.window", "subset"),
        (f"{ROLLOUT}.algo.sde_window_size=null", "sampler.plan.window", "all"),
        ("algorithm.global_std=False", "advantage.scale", "group"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "advantage.scale", "none"),
        ("actor_rollout_ref.model.lora_rank=0", "model.train", "full"),
        ("actor_rollout_ref.model.target_modules=all-linear", "model.lora.targets", ["all-linear"]),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "optimizer.warmup", 20),
        ("actor_rollout_ref.actor.ppo_epochs=2", "optimizer.epochs", 2),
        ("trainer.test_freq=-1", "data.heldout", None),
        ("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4", "model.context_parallel", 4),
        ("actor_rollout_ref.actor.optim.clip_grad=0.5", "optimizer.max_grad_norm", 0.5),
        ("actor_rollout_ref.actor.use_kl_loss=False", "penalties", []),
    ],
)
def test_single_settings(change: str, key: str, value: Any, tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, change)
    assert (recipe.penalties if key == "penalties" else value_at(recipe, key)) == value


def test_a_recipe_that_trains_all_weights_writes_no_numbers_of_a_lora(tmp_path: Path) -> None:
    """They have no effect beside `train: full`, which this base has, so a plan of the recipe refuses them."""
    converted(
        tmp_path, "actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.algorithm=dance_grpo",
        f"{LOSS}.loss_mode=dance_grpo", f"{ROLLOUT}.algo.sde_type=dance_sde",
    )  # fmt: skip
    text = (tmp_path / "ours.yaml").read_text(encoding="utf-8")
    assert "base: dance_grpo@published\n" in text
    assert "lora:" not in text


def test_a_window_of_mixgrpo_slides_by_its_size(tmp_path: Path) -> None:
    recipe, lines = converted(
        tmp_path, "actor_rollout_ref.model.algorithm=mix_grpo", f"{ROLLOUT}.algo.sample_strategy=progressive",
        f"{ROLLOUT}.algo.iters_per_group=5", f"{LOSS}.loss_mode=flow_grpo",
    )  # fmt: skip
    window = recipe.sampler.plan["window"]
    assert (window.name, window["size"], window["stride"], window["interval"]) == ("progressive", 3, 3, 5)
    assert (window["start"], window["stop"]) == (0, 5)
    assert any("there it stays at the end" in line for line in lines)


def test_the_bound_of_a_divergence_is_of_a_whole_latent(tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, f"{LOSS}.loss_mode=flow_dppo", f"{LOSS}.kl_mask_threshold=1e-5")
    assert recipe.objective["trust_nats"] == pytest.approx(1e-5 * 16 * 48 * 48)
    assert recipe.clamp is None


@pytest.mark.parametrize(
    ("schedule", "old"),
    [
        # Two optimizer steps in an iteration, and the average moves every second iteration.
        ("delayed_linear_to_0_999", (0.999, 4, 0.00375, 149, 0.0)),
        ("linear_to_0_5", (0.5, 4, 0.0005, 0, 0.0005)),
        ("copy", (0.0, 4, None, 0, 0.0)),
    ],
)
def test_nft_samples_with_its_old_policy(schedule: str, old: tuple[Any, ...], tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, *NFT, f"algorithm.old_policy_decay_schedule={schedule}")
    objective = recipe.objective
    assert (recipe.sampler.plan.name, objective.name, objective["noise"]) == ("ode", "forward", "image")
    assert dict(objective["loss"].options) == {"beta": 0.1, "bound": 5.0}
    found = objective["old"]
    assert (found.decay, found.every, found.rise, found.after, found.first) == old
    assert [(one.name, one["weight"]) for one in recipe.penalties] == [("kl", 1e-4)]
    theirs = {"delayed_linear_to_0_999": (75, 0.0075, 0.999), "linear_to_0_5": (0, 0.001, 0.5), "copy": (0, 0.0, 0.0)}
    flat, rise, most = theirs[schedule]
    for step in range(2, 400, 2):
        wanted = 0.0 if step < flat else min((step - flat) * rise, most)
        ours = min(found.first + (found.rise or 0.0) * max(2 * step - 1 - found.after, 0), found.decay)
        assert ours == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "transform"),
    [
        ("continuous", None), ("positive_only", "positive"), ("negative_only", "negative"), ("one_only", "one"),
        ("binary", "sign"),
    ],
)  # fmt: skip
def test_a_mode_of_advantages_is_a_transform(mode: str, transform: str | None, tmp_path: Path) -> None:
    recipe, lines = converted(tmp_path, *NFT, f"algorithm.adv_mode={mode}")
    assert (recipe.transform, recipe.clamp) == (transform, None)
    assert not any("adv_mode" in line for line in lines[lines.index("not carried over:") :])


def test_an_old_policy_that_is_the_policy_is_left_out(tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, *NFT, "algorithm.old_policy_update_interval=1")
    assert recipe.objective["old"] is None


def test_pairs_of_the_best_and_the_worst(tmp_path: Path) -> None:
    recipe, _ = converted(tmp_path, f"{LOSS}.loss_mode=dpo", f"{LOSS}.dpo_beta=100.0")
    assert (recipe.objective["loss"].name, recipe.objective["loss"]["beta"]) == ("flow_dpo", 100.0)
    assert [(one.name, one["keep"]) for one in recipe.select] == [("extremes", 2)]
    recipe, lines = converted(tmp_path, f"{LOSS}.loss_mode=dpo", "algorithm.sample_source=offline")
    assert (recipe.sampler.plan.name, recipe.rollout.group) == ("given", 2)
    assert any("columns `prompt`, `chosen` and `rejected`" in line for line in lines)


def test_a_teacher_is_followed_and_rewards_are_reported(tmp_path: Path) -> None:
    teacher = "distillation.teacher_models.teacher_model.model_path=owner/teacher"
    recipe, _ = converted(tmp_path, f"{LOSS}.loss_mode=distill_kl", "distillation.enabled=True", teacher)
    assert (recipe.objective.name, recipe.model.teachers[0].path) == ("visited", "owner/teacher")
    assert [(one.name, one["weight"]) for one in recipe.penalties] == [("taught", 0.1)]


def test_several_rewards_have_their_weights(tmp_path: Path) -> None:
    rewards = {"ocr": ("genrm_ocr.py", 0.5), "jpeg": ("jpeg_compressibility.py", 0.25), "own": ("mine.py", 1.0)}
    words = [
        word
        for name, (file, weight) in rewards.items()
        for word in (
            f"+reward.reward_functions.{name}.path=$(pwd)/{file}",
            f"+reward.reward_functions.{name}.weight={weight}",
        )
    ]
    recipe, _ = converted(tmp_path, *words)
    assert [(one.name, one.weight) for one in recipe.rewards] == [
        ("ocr", 0.5), ("jpeg_compressibility", 0.25), ("my_rewards.py:own", 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (f"{LOSS}.loss_mode=mine", "loss_mode is mine, which has no counterpart here"),
        ("actor_rollout_ref.model.path=ByteDance-Seed/BAGEL-7B-MoT", "the model is BAGEL"),
        (f"{ROLLOUT}.algo.sde_type=heun", "write sde, cps, dance_sde"),
        (f"{LOSS}.loss_mode=diffusion_nft algorithm.adv_mode=best", "write continuous, positive_only, negative_only"),
        ("data.train_batch_size=many", "write a number"),
        ("x='open", "' is not closed"),
    ],
)
def test_what_cannot_be_converted_is_refused(change: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        converted(tmp_path, change)
    with pytest.raises(ValueError, match="whose text encoder writes text"):
        converted(tmp_path, f"{LOSS}.loss_mode=flow_grpo", "actor_rollout_ref.model.algorithm=dual_grpo")
    with pytest.raises(ValueError, match="has another scale at every step"):
        converted(tmp_path, f"{LOSS}.loss_mode=grpo_guard", f"{ROLLOUT}.algo.sde_type=cps")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.train_batch_size=$(nproc)", "data.train_batch_size: $(nproc) says it when the script runs"),
        ("data.train_files=$NOWHERE/train.jsonl", "$NOWHERE says it there; write the file of prompts as data.train"),
        ("actor_rollout_ref.model.attn_backend=_flash_3_varlen_hub", "it would run code that is fetched from the hub"),
        ("algorithm.rollout_correction.rollout_is=sequence", "so nothing is corrected"),
        ("actor_rollout_ref.model.path='~/models/mine'", "model.path is in the home folder"),
        ("new.key=1", "new.key 1: this key is not known here"),
        ("trainer.v1.trainer_mode=separate_async", "weights are never old"),
    ],
)
def test_what_is_not_carried_over_is_said(change: str, says: str, tmp_path: Path) -> None:
    lines = converted(tmp_path, change)[1]
    assert any(says in line for line in lines[lines.index("not carried over:") :])


def words_of(tmp_path: Path, text: str) -> list[tuple[str, list[str]]]:
    script = ShellScript(tmp_path / "run.sh", text)
    return [(word.text, word.unsaid) for word in script.command("tool") or []]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python -m tool a b", ["a", "b"]),
        ("python -m tool 'a b' \"c d\" e\\ f", ["a b", "c d", "e f"]),
        ("python -m tool a=\"['x','y']\" b='\"z\"'", ["a=['x','y']", 'b="z"']),
        ("python -m tool a \\\n  b \\\n  # no comment\n", ["a", "b"]),
        ("X=3\npython -m tool $X ${X} \"$X\" '$X' x$X.y", ["3", "3", "3", "$X", "x3.y"]),
        ("A=${B:-c}\npython -m tool $A ${A:-d} ${Z:-e$A}", ["c", "c", "ec"]),
        ("A=4\nB=2\npython -m tool $((A / B)) $((A*3)) $((2 + 3 * A - 1)) $((${A} % 3))", ["2", "12", "13", "1"]),
        ("python -m tool a > log b", ["a"]),
        ("python -m tool a 2>&1 | tee log", ["a"]),
        ("python -m tool a && rm -r b", ["a"]),
        ('python -m tool a "$@" $* b', ["a", "b"]),
        ("python -m tool first\npython -m tool last", ["last"]),
        ("export A=1\nif true; then\n A=2\nfi\npython -m tool $A", ["1"]),
        ("if true; then\n A=1\nelse\n A=2\nfi\npython -m tool $A", ["2"]),
        ("A=1\nA=$A$A\nA=$A$A\npython -m tool $A", ["1111"]),
        ("python -m tool a='it'\\''s'", ["a=it's"]),
        ("python -m tool $HOME/x", ["~/x"]),
        ("python -m tool a # b", ["a"]),
        ("python -m toolbox a\n", []),
    ],
)
def test_words_of_a_command(text: str, words: list[str], tmp_path: Path) -> None:
    assert [word for word, unsaid in words_of(tmp_path, text) if word or unsaid] == words


@pytest.mark.parametrize(
    ("text", "unsaid"),
    [
        ("python -m tool $A", "$A"),
        ("python -m tool $(date +%s)", "$(date +%s)"),
        ("python -m tool `date`", "`date`"),
        ("python -m tool ${A:?say it}", "${A:?say it}"),
        ("A=(1 2)\npython -m tool ${A[@]}", "${A[@]}"),
        ("python -m tool $((1 / 0))", "$((1 / 0))"),
        ("python -m tool $(( (1 + 2) * 3 ))", "$(( (1 + 2) * 3 ))"),
        ("A=x\npython -m tool $((A + 1))", "$((A + 1))"),
    ],
)
def test_what_only_a_run_shows_is_no_text(text: str, unsaid: str, tmp_path: Path) -> None:
    assert words_of(tmp_path, text)[0][1][-1] == unsaid


def test_a_script_is_never_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    converted(tmp_path, f"trainer.project_name=$(touch {mark})")
    assert not mark.exists()


def test_a_word_that_doubles_is_refused(tmp_path: Path) -> None:
    text = "A=xxxxxxxx\n" + "A=$A$A\n" * 20 + "python -m tool $A"
    with pytest.raises(ValueError, match="more than 20,000 characters"):
        words_of(tmp_path, text)
    with pytest.raises(ValueError, match="too many substitutions"):
        words_of(tmp_path, "python -m tool " + "${A:-" * 40 + "}" * 40)
