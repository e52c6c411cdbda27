"""Processes that hold a model's weights together: what one of them evaluates, all evaluate.

An evaluation of a sharded denoiser gathers its weights from all processes, and so does a backward pass through it. But
processes have unequal work: other prompts, batches that nothing of is trained, a reference on some. So before each
of these steps they tell each other what they are about to do. Where they are not about to do the same, one thing is
done after the other, and those who were about to do something else take part on inputs of an earlier call of their
own, of which nothing comes but gradients of 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .borrowing import exchanging

__all__ = ["Lockstep", "teller", "turn"]

MEET, BACKWARD, EVALUATE = range(3)
"""What a process may be about to do; numbers from `EVALUATE` on name a module, the weights it holds, and the mode."""


def turn(wanted: Sequence[int]) -> int:
    """What all do next, of what each process is about to do.

    Evaluations come first, so that those of one backward pass are complete on all: what most processes are about to
    evaluate, of equals that of the first process. A backward pass is next, of all who are about to do one; then all
    meet.
    """
    evaluations = Counter(step for step in wanted if step >= EVALUATE)
    return evaluations.most_common(1)[0][0] if evaluations else max(wanted)


def teller() -> Callable[[int], list[int]]:
    """What gives a number to all processes, and returns that of each, by rank. All must make it."""
    # On the CPU, so that telling the others does not wait for the accelerator.
    group = dist.new_group(backend="gloo")

    def tell(step: int) -> list[int]:
        found = torch.zeros(dist.get_world_size(group), dtype=torch.long)
        dist.all_gather_into_tensor(found, torch.tensor([step]), group=group)
        return found.tolist()

    return tell


class Lockstep:
    """Keeps this process in step with the others that hold shards of the same modules.

    From its making on, calls of the modules go through it. What else needs all processes (sums, saving) must begin
    with `meet`.

    Args:
        modules: the same on all processes, in the same order.
        tell: gives what this process is about to do to all, and returns what each is about to do, by rank.
        release: drops whole weights that an evaluation has left, for its backward pass, in place of the shards.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tell: Callable[[int], Sequence[int]],
        release: Callable[[], None] | None = None,
    ) -> None:
        self._modules, self._tell = list(modules), tell
        self.release = release or _nothing
        self._inputs: list[tuple[Any, Any] | None] = [None] * len(self._modules)
        self._exchanges: list[tuple[Callable[[], None], Callable[[], None]]] = [(_nothing, _nothing)]
        self._held = 0
        self._company: list[Tensor] = []
        for number, module in enumerate(self._modules):
            # In place of the module's own way into its hooks, the first of which gathers the weights.
            module._compiled_call_impl = partial(self._evaluate, number)

    def exchange(
        self, enter: Callable[[], None], leave: Callable[[], None]
    ) -> Callable[[], AbstractContextManager[None]]:
        """A context in which the shards hold other weights, as an average or a reference.

        All processes must make the same ones in the same order; they may enter them at different times.

        Args:
            enter: puts the other weights into this process's shards; it may be called again before the context ends.
            leave: puts back what was there, bitwise.

        Raises:
            RuntimeError: on entering, if another of these contexts is active.
        """
        number = len(self._exchanges)
        self._exchanges.append((enter, leave))

        def hold() -> None:
            if self._held:
                raise RuntimeError("sharded weights are exchanged within another exchange; leave that context first")
            self._hold(number)

        return exchanging(hold, partial(self._hold, 0))

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, by all processes that have one; the others take part with gradients of 0."""
        self._agree(BACKWARD)
        self._backward([loss])

    def meet(self) -> None:
        """Return once all processes call it; until then take part in what the others do."""
        self._agree(MEET)
        self._company.clear()
        self.release()

    def _agree(self, mine: int) -> None:
        while (step := turn(self._tell(mine))) != mine:
            self._take_part(step)

    def _evaluate(self, number: int, *args: Any, **kwargs: Any) -> Any:
        self._inputs[number] = tree_map(_detached, (args, kwargs))
        mode = 2 * (self._held * len(self._modules) + number) + torch.is_grad_enabled()
        self._agree(EVALUATE + mode)
        return self._forward(number, *args, **kwargs)

    def _forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        module = self._modules[number]
        # What is left differs between processes, and each must gather for the others.
        self.release()
        try:
            return module._call_impl(*args, **kwargs)
        except Exception:
            if (reset := getattr(module, "reset_iter_state", None)) is not None:
                reset()
            raise
        finally:
            if not torch.is_grad_enabled():
                self.release()

    def _take_part(self, step: int) -> None:
        if step == BACKWARD:
            self._backward([])
            return
        place, gradients = divmod(step - EVALUATE, 2)
        held, number = divmod(place, len(self._modules))
        inputs = self._inputs[number]
        if inputs is None:
            raise RuntimeError(
                f"another process evaluates {type(self._modules[number]).__name__}, which this one never has; call it "
                "once on every process first"
            )
        mine, (args, kwargs) = self._held, inputs
        self._hold(held)
        with torch.set_grad_enabled(bool(gradients)):
            made = self._forward(number, *args, **kwargs)
        self._hold(mine)
        if gradients:
            self._company += [part for part in tree_leaves(made) if isinstance(part, Tensor) and part.requires_grad]

    def _backward(self, parts: list[Tensor]) -> None:
        parts += [(made * 0).sum() for made in self._company]
        self._company.clear()
        if not parts:
            raise RuntimeError("another process begins a backward pass of an evaluation that this one took no part in")
        sum(parts[1:], parts[0]).backward()

    def _hold(self, number: int) -> None:
        if number == self._held:
            return
        self.release()
        self._exchanges[self._held][1]()
        self._exchanges[number][0]()
        self._held = number
        if torch.accelerator.is_available():
            # Weights are gathered on a stream of its own, which does not wait for what wrote them.
            torch.accelerator.synchronize()


def _nothing() -> None: ...


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
