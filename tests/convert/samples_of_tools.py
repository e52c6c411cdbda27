"""Small configurations of other tools, in the words of those tools, for the tests of conversions."""

BASE = """
import ml_collections

def get_config():
    config = ml_collections.ConfigDict()
    config.seed = 7
    config.mixed_precision = "fp16"
    config.use_lora = True
    config.eval_freq = 20
    config.pretrained = pretrained = ml_collections.ConfigDict()
    pretrained.model = "some/other-model"
    config.sample = sample = ml_collections.ConfigDict()
    sample.num_steps = 40
    sample.guidance_scale = 4.5
    sample.noise_level = 0.7
    sample.same_latent = False
    sample.global_std = True
    sample.sde_window_size = 2
    sample.sde_window_range = (0, 10)
    config.train = train = ml_collections.ConfigDict()
    train.learning_rate = 3e-4
    train.adam_beta1 = 0.9
    train.adam_beta2 = 0.99
    train.adv_clip_max = 5
    train.clip_range = 1e-4
    train.timestep_fraction = 1.0
    train.beta = 0.0
    train.ema = False
    config.reward_fn = ml_collections.ConfigDict()
    return config
"""
CONFIGS = """
import importlib.util
import os

spec = importlib.util.spec_from_file_location("base", os.path.join(os.path.dirname(__file__), "base.py"))
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)

def common():
    config = base.get_config()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.resolution = 512
    config.sample.num_steps = 10
    config.sample.eval_num_steps = 40
    config.sample.train_batch_size = 6
    config.sample.num_image_per_prompt = 12
    config.prompt_fn = "general_ocr"
    return config

def whole():
    gpu_number = 8
    config = common()
    config.dataset = os.path.join(os.getcwd(), "prompts/mine")
    share = config.sample.train_batch_size / config.sample.num_image_per_prompt
    config.sample.num_batches_per_epoch = int(16 / (gpu_number * share))
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch // 2
    config.train.timestep_fraction = 0.99
    config.train.beta = 0.04
    config.train.ema = True
    config.reward_fn = {"pickscore": 1.0, "wonder": 0.5}
    return config

def fast():
    config = whole()
    config.sample.noise_level = 0.8
    config.sample.sde_window_size = 3
    config.sample.sde_window_range = (0, config.sample.num_steps // 2)
    config.sample.sde_type = "cps"
    config.train.clip_range = 1e-5
    config.train.beta = 0.02
    config.reward_fn = {"ocr": 1.0}
    return config
"""

FLOW_FACTORY = """
num_processes: 4
mixed_precision: bf16
data: {dataset_dir: prompts/mine, max_dataset_size: 100}
model: {model_name_or_path: stabilityai/stable-diffusion-3.5-medium, model_type: sd3-5, finetune_type: lora,
        lora_rank: 16, target_modules: default}
log: {run_name: mine, logging_backend: wandb, save_freq: 20}
train:
  trainer_type: grpo
  advantage_aggregation: sum
  clip_range: 2.0e-4
  kl_type: x-based
  kl_beta: 0.01
  resolution: [384, 512]
  num_inference_steps: 10
  guidance_scale: 4.5
  per_device_batch_size: 8
  group_size: 24
  unique_sample_num_per_epoch: 47
  gradient_step_per_epoch: 2
  learning_rate: 3.0e-4
  ema_decay: 0.99
  ema_update_interval: 4
  max_epochs: 50
scheduler: {dynamics_type: Flow-SDE, noise_level: 0.8, num_sde_steps: 2, sde_steps: [1, 2, 3, 4, 5]}
eval: {resolution: 1024, num_inference_steps: 40, eval_freq: 10}
rewards:
  - {name: pick, reward_model: PickScore, batch_size: 16}
  - {name: own, reward_model: my_package.rewards.Nice, weight: 0.25}
"""

TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: somebody/sums
reward_funcs: [think_format_reward, get_soft_overlong_punishment]
reward_weights: [1.0, 0.5]
learning_rate: 1e-5
lr_scheduler_type: cosine
warmup_ratio: 0.1
max_steps: 400
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
steps_per_generation: 16
num_generations: 8
num_iterations: 2
max_completion_length: 128
beta: 0.001
epsilon: 0.2
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: false
eval_strategy: steps
eval_steps: 40
report_to: wandb
hub_token: hf_secretsecret
"""

UNIRL = """
num_devices: 4
batch_size: 24
adv_use_global_std: true
num_rollouts: 300
save_interval: 20
logging: {report_to_wandb: "${oc.decode:${oc.env:REPORT,true}}", run_name: "${oc.env:RUN_NAME,mine}"}
bundle:
  _target_: unirl.models.sd3.bundle.SD3Bundle.from_config
  config:
    _target_: unirl.models.sd3.config.SD3PipelineConfig
    pretrained_model_ckpt_path: ${oc.env:PRETRAINED_MODEL,stabilityai/stable-diffusion-3.5-medium}
    model_precision: bf16
    shift: 3.0
pipeline:
  _target_: unirl.models.sd3.pipeline.SD3Pipeline
  shift: ${bundle.config.shift}
  strategy: {_target_: unirl.sde.kernels.FlowSDEStrategy}
