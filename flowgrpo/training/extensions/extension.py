"""The protocol of extensions: when a run calls them, and what each call sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...configs.reading_soundness import reward_place
from ...configs.reward_sections import RewardConfig
from ...configs.schema import AnyRecipe
from ...parts.choice import Choice, given_names
from ...parts.needs import Need, Rule
from ...parts.own_code import PartError
from ...rewards.runner import RewardBatch
from ..credit.comparing import refuse_not_finite
from ..credit.pooling import Batch, Pooled
from ..data import PromptRow
from ..distributed.processes import Processes
from ..folder.checkpoint import Kept, Stateful, Written
from ..reporting.clock import Clock
from ..reporting.own_metrics import own_metrics
from ..reporting.reporter import Alarm

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ..tasks import Task

CREDIT = "credit"
"""The key of a recipe that says how the advantages of samples become advantages of steps."""


@dataclass(frozen=True)
class Comparison:
    """How the samples of an iteration were compared.

    Attributes:
        samples: the samples of all processes.
        scores: [L, K] of the samples, as the recipe combines them: after corrections and gates. A reward of weight 0
            has no column.
        compare: [L] rewards -> [L] advantages, by the scale of the recipe.
    """

    samples: Pooled
    scores: RewardBatch
    compare: Callable[[Tensor], Tensor]


@dataclass
class Evaluation:
    """The results of an evaluation.

    Attributes:
        iteration: iterations done before the evaluation.
        means: reward -> mean over the held-out prompts of all processes; None where the reward applied to no sample.
        alarms: extensions append their alarms. An alarm with `ends` ends the run.
    """

    iteration: int
    means: Mapping[str, float | None]
    alarms: list[Alarm] = field(default_factory=list)


def has_hook(choice: Choice, hook: str) -> bool:
    """Whether an extension that a recipe has chosen has a hook of its own."""
    target = choice.target
    if not (isinstance(target, type) and issubclass(target, Extension)):
        return False
    return getattr(target, hook) is not getattr(Extension, hook)


def _bends_samples(recipe: Any, choice: Choice) -> list[str]:
    if not has_hook(choice, "samples_compared"):
        return []
    fault = SAMPLES_ALONE.fault(recipe, f"extension {choice.short}")
    return [fault] if fault else []


SAMPLES_ALONE = Need(CREDIT, ("leaf",), "changes the advantages of samples, not of steps")


class Extension:
    """The base class of extensions; every hook is optional.

    The keyword-only parameters of the constructor are the options of the extension. A parameter that is annotated
    `Given[...]` gets what the run knows before its model is loaded: `recipe`, `rewards` (a `Rewards`) or `evaluated`
    (names of the rewards of evaluations).

    Attributes that are named in `remembers` are in the checkpoints: numbers, text, tensors, and lists and mappings of
    them.

    An extension that only reads in `samples_scored` says so by `keeps_scores`, so that recipes can have it whose loss
    does not come from advantages.

    Each process has its own instance. A checkpoint holds the state of the main process. So remember only what follows
    from the samples of all processes. Each hook says whose samples it sees.
    """

    needs: tuple[Need | Rule, ...] = (_bends_samples,)
    remembers: tuple[str, ...] = ()
    keeps_scores = False
    iteration = 0

    def begin(self, task: Task, processes: Processes, clock: Clock) -> None:
        """Called once, when the model is loaded, before a checkpoint is read. Keeps the processes for later.

        Args:
            task: what is trained; its policy is `task.policy`.
            processes: of the run, to bring together what each process knows.
            clock: measures where the time goes.
        """
        self.processes = processes

    def prompts_drawn(
        self, rows: Sequence[PromptRow], everything: Sequence[PromptRow], iteration: int
    ) -> Sequence[PromptRow]:
        """The prompts of an iteration, of all processes. Return as many prompts, the same on every process.

        This one keeps the number of the iteration, and returns the prompts as they are. The hook may be called several
        times for an iteration, so the result must depend on the state and the iteration alone.

        Args:
            rows: the prompts in the order of the run, or as the previous extension returned them.
            everything: all training prompts.
            iteration: from 0.
        """
        self.iteration = iteration
        return rows

    def samples_scored(self, batch: Batch) -> Batch:
        """The samples of this process with their scores. Return them, or other samples in their place.

        To share a value of each sample with other processes, put the values into `batch.columns` under a name of your
        own. The hooks that see the samples of all processes find the values in `samples.columns`.
        """
        return batch

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """[L] advantages of the samples of all processes, the same on each. Return others. For credit `leaf` only."""
        return advantages

    def advantages_made(self, advantages: Tensor, samples: Pooled, batch: Batch) -> Tensor:
        """[N] or [N, T] advantages of this process's nodes, before the clamp. Return advantages of the same shape.

        Args:
            advantages: a step has the advantage of the node it leads to; a completion is a node.
            samples: of all processes; `samples.mine` says which of them belong to this process.
            batch: of this process; `batch.experience.node_advantages` brings values of its samples to its nodes.
        """
        return advantages

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> None:
        """Called when all optimizer steps of an iteration are done.

        Args:
            samples: of all processes.
            record: the metrics of the iteration so far. Except for times, they are the same on every process.
        """

    def evaluation_done(self, evaluation: Evaluation) -> None:
        """Called when held-out prompts were sampled and scored; `evaluation` is over all processes."""

    def record(self) -> dict[str, float]:
        """Metrics of the iteration. Called once, after `update_done`; the metrics of the main process are written."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What is remembered from one iteration to the next: numbers, text, tensors, and lists and mappings of them.

        This one returns the attributes that are named in `remembers`.
        """
        return {name: getattr(self, name) for name in self.remembers}

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state that `state_dict` returned."""
        for name in self.remembers:
            # An attribute may be changed in place, and the state may be read again.
            setattr(self, name, copy.deepcopy(state[name]))


