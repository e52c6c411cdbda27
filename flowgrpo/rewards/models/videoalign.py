"""VideoAlign (VideoReward): three scores of a video, each read at a token of its own.

Liu et al., "Improving Video Generation with Human Feedback" (2501.13918), section 3: Qwen2-VL 2B, fine-tuned with LoRA,
scores visual quality (VQ), motion quality (MQ) and text alignment (TA). The tokens of VQ and MQ stand before the
prompt, so VQ and MQ do not depend on the prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backbones.model_loading import check_dtype, linear, read_state
from ..backbones.qwen2_vl import FACTOR, PLACE_OF_PROMPT, fit_pixels, load_scorer, read_rubric
from ..options import check_count, check_positive, check_weights
from ..scores import Scores

AXES = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{axis}_reward|>" for axis in AXES)
CONSTANTS = ("DETAILED_PROMPT_WITH_SPECIAL_TOKEN",)
# Mean and standard deviation of each axis on the authors' data, used if the settings of the folder do not give them.
STATISTICS = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
LEAST_PIXELS, MOST_PIXELS = 128 * FACTOR**2, 256 * FACTOR**2
RATE, LEAST_FRAMES = 2.0, 4


class VideoAlign:
    """Quality, motion and text alignment of videos: VideoAlign's three scores, standardised and added.

    Args:
        folder: the folder with `model_config.json` and `checkpoint-N/model.pth`. If there are several checkpoints, the
            one with the largest N is used.
        rubric: path of the text that asks for the scores and has `{text_prompt}` and the tokens `<|VQ_reward|>`,
            `<|MQ_reward|>` and `<|TA_reward|>` in it. It is a text file, or `prompt_template.py` of the release.
        base: folder or model id of Qwen2-VL-2B-Instruct; only its configuration and processor are read.
        weights: weights of VQ, MQ and TA in the sum, 1 each by default.
        video_rate: frames per second of the scored videos. The model sees two frames for each second, and at least 4.
        device: where to score.
        dtype: data type of the weights: float32, or bfloat16 as published, in half the memory. The head is float32.
        batch_size: largest number of videos in one call and in one forward pass.

    Raises:
        ValueError: a file is missing or has another layout, or the weights do not fit.
    """

    name = "videoalign"

    def __init__(
        self,
        folder: str,
        rubric: str,
        *,
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        weights: Mapping[str, float] | None = None,
        video_rate: float = 16.0,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 2,
    ) -> None:
        check_count("videoalign", "batch_size", batch_size)
        check_positive("videoalign", "video_rate", video_rate, "16")
        self.weights = check_weights("videoalign", weights, dict.fromkeys(AXES, 1.0))
        self.rubric = read_rubric("videoalign", rubric, CONSTANTS, TOKENS)
        path, settings = find_checkpoint(Path(folder).expanduser())
        self.statistics = _statistics(settings)
        state = merge_lora(read_state("videoalign", path), _lora_scale(settings, path))
        head = state.get("rm_head.weight")
        if head is None or head.ndim != 2 or head.shape[0] not in (1, len(AXES)):
            raise ValueError(f"videoalign: {path} has no head rm_head.weight of 1 or {len(AXES)} rows")
        self.scorer = load_scorer(
            "videoalign",
            state,
            base,
            TOKENS,
            linear(head, None),
            origin=str(path),
            device=device,
            dtype=check_dtype("videoalign", dtype),
        )
        self.device, self.batch_size, self.video_rate = device, batch_size, video_rate

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Score of each video.

        Args:
            images: [B, F, 3, H, W] in [0, 1], with two frames or more.
            prompts: B strings.
            columns: ignored.

        Returns:
            B weighted sums; sub-scores `VQ`, `MQ` and `TA`, standardised.

        Raises:
            ValueError: the images are single images and not videos, or a prompt contains one of the tokens.
        """
        if images.ndim != 5 or images.shape[1] < 2:
            raise ValueError(f"videoalign: images have shape {list(images.shape)}; give videos [B, F, 3, H, W]")
        chosen = images[:, sampled_frames(images.shape[1], self.video_rate)]
        rows = [torch.zeros(0, len(AXES))]
        for start in range(0, len(prompts), self.batch_size):
            part = slice(start, start + self.batch_size)
            texts = [self.rubric.replace(PLACE_OF_PROMPT, prompt) for prompt in prompts[part]]
            videos = fit_pixels(chosen[part].flatten(0, 1), LEAST_PIXELS, MOST_PIXELS)
            outputs = self.scorer(texts, videos.unflatten(0, (len(texts), -1)))
            # If the head has a row for each axis, each axis is read at its own token.
            rows.append((outputs.diagonal(dim1=1, dim2=2) if outputs.shape[2] > 1 else outputs[:, :, 0]).cpu())
        mean, deviation = torch.tensor([self.statistics[axis] for axis in AXES]).unbind(1)
        standard = (torch.cat(rows) - mean) / deviation
        total = standard @ torch.tensor([self.weights[axis] for axis in AXES])
        return Scores(total, {axis: standard[:, k].tolist() for k, axis in enumerate(AXES)})

    def close(self) -> None:
        """Release the model."""
        del self.scorer


