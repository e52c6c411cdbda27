"""All surrogates by the name that a recipe has for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .offpolicy import MORE_SURROGATES
from .surrogates import SURROGATES as CLASSIC
from .surrogates import clip_nats
from .units import sspo

SURROGATES: dict[str, Callable[..., Tensor]] = {**CLASSIC, "clip_nats": clip_nats, **MORE_SURROGATES, "sspo": sspo}
"""`surrogate(log_ratio [B, T], adv, logp, mask, *, ...) -> [B, T]`."""
