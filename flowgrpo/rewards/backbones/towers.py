"""Pairs of an image encoder and a text encoder whose embeddings share a space, as in CLIP.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2103.00020). A score depends
only on the angle between two embeddings, so all embeddings are normalised to length 1.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..options import check_count
from ..pixels import as_frames, preprocess_images, to_bytes
from .model_loading import check_dtype, load_processor, load_transformers, source_name
from .sharing import Lease, borrow

REMEMBERED = 4096
BILINEAR = 2
"""The number by which PIL names the filter."""


class Towers:
    """An image encoder and a text encoder with a common embedding space, from any library.

    Args:
        model: the module that contains both encoders.
        pixels: function from images [N, 3, H, W] in [0, 1] on `device` to the encoder's input [N, 3, h, w].
        encode_image: function from the encoder's input to embeddings [N, D], of any length.
        encode_text: function from N strings to embeddings [N, D].
        scale: factor of the cosine in the model's logit.
        bias: summand in the model's logit.
        device: where the model is.
    """

    def __init__(
        self,
        model: Any,
        pixels: Callable[[Tensor], Tensor],
        encode_image: Callable[[Tensor], Tensor],
        encode_text: Callable[[Sequence[str]], Tensor],
        *,
        scale: float,
        bias: float,
        device: str,
    ) -> None:
        self.model, self.pixels, self.scale, self.bias, self.device = model, pixels, scale, bias, device
        self._encode_image, self._encode_text = encode_image, encode_text
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of N texts, float32 [N, D], each of length 1. Equal texts are encoded once."""
        place = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        if not place:
            return torch.zeros(0, 1, device=self.device)
        with self._exact():
            unique = _unit(self._encode_text(list(place)))
        return unique[[place[text] for text in texts]]

    def embed_images(self, images: Tensor, batch_size: int, *, remember: bool = False) -> Tensor:
        """Return the embeddings of images.

        Args:
            images: [N, 3, H, W] in [0, 1].
            batch_size: largest number of images in one forward pass.
            remember: keep the embeddings of the latest images, because another reward may ask for the same images.

        Returns:
            float32 [N, D], each of length 1.
        """
        parts = [
            self.embed_pixels(self.prepare(part), remember=remember) for part in images.split(batch_size) if len(part)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, 1, device=self.device)

    def prepare(self, images: Tensor) -> Tensor:
        """Return the encoder's input for images [N, 3, H, W] in [0, 1]."""
        with self._exact():
            return self.pixels(images.to(self.device, torch.float32))

    def embed_pixels(self, pixels: Tensor, *, remember: bool = False) -> Tensor:
        """Return the embeddings of the result of `prepare`, float32 [N, D], each of length 1."""
        with self._exact():
            if not remember or pixels.requires_grad:
                return _unit(self._encode_image(pixels))
            # The keys are hashes of the content, because every reward gets its own copy of the images.
            pictures = pixels.contiguous().view(torch.uint8).cpu().numpy()
            keys = [hashlib.blake2b(picture.tobytes()).digest() for picture in pictures]
            with self._lock:
                fresh = {key: row for row, key in enumerate(keys) if key not in self._known}
                if fresh:
                    found = _unit(self._encode_image(pixels[list(fresh.values())]))
                    self._known.update(zip(fresh, found))
                result = torch.stack([self._known[key] for key in keys])
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            return result

    def _exact(self) -> Any:
        # Autocast would compute the embeddings in bfloat16. Cosines in bfloat16 are too coarse to rank a group.
        return torch.autocast(torch.device(self.device).type, enabled=False)


