"""Several processes of one run: how they share prompts, exchange values, and end together."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, is_deepspeed_available, parse_flag_from_env, reduce
from torch import Tensor

from ...intake.visible import visible
from ...pipelines.experience import part_bounds
from ...weights.kernel_choice import without_cudnn_attention
from ...weights.pieces import is_cut
from ..mendable import message_of
from ..stopping import SIGNALS
from .failures import FailedTogether

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others. One of them may write large weights, or ask a slow reward.

NCCL's own limit is ten minutes. Nobody waits for a process that fails, see `ended_together`."""
POLL_SECONDS = 1.0
FAREWELL_SECONDS = 20.0
GONE_SECONDS = 3.0
"""How long a process that has lost another one waits for a note from it."""
NOTICE_SECONDS = 20.0
_FAILED, _ENDED = "flowgrpo/failed", "flowgrpo/ended"


def launched() -> PartialState:
    """accelerate's state of this process. On a machine without an accelerator, the processes communicate on the CPU.

    Every run and evaluation asks here first, so this is also where cuDNN's attention is ruled out.

    Raises:
        ValueError: the processes were launched with DeepSpeed, and DeepSpeed is not installed or cannot be imported; or
            with FSDP as well; or the port is taken.
    """
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        _require_deepspeed()
    without_cudnn_attention()
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if torch.distributed.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return PartialState(cpu=cpu, timeout=PATIENCE)
    with _ended_at_once(), _noticed():
        try:
            return PartialState(cpu=cpu, timeout=PATIENCE)
        except torch.distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            port = os.environ.get("MASTER_PORT", "")
            raise ValueError(
                f"port {port} is taken, perhaps by another run on this machine; launch with torchrun --standalone, or "
                "give accelerate launch another --main_process_port"
            ) from None


def _require_deepspeed() -> None:
    """Refuse a launch with DeepSpeed that would fail only after the model is loaded."""
    other = "launch with --use_fsdp --fsdp_version 2 in place of --use_deepspeed, which needs no further package"
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError(
            "this run was launched with FSDP and with DeepSpeed; use one of --use_fsdp and --use_deepspeed"
        )
    if not is_deepspeed_available():
        raise ValueError(
            "this run was launched with DeepSpeed, which is not installed: pip install 'deepspeed>=0.19.8'; or " + other
        )
    try:
        importlib.import_module("deepspeed")
    except Exception as error:
        # DeepSpeed looks for a compiler and for CUDA when it is imported, and may fail with any error.
        raise ValueError(
            f"this run was launched with DeepSpeed, which cannot be imported ({type(error).__name__}: {error}); mend "
            "its installation until `python -c 'import deepspeed'` works, or " + other
        ) from error


