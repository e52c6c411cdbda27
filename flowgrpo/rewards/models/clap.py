"""CLAP score: cosine similarity of a sound and its prompt.

Wu et al., "Large-scale Contrastive Language-Audio Pretraining with Feature Fusion and Keyword-to-Caption Augmentation"
(2211.06687). Only scores of sounds for the same prompt can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backbones.model_loading import check_dtype, load_processor, load_transformers, source_name
from ..backbones.sharing import Lease, borrow
from ..backbones.towers import features
from ..options import check_count
from ..spectra import fitting, log_mel, resampled


class SoundTowers:
    """A CLAP model of transformers with its processor.

    Args:
        model: a `ClapModel`.
        processor: its `ClapProcessor`.
        device: where the model is.

    Raises:
        ValueError: the model fuses several crops of a sound.
    """

    def __init__(self, model: Any, processor: Any, device: str) -> None:
        self.model, self.tokenizer, self.reader, self.device = (
            model, processor.tokenizer, processor.feature_extractor, device,
        )  # fmt: skip
        if model.config.audio_config.enable_fusion:
            raise ValueError(
                "clap: this model fuses crops of a sound that are drawn at random, so a sound would have several "
                "scores; use one without fusion, such as laion/clap-htsat-unfused"
            )
        self.filters = torch.from_numpy(self.reader.mel_filters_slaney)

    def spectra(self, sounds: Tensor, rate: int) -> tuple[Tensor, list[int]]:
        """Spectra [P, 1, T, M] of all parts of sounds [B, C, S], and the number of parts of each sound."""
        mono = resampled(sounds.to(self.device).float().mean(1), rate, self.reader.sampling_rate)
        parts = [fitting(sound, self.reader.nb_max_samples) for sound in mono]
        flat = torch.stack([part for own in parts for part in own])
        found = log_mel(flat, self.reader.fft_window_size, self.reader.hop_length, self.filters)
        return found[:, None].to(self.model.dtype), [len(own) for own in parts]

    def embed_sounds(self, sounds: Tensor, rate: int) -> Tensor:
        """Unit embeddings [B, D] of sounds [B, C, S], float32; of a longer sound, the mean over its parts."""
        values, counts = self.spectra(sounds, rate)
        found = features(self.model.get_audio_features(input_features=values)).float()
        means = torch.stack([part.mean(0) for part in torch.nn.functional.normalize(found, dim=-1).split(counts)])
        return torch.nn.functional.normalize(means, dim=-1)

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit embeddings [B, D] of texts, float32; each text is embedded once."""
        unique = list(dict.fromkeys(texts))
        words = self.tokenizer(unique, padding=True, truncation=True, return_tensors="pt").to(self.device)
        found = features(self.model.get_text_features(**words)).float()
        rows = dict(zip(unique, torch.nn.functional.normalize(found, dim=-1), strict=True))
        return torch.stack([rows[text] for text in texts])


def borrow_towers(reward: str, model: str, device: str, dtype: str) -> Lease[SoundTowers]:
    """Return the CLAP model of a folder or model id. Rewards that ask for the same model share it.

    Raises:
        ValueError: the folder holds no such model or processor, or some of the weights are missing.
    """
    source, kind = source_name(reward, "model", model), check_dtype(reward, dtype)

    def load() -> SoundTowers:
        from transformers import ClapModel, ClapProcessor

        processor = load_processor(reward, ClapProcessor, source)
        return SoundTowers(load_transformers(reward, ClapModel, source, dtype=kind, device=device), processor, device)

    return borrow(("clap", source, dtype, str(torch.device(device))), load)


class Clap:
    """How well a sound matches its prompt: the cosine between their CLAP embeddings. It has a gradient.

    A sound is resampled and becomes mono. A sound that is shorter than the model's ten seconds is repeated; of a longer
    one, all parts are read.

    Args:
        model: folder or model id, without feature fusion.
        prefix: text before each prompt, such as "This is a sound of ".
        device: where to score.
        dtype: data type of the weights.
        batch_size: largest number of sounds in one call.

    Raises:
        ValueError: the folder holds no such model, or the model fuses crops of a sound.
    """

    name = "clap"

    def __init__(
        self,
        model: str = "laion/clap-htsat-unfused",
        *,
        prefix: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 8,
    ) -> None:
        check_count(self.name, "batch_size", batch_size)
        self.lease = borrow_towers(self.name, model, device, dtype)
        self.prefix, self.device, self.batch_size = prefix, device, batch_size

    def __call__(self, sounds: Tensor, prompts: Sequence[str], sampling_rate: int, **columns: Any) -> Tensor:
        """Cosine of each sound with its prompt.

        Args:
            sounds: [B, C, S] in [-1, 1].
            prompts: B strings, truncated at the model's context length.
            sampling_rate: samples a second.
            columns: ignored.

        Returns:
            [B] float32.
        """
        towers = self.lease.value
        texts = towers.embed_texts([self.prefix + prompt for prompt in prompts])
        return (towers.embed_sounds(sounds, sampling_rate) * texts).sum(-1)

    def close(self) -> None:
        """Give the model back."""
        self.lease.close()
