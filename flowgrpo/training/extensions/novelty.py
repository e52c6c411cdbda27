"""Larger advantages for good images that differ from the other images of their prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...core.nearest_images import nearest_distances, novelty_factors, patch_means
from ...parts.needs import Need, needs
from ...parts.ranges import Count, Words
from ..credit.pooling import Batch
from .extension import CREDIT, Comparison, Extension
from .rules import once

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...rewards.backbones.sharing import Lease
    from ...rewards.backbones.towers import Towers
    from ..distributed.processes import Processes
    from ..reporting.clock import Clock
    from ..tasks import Task

PIXELS = "pixels"
DISTANCE = "novelty/distance"
Dtype = Literal["float32", "bfloat16", "float16"]


@needs(
    once,
    Need("task", ("images",), "compares images"),
    Need(CREDIT, ("leaf",), "changes the advantages of samples, not of steps"),
)
class Novelty(Extension):
    """Makes advantages larger for good images that differ from the others of their group (GARDO, 2512.24138).

    An advantage above 0 is multiplied by the distance of the image to the nearest image of its group, over the mean of
    these distances in the group. The distance is 1 minus the cosine of the features. Other advantages stay as they are,
    so an image is never good because it is unlike the others.

    Args:
        features: What images are compared by: the folder or model id of an image encoder of transformers (DINOv2,
            DINOv3, CLIP, SigLIP), `scenes` for the scorer of the embedded world, or `pixels` for the mean colours of 8
            x 8 patches, which need no model and know colours alone.
        batch: Images in one call of the encoder.
        dtype: Data type of its weights.
    """

    def __init__(self, *, features: Words = PIXELS, batch: Count = 16, dtype: Dtype = "float32") -> None:
        path = Path(features).expanduser()
        if (path.is_absolute() or features.startswith((".", "~"))) and not path.is_dir():
            raise ValueError(
                f"features is {features!r}, and there is no such folder; give the folder of an image encoder, a model "
                f"id, scenes, or {PIXELS}"
            )
        self.features, self.batch, self.dtype = features, batch, dtype
        self._lease: Lease[Towers] | None = None
        self._record: dict[str, float] = {}

    def begin(self, task: Task, processes: Processes, clock: Clock) -> None:
        """Load the encoder onto the device of the model."""
        super().begin(task, processes, clock)
        if self.features != PIXELS:
            from ...rewards.models.picture_features import feature_towers

            self._lease = feature_towers("extension novelty", self.features, str(task.device), self.dtype)

    def embedded(self, images: Tensor) -> Tensor:
        """[N, D] features of images [N, 3, H, W]; for videos [N, F, 3, H, W], the mean over their frames."""
        frames = images if images.ndim == 5 else images[:, None]
        flat = frames.flatten(0, 1)
        if self._lease is None:
            found = patch_means(flat)
        else:
            towers = self._lease.value
            found = towers.embed_images(flat, self.batch, remember=self._lease.shared).cpu()
        return found.unflatten(0, frames.shape[:2]).mean(1)

    def samples_scored(self, batch: Batch) -> Batch:
        """Share how far each image is from the nearest image of its group."""
        samples: Any = batch.experience.samples
        if isinstance(samples, Tensor):
            found = self.embedded(samples)
        else:
            # Images of several sizes are a list.
            found = torch.cat([self.embedded(image[None]) for image in samples])
        # A preview is not an image of the group: it is compared with nothing.
        outcomes, groups = batch.experience.outcomes, batch.experience.groups
        alone = groups.max() + 1 + torch.arange(len(groups))
        distances = nearest_distances(found, torch.where(outcomes, groups, alone))
        batch.columns[DISTANCE] = distances.tolist()
        return batch

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """Multiply the advantages above 0."""
        samples = comparison.samples
        distances = torch.tensor(samples.columns[DISTANCE], dtype=torch.float64)
        factors = novelty_factors(distances, advantages, samples.groups)
        known = distances[distances.isfinite()]
        self._record = {"novelty/distance": float(known.mean())} if len(known) else {}
        return advantages * factors.to(advantages)

    def record(self) -> dict[str, float]:
        """The mean distance of an image to the nearest image of its group."""
        return self._record
