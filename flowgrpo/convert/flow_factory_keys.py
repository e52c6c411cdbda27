"""Keys of Flow-Factory that need no thought, its own values, and the layers of its LoRAs."""

from __future__ import annotations

from typing import Any

from .conversion import Missing, PlainRow

TRAIN: dict[str, Any] = {
    "trainer_type": "grpo", "resolution": [512, 512], "max_epochs": None, "per_device_batch_size": 1,
    "gradient_step_per_epoch": 2, "max_grad_norm": 1.0, "gradient_accumulation_steps": "auto", "num_inner_epochs": 1,
    "group_size": 1, "unique_sample_num_per_epoch": 8, "num_inference_steps": 10, "guidance_scale": 3.5, "seed": 42,
    "learning_rate": 1e-5, "adam_weight_decay": 1e-4, "adam_betas": [0.9, 0.999], "adam_epsilon": 1e-8,
    "ema_decay": 0.995, "ema_update_interval": 10, "ema_decay_schedule": "power", "global_std": True,
    "advantage_aggregation": "gdpo", "clip_range": 1e-4, "adv_clip_range": 5.0, "kl_type": "x-based", "kl_beta": 0,
    "nft_beta": 1.0, "off_policy": False, "num_train_timesteps": 0, "time_sampling_strategy": "discrete",
    "timestep_range": 0.9, "awm_weighting": "Uniform", "ghuber_power": 0.25, "ema_kl_beta": 0, "beta": 2000.0,
    "dpo_beta": 100.0, "use_shared_noise": True, "clip_dsm": True, "ema_ref_max_decay": 0.3, "ema_ref_ramp_rate": 1e-3,
    "kl_cfg": 1.0, "crd_beta": 1.0, "crd_loss_type": "mse", "use_old_for_loss": True, "adaptive_logp": True,
    "weight_temp": -1.0, "old_model_decay": "0-0.25-0.005-0.999", "sampling_model_decay": "75-0.0-0.0075-0.999",
    "reward_adaptive_kl": True, "enable_gradient_checkpointing": False,
}  # fmt: skip
"""Values of the section `train` where the file says nothing; some belong to one algorithm only."""
OTHERS: dict[str, Any] = {
    "mixed_precision": "bf16", "model.finetune_type": "full", "model.lora_rank": 8, "model.target_modules": "all",
    "model.model_name_or_path": "black-forest-labs/FLUX.1-dev", "model.model_type": "flux1", "eval.eval_freq": 10,
    "eval.num_inference_steps": 30, "scheduler.dynamics_type": "Flow-SDE", "scheduler.noise_level": 0.7,
    "scheduler.num_sde_steps": 1, "scheduler.sde_steps": None, "log.save_freq": 10, "data.dataset_dir": "data",
    "data.sampler_type": "auto",
}  # fmt: skip
DEFAULTS = {f"train.{key}": value for key, value in TRAIN.items()} | OTHERS
OF_METHOD: dict[str, dict[str, Any]] = {
    "dgpo": {"train.timestep_range": 0.6},
    "dpo": {"train.timestep_range": 0.99, "train.num_train_timesteps": 1},
    "crd": {"train.timestep_range": 0.99, "train.kl_type": "v-based", "train.kl_beta": 0.1, "train.kl_cfg": 4.5},
}
"""Values of single algorithms that differ from `TRAIN`."""