def sampled_frames(count: int, rate: float) -> list[int]:
    """Return the numbers of the frames that the model sees: two for each second, evenly spaced from first to last.

    Their count is even, and at least 4 if the video has 4 frames.

    Args:
        count: frames of the video, 2 or more.
        rate: frames per second of the video.
    """
    wanted = min(max(count / rate * RATE, LEAST_FRAMES), count)
    number = min(2 * round(wanted / 2), count - count % 2)
    return torch.linspace(0, count - 1, number).round().long().tolist()


def find_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path of the weights, and the settings, of a VideoAlign folder.

    Raises:
        ValueError: the weights or the settings are missing.
    """
    settings = folder / "model_config.json"
    if not settings.is_file():
        raise ValueError(f"videoalign: {folder} has no model_config.json; give the folder of KwaiVGI/VideoReward")
    found = {
        int(path.parent.name.removeprefix("checkpoint-")): path
        for path in folder.glob("checkpoint-*/model.pth")
        if path.parent.name.removeprefix("checkpoint-").isdecimal()
    }
    if not found:
        raise ValueError(
            f"videoalign: {folder} has no checkpoint-N/model.pth; checkpoints that have the LoRA in a separate "
            "file cannot be read"
        )
    return found[max(found)], json.loads(settings.read_text(encoding="utf-8"))


def merge_lora(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the weights of a model that peft wrapped, with every LoRA merged into its weight: W + scale·B·A.

    Hu et al., "LoRA" (2106.09685), equation 3.

    Args:
        state: weights by name, with the names that peft gives or with plain names.
        scale: factor of the product B·A.

    Raises:
        ValueError: a factor A has no factor B, or the weight that the two adapt is missing.
    """
    prefix = "base_model.model."
    plain = {key.removeprefix(prefix).replace(".base_layer.", "."): value for key, value in state.items()}
    merged: dict[str, Tensor] = {}
    for key, value in plain.items():
        if ".lora_" in key or ".original_module." in key:
            continue
        merged[key.replace(".modules_to_save.default.", ".")] = value
    for key, first in plain.items():
        if ".lora_A." not in key:
            continue
        name, _, rest = key.partition(".lora_A.")
        second = plain.get(f"{name}.lora_B.{rest}")
        if second is None or f"{name}.weight" not in merged:
            raise ValueError(f"videoalign: the LoRA of {name} is not complete")
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = (weight.float() + scale * (second.float() @ first.float())).to(weight.dtype)
    return merged


def _lora_scale(settings: Mapping[str, Any], path: Path) -> float:
    lora = settings.get("peft_lora_config") or {}
    rank, alpha = lora.get("lora_r", 64), lora.get("lora_alpha", 128)
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise ValueError(
            f"videoalign: the settings beside {path} have lora_r {rank!r} and lora_alpha {alpha!r}; give numbers"
        )
    return float(alpha) / (math.sqrt(rank) if lora.get("use_rslora") else rank)


def _statistics(settings: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    given = settings.get("inference_config") or {}
    return {
        axis: (float(given.get(f"{axis}_mean", mean)), float(given.get(f"{axis}_std", deviation)))
        for axis, (mean, deviation) in STATISTICS.items()
    }
