"""Other values that an option could have, by its type, for tests of what an option changes."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from flowgrpo.parts.choice import Choice, Of, options_model, plain
from flowgrpo.parts.kinds import KINDS
from flowgrpo.parts.section import Section

NUMBERS = (1e-7, 1e-3, 0.3, 0.9, 1.7, 40.0)


def options(place: Any, key: str) -> Iterator[tuple[str, Any, Any, tuple[Any, ...]]]:
    """Dotted key, value, type and what is beside the type, of every option of a part or section and those within."""
    if isinstance(place, Choice):
        fields, values = options_model(place.kind, place.name).model_fields, dict(place.options)
    elif isinstance(place, Section):
        fields = type(place).model_fields
        values = {name: getattr(place, name) for name in fields}
    else:
        return
    for name, field in fields.items():
        yield f"{key}.{name}", values[name], field.annotation, tuple(field.metadata)
        yield from options(values[name], f"{key}.{name}")


def others(value: Any, annotation: Any, beside: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Other values as a recipe has them; some of them may be out of range."""
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        beside = (*inner, *beside)
    if kinds := [one.kind for one in beside if isinstance(one, Of)]:
        yield from (name for name in KINDS[kinds[0]].builtin if not isinstance(value, Choice) or name != value.name)
    elif get_origin(annotation) in (Union, UnionType):
        for one in get_args(annotation):
            yield from [None] if one is type(None) and value is not None else others(value, one, beside)
    elif get_origin(annotation) is Literal:
        yield from (one for one in get_args(annotation) if one != value)
    elif annotation is bool:
        yield not value
    elif annotation is int:
        given = value if isinstance(value, int) else 1
        yield from (one for one in dict.fromkeys((given + 1, given - 1, 2 * given + 1, 0, 1, 2, 3)) if one != value)
    elif annotation is float:
        yield from (one for one in (NUMBERS if value is None else (0.5 * value, 3 * value, *NUMBERS)) if one != value)
    elif get_origin(annotation) in (list, tuple) and value:
        numbers = plain(value)
        if isinstance(numbers[0], str):
            yield [*numbers[:-1], f"{numbers[-1]}s"]
            return
        yield from ([*numbers[:-1], numbers[-1] + 1], [numbers[0] + 1, *numbers[1:]], [*numbers, numbers[-1] + 2])
    # On Python 3.10 `list[float]` is an instance of `type`.
    elif get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, Section):
        yield from [{}] if value is None else []
