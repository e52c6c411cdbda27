"""The base class of every section of a recipe."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MOST, MOST_OF_A_KIND = 2**63 - 1, 10**9
"""The largest whole number, which is the limit for seeds, and the largest count."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused and values are not silently converted between types.

    Numbers must be finite. Whole numbers must not be larger than the libraries can count.
    """

    needs: ClassVar[tuple[Any, ...]] = ()
    """What the section needs from the rest of a recipe, see `needs.Need`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_counted(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            kind = cls.model_fields[str(info.field_name)].annotation
            counts = kind in (int, int | None) and info.field_name != "seed"
            most = MOST_OF_A_KIND if counts else MOST
            if abs(value) > most:
                raise PydanticCustomError("too_great", f"should be less than or equal to {most}")
        elif isinstance(value, float) and math.isnan(value):
            raise PydanticCustomError("finite_number", "should be a finite number")
        elif isinstance(value, dict | list) and (found := _fault_within(value)):
            raise PydanticCustomError("within", found[1], {"within": found[0]})  # type: ignore[arg-type]
        return value


def _fault_within(value: Any) -> tuple[str, str] | None:
    """Place and message of a number in a free mapping or list that is NaN or too large; None if there is none."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, float) and math.isnan(inner):
            return str(key), "is nan; give a finite number"
        if isinstance(inner, int) and abs(inner) > MOST:
            return str(key), f"should be less than or equal to {MOST}"
        if isinstance(inner, dict | list) and (found := _fault_within(inner)):
            return f"{key}.{found[0]}", found[1]
    return None


OptionNumber = Annotated[float, Field(allow_inf_nan=True)]
"""A hyper-parameter; if it is infinite, there is no limit."""
