"""Keys of verl-omni that need no thought, verl-omni's own values, and its rewards by the names of ours."""

from __future__ import annotations

from typing import Any

from .conversion import Missing, PlainRow
from .reward_names import NEEDS_A_SERVER, ON_GPU, SERVER, Counterpart
from .unirl_rewards import NEEDS_A_RUBRIC, RUBRIC

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model.", "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
LOSS, PIPELINE, ALGO = f"{ACTOR}diffusion_loss.", f"{ROLLOUT}pipeline.", f"{ROLLOUT}algo."
VALIDATION = f"{ROLLOUT}val_kwargs."

DEFAULTS: dict[str, Any] = {
    f"{MODEL}path": "Qwen/Qwen-Image", f"{MODEL}algorithm": "flow_grpo", f"{MODEL}enable_gradient_checkpointing": True,
    f"{MODEL}lora_rank": 0, f"{MODEL}lora_alpha": 64, f"{MODEL}lora_init_weights": "gaussian",
    f"{MODEL}target_modules": "all-linear",
    f"{ACTOR}ppo_mini_batch_size": 256, f"{ACTOR}ppo_epochs": 1, f"{ACTOR}use_kl_loss": False,
    f"{ACTOR}kl_loss_coef": 0.001, f"{ACTOR}use_distill_loss": False, f"{ACTOR}distill_loss_coef": 1.0,
    f"{ACTOR}grad_clip": 1.0, f"{ACTOR}optim.lr": 1e-6, f"{ACTOR}optim.weight_decay": 0.01,
    f"{ACTOR}optim.betas": [0.9, 0.999], f"{ACTOR}optim.lr_scheduler_type": "constant",
    f"{ACTOR}optim.lr_warmup_steps": -1, f"{ACTOR}optim.lr_warmup_steps_ratio": 0.0,
    f"{LOSS}clip_ratio": 1e-4, f"{LOSS}adv_clip_max": 5.0, f"{LOSS}mix_beta": 0.5, f"{LOSS}ref_kl_coef": 0.0,
    f"{LOSS}dpo_beta": 2000.0, f"{LOSS}kl_mask_threshold": 1e-5, f"{LOSS}add_kl_coefficient": True,
    f"{ROLLOUT}n": 1, f"{ROLLOUT}rollout_adapter": "default",
    f"{PIPELINE}height": 512, f"{PIPELINE}width": 512, f"{PIPELINE}num_inference_steps": 10,
    f"{PIPELINE}true_cfg_scale": 1.0, f"{PIPELINE}max_sequence_length": 512, f"{PIPELINE}num_frames": 1,
    f"{PIPELINE}frame_rate": 24.0,
    f"{VALIDATION}pipeline.num_inference_steps": 50, f"{VALIDATION}n": 1,
    f"{ALGO}noise_level": 1.0, f"{ALGO}sde_type": "sde", f"{ALGO}sde_contiguous": True,
    f"{ALGO}sample_strategy": "random", f"{ALGO}iters_per_group": 1,
    "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.global_std": True, "algorithm.sample_source": "online",
    "algorithm.old_policy_decay_schedule": "copy", "algorithm.old_policy_update_interval": 1,
    "algorithm.timestep_fraction": 1.0, "algorithm.adv_mode": "continuous",
    "data.train_batch_size": 1024, "data.val_max_samples": -1, "trainer.total_epochs": 30, "trainer.save_freq": -1,
    "trainer.test_freq": -1, "reward.aggregation": "weighted_sum", "distillation.enabled": False,
}  # fmt: skip
"""What verl-omni takes where the script says nothing, from its files of configurations."""

