"""HPSv3: a vision-language model trained on human preferences, which also predicts the uncertainty of its score.

Ma et al., "HPSv3: Towards Wide-Spectrum Human Preference Score" (2508.03789), section 4: Qwen2-VL 7B with a head that
predicts the mean and the spread of the score. The reward is the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..backbones.model_loading import check_dtype, find_file, linear_stack, read_state
from ..backbones.qwen2_vl import PLACE_OF_PROMPT, fit_pixels, load_scorer, read_rubric
from ..options import check_count, check_positive
from ..pixels import as_frames
from ..scores import Scores

TOKEN = "<|Reward|>"
CONSTANTS = ("INSTRUCTION", "prompt_with_special_token")
PIXELS = 256 * 28 * 28


class HpsV3:
    """Human preference: HPSv3's mean score, unbounded, up to about 12 for the best images.

    The weights are read under their published names. The rubric is part of the model's own release. To get it, run
    `pip download --no-deps hpsv3==1.0.0`, unzip the wheel, and give the path of `hpsv3/dataset/data_collator_qwen.py`.

    Args:
        rubric: path of the text that asks for the score and has `{text_prompt}` and `<|Reward|>` in it. It is a text
            file, or the Python file of the release that contains the text.
        checkpoint: path of `HPSv3.safetensors`, or "hf-hub:ORG/NAME/FILE".
        base: folder or model id of Qwen2-VL-7B-Instruct; only its configuration and processor are read.
        divisor: the score is divided by this number.
        device: where to score.
        dtype: data type of the weights: float32, or bfloat16 as published, in half the memory. The head is float32.
        batch_size: largest number of images, or frames of videos, in one forward pass, and of samples in one call.
        frames: how many frames of a video are scored at most, evenly spaced.

    Raises:
        ValueError: a file is missing, or the weights do not fit.
    """

    name = "hpsv3"

    def __init__(
        self,
        rubric: str,
        *,
        checkpoint: str = "hf-hub:MizzenAI/HPSv3/HPSv3.safetensors",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        divisor: float = 1.0,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 4,
        frames: int = 4,
    ) -> None:
        check_count("hpsv3", "batch_size", batch_size)
        check_count("hpsv3", "frames", frames)
        check_positive("hpsv3", "divisor", divisor)
        self.rubric = read_rubric("hpsv3", rubric, CONSTANTS, [TOKEN])
        path = find_file("hpsv3", "checkpoint", checkpoint)
        state = read_state("hpsv3", path)
        head = linear_stack(state, "rm_head.", nn.ReLU)
        if head is None:
            raise ValueError(f"hpsv3: {path} has no head rm_head.*; give HPSv3.safetensors")
        kind = check_dtype("hpsv3", dtype)
        self.scorer = load_scorer("hpsv3", state, base, [TOKEN], head, origin=str(path), device=device, dtype=kind)
        self.divisor, self.device, self.batch_size, self.frames = divisor, device, batch_size, frames

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Preference for each image, given its prompt.

        Args:
            images: [B, 3, H, W] in [0, 1], scaled to about as many pixels as 448×448 has, with their proportions kept;
                for videos [B, F, 3, H, W] the frames' scores are averaged.
            prompts: B strings.
            columns: ignored.

        Returns:
            B scores. Sub-score `spread`: the second output of the head, unchanged.

        Raises:
            ValueError: a prompt contains the model's special token.
        """
        frames = as_frames(images, self.frames)
        texts = [self.rubric.replace(PLACE_OF_PROMPT, prompt) for prompt in prompts for _ in range(frames.shape[1])]
        flat = frames.flatten(0, 1)
        outputs = [torch.zeros(0, 2)]
        for start in range(0, len(flat), self.batch_size):
            part = slice(start, start + self.batch_size)
            outputs.append(self.scorer(texts[part], fit_pixels(flat[part], PIXELS, PIXELS))[:, 0].cpu())
        mean, spread = torch.cat(outputs).unflatten(0, frames.shape[:2]).mean(1).unbind(-1)
        return Scores(mean / self.divisor, {"spread": spread.tolist()})

    def close(self) -> None:
        """Release the model."""
        del self.scorer
