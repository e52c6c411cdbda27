"""The protocol of extensions: where a run calls them, and what each call sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...configs.reading_soundness import reward_place
from ...configs.schema import AnyRecipe
from ...parts.choice import Choice
from ...parts.needs import Need, Rule
from ...rewards.runner import RewardBatch
from ..credit.pooling import Batch, Pooled
from ..data import PromptRow
from ..distributed.processes import Processes
from ..folder.checkpoint import Kept, Stateful, Written
from ..reporting.clock import Clock
from ..reporting.reporter import Alarm
from ..tasks import Task

CREDIT = "credit"
"""Where a recipe says how samples' advantages become those of steps."""


@dataclass(frozen=True)
class Comparison:
    """How the samples of an iteration were compared.

    Attributes:
        samples: those of all processes.
        scores: [L, K] of them, as the recipe combines them: verdicts corrected, gates closed; weight 0 has no column.
        compare: [L] rewards -> [L] advantages, by the scale of the recipe.
    """

    samples: Pooled
    scores: RewardBatch
    compare: Callable[[Tensor], Tensor]


@dataclass
class Evaluation:
    """An evaluation that was made.

    Attributes:
        iteration: iterations done before it.
        means: reward -> mean over the held-out prompts of all processes; None where it applied to no sample.
        alarms: what extensions have to say of it; append to it. An alarm with `ends` ends the run.
    """

    iteration: int
    means: Mapping[str, float | None]
    alarms: list[Alarm] = field(default_factory=list)


def _bends_samples(recipe: Any, choice: Choice) -> list[str]:
    target = choice.target
    if not (isinstance(target, type) and issubclass(target, Extension)):
        return []
    if target.samples_compared is Extension.samples_compared:
        return []
    fault = SAMPLES_ALONE.fault(recipe, f"extension {choice.short}")
    return [fault] if fault else []


SAMPLES_ALONE = Need(CREDIT, ("leaf",), "changes the advantages of samples, not of steps")


class Extension:
    """Something that a run may have beside its parts; every hook is optional.

    The keyword-only parameters of the constructor are its options. One that is annotated `Given[...]` gets what the run
    knows before its model is there: `recipe`, `trained` (names of the rewards, in the recipe's order) and `evaluated`
    (names of the rewards of evaluations).

    With several processes each has an instance, and the main one's state is what a checkpoint holds. So remember only
    what follows from the samples of all processes. Each hook says whose samples it sees.
    """

    needs: tuple[Need | Rule, ...] = (_bends_samples,)

    def begin(self, task: Task, processes: Processes, clock: Clock) -> None:
        """The model is there. Called once, before a checkpoint is read.

        Args:
            task: what is trained; its policy is `task.policy`.
            processes: of the run, to bring together what each process knows.
            clock: told where the time goes.
        """

    def prompts_drawn(
        self, rows: Sequence[PromptRow], everything: Sequence[PromptRow], iteration: int
    ) -> Sequence[PromptRow]:
        """The prompts of an iteration, of all processes: return as many, the same on every process.

        It may be called several times for an iteration, so it must follow from the state and the iteration alone.

        Args:
            rows: prompts as the order of the run has them, or as the extension before left them.
            everything: all training prompts.
            iteration: from 0.
        """
        return rows

    def samples_scored(self, batch: Batch) -> Batch:
        """The samples of this process with their scores; return them, or others in their place.

        What other processes should know of each sample goes into `batch.columns`, under a name of your own: all of it
        is in `samples.columns` of the hooks that see the samples of all processes.
        """
        return batch

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """[L] advantages of the samples of all processes, the same on each; return others. Only with credit leaf."""
        return advantages

    def advantages_made(self, advantages: Tensor, samples: Pooled, batch: Batch) -> Tensor:
        """[N] or [N, T] advantages of this process's nodes, before they are bounded; return others.

        Args:
            advantages: a step has that of the node it leads to; completions are their own nodes.
            samples: of all processes; `samples.mine` says which are of this one.
            batch: of this process; `batch.experience.node_advantages` brings values of its samples to its nodes.
        """
        return advantages

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> None:
        """All optimizer steps of an iteration are done.

        Args:
            samples: of all processes.
            record: the metrics of the iteration so far, the same on every process but for times.
        """

    def evaluation_done(self, evaluation: Evaluation) -> None:
        """Held-out prompts were sampled and scored; `evaluation` is of all processes."""

    def record(self) -> dict[str, float]:
        """Metrics of the iteration, asked once, after `update_done`; those of the main process are written."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What is remembered from one iteration to the next: numbers, text, tensors, and lists and mappings of them."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Go on from what `state_dict` gave."""


def names_a_reward(recipe: Any, choice: Choice) -> list[str]:
    """A rule for `needs`: the option `reward` is one of the recipe's rewards."""
    return unknown_reward(recipe, f"extension {choice.short}", choice["reward"])


