"""Keep processes in step that hold a model's weights together: what one process evaluates, all processes evaluate.

An evaluation of a sharded denoiser gathers its weights from all processes. A backward pass gathers them too. But
processes have unequal work: different prompts, batches without trained rows, a reference on some processes only. So
before each of these steps, every process tells the others its next step. If the next steps differ, they are done one
after another. A process that has another next step takes part with the inputs of one of its earlier calls. Its part
adds only gradients of 0.
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
"""The next step of a process; a number from `EVALUATE` on encodes a module, the weights that it holds, and the mode."""


def turn(wanted: Sequence[int]) -> int:
    """The step that all processes do next, chosen among the next steps of the processes.

    Evaluations come first, so that all evaluations before a backward pass are complete on all processes. Among
    evaluations, the one that most processes have next is chosen; if several are equally frequent, the first of them in
    the order of processes is chosen. Then come backward passes, and at last all processes meet.
    """
    evaluations = Counter(step for step in wanted if step >= EVALUATE)
    return evaluations.most_common(1)[0][0] if evaluations else max(wanted)


def teller() -> Callable[[int], list[int]]:
    """A function that sends a number to all processes and returns the numbers of all processes, by rank.

    All processes must call this function.
    """
    # The group works on the CPU, so that a message does not wait for the accelerator.
    group = dist.new_group(backend="gloo")

    def tell(step: int) -> list[int]:
        found = torch.zeros(dist.get_world_size(group), dtype=torch.long)
        dist.all_gather_into_tensor(found, torch.tensor([step]), group=group)
        return found.tolist()

    return tell


class Lockstep:
    """Keeps this process in step with the others that hold shards of the same modules.

    After this object is made, calls of the modules go through it. Any other work that needs all processes (sums,
    saving) must begin with `meet`.

    Args:
        modules: the same on all processes, in the same order.
        tell: sends the next step of this process to all, and returns the next steps of all processes, by rank.
        release: drops whole weights that an evaluation has left for its backward pass; the shards stay.
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
            # This replaces the module's own entry to its hooks, because the first hook gathers the weights.
            module._compiled_call_impl = partial(self._evaluate, number)

    def exchange(
        self, enter: Callable[[], None], leave: Callable[[], None]
    ) -> Callable[[], AbstractContextManager[None]]:
        """A context in which the shards hold other weights, such as an average or a reference.

        All processes must make the same contexts in the same order. They may enter the contexts at different times.

        Args:
            enter: puts the other weights into this process's shards; it may be called again before the context ends.
            leave: puts the earlier weights back, bitwise.

        Raises:
            RuntimeError: on entering, if another context of this kind is active.
        """
        number = len(self._exchanges)
        self._exchanges.append((enter, leave))

        def hold() -> None:
            if self._held:
                raise RuntimeError("sharded weights are exchanged within another exchange; leave that context first")
            self._hold(number)

        return exchanging(hold, partial(self._hold, 0))

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss. Processes without a loss of their own take part with gradients of 0."""
        self._agree(BACKWARD)
        self._backward([loss])

    def meet(self) -> None:
        """Return when all processes have called this method; until then, take part in the steps of the others."""
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
        # Processes may still hold different gathered weights, but each process must gather again for the others.
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
                f"another process evaluates {type(self._modules[number]).__name__}, but this process never has; call "
                "it once on every process first"
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
            raise RuntimeError(
                "another process begins a backward pass, but this process took no part in its evaluation"
            )
        sum(parts[1:], parts[0]).backward()

    def _hold(self, number: int) -> None:
        if number == self._held:
            return
        self.release()
        self._exchanges[self._held][1]()
        self._exchanges[number][0]()
        self._held = number
        if torch.accelerator.is_available():
            # Weights are gathered on a separate stream, and this stream does not wait for the writes above.
            torch.accelerator.synchronize()


def _nothing() -> None: ...


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
