"""Keys of TRL's GRPOConfig and of `trl grpo` that need no thought, and TRL's own values."""

from __future__ import annotations

from typing import Any

from .conversion import Missing, PlainRow

DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0,
    "top_k": 0, "beta": 0.0, "num_iterations": 1, "epsilon": 0.2, "scale_rewards": "group", "loss_type": "dapo",
    "importance_sampling_level": "token", "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False, "gradient_checkpointing": True, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-8, "lr_scheduler_type": "linear", "seed": 42, "num_train_epochs": 3.0,
    "max_steps": -1, "eval_strategy": "no", "save_steps": 500, "use_vllm": False, "use_peft": False, "lora_r": 16,
    "lora_alpha": 32, "lora_dropout": 0.05, "dtype": "float32", "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "entropy_coef": 0.0, "top_entropy_quantile": 1.0,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0, "vllm_mode": "colocate", "dataset_train_split": "train",
}  # fmt: skip
"""What TRL takes where the file says nothing (version 1.10)."""

ROWS = (
    PlainRow("num_generations", "rollout.group", "count"),
    PlainRow("max_completion_length", "generation.max_tokens", "count"),
    PlainRow("temperature", "generation.temperature"),
    PlainRow("learning_rate", "optimizer.learning_rate"),
    PlainRow("weight_decay", "optimizer.weight_decay"),
    PlainRow("adam_epsilon", "optimizer.eps"),
    PlainRow("max_grad_norm", "optimizer.max_grad_norm"),
    PlainRow("num_iterations", "optimizer.epochs", "count"),
    PlainRow("seed", "run.seed", "whole", "the random numbers are others"),
    PlainRow("save_total_limit", "run.keep", "count"),
    PlainRow(
        "max_prompt_length",
        "generation.max_prompt_tokens",
        "count",
        "a longer prompt is refused, or left out with generation.long_prompts: drop; it is not cut",
    ),
)
CLIENT = "a server of your own is not asked to sample here; generation.engine: vllm starts vLLM in the run"
MISSING = (
    Missing("repetition_penalty", (1,), "sampling and scoring use the same distribution here; leave it out"),
    Missing("generation_kwargs", (), "write generation.temperature, top_p, top_k, min_p and stop"),
    Missing(
        "top_entropy_quantile", (1,), "no objective here trains only on tokens of high entropy; use the whole answer"
    ),
    Missing("off_policy_mask_threshold", (), "objective.correction `mask` bounds the distance from the sampler"),
    Missing("use_bias_correction_kl", (), "the KL has the exact gradient on-policy without it"),
    Missing("sync_ref_model", (), "the reference is the base model here"),
    Missing("use_adaptive_entropy", (), "objective.entropy has a target, and moves its coefficient by another rule"),
    Missing("router_aux_loss_coef", (0, 0.001), "no loss is added for the balance of experts"),
    Missing("cast_lm_head_to_fp32", (), "log-probs are taken in float32 anyway"),
    Missing("label_smoothing_factor", (0,), "no such term here"),
    Missing("neftune_noise_alpha", (0,), "no noise on embeddings here"),
    Missing("lr_scheduler_kwargs", (), "schedules have no further arguments here"),
    Missing("max_tool_calling_iterations", (), "there are no tool calls here"),
    Missing(
        "trust_remote_code", (), "code of a model's repository is not run here; give a model that transformers has"
    ),
    Missing("model_revision", ("main",), "download this revision, and give its folder as model.path"),
    Missing("load_in_4bit", (), "weights are not quantised here: model.dtype bfloat16 takes 2 bytes a weight"),
    Missing("load_in_8bit", (), "weights are not quantised here: model.dtype bfloat16 takes 2 bytes a weight"),
    Missing("use_dora", (), "an adapter is a plain LoRA here"),
    Missing("lora_modules_to_save", (), "an adapter is a plain LoRA here"),
    Missing("lora_target_parameters", (), "an adapter is on linear layers here"),
    Missing(
        "resume_from_checkpoint", (), "a checkpoint of another tool cannot be resumed; model.lora.start takes a LoRA"
    ),
    Missing("vllm_structured_outputs_regex", (), "use the reward text_format with this pattern"),
    Missing("deepspeed", (), "see docs/scaling.md for ZeRO-2 and FSDP2"),
    Missing("fsdp", ("",), "see docs/scaling.md for ZeRO-2 and FSDP2"),
    Missing("load_best_model_at_end", (), "write evaluate.results: best"),
    Missing("push_to_hub", (), "`flowgrpo push RUN OWNER/NAME` uploads a result"),
    Missing(
        "report_to",
        ("none", "all", ["none"], ["all"]),
        "write run.trackers, such as [wandb]; it sends the metrics there",
    ),
    Missing("vllm_server_base_url", (), CLIENT),
)
LOGS = "a run writes metrics.jsonl and samples/ anyway"
LAUNCH = "flowgrpo is started with `accelerate launch` or `torchrun`, see docs/scaling.md"
NO_SETTING = "recipes have no such setting"
HUB = "see `flowgrpo push`"
VLLM = "no vLLM samples here"
IDLE = {
    "output_dir": "the run folder is named with --out",
    "run_name": "see the name of the recipe",
    "project": "see run.trackers",
    "trackio*": "see run.trackers",
    "logging_*": LOGS,
    "log_*": LOGS,
    "num_completions_to_print": LOGS,
    "include_*": LOGS,
    "disable_tqdm": LOGS,
    "hub_*": HUB,
    "save_*": "a checkpoint always has what `flowgrpo resume` needs",
    "eval_*": "evaluations have fixed seeds, and begin and end a run",
    "per_device_eval_batch_size": "see evaluate.batch",
    "num_generations_eval": "there is no evaluation",
    "do_*": NO_SETTING,
    "dataloader_*": NO_SETTING,
    "group_by_length": NO_SETTING,
    "length_column_name": NO_SETTING,
    "label_names": NO_SETTING,
    "train_sampling_strategy": NO_SETTING,
    "remove_unused_columns": "rewards get every column of the prompt file",
    "shuffle_dataset": "prompts are always shuffled",
    "data_seed": "run.seed shuffles the prompts",
    "pad_to_multiple_of": NO_SETTING,
    "ds3_gather_for_generation": NO_SETTING,
    "disable_dropout": "dropout is always off",
    "cache_implementation": NO_SETTING,
    "use_cache": NO_SETTING,
    "use_liger_kernel": NO_SETTING,
    "liger_kernel_config": NO_SETTING,
    "torch_*": NO_SETTING,
    "tf32": NO_SETTING,
    "bf16*": "see model.dtype",
    "fp16*": "see model.dtype",
    "dtype": "see model.dtype",
    "torch_dtype": "see model.dtype",
    "half_precision_backend": "see model.dtype",
    "optim*": "AdamW with the numbers above",
    "average_tokens_across_devices": "a mean is always over all processes",
    "auto_find_batch_size": NO_SETTING,
    "activation_checkpointing*": NO_SETTING,
    "gradient_checkpointing_kwargs": NO_SETTING,
    "accelerator_config": LAUNCH,
    "parallelism_config": LAUNCH,
    "fsdp_*": LAUNCH,
    "ddp_*": LAUNCH,
    "local_rank": LAUNCH,
    "num_processes": LAUNCH,
    "use_cpu": LAUNCH,
    "no_cuda": LAUNCH,
    "debug": NO_SETTING,
    "full_determinism": NO_SETTING,
    "ignore_data_skip": NO_SETTING,
    "restore_callback_states_from_checkpoint": NO_SETTING,
    "skip_memory_metrics": NO_SETTING,
    "prediction_loss_only": NO_SETTING,
    "batch_eval_metrics": NO_SETTING,
    "metric_for_best_model": "evaluate.results: best takes the first reward",
    "greater_is_better": "more of a reward is better",
    "overwrite_output_dir": "a run folder is never overwritten",
    "past_index": NO_SETTING,
    "enable_jit_checkpoint": NO_SETTING,
    "use_transformers_*": NO_SETTING,
    "transformers_continuous_*": NO_SETTING,
    "vllm_importance_sampling_cap": "see objective.correction",
    "vllm_*": VLLM,
    "ref_model_*": "the reference is the base model",
    "entropy_coef_*": "see objective.entropy",
    "entropy_target": "see objective.entropy",
    "sapo_*": "the loss of this file does not read it",
    "vespo_*": "the loss of this file does not read it",
    "lora_*": "all weights are trained",
    "use_rslora": "all weights are trained",
    "bnb_*": "weights are not quantised",
    "use_bnb_nested_quant": "weights are not quantised",
    "dataset_streaming": "prompt files are read whole",
    "streaming": "prompt files are read whole",
    "dataset_num_proc": "prompt files are read whole",
    "ignore_bias_buffers": NO_SETTING,
    "loss_weights": "there is one loss",
    "epsilon*": "the loss of this file does not read it",
}

DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
"""Values of `loss_type` that only DPOConfig has."""
DPO_KEYS = (
    "label_smoothing", "loss_weights", "precompute_ref_log_probs", "reference_free", "rpo_alpha", "f_divergence_type",
    "truncation_mode", "ld_alpha", "discopop_tau", "use_weighting",
)  # fmt: skip
"""Settings that only DPOConfig has."""
