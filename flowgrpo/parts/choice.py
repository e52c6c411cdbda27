"""A part as a recipe chooses it: the name of the part, and the options that its signature declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, GetCoreSchemaHandler, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from .docstrings import described
from .kinds import KINDS
from .own_code import OwnPart, own_part
from .plugins import nearest, with_article
from .ranges import is_given
from .section import Section


@dataclass(frozen=True)
class Choice:
    """A part that a recipe has chosen.

    Attributes:
        kind: word of the part's kind.
        name: name of the part, as the recipe writes it.
        options: all options by name; options that the recipe leaves out have their defaults. If the value of an option
            is another part, it is a `Choice` too.
    """

    kind: str
    name: str
    options: Mapping[str, Any]

    def __getitem__(self, option: str) -> Any:
        """The value of an option; raises KeyError if the part does not have the option."""
        return self.options[option]

    def get(self, option: str, default: Any = None) -> Any:
        """The value of an option, or `default` if the part does not have the option."""
        return self.options.get(option, default)

    @property
    def target(self) -> Callable[..., Any]:
        """The function or class."""
        return KINDS[self.kind].resolve(self.name)

    @property
    def short(self) -> str:
        """The name without the file or module in front of it."""
        return self.name.rpartition(":")[2]

    def make(self, *context: Any, **given: Any) -> Any:
        """The function with its options bound, or an instance of the class.

        Args:
            context: positional arguments, which a class gets when it is made and a function when it is called.
            given: values that the run can give. A part gets the values that it asks for (`ranges.Given`), and so do the
                parts within it.

        Raises:
            ValueError: if the part refuses a combination of options.
            PartError: if the constructor of a user's own part fails. The part itself raises it too, when it is called.
        """
        target = self.target
        wanted = {name: given[name] for name in given_names(target) if name in given}
        own = set(KINDS[self.kind].own) - set(_options(target))
        options = {
            name: value.make(**given) if isinstance(value, Choice) else value
            for name, value in self.options.items()
            if name not in own
        }
        if self.name not in KINDS[self.kind].builtin:
            return own_part(target, f"{self.kind} {self.name}", context, {**options, **wanted})
        if isinstance(target, type):
            return target(*context, **options, **wanted)
        return partial(target, *context, **options, **wanted)

    def written(self) -> dict[str, Any]:
        """The part as a recipe writes it, with every option written out, as plain values."""
        return {"name": self.name, **{option: plain(value) for option, value in self.options.items()}}


def plain(value: Any) -> Any:
    """A section, a part or an option's value, as YAML has it. Infinities stay; pydantic's own dump loses them."""
    if isinstance(value, Choice):
        return value.written()
    if isinstance(value, Section):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value


class Of:
    """`kernel: Annotated[Choice, Of("kernel", "flow_sde")]`: a part of a kind, given by its name or with options.

    Args:
        kind: word of the kind.
        default: name of the part if only options are given; None if a name must be given.
    """

    def __init__(self, kind: str, default: str | None = None) -> None:
        self.kind, self.default = kind, default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda given: chosen(self.kind, given, self.default),
            serialization=core_schema.plain_serializer_function_ser_schema(Choice.written),
        )


def named(kind: str, part: Any) -> str:
    """Kind and name of a part that is made, for messages; a user's own part as the recipe names it."""
    while isinstance(part, partial):
        if isinstance(part, OwnPart):
            return part.who
        part = part.func
    return f"{kind} {getattr(part, '__name__', type(part).__name__)}"


def part_field(default: str | dict[str, Any], description: str) -> Any:
    """The field of a section whose value is a part, with a default as a recipe would write it."""
    return Field(default, validate_default=True, description=description)


