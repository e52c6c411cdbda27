"""Keys of flow_grpo that need no thought: carried over as they are, without a counterpart, or without effect here."""

from __future__ import annotations

from .conversion import Missing, PlainRow

ROWS = (
    PlainRow("pretrained.model", "model.path", "text"),
    PlainRow("activation_checkpointing", "model.gradient_checkpointing", "flag"),
    PlainRow("sample.num_steps", "sampler.steps", "whole"),
    PlainRow("train.learning_rate", "optimizer.learning_rate"),
    PlainRow("train.adam_weight_decay", "optimizer.weight_decay"),
    PlainRow("train.adam_epsilon", "optimizer.eps"),
    PlainRow("train.max_grad_norm", "optimizer.max_grad_norm"),
    PlainRow("train.num_inner_epochs", "optimizer.epochs", "whole"),
    PlainRow("train.adv_clip_max", "clamp"),
    PlainRow("sample.eval_num_steps", "evaluate.steps", "whole"),
    PlainRow("eval_freq", "evaluate.every", "whole"),
    PlainRow("seed", "run.seed", "whole", "the random numbers are others"),
    PlainRow("save_freq", "run.checkpoint_every", "whole"),
    PlainRow("num_checkpoint_limit", "run.keep", "whole"),
)
MISSING = (
    Missing("sample.kl_reward", (0,), "write a penalty in place of a reward: penalties.kl.weight"),
    Missing("train.sft", (0,), "no supervised loss is mixed in here"),
    Missing("pretrained.revision", ("main",), "download this revision, and give its folder as model.path"),
    Missing("resume_from", (), "a checkpoint of another tool cannot be resumed; model.lora.start takes a LoRA"),
)
NAMED_OUTSIDE = "the run folder is named with --out"
IDLE = {
    "run_name": NAMED_OUTSIDE,
    "logdir": NAMED_OUTSIDE,
    "save_dir": NAMED_OUTSIDE,
    "run_project": "trackers are named in run.trackers",
    "allow_tf32": "recipes have no such setting",
    "debug": "recipes have no such setting",
    "fsdp_optimizer_offload": "how a run is spread over GPUs is a matter of its launch",
    "prompt_fn*": "the ending of the prompt file decides",
    "sample.batch_size": "no script of theirs reads it",
    "sample.test_batch_size": "rollout.batch is for evaluations too",
    "train.batch_size": "rollout.batch is for sampling and training",
    "train.cfg": "training uses the guidance of model.call, as sampling does",
    "train.clip_range_*": "only their script for BAGEL reads it",
    "train.highclip_range": "no script of theirs reads it",
    "train.sft_batch_size": "no supervised loss is mixed in here",
    "train.timestep_fraction": "their script trains the steps of its window",
    "sample.sde_window_*": "their script for this configuration has no window",
    "sample.sde_type": "their script for this configuration has one kind of noise",
    "sample.eval_guidance_scale": "their script for this configuration evaluates with sample.guidance_scale",
    "sample.train_batch_size": "see rollout.batch",
    "per_prompt_stat_tracking": "samples of a prompt are always compared with each other",
    "diffusion_loss": "no script of theirs reads it",
    "train.timestep_shift": "only their script for BAGEL reads it",
    "train.algorithm": "there is one algorithm",
    "resolution": "see model.call",
}
