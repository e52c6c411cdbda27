"""The settings that configurations of TRL share: the model and its adapter, the optimizer, the length of a run."""

from __future__ import annotations

from .conversion import Conversion

MODEL = "MODEL_FOLDER"
"""The path of a model that the file does not name: training_args is about everything else."""
SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
}  # fmt: skip
EIGHT_BITS = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
"""AdamW of bitsandbytes with averages in 8 bits."""


def model_settings(conversion: Conversion) -> None:
    """The model, its computing type and its adapter."""
    settings = conversion.settings
    name = settings.text("model_name_or_path")
    if name is None:
        conversion.follow("not in the file", "model.path", MODEL)
        conversion.want("the file does not name the model: write model.path, a folder or a hub id")
    else:
        conversion.carry("model_name_or_path", "model.path", name)
    half = settings.flag("fp16")
    brain = settings.flag("bf16") if settings.value("bf16") is not None else not half
    dtype = "float16" if half else "bfloat16" if brain else "float32"
    keys = [key for key in ("bf16", "fp16") if settings.value(key) is not None]
    note = "computing type; trained weights are moved in float32"
    if keys:
        conversion.carry(keys, "model.dtype", dtype, note)
    else:
        conversion.follow("bf16 by default", "model.dtype", dtype, note)
    checkpointing = settings.flag("gradient_checkpointing")
    note = "prompts are then encoded for every completion; false is faster if memory allows" if checkpointing else ""
    conversion.carry("gradient_checkpointing", "model.gradient_checkpointing", checkpointing, note)
    attention = settings.text("attn_implementation")
    if attention in ("eager", "sdpa", "flash_attention_2"):
        conversion.carry("attn_implementation", "model.attention", attention)
    elif attention is not None:
        conversion.lose("attn_implementation", "model.attention is eager, sdpa or flash_attention_2")
    values = settings.value("chat_template_kwargs")
    if values is not None and not isinstance(values, dict):
        raise settings.wrong("chat_template_kwargs", "a mapping of variables of the chat template")
    if values:
        conversion.carry("chat_template_kwargs", "model.chat_template_kwargs", values)
    conversion.used("chat_template_kwargs")
    if (said := settings.text("system_prompt")) is not None:
        conversion.carry("system_prompt", "model.system", said, "a key of open-r1")
    if not settings.flag("use_peft"):
        conversion.carry("use_peft", "model.train", "full")
        if quantised := [key for key in ("load_in_4bit", "load_in_8bit") if settings.flag(key)]:
            conversion.lose(quantised, "quantised weights are frozen, and all weights are trained; train a LoRA")
        conversion.used("load_in_4bit", "load_in_8bit")
        return
    conversion.carry("use_peft", "model.train", "lora")
    _fewer_bits(conversion, dtype)
    _adapter(conversion)


def _fewer_bits(conversion: Conversion, dtype: str) -> None:
    """Quantised weights under a LoRA."""
    settings = conversion.settings
    kind, key = ("nf4", "load_in_4bit") if settings.flag("load_in_4bit") else ("int8", "load_in_8bit")
    conversion.used("load_in_4bit", "load_in_8bit")
    if not settings.flag(key):
        return
    if dtype != "bfloat16":
        conversion.lose(key, f"model.quantize {kind} computes in bfloat16, and the file has {dtype}; write both keys")
    elif kind == "nf4" and settings.text("bnb_4bit_quant_type") not in (None, "nf4"):
        conversion.lose([key, "bnb_4bit_quant_type"], "write model.quantize: nf4; there are no other types of 4 bits")
    elif settings.flag("use_vllm"):
        conversion.lose(key, "vLLM gets whole weights; write generation.engine: transformers, then model.quantize: nf4")
    else:
        note = "weights alone have 8 bits here, a scale for each row" if kind == "int8" else "QLoRA"
        conversion.carry(key, "model.quantize", kind, note)


def _adapter(conversion: Conversion) -> None:
    settings = conversion.settings
    rank, alpha = settings.count("lora_r"), settings.number("lora_alpha") or 0.0
    conversion.carry("lora_r", "model.lora.rank", rank)
    if settings.flag("use_rslora"):
        note = "times the root of the rank: use_rslora divides by the root alone"
        conversion.carry(["lora_alpha", "use_rslora"], "model.lora.alpha", float(f"{alpha * rank**0.5:.6g}"), note)
    else:
        conversion.carry("lora_alpha", "model.lora.alpha", alpha)
        conversion.used("use_rslora")
    conversion.follow("the beginning of peft", "model.lora.init", "default")
    if (settings.number("lora_dropout") or 0.0) > 0:
        conversion.lose("lora_dropout", "an adapter has no dropout: it would change the ratio before the weights move")
    conversion.used("lora_dropout", "lora_task_type")
    targets = settings.texts("lora_target_modules")
    if targets is None:
        text = "peft chooses layers by the model's class, mostly q_proj and v_proj; here every linear layer has an "
        conversion.lose("lora_target_modules", text + "adapter: name layers in model.lora.targets to have fewer")
    elif targets == ["all-linear"]:
        conversion.used("lora_target_modules")
    else:
        conversion.carry("lora_target_modules", "model.lora.targets", targets)


