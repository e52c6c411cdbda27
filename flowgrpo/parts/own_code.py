"""The code of a user's own part, called so that an exception of it names the part, the file and the line."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from types import FrameType, GeneratorType
from typing import Any

from .foreign import is_own, of_package
from .plugins import home_of, told


class PartError(ValueError):
    """A user's own part raised an exception, its `__cause__`. The message has the part, the file and the line."""


class OwnPart(partial[Any]):
    """A function of a user's with its options bound.

    Attributes:
        who: kind and name of the part, for messages.
        file: the file of the function.
    """

    who: str = ""
    file: str | None = None

    def __call__(self, /, *values: Any, **given: Any) -> Any:
        """Call the function.

        Raises:
            PartError: its code raised an exception.
        """
        try:
            return _followed(super().__call__(*values, **given), self.who, self.file)
        except (Exception, SystemExit) as error:
            fault = _fault(error, self.who, self.file, sys._getframe(1))
            if fault is None:
                raise
            raise fault from error


def own_part(target: Callable[..., Any], who: str, context: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A function of a user's with its options bound, or an instance of a class of a user's.

    Args:
        target: the function or class.
        who: kind and name of the part, for messages.
        context: positional arguments of the function or of the constructor.
        options: keyword arguments of the function or of the constructor.

    Raises:
        PartError: the constructor raised an exception. Later calls of the part raise it too.
    """
    if not isinstance(target, type):
        made = OwnPart(target, *context, **options)
        made.who, made.file = who, _file_of(target)
        return made
    try:
        return _watched_class(target, who)(*context, **options)
    except (Exception, SystemExit) as error:
        fault = _fault(error, who, _file_of(target), None)
        if fault is None:
            raise
        raise fault from error


@cache
def _watched_class(target: type, who: str) -> type:
    """A subclass whose methods from a user's files name the part. The run calls `__call__` and public methods only."""
    file, watched = _file_of(target), {}
    for base in reversed(target.__mro__):
        for name, method in vars(base).items():
            called = inspect.isfunction(method) and (name == "__call__" or not name.startswith("_"))
            if called and (is_own(method.__code__.co_filename) or method.__code__.co_filename == file):
                watched[name] = _watched(method, who, file)
            else:
                watched.pop(name, None)
    kept = {name: getattr(target, name) for name in ("__module__", "__qualname__", "__doc__")}
    try:
        made: type = type(target)(target.__name__, (target,), {**kept, **watched})
    except TypeError:
        # A class may refuse subclasses. Its exceptions then come as they are.
        return target
    return made


def _watched(method: Callable[..., Any], who: str, file: str | None) -> Callable[..., Any]:
    @wraps(method)
    def called(*values: Any, **given: Any) -> Any:
        try:
            return _followed(method(*values, **given), who, file)
        except (Exception, SystemExit) as error:
            fault = _fault(error, who, file, sys._getframe(1))
            if fault is None:
                raise
            raise fault from error

    return called


def _followed(found: Any, who: str, file: str | None) -> Any:
    """A result. The code of a generator runs only when somebody iterates."""
    return _steps(found, who, file) if isinstance(found, GeneratorType) else found


def _steps(found: Iterator[Any], who: str, file: str | None) -> Iterator[Any]:
    try:
        return (yield from found)
    except (Exception, SystemExit) as error:
        fault = _fault(error, who, file, sys._getframe(1))
        if fault is None:
            raise
        raise fault from error


def _fault(error: BaseException, who: str, file: str | None, caller: FrameType | None) -> PartError | None:
    """The error that names the part; None for an exception that must pass as it is.

    These pass: an exception that names its part already; one that the user's own code may catch, because this code
    made the call; and one from within this package, unless it is a message for the user.

    Args:
        error: as it was caught. Its traceback begins with the function that caught it.
        who: kind and name of the part.
        file: the file of the part.
        caller: the frame from which the part was called; None for a constructor.
    """
    if isinstance(error, PartError) or (caller is not None and is_own(caller.f_code.co_filename)):
        return None
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)[1:]]
    owned = [name for name in frames if of_package(name) or is_own(name) or name == file]
    if frames and not any(not of_package(name) for name in owned):
        return None
    if owned and of_package(owned[-1]) and not isinstance(error, ValueError):
        return None
    return PartError(f"{who} failed: {told(error, file)}")


def _file_of(target: Any) -> str | None:
    """The file that defines a function or class."""
    return getattr(sys.modules.get(home_of(target) or ""), "__file__", None)
