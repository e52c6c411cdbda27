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
