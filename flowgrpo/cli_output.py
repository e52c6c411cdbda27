"""What commands print with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rich.console import Console

console = Console()


def say(text: str) -> None:
    """Print a line as it is: names and prompts are not markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def is_first() -> bool:
    """Whether this is the first of the processes that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def timed_report() -> Callable[[str], None]:
    """Prints lines with the seconds since this call."""
    began = time.perf_counter()
    return lambda text: say(f"{time.perf_counter() - began:7.0f} s  {text}")
