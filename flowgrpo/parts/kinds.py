"""The kinds of parts: their names, where a recipe chooses them, and which parts the package has."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from . import plugins
from .ranges import Positive


@dataclass(frozen=True)
class Kind:
    """One kind of part.

    Attributes:
        word: name of the kind in messages and pages. The group of its entry points is `flowgrpo.WORD`, with `_` for
            spaces.
        key: key at which a recipe chooses a part of this kind.
        table: `module:NAME` of the mapping from names to functions or classes.
        call: signature of such a part, for authors of parts.
        own: further options of every entry of a list of such parts, name -> (type, default).
        rules: `module:NAME` of what all parts of the kind need from a recipe, in the form of `needs.needs`; None if
            they need nothing.
    """

    word: str
    key: str
    table: str
    call: str
    own: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    rules: str | None = None

    @property
    def group(self) -> str:
        """The group of entry points in which installed packages declare parts of this kind."""
        return f"flowgrpo.{self.word.replace(' ', '_')}"

    @property
    def plural(self) -> str:
        """The plural of `word`."""
        if self.word.endswith("y"):
            return f"{self.word[:-1]}ies"
        return f"{self.word}es" if self.word.endswith("s") else f"{self.word}s"

    @property
    def positional(self) -> list[str] | None:
        """The names of the values that a function of the kind is called with; None for classes and for free choices."""
        head, _, rest = self.call.partition("(")
        before = re.sub(r" ?\[[^]]*\]", "", rest.partition(")")[0]).partition(", *")[0]
        return None if "class" in head or "..." in before else before.split(", ")

    @cached_property
    def builtin(self) -> Mapping[str, Callable[..., Any]]:
        """The parts of the package, by name."""
        found: Mapping[str, Callable[..., Any]] = _found(self.table)
        return found

    @cached_property
    def needs(self) -> tuple[Any, ...]:
        """What all parts of the kind need from a recipe."""
        return () if self.rules is None else tuple(_found(self.rules))

    def resolve(self, name: str) -> Callable[..., Any]:
        """The function or class that a name means: from this package, from another package, or from a file.

        Raises:
            ValueError: if there is no such part; the message lists what exists. Or it is a part of Python itself.
        """
        try:
            found = plugins.resolve(name, self.word, self.builtin, self.group, "or a class")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{self.word} {name!r} needs the package {error.name!r}, which is not installed"
            ) from error
        except ValueError as error:
            others = [f"{kind.word} ({kind.key})" for kind in KINDS.values() if name in kind.builtin]
            if not others or ":" in name or name in self.names():
                raise
            raise ValueError(f"{error} This name belongs to: {', '.join(others)}.") from error
        plugins.refuse_library(found, name, self.word)
        return found

    def names(self) -> list[str]:
        """Names of the package's parts, and of the parts that installed packages declare."""
        return list(dict.fromkeys([*self.builtin, *(point.name for point in plugins.entry_points(self.group))]))


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


_WEIGHT = Annotated[Positive, Field(description="Factor with which it is added to the loss.")]
Among = Annotated[Literal["group", "split"], Field(description="`split`: among the images below one last split.")]
Centre = Annotated[
    bool,
    Field(description="Shift the advantages of each group, so that the advantages of its kept samples sum to 0."),
]

