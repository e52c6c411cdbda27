"""All surrogates, by the names that recipes use."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .curvature import capo
from .entropy_guided import hapo
from .offpolicy import MORE_SURROGATES
from .pooled_ratios import sspo
from .surrogates import SURROGATES as CLASSIC
from .surrogates import clip_nats
from .trust_regions import TRUST_REGIONS

SURROGATES: dict[str, Callable[..., Tensor]] = {
    **CLASSIC, "clip_nats": clip_nats, **MORE_SURROGATES, "sspo": sspo, "hapo": hapo, "capo": capo, **TRUST_REGIONS,
}  # fmt: skip
"""`surrogate(log_ratio [B, T], adv, logp, mask, *, ...) -> [B, T]`."""
