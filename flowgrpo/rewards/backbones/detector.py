"""Detection of objects in images, by a Mask2Former of transformers for instance segmentation.

Cheng et al., "Masked-attention Mask Transformer for Universal Image Segmentation" (2112.01527).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..pixels import preprocess_images
from .model_loading import check_dtype, load_processor, load_transformers, source_name
from .sharing import Lease, borrow

STRIDE = 32
LONGEST = 1333
MOST = 100
# The classes of COCO in their order, with GenEval's names. Checkpoints agree on the order, but not on the names.
COCO = (
    "person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant stop_sign parking_meter "
    "bench bird cat dog horse sheep cow elephant bear zebra giraffe backpack umbrella handbag tie suitcase frisbee "
    "skis snowboard sports_ball kite baseball_bat baseball_glove skateboard surfboard tennis_racket bottle wine_glass "
    "cup fork knife spoon bowl banana apple sandwich orange broccoli carrot hot_dog pizza donut cake chair couch "
    "potted_plant bed dining_table toilet tv laptop computer_mouse tv_remote computer_keyboard cell_phone microwave "
    "oven toaster sink refrigerator book clock vase scissors teddy_bear hair_drier toothbrush"
)
COCO_NAMES = tuple(name.replace("_", " ") for name in COCO.split())


@dataclass(frozen=True)
class Detection:
    """An object found in an image.

    Attributes:
        label: the class of the object.
        score: the detector's confidence, in [0, 1].
        box: left, top, right and bottom edge in pixels; right and bottom are exclusive.
        mask: [H, W] bool, the pixels of the object.
    """

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: Tensor


class Detector:
    """Finds instances of objects in images.

    Args:
        model: a `Mask2FormerForUniversalSegmentation`.
        mean: mean of the model's input, for each channel.
        std: standard deviation of the model's input, for each channel.
        device: where the model is.
        resolution: length in pixels to which the shorter side of an image is scaled.
    """

    def __init__(self, model: Any, mean: list[float], std: list[float], device: str, resolution: int) -> None:
        self.model, self.mean, self.std, self.device, self.resolution = model, mean, std, device, resolution
        self.labels = class_names(model.config.id2label)

    @torch.no_grad()
    def __call__(self, images: Tensor, threshold: float) -> list[list[Detection]]:
        """Return the objects in each image, the most confident first.

        Args:
            images: [N, 3, H, W] in [0, 1]; the channels are red, green and blue.
            threshold: only objects with a higher confidence are returned.
        """
        size = (int(images.shape[-2]), int(images.shape[-1]))
        settings = {
            "size": _input_size(*size, self.resolution),
            "mean": self.mean,
            "std": self.std,
            "interpolation": "bilinear",
            "resize_mode": "squash",
        }
        with torch.autocast(torch.device(self.device).type, enabled=False):
            pixels = preprocess_images(images.to(self.device, torch.float32), settings)
            output = self.model(pixel_values=pixels.to(self.model.dtype))
        return [
            self._instances(classes.float(), masks.float(), size, threshold)
            for classes, masks in zip(output.class_queries_logits, output.masks_queries_logits)
        ]

    def _instances(self, classes: Tensor, masks: Tensor, size: tuple[int, int], threshold: float) -> list[Detection]:
        # The last class means "no object".
        probabilities = classes.softmax(-1)[:, :-1]
        best, places = probabilities.flatten().topk(min(MOST, probabilities.numel()))
        # A score is this probability times a probability of the mask. So an object that is below the threshold here
        # stays below it.
        places = places[best > threshold]
        found = []
        for place in places.tolist():
            query, label = divmod(place, probabilities.shape[1])
            logits = torch.nn.functional.interpolate(masks[query][None, None], size=size, mode="bilinear")[0, 0]
            mask = logits > 0
            area = mask.sum()
            score = float(probabilities[query, label] * (logits.sigmoid() * mask).sum() / (area + 1e-6))
            if area and score > threshold:
                found.append(Detection(self.labels[label], score, _box(mask), mask.cpu()))
        return sorted(found, key=lambda detection: -detection.score)


def load_detector(
    reward: str, model: str, *, device: str = "cpu", dtype: str = "float32", resolution: int = 800
) -> Lease[Detector]:
    """Return a detector for a reward. Rewards that ask for the same detector share it.

    Args:
        reward: name of the reward, for messages.
        model: folder or model id of a `Mask2FormerForUniversalSegmentation` for instances.
        device: where it runs.
        dtype: data type of the weights.
        resolution: length in pixels to which the shorter side of an image is scaled; the longer side becomes at most
            1333.

    Raises:
        ValueError: the folder holds no such model, or some of the weights are missing.
    """
    source, kind = source_name(reward, "detector", model), check_dtype(reward, dtype)

    def load() -> Detector:
        from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

        processor = load_processor(reward, AutoImageProcessor, source)
        loaded = load_transformers(reward, Mask2FormerForUniversalSegmentation, source, dtype=kind, device=device)
        return Detector(loaded, processor.image_mean, processor.image_std, device, resolution)

    return borrow(("mask2former", source, dtype, str(torch.device(device)), resolution), load)


def class_names(id2label: dict[int, str]) -> tuple[str, ...]:
    """Return the names of a detector's classes. For the 80 classes of COCO, these are GenEval's names."""
    names = tuple(id2label[place] for place in sorted(id2label))
    is_coco = len(names) == len(COCO_NAMES) and (names[0], names[-1]) == (COCO_NAMES[0], COCO_NAMES[-1])
    return COCO_NAMES if is_coco else names


def _input_size(height: int, width: int, resolution: int) -> tuple[int, int]:
    scale = min(resolution / min(height, width), LONGEST / max(height, width))
    rounded = [max(STRIDE, round(side * scale / STRIDE) * STRIDE) for side in (height, width)]
    return rounded[0], rounded[1]


def _box(mask: Tensor) -> tuple[float, float, float, float]:
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
