"""Reward models based on Qwen2-VL: a head reads scores from the hidden states at special tokens of the text.

Wang et al., "Qwen2-VL" (2409.12191). HPSv3 and VideoAlign were trained with transformers 4.45. That version numbered
the positions of all tokens 0, 1, 2, ...; later versions give image and video tokens special positions, which changes
the scores. Therefore the positions are passed to the model explicitly.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..pixels import preprocess_images, to_bytes
from .model_loading import find_file, load_processor, load_transformers, source_name

FACTOR = 28
PLACE_OF_PROMPT = "{text_prompt}"


class TokenScorer:
    """A Qwen2-VL model that gives its scores at special tokens of the text.

    Args:
        reward: name of the reward, for messages.
        model: a `Qwen2VLModel`.
        head: module from a hidden state to the outputs, in float32.
        processor: the processor of the model; its tokenizer has the special tokens.
        tokens: the special tokens, in the order in which they stand in the text.
        device: where the model is.
    """

    def __init__(
        self, reward: str, model: Any, head: nn.Module, processor: Any, tokens: Sequence[str], device: str
    ) -> None:
        self.reward, self.model, self.head, self.processor, self.device = reward, model, head, processor, device
        self.ids = torch.tensor(processor.tokenizer.convert_tokens_to_ids(list(tokens)))

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], visuals: Tensor) -> Tensor:
        """Return the outputs of the head at each special token.

        Args:
            texts: B texts; each has every special token exactly once.
            visuals: uint8 images [B, 3, H, W] or videos [B, F, 3, H, W]; H and W are multiples of 28, and F is even.

        Returns:
            float32 [B, tokens, outputs].

        Raises:
            ValueError: a text does not have every special token exactly once.
        """
        kind = "image" if visuals.ndim == 4 else "video"
        chats = [[{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}] for text in texts]
        written = self.processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        settings: dict[str, Any] = {"do_resize": False, **({"do_sample_frames": False} if kind == "video" else {})}
        inputs = self.processor(
            text=written,
            padding=True,
            padding_side="right",
            return_tensors="pt",
            **{f"{kind}s": list(visuals.cpu()), f"{kind}s_kwargs": settings},
        )
        # Later versions of transformers would derive the positions of the tokens from this entry.
        inputs.pop("mm_token_type_ids", None)
        inputs = {name: value.to(self.device) for name, value in inputs.items() if isinstance(value, Tensor)}
        asked = self._asked(inputs["input_ids"].cpu(), texts)
        batch, length = inputs["input_ids"].shape
        places = torch.arange(length, device=self.device).expand(3, batch, length)
        with torch.autocast(torch.device(self.device).type, enabled=False):
            hidden = self.model(**inputs, position_ids=places, use_cache=False).last_hidden_state
            rows = torch.arange(batch)[:, None]
            scores: Tensor = self.head(hidden[rows, asked].float())
        return scores

    def _asked(self, ids: Tensor, texts: Sequence[str]) -> Tensor:
        """Return the places of the special tokens, [B, tokens]."""
        found = ids[:, None, :] == self.ids[None, :, None]
        for row, counts in enumerate(found.sum(-1).tolist()):
            if counts != [1] * len(self.ids):
                raise ValueError(
                    f"{self.reward}: the text has its special tokens {counts} times instead of once each; does the "
                    f"prompt contain one? {texts[row][-200:]!r}"
                )
        return found.int().argmax(-1)


def load_scorer(
    reward: str,
    state: Mapping[str, Tensor],
    base: str,
    tokens: Sequence[str],
    head: nn.Module,
    *,
    origin: str,
    device: str,
    dtype: torch.dtype,
) -> TokenScorer:
    """Load the scorer of a checkpoint.

    Args:
        reward: name of the reward, for messages.
        state: weights of the language model and the vision model, with old or new names.
        base: folder or model id with the configuration and processor of the Qwen2-VL that was fine-tuned.
        tokens: special tokens, which are added to the tokenizer.
        head: module from a hidden state to the outputs; see `TokenScorer`.
        origin: name of the checkpoint in messages.
        device: where it runs.
        dtype: data type of the weights; the head stays in float32.

    Raises:
        ValueError: the weights do not fit the configuration or the tokenizer.
    """
    from transformers import AutoConfig, AutoProcessor, Qwen2VLModel

    source = source_name(reward, "base", base)
    processor = load_processor(reward, AutoProcessor, source)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    weights = rename_weights(state)
    words = weights.get("language_model.embed_tokens.weight")
    if words is None:
        raise ValueError(f"{reward}: {origin} is not a Qwen2-VL model: it lacks the token embeddings")
    if len(processor.tokenizer) > len(words):
        raise ValueError(
            f"{reward}: the tokenizer of {base} has {len(processor.tokenizer)} tokens with the special ones, but "
            f"{origin} has {len(words)}; set base to the model that was fine-tuned"
        )
    config = load_processor(reward, AutoConfig, source)
    config.text_config.vocab_size = len(words)
    model = load_transformers(reward, Qwen2VLModel, origin, dtype=dtype, device=device, weights=(config, weights))
    return TokenScorer(reward, model, head.to(device), processor, tokens, device)


def rename_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a Qwen2-VL for generation under the names of `Qwen2VLModel`.

    The names in `state` are from transformers 4.45 or a later version. The weights of the output over the vocabulary
    and of other heads are left out.
    """
    renamed = {}
    for key, value in state.items():
        if key.startswith(("visual.", "model.visual.")):
            renamed[key.removeprefix("model.")] = value
        elif key.startswith("model."):
            renamed["language_model." + key.removeprefix("model.").removeprefix("language_model.")] = value
    return renamed


def read_rubric(reward: str, path: str, constants: Sequence[str], tokens: Sequence[str]) -> str:
    """Return the text that asks for scores, with `{text_prompt}` in place of the prompt.

    Args:
        reward: name of the reward, for messages.
        path: path of a text file, or of the Python file of the model's release that contains the text. The Python file
            is parsed, not run.
        constants: names of the constants in the Python file; their texts are joined.
        tokens: special tokens; the text must have each of them once.

    Raises:
        ValueError: there is no such file or constant, or the text does not have each token and the place of the prompt
            once.
    """
    file = find_file(reward, "rubric", path)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        found = _constants(ast.parse(text))
        missing = [name for name in constants if name not in found]
        if missing:
            raise ValueError(f"{reward}: {file} does not define the text {missing[0]}")
        text = "".join(found[name] for name in constants)
    for needed in (PLACE_OF_PROMPT, *tokens):
        if text.count(needed) != 1:
            raise ValueError(f"{reward}: {file} has {needed} {text.count(needed)} times; it must have it exactly once")
    return text


def _constants(tree: ast.Module) -> dict[str, str]:
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def fit_pixels(images: Tensor, least: int, most: int) -> Tensor:
    """Return images in the size in which Qwen2-VL sees them, as 8-bit levels.

    Args:
        images: [N, 3, H, W] in [0, 1].
        least: smallest number of pixels of an image.
        most: largest number of pixels of an image.

    Returns:
        uint8 [N, 3, h, w]; h and w are multiples of 28, and the proportions are nearly the same.
    """
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    height, width = images.shape[-2:]
    size = smart_resize(int(height), int(width), factor=FACTOR, min_pixels=least, max_pixels=most)
    plain = {"size": size, "mean": (0.0,) * 3, "std": (1.0,) * 3, "resize_mode": "squash"}
    return to_bytes(preprocess_images(images.float(), plain))
