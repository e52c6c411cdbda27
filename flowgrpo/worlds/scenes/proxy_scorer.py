"""Proxy reward of the embedded world: a small CLIP that `proxy_training` fits to drawn scenes.

The proxy agrees with the gold reward on ordinary scenes. Training can raise the proxy without raising the gold reward.
Learned rewards of real images behave in the same way (Gao et al., "Scaling Laws for Reward Model Overoptimization",
2210.10760).

A scorer is a folder with `open_clip_config.json`, `vocab.json` and `open_clip_model.safetensors`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...rewards.pixels import check_single, preprocess_images
from .scene_prompts import all_prompts

CONFIG, VOCABULARY, WEIGHTS = "open_clip_config.json", "vocab.json", "open_clip_model.safetensors"
TOKENS = 12

_PAD, _UNKNOWN, _START, _END = "<pad>", "<unk>", "<start>", "<end>"


class WordTokenizer:
    """A tokenizer whose tokens are words; a word outside the vocabulary becomes `<unk>`.

    Args:
        vocabulary: tokens in the order of their ids; `<end>` is last, because CLIP's text tower reads its output at
            the highest id.
        length: ids per text; a longer text is cut and still ends with `<end>`.

    Raises:
        ValueError: a special token is missing or out of place.
    """

    def __init__(self, vocabulary: Sequence[str], length: int = TOKENS) -> None:
        self.vocabulary, self.length = list(vocabulary), length
        if self.vocabulary[:3] != [_PAD, _UNKNOWN, _START] or self.vocabulary[-1] != _END:
            raise ValueError(f"a vocabulary must start with {_PAD}, {_UNKNOWN}, {_START} and end with {_END}")
        self._ids = {word: k for k, word in enumerate(self.vocabulary)}

    @classmethod
    def of_scenes(cls) -> WordTokenizer:
        """The tokenizer of all words in the prompts of the embedded world."""
        words = sorted({word for prompt in all_prompts() for word in _words(prompt.text)})
        return cls([_PAD, _UNKNOWN, _START, *words, _END])

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Ids of B texts, int64 [B, length]."""
        table = torch.full((len(texts), self.length), self._ids[_PAD])
        for row, text in zip(table, texts):
            words = [self._ids.get(word, self._ids[_UNKNOWN]) for word in _words(text)[: self.length - 2]]
            row[: len(words) + 2] = torch.tensor([self._ids[_START], *words, self._ids[_END]])
        return table


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Proxy:
    """Learned scorer of the embedded scenes: cosine similarity of image and prompt, which can be over-optimised.

    Args:
        folder: folder of a scorer; by default the scorer of the package.
        device: where the model runs.
        batch_size: largest number of images per forward pass.

    Raises:
        ValueError: there is no scorer in the folder, or its files do not match.
    """

    name = "proxy"

    def __init__(self, folder: str | None = None, *, device: str = "cpu", batch_size: int = 256) -> None:
        packaged = resources.files("flowgrpo.worlds.scenes") / "proxy"
        path = Path(str(packaged)) if folder is None else Path(folder).expanduser()
        missing = [name for name in (CONFIG, VOCABULARY, WEIGHTS) if not (path / name).is_file()]
        if missing:
            raise ValueError(
                f"proxy: there is no scorer in {path} (it lacks {', '.join(missing)}); make one with "
                "`flowgrpo build scenes --out FOLDER` and set the option `folder` to FOLDER/proxy"
            )
        try:
            config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
            self.preprocess: dict[str, Any] = config["preprocess_cfg"]
            self.model = build_model(config["model_cfg"], seed=0)
            words = json.loads((path / VOCABULARY).read_text(encoding="utf-8"))
            self.tokenizer = WordTokenizer(words, self.model.context_length)
            if len(words) != self.model.vocab_size:
                raise ValueError(f"{VOCABULARY} has {len(words)} tokens, the model {self.model.vocab_size}")
            self.model.load_state_dict(load_file(path / WEIGHTS), strict=True)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"proxy: the scorer in {path} does not load: {error}") from error
        self.model.to(device).eval().requires_grad_(False)
        self.device, self.batch_size = device, batch_size

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Tensor:
        """Cosine similarity of each image and its prompt.

        Args:
            images: [B, 3, H, W] in [0, 1]; they are resized to the model's 64×64.
            prompts: B strings; they are cut at the model's context length.
            columns: ignored.

        Returns:
            [B] float32 in [-1, 1].

        Raises:
            ValueError: the images are videos.
        """
        check_single("proxy", images)
        # Autocast would convert the embeddings to bfloat16, and cosines in bfloat16 are too coarse to rank a group.
        with torch.autocast(torch.device(self.device).type, enabled=False):
            place = {text: k for k, text in enumerate(dict.fromkeys(prompts))}
            text = self.model.encode_text(self.tokenizer(list(place)).to(self.device), normalize=True)
            rows = torch.tensor([place[prompt] for prompt in prompts], device=self.device)
            pixels = preprocess_images(images.to(self.device, torch.float32), self.preprocess)
            parts = [self.model.encode_image(part, normalize=True) for part in pixels.split(self.batch_size)]
            return (torch.cat(parts) * text[rows]).sum(-1)


def build_model(config: dict[str, Any], seed: int) -> Any:
    """An open_clip model of the given architecture, with random weights that depend on `seed` alone."""
    import open_clip

    # The initial weights must not change the state of the caller's generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return open_clip.CLIP(**config)