@contextmanager
def _ended_at_once() -> Iterator[None]:
    """Within the block, signals end the process at once, as they do without a handler.

    A handler of Python would not run while torch waits for the other processes, and nothing is there yet to keep.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [number for number in SIGNALS if callable(signal.getsignal(number))]
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _noticed() -> Iterator[None]:
    """Say what this process waits for, if it waits for long."""
    count, rank = os.environ["WORLD_SIZE"], os.environ.get("RANK", "?")
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    told = f"process {rank} waits for {count} processes to meet at {where}; is each of them started?"
    notice = threading.Timer(NOTICE_SECONDS, print, (told,), {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def part() -> None:
    """Leave the other processes, at the end of a command. Every process must call it."""
    launched().destroy_process_group()


class Processes:
    """The processes of a run, which take prompts in turn.

    With context parallelism, processes of consecutive ranks form groups. The processes of a group have the same prompts
    and samples, and the first of them speaks for the group.

    Args:
        rank: number of this process.
        count: number of processes.
        meet: called before the processes exchange values; it returns when no process needs another any more.
        context: number of processes in a group; it divides `count`.

    Attributes:
        groups: number of groups; `count` without context parallelism.
        group: number of this process's group.
        leads: whether this process speaks for its group.
    """

    def __init__(self, rank: int = 0, count: int = 1, meet: Callable[[], None] | None = None, context: int = 1) -> None:
        self.rank, self.count = rank, count
        self._meet, self._context = meet, context
        self.groups, self.group, self.leads = count // context, rank // context, rank % context == 0

    def meet(self) -> None:
        """Return once no process needs another for a backward pass or for weights. Every process must call it."""
        if self._meet is not None:
            self._meet()

    @classmethod
    def of_this_run(cls) -> Processes:
        """The processes that the launcher started."""
        state = launched()
        return cls(state.process_index, state.num_processes)

    def share(self, total: int) -> range:
        """Numbers of this process's prompts among `total`; shares differ by one prompt at most."""
        return range(self.group, total, self.groups)

    def cuts(self, total: int, updates: int) -> tuple[int, ...]:
        """First prompt of each part of an iteration after the first, counted in this process's prompts.

        The prompts of a part do not depend on the number of processes.
        """
        return tuple(len(self.share(start)) for start in part_bounds(total, updates, None)[1:-1])

    def gather(self, thing: T) -> list[T]:
        """The `thing` of each process, or of the first process of each group, by rank. Every process must call it."""
        return self.hear(thing)[:: self._context]

    def hear(self, thing: T) -> list[T]:
        """The `thing` of each process, by rank, also within groups. Every process must call it."""
        self.meet()
        return list(gather_object([thing])) if self.count > 1 else [thing]

    def add(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over processes, in which each group counts once. Every process must call it."""
        self.meet()
        if self.count == 1:
            return tensor
        return reduce(tensor if self.leads else torch.zeros_like(tensor), "sum")

    def pool(self, items: Sequence[T], places: Sequence[int]) -> tuple[list[T], list[int]]:
        """The items of all processes in the order of their places. Every process must call it.

        The order does not depend on the number of processes.

        Args:
            items: of this process. Of a group, only the first process's items count.
            places: the number of the prompt of each item. No other process, or group, has this prompt. Items of one
                place keep their order.

        Returns:
            The items of all processes, and the position of each item of this process among them.
        """
        parts = self.gather(list(zip(places, items, strict=True)))
        everything = [pair for part in parts for pair in part]
        order = sorted(range(len(everything)), key=lambda k: everything[k][0])
        position = {k: found for found, k in enumerate(order)}
        first = sum(len(part) for part in parts[: self.group])
        return [everything[k][1] for k in order], [position[first + k] for k in range(len(items))]

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Give every process the sum of the gradients of all processes. Every process must call it.

        The gradients are added, because losses are already divided by counts of the whole optimizer step; the mean of
        DDP would divide once more. The gradients of shards were already added in the backward pass. The processes of
        a group have gradients of different tokens, which are added in the same way.
        """
        self.meet()
        parameters = [parameter for parameter in parameters if not is_cut(parameter)]
        if self.count == 1 or not parameters:
            return
        known = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        # A parameter without a gradient on any process must stay without one, or the optimizer would still move it.
        used = [p for p, count in zip(parameters, reduce(known, "sum").tolist()) if count]
        if not used:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
        # In place: `reduce` would keep a second copy of all gradients.
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        for parameter, part in zip(used, flat.split([p.numel() for p in used])):
            parameter.grad = part.view_as(parameter)


@contextmanager
def ended_together(onward: str = "Go on with `flowgrpo resume`, if the run has begun") -> Iterator[None]:
    """A context in which a failure of one process ends all: the others say how it failed, and exit with status 1.

    Without this context, the others would wait in the next sum of gradients for as long as the backend allows. Every
    process must enter the block. A process that fails waits a moment until the others know of the failure. If all
    processes know of it already, each of them reports it.

    Args:
        onward: a sentence without a full stop that says what to do when a process was killed.

    Raises:
        ValueError: another process was killed.
    """
    state = launched()
    if state.num_processes == 1 or not torch.distributed.is_initialized():
        yield
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    over = threading.Event()
    # The thread has its own connection, because the main connection is blocked while the backend waits on it.
    watch = threading.Thread(target=_watch, args=(store.clone(), state.process_index, over), daemon=True)
    watch.start()
    try:
        yield
    # A process that calls `sys.exit` would leave the others waiting as well.
    except (Exception, SystemExit) as error:
        over.set()
        watch.join()
        if _lost(error) and not _noted(store):
            raise ValueError(
                f"another process is gone: it was killed, perhaps because memory ran out. {onward} "
                f"({str(error).splitlines()[0][:200]})"
            ) from None
        _tell(store, state.process_index, state.num_processes, known=isinstance(error, FailedTogether))
        raise
    finally:
        over.set()
        watch.join()


def _lost(error: BaseException) -> bool:
    """Whether an exchange failed because the connection to another process broke."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _noted(store: Any) -> bool:
    """Whether another process has left a note that it failed, or leaves one soon."""
    try:
        store.wait([_FAILED], timedelta(seconds=GONE_SECONDS))
    except RuntimeError:
        return False
    return True


def _watch(store: Any, rank: int, over: threading.Event) -> None:
    """End this process once another process has left a note that it failed."""
    while not over.wait(POLL_SECONDS):
        try:
            if not store.check([_FAILED]):
                continue
            note = store.get(_FAILED).decode()
            store.set(f"{_ENDED}/{rank}", "")
        except RuntimeError:
            return  # the process with the store has ended, and the backend tells the main thread
        sys.stdout.flush()
        print(note, file=sys.stderr, flush=True)
        # Only this call ends a main thread that waits in the backend.
        os._exit(1)


def _tell(store: Any, rank: int, count: int, known: bool) -> None:
    """Leave a note for the other processes, unless they know, and wait until all have ended or failed.

    The note has what this process prints of its error: a message if a user can mend it, or else the traceback.
    """
    message = message_of(sys.exc_info()[1])
    told = f". Its traceback:\n{traceback.format_exc()}" if message is None else f": {visible(message)}"
    note = f"process {rank} of {count} failed, so this one ends as well{told}"
    with suppress(RuntimeError):
        store.set(f"{_ENDED}/{rank}", "")
        if not known and not store.check([_FAILED]):
            store.set(_FAILED, note)
        store.wait([f"{_ENDED}/{k}" for k in range(count)], timedelta(seconds=FAREWELL_SECONDS))
