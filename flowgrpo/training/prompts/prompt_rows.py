"""One prompt with its columns, and how it is made from an entry of a file or a row of a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image

from ...configs.prompt_source import PromptSource
from ...pipelines.pictures import Picture
from ...text.picture_marks import MARK, PART
from ..folder.json_lines import unwritable
from .stored_table import StoredColumns, StoredTable

Size = tuple[int, int]
"""Height and width, in pixels."""
# DrawBench and UniGenBench have these names for the column `prompt`.
OTHER_NAMES = ("prompts", "prompt_en", "prompt_zh")
ASSISTANT = "assistant"
PAIR = ("chosen", "rejected")
"""Columns of preference data, from which the prompt is read if there is no column for it."""
MAY_BE_EMPTY = ("system", ASSISTANT)
"""Roles of messages that may say nothing."""
LOST = ("tool_calls", "function_call", "thinking", "reasoning", "reasoning_content", "refusal")
"""Fields in which other tools write what a message says beside its content."""


@dataclass(frozen=True)
class GivenImage:
    """A picture, or a video whose frames stand side by side in a picture.

    Attributes:
        picture: the file.
        frames: number of frames; 1 for a picture.
    """

    picture: Picture
    frames: int = 1

    def read(self) -> list[Image.Image]:
        """The frames in RGB.

        Raises:
            ValueError: the file can no longer be read.
        """
        whole = self.picture.read()
        width = whole.width // self.frames
        return [whole.crop((k * width, 0, (k + 1) * width, whole.height)) for k in range(self.frames)]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt with the other columns of its file.

    Attributes:
        id: the position of the prompt in its file, from 0.
        text: the prompt; for a conversation the content of the last message that is not the assistant's.
        columns: the other columns, by name.
        messages: a conversation, for language models; None for a plain prompt.
        pictures: the pictures that condition the pipeline together with the text; see `with_pictures`.
        place: file and line of the prompt, for messages.
        size: the size of the images of this prompt; None for the size of the pipeline's call.
        given: pictures or videos that stand in the place of samples; see `with_given`.
        conditions: further pictures for the pipeline, by the argument of its call; see `with_conditions`.
        texts: further texts for the pipeline, by the argument of its call, such as lyrics.
        teaching: the pictures that the prompt's teacher sees in place of `pictures`; None if it sees these.
        target: the picture that rewards compare samples with; see `with_targets`. No pipeline sees it.
    """

    id: int
    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] | None = None
    pictures: Picture | tuple[Picture, ...] | None = None
    place: str = field(default="", compare=False)
    size: Size | None = None
    given: tuple[GivenImage, ...] = ()
    conditions: Mapping[str, Picture] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    teaching: Picture | tuple[Picture, ...] | None = None
    target: Picture | None = None

    @property
    def prompt(self) -> str:
        """The prompt that a pipeline gets: the text, with further texts and pictures. Each access reads the pictures.

        Raises:
            ValueError: a picture can no longer be read.
        """
        if self.pictures is None and not self.conditions and not self.texts:
            return self.text
        from ...pipelines.capture import ConditionedPrompt

        call: dict[str, Any] = {**self.texts, **{name: picture.read() for name, picture in self.conditions.items()}}
        if isinstance(self.pictures, Picture):
            call["image"] = self.pictures.read()
        elif self.pictures is not None:
            call["image"] = [picture.read() for picture in self.pictures]
        return ConditionedPrompt(self.text, **call)

    @property
    def shown(self) -> tuple[Picture, ...]:
        """The pictures of the prompt, however many there are."""
        if self.pictures is None:
            return ()
        return (self.pictures,) if isinstance(self.pictures, Picture) else tuple(self.pictures)

    def with_columns(self, added: Mapping[str, Any]) -> PromptRow:
        """The prompt with further columns; a column that it has already is replaced."""
        return replace(self, columns={**self.columns, **added})


