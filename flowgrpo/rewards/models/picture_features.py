"""Features of pictures for rewards that learn from people: the embeddings of a frozen model of images and texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from ..backbones.model_loading import check_dtype, load_processor, source_name
from ..backbones.open_clip_model import open_clip_towers
from ..backbones.sharing import Lease, borrow
from ..backbones.towers import Towers, encoder_towers, transformers_towers
from ..pixels import as_frames, load_frames, preprocess_images
from ..registry import resolve
from .bradley_terry import Array

SCENES = "scenes"


def feature_towers(reward: str, features: str, device: str, dtype: str) -> Lease[Towers]:
    """Return the model that gives the features.

    Args:
        reward: name of the reward, for messages.
        features: "scenes" for the scorer of the embedded world; otherwise the folder of a CLIP or SigLIP model, in the
            format of transformers or open_clip, or a model id. DINOv2 and DINOv3 embed pictures, but no texts.
        device: where it runs.
        dtype: data type of the weights.

    Raises:
        ValueError: the model cannot be loaded.
    """
    if features == SCENES:
        key = ("scenes", dtype, str(torch.device(device)))
        return borrow(key, lambda: _scenes(device, check_dtype(reward, dtype)))
    folder = Path(features).expanduser()
    if features.startswith(("hf-hub:", "local-dir:")) or (folder / "open_clip_config.json").is_file():
        return open_clip_towers(reward, features, device=device, dtype=dtype)
    from transformers import AutoConfig

    kind = load_processor(reward, AutoConfig, source_name(reward, "features", features)).model_type
    if kind.startswith("dino"):
        return encoder_towers(reward, features, device=device, dtype=dtype)
    # SigLIP 2 was trained on lower-case texts.
    lowercase = kind.startswith("siglip")
    return transformers_towers(reward, features, device=device, dtype=dtype, lowercase=lowercase)


def known_embeddings(towers: Towers, samples: Sequence[tuple[Path, int]], batch_size: int, most: int | None) -> Array:
    """Return the embeddings of N samples [N, D]; the embedding of a video is the mean over its frames.

    Args:
        towers: the model.
        samples: file of each sample, and the number of frames that stand side by side in it.
        batch_size: largest number of pictures in one forward pass.
        most: how many frames of a video count at most; None takes all.

    Raises:
        ValueError: a file cannot be read, or does not hold so many frames.
    """
    videos = (load_frames(file, frames) for file, frames in samples)
    stills = ((place, still) for place, video in enumerate(videos) for still in as_frames(video.unsqueeze(0), most)[0])
    owners, parts = [], []
    while some := list(islice(stills, batch_size)):
        owners += [place for place, _ in some]
        # The pictures may have several sizes, but the encoder's input has one size.
        pixels = [towers.prepare(still.unsqueeze(0)) for _, still in some]
        parts.append(towers.embed_pixels(torch.cat(pixels)))
    frames = torch.cat(parts).cpu().double()
    sums = frames.new_zeros(len(samples), frames.shape[1]).index_add_(0, torch.tensor(owners), frames)
    return (sums / torch.tensor(owners).bincount().unsqueeze(1)).numpy()


def known_texts(towers: Towers, texts: Sequence[str], batch_size: int) -> Array:
    """Return the embeddings of N texts [N, D]. Equal texts are encoded once, and at most `batch_size` in one pass."""
    places = {text: place for place, text in enumerate(sorted(set(texts)))}
    unique = list(places)
    parts = [towers.embed_texts(unique[start : start + batch_size]) for start in range(0, len(unique), batch_size)]
    known: Array = torch.cat(parts).cpu().double().numpy()
    return known[[places[text] for text in texts]]


def _scenes(device: str, dtype: torch.dtype) -> Towers:
    """Return the scorer of the embedded world as towers."""
    proxy = resolve("proxy")(device=device)
    model = proxy.model.to(dtype)
    return Towers(
        model,
        lambda images: preprocess_images(images, proxy.preprocess).to(dtype),
        model.encode_image,
        lambda texts: model.encode_text(proxy.tokenizer(texts).to(device)),
        scale=float(model.logit_scale.float().exp()),
        bias=0.0,
        device=device,
    )
