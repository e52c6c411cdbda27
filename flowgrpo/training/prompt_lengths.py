"""Prompts that are too long for a pipeline's tokenizers: the pipeline cuts their ends off and says nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..weights.json_files import read_json_object

_NO_LIMIT = 1_000_000
MOST = 20_000
"""Most prompts of a file whose tokens are counted. More prompts would keep a run waiting."""


def long_prompts(
    folder: Path,
    source: str,
    prompts: Sequence[str],
    call: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
) -> Iterator[str]:
    """A line for each tokenizer that cuts off some prompts. Of a long file, prompts at equal distances are looked at.

    Args:
        folder: of the pipeline.
        source: the prompt file, for messages.
        prompts: its prompts.
        call: arguments of the pipeline's call.
        parameters: of the call. A parameter `max_sequence_length` is the limit of all tokenizers except CLIP's.
    """
    index = read_json_object(folder / "model_index.json")
    total, prompts = len(prompts), prompts[:: -(-len(prompts) // MOST) or 1]
    some = "" if len(prompts) == total else f" (of {total:,}, the others were not looked at)"
    for name in sorted(key for key in index if key.startswith("tokenizer")):
        library_and_class = index[name]
        if not isinstance(library_and_class, list) or library_and_class[-1] is None:
            continue
        limit = _limit(folder / name, str(library_and_class[-1]), call, parameters)
        # A token has at least one byte, and two more tokens mark beginning and end.
        suspects = [text for text in prompts if limit is not None and len(text.encode()) + 2 > limit]
        if limit is None or not suspects or (count := _counter(folder / name)) is None:
            continue
        lengths = count(suspects)
        over = [length for length in lengths if length > limit]
        if over:
            yield (
                f"{len(over)} of {len(prompts)} prompts of {source}{some} are longer than the {limit} tokens that "
                f"{name} takes (the longest has {max(over)}); their ends are not seen by its encoder"
            )


def _limit(folder: Path, kind: str, call: Mapping[str, Any], parameters: Mapping[str, Any]) -> int | None:
    settings = folder / "tokenizer_config.json"
    own = read_json_object(settings).get("model_max_length") if settings.is_file() else None
    given = parameters.get("max_sequence_length")
    asked = call.get("max_sequence_length", None if given is None else given.default)
    if not kind.startswith("CLIP") and type(asked) is int and asked > 0:
        return asked
    return own if isinstance(own, int) and own < _NO_LIMIT else None


def _counter(folder: Path) -> Any:
    """A function that counts the tokens of prompts; None for a tokenizer without the file of fast tokenizers.

    Raises:
        ValueError: the file is not a tokenizer.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer ({error}); download the model again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda prompts: [len(found.ids) for found in tokenizer.encode_batch(list(prompts))]
