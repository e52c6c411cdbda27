"""What the keys of recipes mean: the descriptions in the schema, and more words where those are not enough."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.fields import FieldInfo

NOTES = {
    "task": "`text` for language models, see [runs of text](#runs-of-text).",
    "name": "Name of the recipe; run folders are named after it.",
    "paper": "The papers and equations that the recipe follows.",
    "model.train": "A LoRA adapter on the denoiser, or all of the denoiser's weights.",
    "model.lora.init": "`gaussian` draws A from N(0, 1/rank²), `default` is peft's. B starts at zero in both.",
    "model.call": "Height, width, frames, guidance scale, negative prompt and so on; a picture is given by its path.",
    "model.variant": "How single states are evaluated; `auto` takes the lightest way that replays the pipeline's own "
    "loop exactly.",
    "model.gradient_checkpointing": "Recompute activations in the backward pass: less memory, more time.",
    "data.train": "Files end in .txt (a prompt a line), .jsonl, .json, .csv or .tsv (a `prompt` column; the others go "
    "to the rewards). For a pipeline that takes a picture, a column `image` has its path, from the folder of the file.",
    "data.heldout": "`null` switches evaluation off.",
    "data.test": "Choose nothing by them.",
    "sampler.steps": "Denoising steps.",
    "sampler.sigmas": "The levels fall from at most 1 to exactly 0. They replace `sampler.steps`.",
    "rollout.group": "With plan `spine`, the number of main lines per prompt; plan `branch` does not use it.",
    "extensions": "See [extensions](extensions.md).",
    "critic.learning_rate": "Learning rate of the critic's AdamW.",
    "rollout.decode_batch": "Latents in one call of the decoder.",
    "rewards": "See [rewards.md](rewards.md).",
    "rewards[].name": "A name of `flowgrpo rewards`, `path/to/file.py:name`, or `package.module:name`.",
    "rewards[].weight": "Factor in the combination. Below 0, less of the reward is better; 0 only records the reward.",
    "rewards[].label": "Name of the reward in metrics; its own name if left out.",
    "rewards[].options": "Arguments of a class's constructor, or parameters of a function.",
    "evaluate.rewards": "An entry has the same keys as an entry of `rewards`.",
    "optimizer.learning_rate": "Learning rate of AdamW.",
    "optimizer.betas": "Decay of AdamW's averages.",
    "optimizer.weight_decay": "Decoupled from the gradient.",
    "optimizer.eps": "Added to the root of the second average.",
    "optimizer.max_grad_norm": "Gradients are scaled down to this norm.",
    "optimizer.ema": "`null` keeps no average: the weights themselves are evaluated and saved.",
    "run.iterations": "Each is a rollout and its optimizer steps.",
    "run.seed": "Seed of everything random in training: prompts, noise, random windows, adapter.",
    "run.checkpoint_every": "Iterations between checkpoints; the last iteration always writes one.",
    "run.checkpoint_minutes": "Less often if writing takes long; see [Checkpoints](scaling.md#checkpoints).",
}
"""Keys that the schema does not describe, or not well enough for a reader who does not see the code."""

TEXT_NOTES = {
    "model.dtype": "The optimizer moves trained weights in float32.",
    "model.train": "A LoRA adapter on every linear layer but the last, or all weights.",
    "model.gradient_checkpointing": "Recompute activations in the backward pass: less memory, more time; prompts are "
    "then not shared.",
    "evaluate.rewards": "An entry has the same keys as an entry of `rewards`.",
}

MASKED_NOTES = {
    **TEXT_NOTES,
    "model.gradient_checkpointing": "Recompute activations in the backward pass: less memory, more time.",
}

NOTES_OF = {"images": NOTES, "text": {**NOTES, **TEXT_NOTES}, "masked": {**NOTES, **MASKED_NOTES}}
"""The notes of each task."""


def meaning(key: str, field: FieldInfo, notes: Mapping[str, str]) -> str:
    """The meaning of a key.

    Raises:
        ValueError: neither the schema nor the notes describe the key.
    """
    words = " ".join(filter(None, [field.description, notes.get(key)]))
    if not words:
        raise ValueError(f"the recipe key {key} has no meaning; give its field a description in flowgrpo/configs")
    return words