def row_of(place: str, index: int, entry: Any, column: str | None) -> PromptRow:
    """The prompt of an entry of a file.

    Args:
        place: file and line, for messages.
        index: number of the prompt.
        entry: a prompt, or a mapping from columns to values.
        column: name of the column with the prompt; None for `prompt` or one of `OTHER_NAMES`.

    Raises:
        ValueError: there is no prompt, or a value cannot stand in the files of a run.
    """
    if isinstance(entry, str):
        if column is not None:
            raise ValueError(f"{place}: this prompt has no columns; leave out `column={column:.80}` after the `?`")
        entry = {"prompt": entry}
    if isinstance(entry, dict) and column is None and _is_implicit(entry) and isinstance(entry[PAIR[0]], list):
        entry = {"prompt": _common(place, *(entry[name] for name in PAIR)), **entry}
    key = _prompt_column(place, entry if isinstance(entry, dict) else None, column, type(entry).__name__)
    for name, value in entry.items():
        if (why := unwritable(value)) is not None:
            raise ValueError(f"{place}: `{name}` cannot be kept: {why}; write it as text or a number")
    columns = {k: v for k, v in entry.items() if k not in (key, None)}
    return _worded(place, index, key, entry[key], columns)


def _prompt_column(place: str, names: Collection[Any] | None, column: str | None, kind: str = "") -> str:
    """The name of the column that holds the prompts, among the names of an entry; None for an entry without names."""
    names = [] if names is None else [name for name in names if isinstance(name, str)]
    if column is not None:
        if column not in names:
            raise ValueError(
                f"{place}: no column {column!r:.80} (it has {', '.join(names)[:200] or kind or 'nothing'})"
            )
        return column
    known = {name.lower(): name for name in names}
    both = [name for name in names if name.lower() == "prompt"]
    if len(both) > 1:
        raise ValueError(f"{place}: {' and '.join(both)} could be the prompt; keep one of them")
    others = [known[name] for name in OTHER_NAMES if name in known]
    if "prompt" not in known and len(others) > 1:
        raise ValueError(f"{place}: {' and '.join(others)} could be the prompt; name one of them `prompt`")
    if "prompt" not in known and not others:
        hint = f"; say which column holds the prompts, as in ?column={names[0]}" if names else ""
        raise ValueError(f"{place}: no `prompt` (it has {', '.join(names)[:200] or kind or 'nothing'}){hint}")
    return known["prompt"] if "prompt" in known else others[0]


def _is_implicit(names: Collection[Any]) -> bool:
    """Whether preference data have no column for the prompt, because their conversations begin with it."""
    known = {name.lower() for name in names if isinstance(name, str)}
    return set(PAIR) <= set(names) and not known & {"prompt", *OTHER_NAMES}


def _common(place: str, chosen: Any, rejected: Any) -> list[Any]:
    """The messages with which two conversations begin, up to the answers.

    Raises:
        ValueError: they are no conversations, or do not begin alike.
    """
    if isinstance(chosen, list) and isinstance(rejected, list):
        count = next((k for k, (one, other) in enumerate(zip(chosen[:-1], rejected[:-1])) if one != other), None)
        shared = chosen[: min(len(chosen), len(rejected)) - 1] if count is None else chosen[:count]
        if shared:
            return shared
    raise ValueError(
        f"{place}: there is no `prompt`, and `chosen` and `rejected` are no conversations that begin alike; write the "
        "prompt into a column `prompt`"
    )


def _worded(place: str, index: int, key: str, said: Any, columns: Mapping[str, Any]) -> PromptRow:
    if isinstance(said, list):
        messages = _conversation(place, said)
        text = messages[answered(messages)]["content"].replace(PART, MARK)
        return PromptRow(index, text, columns, messages, place=place)
    if not isinstance(said, str) or not said.strip():
        raise ValueError(f"{place}: `{key}` is {said!r:.80}; write the words of a prompt")
    if "\0" in said:
        raise ValueError(f"{place}: `{key}` holds a NUL character; is the file a text?")
    return PromptRow(index, said, columns, place=place)