def chosen(kind: str, given: Any, default: str | None = None) -> Choice:
    """The part that a recipe chooses, checked.

    Raises:
        PydanticCustomError: with type "part", if there is no such part or option, or a value is out of range. Its
            context has `faults`, a list of (place within the part, message, input).
    """
    word = kind
    if isinstance(given, Choice):
        return given
    if callable(given):
        # The default of an option may be the code itself.
        given = next((known for known, code in KINDS[kind].builtin.items() if code is given), given)
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        raise _refused(
            [((), f"should be the name of {with_article(word)}, or a mapping with its `name` and options", given)]
        )
    name = given.get("name", default)
    if not isinstance(name, str) or not name:
        known = ", ".join(KINDS[kind].names())
        raise _refused([(("name",), f"should be the name of {with_article(word)}: {known}, or FILE.py:NAME", name)])
    try:
        model = options_model(kind, name)
    except ValueError as error:
        raise _refused([((), str(error), None)]) from None
    options = {key: value for key, value in given.items() if key != "name"}
    unknown = [key for key in options if key not in model.model_fields]
    faults: list[tuple[Any, Any, Any]] = [((key,), no_option(kind, name, key), None) for key in unknown]
    try:
        made = model.model_validate({key: value for key, value in options.items() if key not in unknown})
    except ValidationError as error:
        for fault in error.errors():
            if fault["type"] == "part":
                faults += [((*fault["loc"], *place), said, what) for place, said, what in fault["ctx"]["faults"]]
            else:
                told: dict[str, Any] = dict(fault)
                if fault["type"] == "extra_forbidden":
                    told["known"] = fields_at(model, fault["loc"][:-1])
                faults.append((fault["loc"], told, fault.get("input")))
    if faults:
        raise _refused(faults)
    return Choice(kind, name, {key: getattr(made, key) for key in model.model_fields})


def section_at(schema: type[BaseModel], location: Iterable[Any]) -> type[BaseModel]:
    """The section at a place in a schema; entries of lists are looked through.

    Raises:
        KeyError: if there is no such key, or no section is at this place.
    """
    model: Any = schema
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        candidates += [inner for c in candidates for inner in getattr(c, "__args__", ())]
        # Python 3.10 takes `list[int]` for a type.
        sections = [c for c in candidates if get_origin(c) is None and isinstance(c, type) and issubclass(c, BaseModel)]
        if not sections:
            raise KeyError(part)
        model = sections[0]
    return model  # type: ignore[no-any-return]


def fields_at(schema: type[BaseModel], location: Iterable[Any]) -> list[str]:
    """The keys of the section at a place in a schema; entries of lists have no keys of their own."""
    return list(section_at(schema, location).model_fields)


def _refused(faults: list[tuple[Any, Any, Any]]) -> PydanticCustomError:
    return PydanticCustomError("part", "a part is wrong", {"faults": faults})


def no_option(kind: str, name: str, option: str) -> str:
    """The message for an option that a part does not have. It names the part's options, and parts with this option."""
    if ":" in name and _stands_before(KINDS[kind].resolve(name), option):
        return (
            f"{kind} {name} has {option!r} among its positional parameters, and an option is keyword-only; write `*,` "
            f"before `{option}` in {name.rpartition(':')[0]} to make it an option"
        )
    known = list(options_model(kind, name).model_fields)
    elsewhere = owners(str(option))
    told = f"{kind} {name} has no option {option!r}"
    close = nearest(str(option), known)
    if close.startswith(";") and not elsewhere:
        return f"{told}{close}"
    has = f"its options are {', '.join(known)}" if known else "it has none"
    return f"{told}; {has}" + (f". {elsewhere}" if elsewhere else "")


def _stands_before(target: Callable[..., Any], option: str) -> bool:
    """Whether a parameter with a default would be an option if it stood behind the `*`."""
    found = inspect.signature(target).parameters.get(option)
    return found is not None and found.kind is found.POSITIONAL_OR_KEYWORD and found.default is not found.empty


def owners(option: str) -> str:
    """A sentence that names parts of the package with an option of this name; empty if there are none."""
    found = [
        f"{word} {name} ({kind.key}.{option})"
        for word, kind in KINDS.items()
        for name in kind.builtin
        if option in options_model(word, name).model_fields
    ]
    if not found:
        return ""
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{option!r} is an option of {', '.join(found[:3])}{more}"


def options_model(kind: str, name: str) -> type[Section]:
    """The section that checks the options of a part.

    Raises:
        ValueError: if there is no such part, or its signature cannot be read as options.
    """
    return _model(kind, KINDS[kind].resolve(name), name)


@cache
def _model(kind: str, target: Callable[..., Any], name: str) -> type[Section]:
    if "name" in _options(target):
        raise ValueError(f"{kind} {name}: an option cannot be called name, which is the key of the part; rename it")
    _check_call(kind, target, name)
    texts = described(target)
    fields: dict[str, Any] = {}
    for option, (annotation, default) in {**KINDS[kind].own, **_options(target)}.items():
        missing = default is inspect.Parameter.empty
        # Options that every entry of a list has are described in the kind.
        told: dict[str, Any] = {"description": texts[option]} if option in texts else {}
        about = Field(
            ... if missing else default,
            **told,
            validate_default=isinstance(default, str | dict) or (callable(default) and not missing),
        )
        fields[option] = (annotation, about)
    return create_model(f"{kind.title()} {name}", __base__=Section, __doc__=inspect.getdoc(target), **fields)


