"""Keys of UniRL that need no thought, and UniRL's own values."""

from __future__ import annotations

from typing import Any

from .conversion import Missing, PlainRow

BOTH: dict[str, Any] = {
    "num_rollouts": 100, "save_interval": 0, "stack.num_updates_per_batch": 1, "algorithm.clip_range": 1e-4,
    "algorithm.clip_schedule": "constant", "backend.lora_cfg.rank": 8, "backend.lora_cfg.alpha": 16,
    "backend.lora_cfg.target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "backend.lora_cfg.dropout": 0.0,
    "backend.ema_lora_cfg.rank": 8, "backend.ema_lora_cfg.alpha": 16, "backend.ema_lora_cfg.dropout": 0.0,
    "backend.ema_lora_cfg.target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "backend.ema_lora_cfg.ema_decay": 0.001, "backend.ema_lora_cfg.ema_decay_type": "constant",
    "backend.ema_lora_cfg.ema_flat_steps": 0, "backend.ema_lora_cfg.ema_uprate": 0.001,
    "backend.ema_lora_cfg.ema_uphold": 0.5, "backend.ema_lora_cfg.timing": "rollout_end",
    "backend.fsdp_cfg.activation_checkpointing": False, "bundle.config.model_precision": "bf16",
    "algorithm.old_logp_source": "rollout", "sampling.samples_per_prompt": 1, "reward.truncated_reward": "zero",
}  # fmt: skip
DEFAULTS: dict[str, Any] = BOTH | {
    "sampling.num_inference_steps": 50, "sampling.guidance_scale": 7.5, "sampling.height": 256, "sampling.width": 256,
    "sampling.num_frames": 16, "sampling.eta": 1.0, "sampling.init_same_noise": False, "sampling.seed": 42,
    "adv_use_global_std": False, "sampling.scheduler.config.window_size": 4,
    "sampling.scheduler.config.strategy": "all", "sampling.scheduler.config.iters_per_window": 25,
    "sampling.scheduler.config.roll_back": False, "algorithm.kl_mask_threshold": 1e-5,
    "algorithm.add_kl_coefficient": True, "algorithm.beta": 1.0, "algorithm.adv_clip_max": 5.0,
    "algorithm.use_adaptive_weight": True, "algorithm.train_timestep_mode": "all",
    "algorithm.training_timestep_fraction": 0.99,
}  # fmt: skip
"""What UniRL takes for images and videos where the file says nothing."""
OF_TEXT: dict[str, Any] = BOTH | {
    "sampling.temperature": 0.7, "sampling.top_p": 0.9, "sampling.top_k": 1024, "sampling.max_new_tokens": 512,
    "adv_normalization_scope": "group", "normalize_adv_by_std": True, "algorithm.loss_agg_mode": "token-mean",
    "algorithm.horizon": 8192, "algorithm.drpo_epsilon": 12.5, "algorithm.penalty_mu_weighted": True,
    "eval_interval": 0, "eval_num_prompts": 60, "eval_samples_per_prompt": 16, "eval_temperature": 1.0,
    "reward.overlong_buffer_len": 4096, "reward.overlong_penalty_factor": 1.0, "pipeline.enable_thinking": False,
}  # fmt: skip
"""What UniRL takes for text where the file says nothing."""

