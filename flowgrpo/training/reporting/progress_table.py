"""The table of a run's iterations: its columns, and how they fit a terminal of a given width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

INDENT = 11
"""Indentation of the lines that continue the line of an iteration, in columns."""
_NOTHING = "–"
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        name: its header.
        width: in characters.
        rank: if a terminal is too narrow, columns with the highest rank are left out first. Columns of rank 0 stay.
    """

    name: str
    width: int
    rank: int = 0


def columns_of(record: Mapping[str, Any], total: int, noun: str, heldout: bool, given: bool = False) -> list[Column]:
    """The columns of a run.

    Args:
        record: metrics of an iteration; a metric that the run does not have gets no column.
        total: iterations of the run.
        noun: what a sample is called, in the plural; if empty, there is no column for the rate.
        heldout: whether an evaluation has exactly one number.
        given: whether the data give the samples. Their rewards say nothing about the policy.
    """
    rate = f"{noun[:6]}/s"
    compared = record.get("preferred") is not None
    measured = {
        "reward": not given,
        "trend": not given,
        "preferred": compared,
        "loss": given and not compared,
        "held-out": heldout,
        rate: noun != "",
        "ratio": record.get("ratio/mean") is not None,
        "clip": record.get("clip_share") is not None,
        "kl": record.get("kl") is not None,
    }
    every = [
        Column("iteration", max(9, 2 * len(str(total)) + 1)),
        Column("reward", 7),
        Column("trend", 6, 5),
        Column("preferred", 9),
        Column("loss", 8),
        Column("held-out", 8, 1),
        Column("ratio", 8, 3),
        Column("clip", 6, 4),
        Column("kl", 6, 6),
        Column(rate, 8, 7),
        Column("s/iter", 6, 2),
        Column("left", 6),
    ]
    return [column for column in every if measured.get(column.name, True)]


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit a terminal of `width` characters; the last character stays free."""
    kept = list(columns)
    while sum(column.width + 1 for column in kept) > width:
        last = max(kept, key=lambda column: column.rank)
        if last.rank == 0:
            break
        kept.remove(last)
    return kept


def row(cells: Mapping[str, str], columns: Sequence[Column], styles: Mapping[str, str]) -> Text:
    """A line of the table; cells are aligned to the right."""
    line = Text()
    for column in columns:
        line.append(" " if line.plain else "")
        line.append(f"{cells.get(column.name, _NOTHING):>{column.width}}", styles.get(column.name))
    return line


def header(columns: Sequence[Column]) -> Text:
    """The line with the names of the columns."""
    names = {column.name: column.name for column in columns}
    return row(names, columns, dict.fromkeys(names, "bold"))


def number(value: float | None, width: int, digits: int) -> str:
    """A number in at most `width` characters (5 or more): at most `digits` decimals, or an exponent if needed.

    A value that is not 0 is never shown as 0.
    """
    if value is None or not math.isfinite(value):
        return _NOTHING
    for decimals in range(digits, -1, -1):
        text = f"{value:.{decimals}f}"
        if value != 0 and float(text) == 0:
            break
        if len(text) <= width:
            return text
    for decimals in range(max(digits, 1), -1, -1):
        mantissa, exponent = f"{value:.{decimals}e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
        if len(text) <= width:
            return text
    return f"{'-' if value < 0 else ''}1e{math.floor(math.log10(abs(value)))}"[:width]


def share(value: float | None) -> str:
    """A share in [0, 1] in per cent, in at most 6 characters."""
    return _NOTHING if value is None or not math.isfinite(value) else f"{number(100 * value, 5, 1)}%"


def duration(seconds: float) -> str:
    """A duration in at most 6 characters: `0:06`, `59:59`, `1h02m`, `3d04h`, `412d`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days > 99:
        return f"{min(days, 99999)}d"
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}:{rest:02}"


def named(values: Mapping[str, float | None], width: int) -> list[str]:
    """Each value with its name, `gold 0.7408`, in at most `width` columns; a long name loses its middle."""
    cells = {name: number(value, 10, 4) for name, value in values.items()}
    return [f"{shortened(name, width - len(cell) - 1)} {cell}" for name, cell in cells.items()]


def means_of(record: Mapping[str, float | None], kind: str) -> dict[str, float | None]:
    """The means of an evaluation by reward; `kind` is `eval` or `quick`."""
    return {name.removeprefix(f"{kind}/"): value for name, value in record.items() if name.startswith(f"{kind}/")}


def gained(record: Mapping[str, float | None], name: str) -> str:
    """The gain of a reward since the start with its standard error, ` (+0.031 ± 0.02)`, or nothing."""
    gain, error = (record.get(f"quick_gain{part}/{name}") for part in ("", "_error"))
    if gain is None:
        return ""
    return f" ({'+' if gain >= 0 else ''}{number(gain, 10, 3)} ± {number(error, 10, 3)})"


def sparkline(values: Sequence[float | None], least: float = 0.0) -> str:
    """A curve of block characters from the least value to the greatest; a value that is missing is a space.

    Args:
        values: the values.
        least: the height of the curve stands for at least this difference.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = max(high - low, least)
    low -= (span - (high - low)) / 2
    cells = [
        " " if value is None or not math.isfinite(value) else _BLOCKS[round((value - low) / (span or 1.0) * 7)]
        for value in values
    ]
    return "".join(cells)


def curve(values: Sequence[float | None], width: int, least: float = 0.0) -> str:
    """`sparkline` in at most `width` columns. Of more values, a column shows the mean of neighbours."""
    count = min(len(values), width)
    cells: list[float | None] = []
    for k in range(count):
        part = values[k * len(values) // count : (k + 1) * len(values) // count]
        known = [value for value in part if value is not None and math.isfinite(value)]
        cells.append(fmean(known) if known else None)
    return sparkline(cells, least)


def weighted(names: Sequence[str], weights: Sequence[float]) -> str:
    """The rewards of a run with their weights: `pickscore, 0.1 × jpeg_compressibility`."""
    return ", ".join(name if weight == 1 else f"{weight:.4g} × {name}" for name, weight in zip(names, weights))


def folded(items: Sequence[str], width: int) -> Iterator[str]:
    """Lines of at most `width` columns, with items separated by two spaces; no item is broken."""
    line = ""
    for item in items:
        if line and cell_len(line) + 2 + cell_len(item) > width:
            yield line
            line = ""
        line = f"{line}  {item}" if line else item
    if line:
        yield line


def shortened(name: str, width: int) -> str:
    """A name in at most `width` columns; a longer name keeps its beginning and its end."""
    if cell_len(name) <= width:
        return name
    end = (width - 1) // 2
    beginning = chop_cells(name, width - 1 - end)[0]
    backwards = chop_cells(name[::-1], end)[0] if end else ""
    return set_cell_size(f"{beginning}…{backwards[::-1]}", width).rstrip()
