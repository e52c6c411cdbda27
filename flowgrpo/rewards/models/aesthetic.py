"""LAION's aesthetic predictor: how much people liked a picture, whatever its prompt.

Schuhmann et al., "LAION-5B" (2210.08402), and the second, "improved" version of the predictor: a head of linear layers
on the embedding of OpenAI's CLIP ViT-L/14, trained on ratings from 1 to 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backbones.model_loading import find_file, linear_stack, read_state
from ..backbones.towers import TowerReward, transformers_towers


class Aesthetic(TowerReward):
    """Beauty without regard to the prompt: LAION's predictor, about 4 to 7 on a scale of 1 to 10.

    Args:
        head: path of `sac+logos+ava1-l14-linearMSE.pth` (or of the first version, `sa_0_4_vit_l_14_linear.pth`), or
            "hf-hub:ORG/NAME/FILE".
        model: folder or model id of the transformers `CLIPModel` whose embeddings the head was trained on.
        device: where to score.
        dtype: data type of the weights of the CLIP model; the head is float32.
        batch_size: largest number of images in one call.
        frames: how many frames of a video are scored at most, evenly spaced; all by default.

    Raises:
        ValueError: there is no such file or model, or head and embedding do not fit.
    """

    name = "aesthetic"

    def __init__(
        self,
        head: str,
        *,
        model: str = "openai/clip-vit-large-patch14",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int | None = None,
    ) -> None:
        path = find_file("aesthetic", "head", head)
        state = read_state("aesthetic", path)
        # The first version has a single layer, whose weights have no number in their names.
        numbered = {f"layers.0.{key}": value for key, value in state.items()} if "weight" in state else state
        layers = linear_stack(numbered, "layers.")
        if layers is None or layers[-1].out_features != 1:
            raise ValueError(
                f"aesthetic: {path} has no usable head; it needs layers.N.weight and layers.N.bias, with 1 output"
            )
        lease = transformers_towers("aesthetic", model, device=device, dtype=dtype)
        width = int(lease.value.model.config.projection_dim)
        if layers[0].in_features != width:
            lease.close()
            raise ValueError(
                f"aesthetic: the head takes embeddings of size {layers[0].in_features}, but {model} makes {width}; "
                "the published heads belong to openai/clip-vit-large-patch14"
            )
        super().__init__(lease, batch_size=batch_size, frames=frames)
        self.head = layers.to(device)

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Tensor:
        """Rating of each image.

        Args:
            images: [B, 3, H, W] in [0, 1]; for videos [B, F, 3, H, W] the frames' ratings are averaged.
            prompts: ignored.
            columns: ignored.

        Returns:
            [B] float32.
        """
        embeddings = self.embeddings(images)
        with torch.autocast(torch.device(self.device).type, enabled=False):
            return self.head(embeddings).squeeze(-1).mean(1) if len(embeddings) else embeddings.new_zeros(0)