ROWS = (
    PlainRow(f"{MODEL}path", "model.path", "text"),
    PlainRow(f"{MODEL}enable_gradient_checkpointing", "model.gradient_checkpointing", "flag"),
    PlainRow(
        f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size",
        "model.context_parallel",
        "count",
        "docs/scaling.md names the classes that it splits",
    ),
    PlainRow(f"{PIPELINE}num_inference_steps", "sampler.steps", "count"),
    PlainRow("data.train_batch_size", "rollout.prompts", "count"),
    PlainRow(f"{ROLLOUT}n", "rollout.group", "count"),
    PlainRow(f"{ACTOR}optim.lr", "optimizer.learning_rate"),
    PlainRow(f"{ACTOR}optim.weight_decay", "optimizer.weight_decay"),
    PlainRow(f"{ACTOR}optim.override_optimizer_config.eps", "optimizer.eps"),
    PlainRow(f"{ACTOR}ppo_epochs", "optimizer.epochs", "count"),
    PlainRow("data.seed", "run.seed", "whole", "the random numbers are others"),
    PlainRow("trainer.max_actor_ckpt_to_keep", "run.keep", "count"),
)
CORRECTION = "the weights that sample are those that train, so nothing is corrected"
MISSING = (
    Missing(f"{MODEL}lora_adapter_path", (), "a LoRA there can be the start of a LoRA here: model.lora.start"),
    Missing(f"{MODEL}exclude_modules", (), "name the layers that have an adapter in model.lora.targets"),
    Missing(f"{MODEL}target_parameters", (), "an adapter is on linear layers here"),
    Missing("data.train_max_samples", (-1,), "cut the prompt file to this many lines"),
    Missing("algorithm.rollout_correction.rollout_is", (), CORRECTION),
    Missing("algorithm.rollout_correction.rollout_rs", (), CORRECTION),
    Missing("trainer.resume_from_path", (), "a checkpoint of another tool cannot be resumed"),
    Missing(f"{PIPELINE}aspect_ratio", (), "write model.call.height and model.call.width"),
    Missing(f"{PIPELINE}output_type", ("pt",), "rewards get decoded images"),
)
LAUNCH = "flowgrpo is started with `accelerate launch` or `torchrun`, see docs/scaling.md"
NO_SETTING = "recipes have no such setting"
ENGINE = "no other engine samples here"
LATER = "the algorithm of this script does not read it"
IDLE = {
    f"{MODEL}external_lib": "the pipeline's own class decides",
    f"{MODEL}model_type": "the pipeline's own class decides",
    f"{MODEL}architecture": "the pipeline's own class decides",
    f"{MODEL}policy_state_adapters": "see objective.old",
    f"{MODEL}lora_dtype": "trained weights are float32",
    f"{MODEL}lora_*": "all weights are trained",
    f"{MODEL}*": "the pipeline's folder says it",
    f"{ACTOR}fsdp_config.model_dtype": "see model.dtype",
    f"{ACTOR}fsdp_config.*": LAUNCH,
    f"{ACTOR}veomni_config.*": LAUNCH,
    f"{ACTOR}strategy": LAUNCH,
    f"{ACTOR}profiler.*": NO_SETTING,
    f"{ACTOR}checkpoint.*": "a checkpoint always has what `flowgrpo resume` needs",
    f"{ACTOR}optim.*": "AdamW with the numbers above",
    f"{ACTOR}shuffle": "an update takes whole groups, in the order of the prompts",
    f"{ACTOR}data_loader_seed": "run.seed draws the noise levels",
    f"{ACTOR}*": LATER,
    "actor_rollout_ref.ref.*": "the reference is the model without the LoRA, or a copy",
    "actor_rollout_ref.nccl_timeout": LAUNCH,
    "actor_rollout_ref.hybrid_engine": ENGINE,
    f"{VALIDATION}algo.*": "evaluations have no noise in their steps",
    f"{VALIDATION}*": "see evaluate",
    f"{ALGO}sde_window_seed": "run.seed draws the window",
    f"{ALGO}*": LATER,
    f"{PIPELINE}*": "the pipeline's call has no such argument here",
    f"{ROLLOUT}seed": "run.seed gives the noise",
    f"{ROLLOUT}calculate_log_probs": "the ratio is 1 until the weights move, as if log-probabilities were taken again",
    f"{ROLLOUT}*": ENGINE,
    "algorithm.trainer_type": "the loss decides",
    "algorithm.adv_estimator": "the loss decides",
    "algorithm.paired_preference": "the loss decides",
    "algorithm.rollout_correction.*": CORRECTION,
    "algorithm.*": LATER,
    "data.max_prompt_length": "see max_sequence_length",
    "data.truncation": "the pipeline cuts a long prompt",
    "data.shuffle": "prompts are always shuffled",
    "data.*": NO_SETTING,
    "reward.*": "see rewards",
    "distillation.*": LATER,
    "trainer.logger": "a run writes metrics.jsonl anyway",
    "trainer.project_name": "see run.trackers",
    "trainer.experiment_name": "see the name of the recipe",
    "trainer.val_before_train": "evaluations begin and end a run",
    "trainer.total_epochs": "total_training_steps sets the length, there too",
    "trainer.*_data_dir": "a run writes samples/ anyway",
    "trainer.default_local_dir": "the run folder is named with --out",
    "trainer.*": LAUNCH,
    "ray_kwargs.*": LAUNCH,
    "global_profiler.*": NO_SETTING,
    "transfer_queue.*": LAUNCH,
    "diffusion/*": LAUNCH,
}

READS = "RapidOCR reads the images here, a vision-language model there"
REWARDS: dict[str, Counterpart] = {
    "genrm_ocr": Counterpart("ocr", note=READS),
    "hpsv3_reward": Counterpart("hpsv3", {**RUBRIC, **ON_GPU}, needs=NEEDS_A_RUBRIC),
    "jpeg_compressibility": Counterpart("jpeg_compressibility"),
    "pickscore_reward": Counterpart("pickscore", ON_GPU),
    "unified_reward": Counterpart("unified_reward", SERVER, needs=NEEDS_A_SERVER),
}
"""Their file of a reward, without its ending -> our reward."""
