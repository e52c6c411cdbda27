"""What a recipe chooses by name: surrogates, subsets of a group, and advantages that need rewards and ids alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from .advantages import anchored_advantages, group_advantages
from .baselines import beta_advantages, stratified_advantages, virtual_maximum_advantages
from .offpolicy import MORE_SURROGATES
from .outcomes import consistency_advantages, quantile_advantages
from .pooled_ratios import sspo
from .selection import select
from .subsets import balanced, widest
from .surrogates import SURROGATES as CLASSIC
from .surrogates import clip_nats

SELECTIONS: dict[str, Callable[..., Tensor]] = {
    "extremes": partial(select, choice="extremes"),
    "best": partial(select, choice="best"),
    "widest": widest,
    "balanced": balanced,
}
"""`selection(values[N], groups[N], keep) -> [N]` bool."""

SURROGATES: dict[str, Callable[..., Tensor]] = {**CLASSIC, "clip_nats": clip_nats, **MORE_SURROGATES, "sspo": sspo}

Advantage = Callable[..., Tensor]
"""`advantage(rewards[B], groups[B], **options) -> [B]`; one that compares by more takes those ids after `groups`."""

ADVANTAGES: dict[str, Advantage] = {
    "group": group_advantages,
    "anchored": anchored_advantages,
    "virtual_maximum": virtual_maximum_advantages,
    "beta": beta_advantages,
    "quantile": quantile_advantages,
    "consistency": consistency_advantages,
    "stratified": stratified_advantages,
}


def advantage_of(name: str, options: Mapping[str, object] | None = None) -> Advantage:
    """The advantage called `name`, with its hyper-parameters.

    Raises:
        ValueError: An unknown name, a hyper-parameter that it does not have, or a value that it cannot take.
    """
    if name not in ADVANTAGES:
        raise ValueError(f"there is no advantage {name!r}; use one of {', '.join(ADVANTAGES)}")
    function = ADVANTAGES[name]
    parameters = inspect.signature(function).parameters
    known = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    for option in options or {}:
        if option not in known:
            raise ValueError(
                f"`options` has {option!r}, which advantage {name} does not take; it takes {', '.join(known) or 'none'}"
            )
    bound = partial(function, **(options or {}))
    bound(torch.zeros(1), *[[0]] * (len(parameters) - len(known) - 1))
    return bound