def optimizer_settings(conversion: Conversion) -> None:
    """AdamW, its schedule and its warm-up."""
    settings = conversion.settings
    betas = [settings.number("adam_beta1"), settings.number("adam_beta2")]
    conversion.carry(["adam_beta1", "adam_beta2"], "optimizer.betas", betas)
    conversion.follow("no average of the weights", "optimizer.ema", None)
    schedule = settings.text("lr_scheduler_type") or "linear"
    if schedule in SCHEDULES:
        conversion.carry("lr_scheduler_type", "optimizer.schedule", SCHEDULES[schedule])
    else:
        conversion.lose(
            "lr_scheduler_type", f"optimizer.schedule is {', '.join(dict.fromkeys(SCHEDULES.values()))} or inverse"
        )
        conversion.follow("a schedule that is not known", "optimizer.schedule", "linear")
    name = settings.text("optim") or "adamw_torch"
    if name in EIGHT_BITS:
        note = "both averages stay on the card" if name.startswith("paged") else ""
        conversion.carry("optim", "optimizer.type", "adamw_8bit", note)
    elif not name.startswith("adamw") or "bit" in name:
        conversion.lose("optim", "AdamW moves the weights here; optimizer.type says in how many bits its averages are")
    conversion.used("optim")
    steps, ratio = settings.number("warmup_steps") or 0.0, settings.number("warmup_ratio") or 0.0
    total = settings.whole("max_steps") or -1
    share = ratio or (steps if 0 < steps < 1 else 0.0)
    conversion.used("warmup_steps", "warmup_ratio")
    if steps >= 1:
        conversion.carry("warmup_steps", "optimizer.warmup", int(steps))
    elif share and total > 0:
        key = "warmup_ratio" if ratio else "warmup_steps"
        conversion.carry([key, "max_steps"], "optimizer.warmup", round(share * total))
    elif share:
        key = "warmup_ratio" if ratio else "warmup_steps"
        conversion.lose(key, f"write optimizer.warmup: {share:g} times the number of all optimizer steps")


def length_settings(conversion: Conversion, steps: int) -> None:
    """The length of a run, in iterations of `steps` optimizer steps."""
    settings = conversion.settings
    total, epochs = settings.whole("max_steps") or -1, settings.number("num_train_epochs")
    if total > 0:
        note = f"{steps} optimizer steps in an iteration" if steps > 1 else ""
        conversion.carry("max_steps", "run.iterations", max(-(-total // steps), 1), note)
        if settings.has("num_train_epochs"):
            conversion.ignore("num_train_epochs", "max_steps sets the length, there too")
    else:
        prompts = conversion.recipe["rollout"]["prompts"]
        times = "the number of epochs" if epochs is None else f"{epochs:g}"
        text = f"write run.iterations: {times} × the number of training prompts / {prompts}; 1000 stands in its place"
        conversion.lose("num_train_epochs", text)
        conversion.follow("to be written", "run.iterations", 1000)
        conversion.used("max_steps")
    if settings.value("save_strategy") in (None, "steps"):
        every(conversion, ["save_steps"], "run.checkpoint_every", steps)
    else:
        conversion.ignore("save_strategy", "a run always keeps checkpoints; run.checkpoint_every says how often")
        conversion.used("save_steps")


def every(conversion: Conversion, keys: list[str], ours: str, steps: int) -> None:
    """An interval of optimizer steps, the last of `keys`, in iterations; below 1 it is a share of all steps."""
    settings = conversion.settings
    every, total = settings.number(keys[-1]) or 0.0, settings.whole("max_steps") or -1
    if every >= 1:
        conversion.carry(keys[-1], ours, max(round(every / steps), 1))
    elif every > 0 and total > 0:
        conversion.carry([keys[-1], "max_steps"], ours, max(round(every * total / steps), 1))
    elif settings.has(keys[-1]):
        conversion.lose(keys, f"write {ours}, a number of iterations")
    conversion.used(*keys)