def _check_call(kind: str, target: Callable[..., Any], name: str) -> None:
    values = KINDS[kind].positional
    if values is None or isinstance(target, type):
        return
    try:
        inspect.signature(target).bind(*values, **dict.fromkeys(_keywords(target)))
    except TypeError:
        raise ValueError(
            f"{kind} {name} has the parameters {inspect.signature(target)}, but it is called with {len(values)} "
            f"value{'' if len(values) == 1 else 's'}; write {KINDS[kind].call}"
        ) from None


@cache
def _options(target: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Option -> (type, default) of a function or class: its keyword-only parameters that a run does not give."""
    found = {}
    for name, parameter in _keywords(target).items():
        annotation = _annotation(target, parameter)
        if not is_given(annotation):
            found[name] = (annotation, _named(annotation, parameter.default))
    return found


def _named(annotation: Any, default: Any) -> Any:
    """A default that is the code of a part of the package becomes the part's name; any other default stays as it is."""
    kinds = [KINDS[of.kind] for of in getattr(annotation, "__metadata__", ()) if isinstance(of, Of)]
    return next((name for kind in kinds for name, code in kind.builtin.items() if code is default), default)


@cache
def given_names(target: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the keyword-only parameters that a run gives."""
    return tuple(name for name, parameter in _keywords(target).items() if is_given(_annotation(target, parameter)))


def _keywords(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {n: p for n, p in inspect.signature(target).parameters.items() if p.kind is p.KEYWORD_ONLY}


def _annotation(target: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The type of a parameter: its annotation, or the type of its default if it has no annotation."""
    written = parameter.annotation
    if isinstance(written, str):
        while isinstance(target, partial):
            target = target.func
        # Only this annotation is evaluated: other annotations may use names that are imported only for type checkers.
        owner = vars(target).get("__init__") if isinstance(target, type) else inspect.unwrap(target)
        written = eval(written, getattr(owner, "__globals__", {}))
    if written is not parameter.empty:
        # YAML has lists, not tuples.
        return Annotated[written, Field(strict=False)] if get_origin(written) is tuple else written
    if parameter.default is parameter.empty or parameter.default is None:
        return Any
    return type(parameter.default)


def value_at(recipe: Any, key: str) -> Any:
    """The value at a dotted key of a recipe; for a part, its name. None if a part has no such option."""
    place = recipe
    for word in key.split("."):
        place = place.get(word) if isinstance(place, Choice) else getattr(place, word, None)
    return place.name if isinstance(place, Choice) else place


def choices(section: Any, key: str = "") -> list[tuple[str, Choice]]:
    """Every part that a recipe has chosen, with its dotted key; parts within other parts are included."""
    found: list[tuple[str, Choice]] = []
    if isinstance(section, Choice):
        found.append((key, section))
        inner = dict(section.options)
    elif isinstance(section, Section):
        inner = {name: getattr(section, name) for name in type(section).model_fields}
    elif isinstance(section, list):
        inner = {str(number): entry for number, entry in enumerate(section)}
    else:
        return []
    for name, value in inner.items():
        found += choices(value, f"{key}.{name}" if key else name)
    return found


def default_of(field: FieldInfo) -> Any:
    """The default of an option as a recipe would write it; if the default is the code of a part, the part's name."""
    value = field.get_default(call_default_factory=True)
    named = (name for kind in KINDS.values() for name, code in kind.builtin.items() if code is value)
    return plain(next(named, value)) if callable(value) else plain(value)


def annotation_of(kind: str, name: str, option: str) -> str:
    """The type and range of an option, in words."""
    field = options_model(kind, name).model_fields[option]
    return _words(field.annotation, field.metadata)


def _words(annotation: Any, metadata: Sequence[Any]) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        return _words(annotation, [*(m for one in inner for m in getattr(one, "metadata", [one])), *metadata])
    if kinds := [m.kind for m in metadata if isinstance(m, Of)]:
        return " ".join(map(with_article, kinds))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join("null" if part is type(None) else _words(part, metadata) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        return " | ".join(map(str, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"mapping of {', '.join(annotation.model_fields)}"
    if get_origin(annotation) is list or get_args(annotation)[1:] == (...,):
        return f"list of {_words(get_args(annotation)[0], [])}"
    words = {int: "whole number", float: "number", bool: "true | false", str: "text"}.get(annotation, "mapping")
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{sign} {getattr(m, key):g}" for m in metadata for key, sign in signs.items() if hasattr(m, key)]
    return " ".join([words, *bounds])
