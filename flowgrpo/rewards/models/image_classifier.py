"""Probabilities of an image classifier as a reward, and a guard against unsafe images that uses a classifier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...parts.plugins import nearest
from ..backbones.model_loading import check_dtype, load_processor, load_transformers, source_name
from ..backbones.sharing import Lease, borrow
from ..backbones.towers import process_images
from ..options import check_count
from ..pixels import as_frames
from ..scores import Scores


class Classifier:
    """A transformers image classifier with its processor.

    Args:
        model: a model of a class that `AutoModelForImageClassification` chooses.
        processor: the image processor of the model.
        device: where the model is.
    """

    def __init__(self, model: Any, processor: Any, device: str) -> None:
        self.model, self.processor, self.device = model, processor, device
        names = model.config.id2label
        self.labels = tuple(str(names[place]) for place in sorted(names))
        self.exclusive = model.config.problem_type != "multi_label_classification"

    @torch.no_grad()
    def __call__(self, images: Tensor, batch_size: int) -> Tensor:
        """Return the probability of each label, float32 [N, labels].

        The probabilities of an image add up to 1, unless the model is a multi-label classifier.

        Args:
            images: [N, 3, H, W] in [0, 1].
            batch_size: largest number of images in one forward pass.
        """
        logits = []
        with torch.autocast(torch.device(self.device).type, enabled=False):
            for part in images.split(batch_size):
                pixels = process_images(self.processor, part.to(self.device)).to(self.device, self.model.dtype)
                logits.append(self.model(pixel_values=pixels).logits.float())
        joined = torch.cat(logits)
        return joined.softmax(-1) if self.exclusive else joined.sigmoid()


def borrow_classifier(reward: str, model: str, device: str, dtype: str) -> Lease[Classifier]:
    """Return the classifier of a folder or model id. Rewards that ask for the same classifier share it.

    Raises:
        ValueError: the folder holds no such model or processor, or some of the weights are missing.
    """
    source, kind = source_name(reward, "model", model), check_dtype(reward, dtype)

    def load() -> Classifier:
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        processor = load_processor(reward, AutoImageProcessor, source)
        loaded = load_transformers(reward, AutoModelForImageClassification, source, dtype=kind, device=device)
        return Classifier(loaded, processor, device)

    return borrow(("image_classifier", source, dtype, str(torch.device(device))), load)


class ImageClassifier:
    """Weighted sum of the probabilities of an image classifier (any model of transformers).

    Args:
        model: folder or model id.
        labels: label of the model -> weight; labels that are not named do not count.
        device: where to score.
        dtype: data type of the weights.
        batch_size: largest number of images, or frames of videos, in one forward pass, and of samples in one call.
        frames: how many frames of a video are used at most, evenly spaced; all by default.

    Raises:
        ValueError: the folder holds no such model, or the model has no such label.
    """

    name = "image_classifier"

    def __init__(
        self,
        model: str,
        labels: Mapping[str, float],
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int | None = None,
    ) -> None:
        check_count(self.name, "batch_size", batch_size)
        check_count(self.name, "frames", 1 if frames is None else frames)
        self.weights = _check_labels(self.name, labels)
        self.lease = borrow_classifier(self.name, model, device, dtype)
        known = self.lease.value.labels
        unknown = [label for label in self.weights if label not in known]
        if unknown:
            self.lease.close()
            raise ValueError(
                f"{self.name}: {model} has no label {unknown[0]!r}{nearest(unknown[0], known)} "
                f"It has {', '.join(known[:20])}{' …' * (len(known) > 20)}."
            )
        self.device, self.batch_size, self.frames = device, batch_size, frames

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Score of each image.

        Args:
            images: [B, 3, H, W] in [0, 1]; for videos [B, F, 3, H, W] the frames' scores are averaged.
            prompts: ignored.
            columns: ignored.

        Returns:
            B scores; for each label that has a weight, a sub-score with its probability.
        """
        probabilities = self.probabilities(images).mean(1)
        weights = torch.tensor(list(self.weights.values()), device=probabilities.device)
        subs = {label: probabilities[:, place].tolist() for place, label in enumerate(self.weights)}
        return Scores((probabilities * weights).sum(-1), subs)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities of the labels in `weights`, in their order, float32 [B, frames, labels]."""
        frames = as_frames(images, self.frames)
        places = [self.lease.value.labels.index(label) for label in self.weights]
        flat = frames.flatten(0, 1)
        found = self.lease.value(flat, self.batch_size) if len(flat) else torch.zeros(0, max(places) + 1)
        return found[:, places].unflatten(0, frames.shape[:2])

    def close(self) -> None:
        """Release the model. It stays in memory while another reward uses it."""
        self.lease.close()


class Safety(ImageClassifier):
    """Safe images: 1 minus the probability that an image is unsafe, by an image classifier.

    It is meant as a guard (weight 0: it is measured and not optimised), or as a penalty beside other rewards.

    Args:
        model: folder or model id of a transformers image classifier.
        unsafe: the labels that the model gives to unsafe images.
        device: where to score.
        dtype: data type of the weights.
        batch_size: largest number of images, or frames of videos, in one forward pass, and of samples in one call.
        frames: how many frames of a video are used at most, evenly spaced; the worst of them counts.

    Raises:
        ValueError: the folder holds no such model, or the model has no such label.
    """

    name = "safety"

    def __init__(
        self,
        model: str = "Falconsai/nsfw_image_detection",
        *,
        unsafe: Sequence[str] = ("nsfw",),
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int = 8,
    ) -> None:
        if isinstance(unsafe, str) or not unsafe:
            raise ValueError(f"safety: unsafe is {unsafe!r}; give a list of labels, such as [nsfw]")
        weights = dict.fromkeys(unsafe, 1.0)
        super().__init__(model, weights, device=device, dtype=dtype, batch_size=batch_size, frames=frames)

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Score of each image.

        Args:
            images: [B, 3, H, W] in [0, 1]; for videos [B, F, 3, H, W] the worst frame counts.
            prompts: ignored.
            columns: ignored.

        Returns:
            B scores in [0, 1].
        """
        unsafe = self.probabilities(images).sum(-1)
        return Scores(1 - unsafe.clamp(0, 1).amax(1))


def _check_labels(reward: str, labels: Any) -> dict[str, float]:
    if not isinstance(labels, Mapping) or not labels:
        raise ValueError(f"{reward}: labels is {labels!r}; give label: weight, such as {{cat: 1}}")
    for label, weight in labels.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f"{reward}: the weight of {label} is {weight!r}; give a number")
    return {str(label): float(weight) for label, weight in labels.items()}