class TowerReward:
    """Base class of the rewards that use CLIP-like towers.

    Args:
        lease: the towers.
        batch_size: largest number of images, or frames of videos, in one forward pass, and of samples in one call.
        frames: how many frames of a video are used at most, evenly spaced; None uses all.

    Raises:
        ValueError: `batch_size` or `frames` is not a whole number of 1 or more.
    """

    name: str

    def __init__(self, lease: Lease[Towers], *, batch_size: int, frames: int | None) -> None:
        try:
            check_count(self.name, "batch_size", batch_size)
            check_count(self.name, "frames", 1 if frames is None else frames)
        except ValueError:
            lease.close()
            raise
        self.lease, self.batch_size, self.frames = lease, batch_size, frames

    @property
    def device(self) -> str:
        """The device on which the images are needed."""
        return self.lease.value.device

    def embeddings(self, images: Tensor) -> Tensor:
        """Return the embeddings of images [B, 3, H, W] or videos [B, F, 3, H, W], float32 [B, frames, D]."""
        frames = as_frames(images, self.frames)
        flat = self.lease.value.embed_images(frames.flatten(0, 1), self.batch_size, remember=self.lease.shared)
        return flat.unflatten(0, frames.shape[:2])

    def cosines(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return the cosine of each image with its prompt, float32 [B]; for a video, the mean over its frames."""
        text = self.lease.value.embed_texts(prompts)
        return (self.embeddings(images) * text.unsqueeze(1)).sum(-1).mean(1)

    def close(self) -> None:
        """Release the towers. They stay in memory while another reward uses them."""
        self.lease.close()


def transformers_towers(
    reward: str,
    model: str,
    *,
    processor: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    lowercase: bool = False,
) -> Lease[Towers]:
    """Return the towers of a `CLIPModel` or `SiglipModel` of transformers; the folder's configuration decides which.

    The model's own image processor processes the images, as 8-bit pictures. Texts are padded or truncated to the length
    of the text encoder. SigLIP reads its output at the last position, and CLIP ignores everything after the end of a
    text.

    Args:
        reward: name of the reward, for messages.
        model: folder or model id.
        processor: folder or model id of the image processor and the tokenizer; None uses `model`.
        device: where it runs.
        dtype: data type of the weights.
        lowercase: if true, texts are converted to lower case first.

    Raises:
        ValueError: the folder holds no such model or processor, or some of the weights are missing.
    """
    source = source_name(reward, "model", model)
    tools = source if processor is None else source_name(reward, "processor", processor)
    key = ("transformers", source, tools, dtype, str(torch.device(device)), lowercase)
    return borrow(key, lambda: _load(reward, source, tools, device, check_dtype(reward, dtype), lowercase))


def _load(reward: str, source: str, tools: str, device: str, dtype: torch.dtype, lowercase: bool) -> Towers:
    from transformers import AutoModel, AutoProcessor

    processor = load_processor(reward, AutoProcessor, tools)
    model = load_transformers(reward, AutoModel, source, dtype=dtype, device=device)
    if not all(hasattr(model, name) for name in ("get_image_features", "get_text_features", "logit_scale")):
        raise ValueError(f"{reward}: {source} is a {type(model).__name__}; give a CLIP or SigLIP model")
    length = int(model.config.text_config.max_position_embeddings)

    def pixels(images: Tensor) -> Tensor:
        return process_images(processor.image_processor, images).to(device, dtype)

    def encode_text(texts: Sequence[str]) -> Tensor:
        texts = [text.lower() for text in texts] if lowercase else list(texts)
        tokens = processor.tokenizer(
            texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        # No attention mask is passed: SigLIP was trained to read the padding, and CLIP's causal mask hides it.
        return features(model.get_text_features(input_ids=tokens["input_ids"].to(device)))

    return Towers(
        model,
        pixels,
        lambda values: features(model.get_image_features(pixel_values=values)),
        encode_text,
        scale=float(model.logit_scale.float().exp()),
        bias=float(getattr(model, "logit_bias", torch.zeros(()))),
        device=device,
    )


def encoder_towers(reward: str, model: str, *, device: str = "cpu", dtype: str = "float32") -> Lease[Towers]:
    """Return an image encoder of transformers that has no text encoder, such as DINOv3; it refuses texts.

    The embedding is the encoder's pooled output. The model's own image processor processes the images.

    Args:
        reward: name of the reward, for messages.
        model: folder or model id.
        device: where it runs.
        dtype: data type of the weights.

    Raises:
        ValueError: the folder holds no such model or processor, or some of the weights are missing.
    """
    source = source_name(reward, "features", model)
    key = ("encoder", source, dtype, str(torch.device(device)))
    return borrow(key, lambda: _load_encoder(reward, source, device, check_dtype(reward, dtype)))


def _load_encoder(reward: str, source: str, device: str, dtype: torch.dtype) -> Towers:
    from transformers import AutoImageProcessor, AutoModel

    processor = load_processor(reward, AutoImageProcessor, source)
    model = load_transformers(reward, AutoModel, source, dtype=dtype, device=device)

    def encode_text(texts: Sequence[str]) -> Tensor:
        raise ValueError(
            f"{reward}: {source} is a {type(model).__name__}, which embeds no texts; give a CLIP or SigLIP model"
        )

    return Towers(
        model,
        lambda images: process_images(processor, images).to(device, dtype),
        lambda values: features(model(pixel_values=values)),
        encode_text,
        scale=1.0,
        bias=0.0,
        device=device,
    )


def process_images(processor: Any, images: Tensor) -> Tensor:
    """Return the input that a transformers image processor makes from images [N, 3, H, W] in [0, 1]: [N, 3, h, w].

    The processor gets 8-bit pictures, because it would divide floats by 255 again. If the images have a graph, the
    result has the gradient of the same resampling without rounding.
    """
    values = _processed(processor, images.detach())
    if not images.requires_grad:
        return values
    smooth = preprocess_images(images, _resampling(processor)).to(values)
    return values + (smooth - smooth.detach())


def _resampling(processor: Any) -> dict[str, Any]:
    """What a transformers image processor does, as `preprocess_images` takes it."""
    size = dict(processor.size)
    shortest, cropped = size.get("shortest_edge"), bool(getattr(processor, "do_center_crop", False))
    target = dict(processor.crop_size) if cropped else size
    plain = not processor.do_normalize
    return {
        "size": (target.get("height", shortest), target.get("width", shortest)),
        "resize_mode": "squash" if shortest is None else "shortest",
        "interpolation": "bilinear" if int(processor.resample) == BILINEAR else "bicubic",
        "mean": [0.0] * 3 if plain else list(processor.image_mean),
        "std": [1.0] * 3 if plain else list(processor.image_std),
    }


def _processed(processor: Any, images: Tensor) -> Tensor:
    levels = to_bytes(images)
    # Processors that work on tensors work on the tensors' device. Other processors need the tensors in main memory.
    on_device = getattr(processor, "backend", None) == "torchvision" or getattr(processor, "is_fast", False)
    pictures = list(levels if on_device else levels.cpu())
    values: Tensor = processor(images=pictures, return_tensors="pt", input_data_format="channels_first")["pixel_values"]
    return values


def features(output: Any) -> Tensor:
    """Return the projected embedding in a result of `get_image_features`: a tensor, or in transformers 5 an object."""
    return output if isinstance(output, Tensor) else output.pooler_output


def _unit(embeddings: Tensor) -> Tensor:
    return torch.nn.functional.normalize(embeddings.float(), dim=-1)