def unknown_reward(recipe: Any, who: str, asked: str) -> list[str]:
    """What to say of a reward that is asked and is not there."""
    if reward_place(recipe.rewards, asked) is not None:
        return []
    labels = ", ".join(reward.label or reward.name for reward in recipe.rewards)
    return [f"{who} asks reward {asked!r}; the rewards are {labels}"]


def reported(recipe: Any, trained: Sequence[str], asked: str) -> str:
    """The name under which the scores of a reward are reported that a recipe means by its label or name."""
    place = reward_place(recipe.rewards, asked)
    if place is None:
        raise ValueError(f"there is no reward {asked!r}; the rewards are {', '.join(trained)}")
    return trained[place]


def once(recipe: Any, choice: Choice) -> list[str]:
    """A rule for `needs`: a recipe has at most one entry of this name."""
    names = [other.name for other in recipe.extensions]
    if names.count(choice.name) < 2 or next(o for o in recipe.extensions if o.name == choice.name) is not choice:
        return []
    return [f"extensions has {choice.short} {names.count(choice.name)} times; write it once"]


def one_round(why: str) -> Rule:
    """A need that every prompt is sampled once; `why` is a clause with the extension as its subject."""

    def rule(recipe: Any, choice: Choice) -> list[str]:
        wanted = {"rollout.budget": recipe.rollout.budget, "data.templates": recipe.data.templates}
        return [
            f"extension {choice.short} {why}, and {key} samples a prompt in several rounds; leave one of them out"
            for key, value in wanted.items()
            if value
        ]

    return rule


class Extensions:
    """Calls the hooks of every extension, each with what the one before left.

    Args:
        each: name -> extension.
    """

    def __init__(self, each: Mapping[str, Extension] | None = None) -> None:
        self.each = dict(each or {})

    @classmethod
    def of(cls, recipe: AnyRecipe, trained: Sequence[str], evaluated: Sequence[str]) -> Extensions:
        """Those of a recipe; the second entry of one name is called NAME-2.

        Args:
            recipe: as it is written.
            trained: names of its rewards, in its order.
            evaluated: names of the rewards of its evaluations.

        Raises:
            ValueError: options that do not go with the rewards, or something that is no extension.
        """
        found: dict[str, Extension] = {}
        for choice in recipe.extensions:
            try:
                made = choice.make(recipe=recipe, trained=trained, evaluated=evaluated)
            except (TypeError, ValueError) as error:
                raise ValueError(f"extension {choice.short}: {error}") from error
            if not isinstance(made, Extension):
                raise ValueError(
                    f"extension {choice.name} is a {type(made).__name__}; write a class that inherits from "
                    "flowgrpo.training.extensions.Extension"
                )
            number = 1 + sum(other.short == choice.short for other in recipe.extensions[: len(found)])
            found[choice.short if number == 1 else f"{choice.short}-{number}"] = made
        return cls(found)

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds of those that remember something, by file name."""
        return {
            f"extensions/{name}": one
            for name, one in self.each.items()
            if type(one).state_dict is not Extension.state_dict
        }

    def kept(self) -> dict[str, Written]:
        """Copies of what they remember."""
        return {name: Kept(part) for name, part in self.parts().items()}

    def begin(self, task: Task, processes: Processes, clock: Clock) -> None:
        """The model is there."""
        for one in self.each.values():
            one.begin(task, processes, clock)

    def prompts_drawn(
        self, rows: Sequence[PromptRow], everything: Sequence[PromptRow], iteration: int
    ) -> Sequence[PromptRow]:
        """The prompts of an iteration, of all processes.

        Raises:
            ValueError: an extension gave more prompts or fewer.
        """
        for name, one in self.each.items():
            drawn = one.prompts_drawn(rows, everything, iteration)
            if len(drawn) != len(rows):
                raise ValueError(
                    f"extension {name} drew {len(drawn)} prompts for iteration {iteration}; return {len(rows)} of them"
                )
            rows = drawn
        return rows

    def samples_scored(self, batch: Batch) -> Batch:
        """The samples of this process. All processes must call it."""
        for one in self.each.values():
            batch = one.samples_scored(batch)
        return batch

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """[L] advantages of the samples of all processes."""
        for one in self.each.values():
            advantages = one.samples_compared(advantages, comparison)
        return advantages

    def advantages_made(self, advantages: Tensor, samples: Pooled, batch: Batch) -> Tensor:
        """[N] or [N, T] advantages of this process's nodes."""
        for one in self.each.values():
            advantages = one.advantages_made(advantages, samples, batch)
        return advantages

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> dict[str, float]:
        """Tell all of an iteration's update; returns their metrics."""
        found: dict[str, float] = {}
        for one in self.each.values():
            one.update_done(samples, record)
            found |= one.record()
        return found

    def evaluation_done(self, evaluation: Evaluation) -> None:
        """Tell all of an evaluation."""
        for one in self.each.values():
            one.evaluation_done(evaluation)