backend:
  _target_: unirl.train.backend.fsdp.FSDPBackend
  block_class_names: [JointTransformerBlock]
  fsdp_cfg: {_target_: unirl.train.configs.FSDPConfig, param_dtype: bf16, activation_checkpointing: true}
  optimizer_cfg: {_target_: unirl.train.backend.base.OptimizerConfig, learning_rate: 2.0e-4, adam_beta1: 0.9,
                  adam_beta2: 0.99, adam_epsilon: 1.0e-8, weight_decay: 0.0}
  scheduler_cfg: {_target_: unirl.train.backend.base.LrSchedulerConfig, type: constant, total_steps: 1000}
  lora_cfg: {_target_: unirl.train.configs.LoraConfig, rank: 16, alpha: 32, dropout: 0.0,
             target_modules: [attn.to_q, attn.to_k]}
rollout: {_target_: unirl.rollout.engine.trainside.engine.TrainsideRolloutEngine, forward_batch_size: 8}
reward:
  _target_: unirl.reward.service.RewardService
  backend:
    _target_: unirl.reward.local.pickscore.PickScoreRewardScorer
    config: {_target_: unirl.reward.local.pickscore.PickScoreSpec, batch_size: 4}
algorithm:
  _target_: unirl.algorithms.flowgrpo.FlowGRPO
  stage_attr: diffusion
  clip_range: 2.0e-4
  old_logp_source: replay
  params: ${sampling}
stack: {_target_: unirl.train.stack.TrainStack, micro_batch_size: 2, max_grad_norm: 0.5, num_updates_per_batch: 2}
data_source:
  _target_: unirl.data.data_source.MultimodalRLDataSource
  args:
    run: {data_path: prompts/mine/train.txt, eval_data_path: prompts/mine/test.txt, seed: 42}
    algorithm: {prompts_per_rollout: "${batch_size}"}
sampling:
  _target_: unirl.types.sampling.DiffusionSamplingParams
  num_inference_steps: 12
  guidance_scale: 4.5
  height: 384
  width: 512
  eta: 0.8
  samples_per_prompt: 8
  seed: 7
  init_same_noise: true
  scheduler:
    _target_: unirl.utils.scheduler_utils.AllSDEScheduler
    num_timesteps: ${..num_inference_steps}
    num_sde_steps: 3
    timestep_fraction: [0.25, 0.75]
"""

VERL_OMNI = r"""
#!/usr/bin/env bash
# A comment with python3 -m verl_omni.trainer.main_diffusion in it.
set -x
WORKSPACE=${WORKSPACE:-$HOME}
train_path=$WORKSPACE/prompts/mine/train.parquet
model_name=${MODEL_NAME:-stabilityai/stable-diffusion-3.5-medium}
NUM_GPUS=4
ROLLOUT_TP=2
SIDE=384
ATTN_BACKEND=native
if [ "${FA3:-0}" = "1" ]; then
    ATTN_BACKEND=_flash_3_varlen_hub
fi

python3 -m verl_omni.trainer.main_diffusion \
    data.train_files=$train_path \
    data.val_files=$WORKSPACE/prompts/mine/test.parquet \
    data.train_batch_size=$((NUM_GPUS * 4 / 2)) \
    data.val_max_samples=32 \
    data.seed=42 \
    actor_rollout_ref.model.path=$model_name \
    actor_rollout_ref.model.algorithm=flow_grpo \
    actor_rollout_ref.model.attn_backend=$ATTN_BACKEND \
    actor_rollout_ref.model.lora_rank=16 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules="['to_q','to_k']" \
    'actor_rollout_ref.model.extra_tokenizers={clip: {path: tokenizer, max_length: 77}}' \
    actor_rollout_ref.actor.diffusion_loss.clip_ratio=2e-5 \
    actor_rollout_ref.actor.optim.lr=1e-4 \
    actor_rollout_ref.actor.optim.weight_decay=0.0001 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.04 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$ROLLOUT_TP \
    actor_rollout_ref.rollout.pipeline.height=$SIDE \
    actor_rollout_ref.rollout.pipeline.width=$SIDE \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \
    actor_rollout_ref.rollout.pipeline.guidance_scale=4.5 \
    actor_rollout_ref.rollout.pipeline.max_sequence_length=256 \
    actor_rollout_ref.rollout.algo.noise_level=0.8 \
    actor_rollout_ref.rollout.algo.sde_type="sde" \
    actor_rollout_ref.rollout.algo.sde_window_size=3 \
    actor_rollout_ref.rollout.algo.sde_window_range="[0,5]" \
    ++actor_rollout_ref.rollout.engine_kwargs.vllm_omni.max_num_seqs=${MAX_NUM_SEQS:-256} \
    actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=28 \
    reward.custom_reward_function.path=verl_omni/utils/reward_score/pickscore_reward.py \
    reward.custom_reward_function.name=compute_score_pickscore \
    trainer.logger='["console", "wandb"]' \
    trainer.experiment_name=mine \
    trainer.default_local_dir=$(pwd)/out \
    trainer.test_freq=20 \
    trainer.save_freq=50 \
    trainer.total_training_steps=100 \
    "$@" 2>&1 | tee run.log
"""