_ALL = (
    Kind(
        "plan", "sampler.plan", "flowgrpo.samplers.plan_parts:PLANS",
        "plan(setting, iteration, *, ...) -> Plan",
    ),
    Kind(
        "window", "sampler.plan.window", "flowgrpo.samplers.windows:WINDOWS",
        "window(iteration, num_steps, seed, *, ...) -> steps",
    ),
    Kind(
        "kernel", "sampler.kernel", "flowgrpo.samplers.kernels:STOCHASTIC",
        "kernel(sigmas, step, *, ...) -> (std, kappa)",
        rules="flowgrpo.samplers.plan_parts:OF_KERNELS",
    ),
    Kind(
        "solver", "sampler.solver", "flowgrpo.samplers.solvers:SOLVERS",
        "solver(velocity, x, sigma, sigma_next, history, *, ...) -> x_next",
    ),
    Kind(
        "order", "sampler.order", "flowgrpo.samplers.unmasking:ORDERS",
        "order(chance [N, L], uniform [N, L] or None, *, ...) -> priority [N, L]",
    ),
    Kind(
        "form", "rollout.form", "flowgrpo.training.text.forms:FORMS",
        "form(writer, *, ...) -> attempts",
        rules="flowgrpo.training.text.forms:NEEDS",
    ),
    Kind(
        "tool", "rollout.form.tool", "flowgrpo.training.text.forms.tools:TOOLS",
        "tool(call, row, *, ...) -> text",
    ),
    Kind(
        "combination", "combine", "flowgrpo.training.credit.combining:COMBINATIONS",
        "combination(rewards [L, K], *, ...) -> [L]",
    ),
    Kind(
        "advantage", "advantage", "flowgrpo.training.credit.comparing:ADVANTAGES",
        "advantage(rewards [B], groups [B], *, ...) -> [B], or a class that remembers and is called like this",
    ),
    Kind("credit", "credit", "flowgrpo.training.credit.credits:CREDITS", "credit(judged, *, ...) -> [N] or [N, T]"),
    Kind(
        "selection", "select", "flowgrpo.training.credit.selecting:SELECTIONS",
        "selection(rewards [L], groups [L], *, ...) -> [L] bool",
        {"among": (Among, "group"), "centre": (Centre, False)},
        "flowgrpo.training.credit.selecting:NEEDS",
    ),
    Kind(
        "surrogate", "objective.surrogate", "flowgrpo.core.surrogates_by_name:SURROGATES",
        "surrogate(log_ratio [B, T], adv [B, T], logp [B, T], mask [B, T], *, ...) -> [B, T]",
    ),
    Kind(
        "objective", "objective", "flowgrpo.training.losses.objectives_by_name:OBJECTIVES",
        "class objective: __init__(setting, *, ...), and the methods of training.losses.objective.Objective",
    ),
    Kind(
        "forward loss", "objective.loss", "flowgrpo.core.forward_process:FORWARD",
        "loss(rows, *, ...) -> (loss, log_ratio)",
    ),
    Kind(
        "penalty", "penalties", "flowgrpo.core.penalties:PENALTIES",
        "penalty(edges, *, ...) -> penalty",
        own={"weight": (_WEIGHT, inspect.Parameter.empty)},
    ),
    Kind(
        "text objective", "objective", "flowgrpo.training.text.answer_objective:TEXT_OBJECTIVES",
        "a class objective(recipe, policy, controls, *, ...) with the methods of TextObjective",
    ),
    Kind(
        "masked objective", "objective", "flowgrpo.training.masked.sandwiched:MASKED_OBJECTIVES",
        "a class objective(recipe, policy, controls, *, ...) with the methods of losses.objective.Objective",
    ),
    Kind(
        "likelihood", "objective.likelihood", "flowgrpo.core.likelihoods:LIKELIHOODS",
        "likelihood(length, generator, *, ...) -> passes; the parameters `steps: Given[Tensor]`, "
        "`block: Given[int | None]` and `written: Given[Tensor]` are the step that revealed each position, "
        "model.block, and which positions belong to the text",
    ),
    Kind(
        "answer loss", "objective.loss", "flowgrpo.core.answer_losses:ANSWER_LOSSES",
        "loss(logp, ..., *, ...) -> losses [n]; the parameters before the * are any of logp, ref_logp, old_logp, "
        "lengths, log_ratio, advantages, correct, groups, pairs, and for causal models drift",
    ),
    Kind(
        "correction", "objective.correction", "flowgrpo.core.corrections:CORRECTIONS",
        "correction(gap, *, ...) -> (weight, cut), or None",
    ),
    Kind(
        "token penalty", "penalties", "flowgrpo.core.token_penalties:TOKEN_PENALTIES",
        "penalty(logp, ..., *, ...) -> [R, T]; the parameters before the * are any of logp, ref_logp, old_logp, mask, "
        "adv, and for causal models entropy",
        own={"weight": (_WEIGHT, inspect.Parameter.empty)},
    ),
    Kind(
        "extension", "extensions", "flowgrpo.training.extensions:EXTENSIONS",
        "class with the hooks of flowgrpo.training.extensions.Extension",
    ),
)  # fmt: skip

KINDS: dict[str, Kind] = {kind.word: kind for kind in _ALL}
"""All kinds by word, in the order in which an iteration uses them."""