@dataclass(frozen=True)
class Rewards:
    """The rewards of a run.

    Attributes:
        entries: of the recipe.
        names: the name under which the scores of each are reported.
    """

    entries: Sequence[RewardConfig]
    names: Sequence[str]

    def reported(self, asked: str) -> str:
        """The name under which the scores of a reward are reported; `asked` is its label or name in the recipe."""
        return self.names[self._place(asked)]

    def options(self, asked: str) -> Mapping[str, Any]:
        """The options of a reward in the recipe; `asked` is its label or name there."""
        return self.entries[self._place(asked)].options

    def _place(self, asked: str) -> int:
        place = reward_place(self.entries, asked)
        if place is None:
            raise ValueError(f"there is no reward {asked!r}; the rewards are {', '.join(self.names)}")
        return place


class Extensions:
    """Calls the hooks of every extension. Each extension gets the result of the previous one.

    Args:
        each: name -> extension.
    """

    def __init__(self, each: Mapping[str, Extension] | None = None) -> None:
        self.each = dict(each or {})

    @classmethod
    def of(cls, recipe: AnyRecipe, trained: Sequence[str], evaluated: Sequence[str]) -> Extensions:
        """The extensions of a recipe; the second entry with the same name is called NAME-2.

        Args:
            recipe: as it is written.
            trained: names of its rewards, in its order.
            evaluated: names of the rewards of its evaluations.

        Raises:
            ValueError: options do not fit the rewards, or an entry is not an extension.
        """
        given = {"recipe": recipe, "rewards": Rewards(recipe.rewards, trained), "evaluated": evaluated}
        found: dict[str, Extension] = {}
        for choice in recipe.extensions:
            target = choice.target
            # Only a class that is an extension may be called at all.
            if not (isinstance(target, type) and issubclass(target, Extension)):
                kind = target.__name__ if isinstance(target, type) else type(target).__name__
                raise ValueError(
                    f"extension {choice.name} is a {kind}; write a class that inherits from "
                    "flowgrpo.training.extensions.Extension"
                )
            for name in given_names(choice.target):
                if name not in given:
                    raise ValueError(
                        f"extension {choice.short} asks for {name!r}, which a run does not give; it gives "
                        f"{', '.join(given)}"
                    )
            try:
                made = choice.make(**given)
            except PartError:
                raise
            except (TypeError, ValueError) as error:
                raise ValueError(f"extension {choice.short}: {error}") from error
            number = 1 + sum(other.short == choice.short for other in recipe.extensions[: len(found)])
            found[choice.short if number == 1 else f"{choice.short}-{number}"] = made
        return cls(found)

    def parts(self) -> dict[str, Stateful]:
        """The extensions that remember something, by file name in the checkpoint."""
        return {
            f"extensions/{name}": one
            for name, one in self.each.items()
            if one.remembers or type(one).state_dict is not Extension.state_dict
        }

    def kept(self) -> dict[str, Written]:
        """Copies of what the extensions remember."""
        return {name: Kept(part) for name, part in self.parts().items()}

    def begin(self, task: Task, processes: Processes, clock: Clock) -> None:
        """Tell all extensions that the model is loaded."""
        for one in self.each.values():
            one.begin(task, processes, clock)

    def prompts_drawn(
        self, rows: Sequence[PromptRow], everything: Sequence[PromptRow], iteration: int
    ) -> Sequence[PromptRow]:
        """The prompts of an iteration, of all processes.

        Raises:
            ValueError: an extension returned more or fewer prompts, or something else.
        """
        for name, one in self.each.items():
            drawn = one.prompts_drawn(rows, everything, iteration)
            _check_returned(name, "prompts_drawn", drawn, Sequence)
            if len(drawn) != len(rows):
                raise ValueError(
                    f"extension {name} drew {len(drawn)} prompts for iteration {iteration}; return {len(rows)} of them"
                )
            rows = drawn
        return rows

    def samples_scored(self, batch: Batch) -> Batch:
        """The samples of this process. Every process must call it."""
        for name, one in self.each.items():
            batch = one.samples_scored(batch)
            _check_returned(name, "samples_scored", batch, Batch)
        return batch

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """[L] advantages of the samples of all processes."""
        for name, one in self.each.items():
            advantages = _advantages(name, "samples_compared", one.samples_compared(advantages, comparison), advantages)
        return advantages

    def advantages_made(self, advantages: Tensor, samples: Pooled, batch: Batch) -> Tensor:
        """[N] or [N, T] advantages of this process's nodes."""
        for name, one in self.each.items():
            advantages = _advantages(
                name, "advantages_made", one.advantages_made(advantages, samples, batch), advantages
            )
        return advantages

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> dict[str, float | None]:
        """Tell all extensions that the update of an iteration is done; returns their metrics."""
        found: dict[str, float | None] = {}
        for name, one in self.each.items():
            one.update_done(samples, record)
            found |= own_metrics(f"extension {name}", one.record(), record)
        return found

    def evaluation_done(self, evaluation: Evaluation) -> None:
        """Tell all extensions the results of an evaluation."""
        for one in self.each.values():
            one.evaluation_done(evaluation)


def _check_returned(extension: str, hook: str, found: object, kind: type) -> None:
    if not isinstance(found, kind):
        raise ValueError(
            f"{hook}() of extension {extension} returned {type(found).__name__}; return the {kind.__name__} that the "
            "run goes on with"
        )


def _advantages(extension: str, hook: str, found: Tensor, before: Tensor) -> Tensor:
    _check_returned(extension, hook, found, Tensor)
    if found.shape != before.shape:
        raise ValueError(
            f"{hook}() of extension {extension} returned advantages of shape {tuple(found.shape)}; return advantages "
            f"of the shape {tuple(before.shape)} that it got"
        )
    refuse_not_finite(f"{hook}() of extension {extension}", found, before.isfinite())
    return found