OPTIMIZER = "backend.optimizer_cfg."
ROWS = (
    PlainRow(f"{OPTIMIZER}learning_rate", "optimizer.learning_rate"),
    PlainRow(f"{OPTIMIZER}weight_decay", "optimizer.weight_decay"),
    PlainRow(f"{OPTIMIZER}adam_epsilon", "optimizer.eps"),
    PlainRow("stack.max_grad_norm", "optimizer.max_grad_norm"),
    PlainRow("sampling.samples_per_prompt", "rollout.group", "count"),
    PlainRow("num_rollouts", "run.iterations", "count"),
)
MISSING = (
    Missing("load_dir", (), "a checkpoint of another tool cannot be resumed; model.lora.start takes a LoRA"),
    Missing("algorithm.kl_coef", (0,), "write a penalty: penalties: [{name: kl, weight: …}]"),
    Missing("algorithm.adv_mode", ("raw",), "advantages are as they are in the loss"),
    Missing("algorithm.apply_time_shift_in_loss", (), "their program refuses it too"),
    Missing("backend.fsdp_cfg.cpu_offload", (), "see docs/scaling.md for what FSDP2 keeps where"),
    Missing("backend.ema_cfg.target_decay", (), "write optimizer.ema: {decay: …, every: 1}"),
    Missing("logging.report_to_wandb", (), "write run.trackers: [wandb]; it sends the metrics there"),
    Missing("sampling.noise_group_ids", (), "which samples share their noise is sampler.plan.shared_noise"),
    Missing("sampling.taylor_cache_interval", (), "no step is skipped here"),
    Missing("bundle.config.vae_ckpt_path", (), "save a pipeline with this part with diffusers, and give its folder"),
    Missing("bundle.config.text_encoder_ckpt_path", (), "save a pipeline with this part, and give its folder"),
)
LAUNCH = "flowgrpo is started with `accelerate launch` or `torchrun`, see docs/scaling.md"
NO_SETTING = "recipes have no such setting"
ENGINE = "another engine would sample; here the denoiser of the run does"
TRACKERS = "see run.trackers"
PRECISION = "see model.dtype; trained weights are float32, and log-probabilities too"
LORA = "an adapter is a plain LoRA"
IDLE = {
    "*._target_": "the other keys say what is meant",
    "algorithm.conditions_cls.path": "the model decides",
    "algorithm.stage_attr": "the model decides",
    "algorithm.*": "the algorithm of this file does not read it",
    "num_devices": "the number of processes does not change a run here",
    "devices_per_node": LAUNCH,
    "workers_per_device": LAUNCH,
    "transport_kind": LAUNCH,
    "transfer_queue.*": LAUNCH,
    "layout": ENGINE,
    "train_fraction": ENGINE,
    "enable_fsdp_offload": ENGINE,
    "weight_sync_interval": "the trained weights sample in every iteration",
    "sync.*": ENGINE,
    "rollout.*": ENGINE,
    "strategy.*": "see sampler.kernel",
    "logging.*": TRACKERS,
    "save_dir": "the run folder is named with --out",
    "save_mode": "a checkpoint always has what `flowgrpo resume` needs",
    "save_interval": "a run always keeps checkpoints; run.checkpoint_every says how often",
    "dump_dir": "a run writes samples/ anyway",
    "batch_size": "the data source says how many prompts a rollout has",
    "*_precision": PRECISION,
    "backend.fsdp_cfg.param_dtype": PRECISION,
    "backend.fsdp_cfg.master_dtype": PRECISION,
    "backend.fsdp_cfg.*": LAUNCH,
    "backend.block_class_names": LAUNCH,
    "backend.trainable_attr": "the denoiser is trained",
    "backend.with_aux": LAUNCH,
    "backend.*lora_cfg.*": LORA,
    "backend.ema_cfg.*": "see optimizer.ema",
    "backend.scheduler_cfg.*": "the learning rate is constant",
    "bundle.config.*": "the pipeline's own",
    "model_config.*": "the pipeline's own",
    "pipeline.*": "the pipeline's own",
    "sampling.scheduler.num_timesteps": "see sampler.steps",
    "sampling.num_samples_per_prompt": "see rollout.group",
    "sampling.num_frames": "the model makes images",
    "sampling.*": "the pipeline of the model has no such argument",
    "data_source.args.run.seed": "run.seed shuffles the prompts",
    "data_source.*": NO_SETTING,
    "reward.*": "see rewards",
    "adv_use_global_std": "their program for text does not read it",
    "eval_*": "their program for images makes no evaluations",
    "stack.*": NO_SETTING,
}
