"""Threads that make calls for others. They do not keep the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Line:
    """A thread that makes calls in the order in which they were submitted. It does not keep the process from ending.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def put(self, call: Callable[[], T]) -> Future[T]:
        """Submit a call, which runs with the current CUDA device of the submitting thread, and return its future."""
        future: Future[T] = Future()
        self._calls.put((future, _on_this_device(call)))
        return future

    def end(self) -> None:
        """Let the thread end after the submitted calls that were not cancelled."""
        self._calls.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self.thread.join()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            del item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            # Without this, the arguments of the call would stay in memory until the next call.
            del future, call


def _on_this_device(call: Callable[[], T]) -> Callable[[], T]:
    """Bind a call to this thread's current CUDA device. In another thread, the current device is the first one."""
    place = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def placed() -> T:
        with nullcontext() if place is None else torch.cuda.device(place):
            return call()

    return placed
