"""Prompts that show pictures to a language model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2
import torch
from torch import Tensor

from .picture_marks import MARK, PART, marked

_KINDS = "type_ids"
_OTHERS = ("input_ids", "attention_mask", "labels")


class Shown(Protocol):
    """A picture in a file."""

    def read(self) -> Any:
        """The picture, as an RGB image of Pillow."""


class PicturedIds(list[int]):
    """Token ids of a prompt that shows pictures, and what the model needs beside them.

    Two prompts are equal if their ids and their pictures are equal.

    Attributes:
        inputs: name -> tensor, further arguments of the model's call. The first dimension counts pictures, or parts of
            pictures.
        kinds: name -> [L] kinds of the tokens, for models that tell tokens of pictures from words.
        places: [A, L] positions, mostly in time, height and width; None for a model that counts tokens.
        pictures: the pictures.
    """

    def __init__(
        self,
        ids: Sequence[int],
        inputs: Mapping[str, Tensor],
        kinds: Mapping[str, Tensor],
        places: Tensor | None,
        pictures: Sequence[Shown] = (),
    ) -> None:
        super().__init__(ids)
        self.inputs, self.kinds, self.places, self.pictures = inputs, kinds, places, tuple(pictures)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PicturedIds) and self.pictures == other.pictures and list(self) == list(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def followed(ids: list[int], more: Sequence[int]) -> list[int]:
    """Ids with further ones after them; a prompt that shows pictures still shows them."""
    if not isinstance(ids, PicturedIds):
        return [*ids, *more]
    kinds = {name: torch.cat([of, of.new_zeros(len(more))]) for name, of in ids.kinds.items()}
    places = ids.places
    if places is not None:
        onward = int(places.max()) + 1 + torch.arange(len(more))
        places = torch.cat([places, onward.to(places).expand(len(places), len(more))], dim=1)
    return PicturedIds([*ids, *more], ids.inputs, kinds, places, ids.pictures)


def identity(ids: Sequence[int]) -> tuple[Any, ...]:
    """A key of what a model sees: the ids, and the pictures if there are any."""
    return (ids.pictures if isinstance(ids, PicturedIds) else (), *ids)


def pictured_ids(
    processor: Any,
    model: Any,
    talk: Sequence[Mapping[str, str]],
    pictures: Sequence[Shown],
    variables: Mapping[str, Any],
) -> PicturedIds:
    """Token ids of a conversation that shows pictures, through the chat template of a processor.

    Args:
        processor: of the model, whose tokenizer has a chat template.
        model: of transformers; None if only the number of tokens matters.
        talk: messages with `role` and `content`; if the last message is the assistant's, it is the beginning of the
            answer. Each `MARK` stands for the next picture. Without any, the pictures are shown before the words of the
            last message of the user.
        pictures: the pictures, in their order.
        variables: values for further variables of the template.

    Raises:
        ValueError: the number of marks is not the number of pictures, the template refuses the conversation, or a
            picture cannot be read.
    """
    continues, parts = talk[-1]["role"] == "assistant", with_parts(talk, len(pictures))
    try:
        text = processor.tokenizer.apply_chat_template(
            parts, tokenize=False, add_generation_prompt=not continues,
            continue_final_message=continues, **variables,
        )  # fmt: skip
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise ValueError(
            f"the chat template refuses a prompt with pictures: {error}; check the roles of the conversation and "
            "model.system, or mend the template"
        ) from error
    # The template writes the special tokens itself.
    made = processor(
        text=[text], images=[[one.read() for one in pictures]], return_tensors="pt", add_special_tokens=False
    )
    named = {name: value for name, value in made.items() if isinstance(value, Tensor)}
    places = None if model is None else _places(model, named)
    kinds = {name: value[0] for name, value in named.items() if name.endswith(_KINDS)}
    inputs = {name: value for name, value in named.items() if name not in (*_OTHERS, *kinds)}
    return PicturedIds(named["input_ids"][0].tolist(), inputs, kinds, places, pictures)


def with_parts(talk: Sequence[Mapping[str, str]], pictures: int) -> list[dict[str, Any]]:
    """Messages whose contents are lists of texts and pictures, as templates of models that see want them.

    Raises:
        ValueError: the number of marks is not the number of pictures.
    """
    at_marks = marked([message["content"] for message in talk], pictures)
    shows = max((k for k, message in enumerate(talk) if message["role"] == "user"), default=len(talk) - 1)
    found: list[dict[str, Any]] = []
    for k, message in enumerate(talk):
        parts: list[dict[str, str]] = [{"type": "image"}] * pictures if not at_marks and k == shows else []
        for number, text in enumerate(message["content"].replace(PART, MARK).split(MARK)):
            parts = [
                *parts,
                *([{"type": "image"}] if number else []),
                *([{"type": "text", "text": text}] if text else []),
            ]
        found.append({**message, "content": parts})
    return found


def _places(model: Any, named: Mapping[str, Tensor]) -> Tensor | None:
    """The positions [A, L] of a model with positions in time, height and width; None for other models."""
    place = getattr(getattr(model, "model", None), "get_rope_index", None)
    if place is None:
        return None
    known = inspect.signature(place).parameters
    found, _ = place(**{name: value for name, value in named.items() if name in known})
    return found[:, 0].cpu()  # type: ignore[no-any-return]