ROWS = (
    PlainRow("model.model_name_or_path", "model.path", "text"),
    PlainRow("train.enable_gradient_checkpointing", "model.gradient_checkpointing", "flag"),
    PlainRow("train.num_inference_steps", "sampler.steps", "whole"),
    PlainRow("scheduler.flow_shift", "sampler.shift"),
    PlainRow("train.group_size", "rollout.group", "count"),
    PlainRow("train.learning_rate", "optimizer.learning_rate"),
    PlainRow("train.adam_weight_decay", "optimizer.weight_decay"),
    PlainRow("train.adam_epsilon", "optimizer.eps"),
    PlainRow("train.max_grad_norm", "optimizer.max_grad_norm"),
    PlainRow("train.num_inner_epochs", "optimizer.epochs", "count"),
    PlainRow("train.seed", "run.seed", "whole", "the random numbers are others"),
    PlainRow("eval.num_inference_steps", "evaluate.steps", "count"),
)
CALL = (
    "num_frames",
    "negative_prompt",
    "max_sequence_length",
    "guidance_scale_2",
    "cfg_normalization",
    "cfg_truncation",
)
"""Keys of `train` that its model adapters take as arguments of the pipeline's call, by the same names."""
PICTURES = ("kontext", "edit", "i2v", "v2v", "i2av")
"""Parts of the names of model types that take a picture or a video with each prompt."""
SIZES = "a picture of a prompt gets the size of model.call.height and model.call.width"
MISSING = (
    Missing("data.max_dataset_size", (), "cut the prompt file to this many lines"),
    Missing("model.resume_path", (), "a LoRA there can be the start of a LoRA here: model.lora.start"),
    Missing("train.kl_weight", ("Uniform",), "all steps of a penalty have the same weight here"),
    Missing("train.condition_image_size", (), SIZES),
    Missing("eval.condition_image_size", (), SIZES),
    Missing("train.strength", (), "write it as model.call.strength, if the pipeline's call has it"),
    Missing("train.clip_kl", (), "the penalty `kl` has no clip here"),
    Missing("train.use_ema_ref", (), "the loss compares with the base model, or with the section `reference`"),
    Missing("log.logging_backend", ("none",), "write run.trackers, such as [wandb]; it sends the metrics there"),
)  # fmt: skip
STORED = "how samples are stored is rollout.store, and their dtype is model.dtype"
LAUNCH = "flowgrpo is started with `accelerate launch` or `torchrun`, see docs/scaling.md"
NO_SETTING = "recipes have no such setting"
OTHER_METHOD = "the algorithm of this file does not read it"
IDLE = {
    "launcher": LAUNCH,
    "config_file": LAUNCH,
    "main_process_*": LAUNCH,
    "machine_rank": LAUNCH,
    "num_machines": LAUNCH,
    "num_processes": "the number of processes does not change a run here",
    "data.cache_dir": "prompts are encoded at the start of a run",
    "data.preprocess*": "prompts are encoded at the start of a run",
    "data.enable_preprocess": "prompts are encoded at the start of a run",
    "data.force_reprocess": "prompts are encoded at the start of a run",
    "data.dataloader_num_workers": NO_SETTING,
    "data.sampler_type": "a prompt with its whole group is on one process",
    "model.model_type": "the pipeline's own class decides",
    "model.resume_type": "see model.lora.start",
    "model.master_weight_dtype": "trained weights are always float32",
    "log.save_model_only": "a checkpoint always has what `flowgrpo resume` needs",
    "log.run_name": "see the name of the recipe",
    "log.project": "see run.trackers",
    "log.save_dir": "the run folder is named with --out",
    "log.verbose": NO_SETTING,
    "train.*_device": NO_SETTING,
    "train.latent_storage_dtype": STORED,
    "train.gradient_step_per_epoch": "see optimizer.updates",
    "train.per_device_batch_size": "see rollout.batch",
    "train.time_shift": "the rollout gives the noise levels",
    "*.auto_resize": SIZES,
    "train.switch_ema_ref": "the lagging policy samples from the start",
    "train.guidance_scale": "see model.call",
    "eval.per_device_batch_size": "rollout.batch is for evaluations too",
    "eval.seed": "the noise of evaluations is fixed",
    "scheduler.seed": "run.seed draws the steps too",
    "scheduler.*": "the deterministic sampler has no noise",
    **dict.fromkeys(
        (f"train.{key}" for key in (
            "global_std", "clip_range", "nft_beta", "off_policy", "num_train_timesteps", "time_sampling_strategy",
            "timestep_range", "awm_weighting", "ghuber_power", "beta", "dpo_beta", "use_shared_noise", "clip_dsm",
            "ema_ref_*", "kl_type", "kl_beta", "kl_cfg", "weighting_scheme", "logit_*", "crd_*", "use_old_for_loss",
            "adaptive_logp", "weight_temp", "old_model_decay", "sampling_model_decay", "reward_adaptive_kl",
        )),
        OTHER_METHOD,
    ),
}  # fmt: skip

ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")
WAN = (
    *(f"attn{k}.{layer}" for k in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out.0")),
    "ffn.net.0.proj",
    "ffn.net.2",
)
FLUX = (*ATTENTION, *ADDED, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
LAYERS: dict[str, tuple[str, ...] | None] = {
    "sd3-5": None,
    "flux1": FLUX,
    "flux1-kontext": FLUX,
    "qwen-image": (*ATTENTION, *ADDED, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    "wan2_t2v": WAN,
    "wan2_i2v": WAN,
    "wan2_v2v": WAN,
    "z-image": (
        *(layer.replace("attn.", "attention.") for layer in ATTENTION), "feed_forward.w1", "feed_forward.w2",
        "feed_forward.w3",
    ),
}  # fmt: skip
"""Layers of `target_modules: default` by model type; None for the attention projections, the default of recipes."""