def stored_rows(table: StoredTable, chosen: range, source: PromptSource) -> list[PromptRow]:
    """The chosen rows of a table. Their columns stay in the table.

    Raises:
        ValueError: there is no column of prompts, or a row has no prompt.
    """
    places = list(table.places())
    both = [table.values(name) for name in PAIR] if source.column is None and _is_implicit(table.names) else []
    if both and isinstance(both[0][0], list):
        names, key = table.names, PAIR[0]
        said = [_common(place, *pair) for place, *pair in zip(places, *both, strict=True)]
    else:
        key = _prompt_column(places[0], table.names, source.column)
        names, said = tuple(name for name in table.names if name != key), table.values(key)
    return [
        _worded(places[row], index, key, said[row], StoredColumns(table, row, names))
        for index, row in enumerate(chosen)
    ]


def answered(messages: Sequence[Mapping[str, str]]) -> int:
    """The place of the message that is answered: the last one, or the one before an answer that is to be continued."""
    return len(messages) - 1 - (messages[-1]["role"] == ASSISTANT)


def _conversation(place: str, messages: list[Any]) -> tuple[dict[str, str], ...]:
    found = [message_of(place, message) for message in messages]
    if found and found[-1] == {"role": ASSISTANT, "content": ""}:
        raise ValueError(
            f"{place}: the last message of the conversation in `prompt` is the assistant's, and its content is empty; "
            "write the beginning of the answer, or leave the message out"
        )
    if not found or (found[-1]["role"] == ASSISTANT and (len(found) == 1 or found[-2]["role"] == ASSISTANT)):
        raise ValueError(
            f"{place}: the conversation in `prompt` must end with a message to be answered, with `role` and `content`; "
            "the beginning of the answer may follow, as a message of the assistant"
        )
    return tuple(found)


def message_of(place: str, message: Any) -> dict[str, str]:
    """A message with its content as one text, in which `PART` stands for a picture.

    Other tools write a content as a list of texts and pictures. The pictures themselves are in a column.

    Raises:
        ValueError: it is no message, its content is empty, or it says something outside its content.
    """
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    check_fields(place, message)
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = sorted({str(part.get("type")) for part in content} - {"text", "image"})
        if kinds:
            raise ValueError(
                f"{place}: a message holds {', '.join(kinds)}, and a language model reads text or pictures; leave it "
                "out"
            )
        if given := sorted({key for part in content for key in part if part.get(key)} - {"type", "text"}):
            raise ValueError(
                f"{place}: a message holds a picture by its {given[0]}; write {{type: image}} alone, and the path of "
                "the picture into a column `image`"
            )
        content = "".join(PART if part.get("type") == "image" else str(part.get("text") or "") for part in content)
    if isinstance(role, str) and role and content in ("", []) and role not in MAY_BE_EMPTY:
        raise ValueError(
            f"{place}: `prompt` has a message of the role {role!r:.80}, and its content is empty; write what it says, "
            "or leave the message out"
        )
    if not (isinstance(role, str) and role and isinstance(content, str)):
        raise ValueError(f"{place}: `prompt` has the message {message!r:.200}; give objects with `role` and `content`")
    return {"role": role, "content": content}


def check_fields(place: str, message: Any) -> None:
    """Refuse a message that says something outside its content, because only role and content are read.

    Raises:
        ValueError: a field of `LOST` is not empty.
    """
    found = [name for name in LOST if message.get(name)] if isinstance(message, dict) else []
    if found:
        raise ValueError(
            f"{place}: a message of the role {message.get('role')!r:.80} has `{'` and `'.join(found)}`, and only "
            "`role` and `content` are read; write it into `content`, in the words that the model's chat template has "
            "for it, or leave it out"
        )
