"""Processes that share weights do the same operations in the same order, although their work differs."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowgrpo.weights.collective import BACKWARD, EVALUATE, MEET, Lockstep, turn


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([MEET, MEET], MEET),
        ([MEET, BACKWARD], BACKWARD),
        ([BACKWARD, EVALUATE, BACKWARD], EVALUATE),
        ([EVALUATE + 3, EVALUATE, EVALUATE], EVALUATE),
        ([EVALUATE + 3, EVALUATE, BACKWARD], EVALUATE + 3),
    ],
)
def test_evaluations_come_before_backward_passes_and_those_before_meeting(wanted: list[int], expected: int) -> None:
    assert turn(wanted) == expected


class Diary(nn.Module):
    """y = w·x. Writes down which weight it had at each evaluation and backward pass."""

    def __init__(self, weight: float, done: list[Any]) -> None:
        super().__init__()
        self.weight, self.done = nn.Parameter(torch.tensor(weight)), done

    def forward(self, x: Tensor) -> Tensor:
        self.done.append((float(self.weight.detach()), torch.is_grad_enabled()))
        y = self.weight * x
        if y.requires_grad:
            y.register_hook(lambda gradient: self.done.append("backward"))
        return y


class Worker:
    """One process, in a thread, with two experts."""

    def __init__(self, tell: Callable[[int], Sequence[int]]) -> None:
        self.done: list[Any] = []
        self.module, self.second = Diary(2.0, self.done), Diary(3.0, self.done)
        self.steps = Lockstep([self.module, self.second], tell)
        self.average = self.steps.exchange(lambda: self.put(5.0), lambda: self.put(2.0))
        for module in (self.module, self.second):  # all have evaluated once
            module(torch.zeros(2))
        self.steps.meet()

    def put(self, value: float) -> None:
        self.module.weight.data.fill_(value)

    def train(self, *values: float) -> None:
        """A backward pass of Σ w·x, of one evaluation for each value."""
        self.steps.backward(torch.stack([self.module(torch.tensor([value])).sum() for value in values]).sum())

    def evaluate(self, value: float) -> float:
        with torch.no_grad(), self.average():
            return float(self.module(torch.tensor([value]))[0])


def together(*work: Callable[[Worker], Any]) -> tuple[list[Worker], list[Any]]:
    """Each job by a worker of its own; all meet at the end."""
    told, barrier = [0] * len(work), threading.Barrier(len(work), timeout=20)
    workers: dict[int, Worker] = {}
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        def tell(step: int) -> list[int]:
            told[rank] = step
            barrier.wait()
            everything = list(told)
            barrier.wait()
            return everything

        workers[rank] = Worker(tell)
        found[rank] = work[rank](workers[rank])
        workers[rank].steps.meet()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(work)
    return [workers[rank] for rank in range(len(work))], [found[rank] for rank in range(len(work))]


def gradients(workers: Sequence[Worker]) -> list[float]:
    return [0.0 if w.module.weight.grad is None else float(w.module.weight.grad) for w in workers]


def test_who_has_nothing_to_do_takes_part_with_gradients_of_zero() -> None:
    workers, _ = together(lambda w: [w.train(3.0), w.train(4.0)], lambda w: None)
    assert workers[0].done == workers[1].done
    assert workers[0].done[2:] == [(2.0, True), "backward"] * 2
    assert gradients(workers) == [7.0, 0.0]


def test_unequal_work_is_done_in_one_order() -> None:
    def one(worker: Worker) -> float:
        worker.train(1.0, 10.0)
        return worker.evaluate(3.0)

    def other(worker: Worker) -> float:
        seen = worker.evaluate(7.0)
        worker.train(100.0)
        return seen

    workers, found = together(one, other, lambda w: w.train(1000.0))
    assert found == [15.0, 35.0, None]
    assert gradients(workers) == [11.0, 100.0, 1000.0]
    assert workers[0].done == workers[1].done == workers[2].done
    assert [w.module.weight.item() for w in workers] == [2.0, 2.0, 2.0]


def test_experts_are_told_apart() -> None:
    def second(worker: Worker) -> float:
        with torch.no_grad():
            return float(worker.second(torch.ones(1))[0])

    workers, found = together(lambda w: w.train(3.0), second)
    assert found == [None, 3.0]
    assert workers[0].done == workers[1].done
    assert workers[0].done[2:] == [(2.0, True), (3.0, False), "backward"]
    assert gradients(workers) == [3.0, 0.0]


def test_an_exchange_within_another_is_refused() -> None:
    def work(worker: Worker) -> None:
        with worker.average(), pytest.raises(RuntimeError, match="within another exchange"), worker.average():
            pass

    together(work)


def test_a_backward_pass_needs_an_evaluation_by_all() -> None:
    steps = Lockstep([nn.Linear(1, 1)], lambda step: [step, BACKWARD])
    with pytest.raises(RuntimeError, match="took no part in"):
        steps.meet()


def test_an_evaluation_needs_inputs_of_an_earlier_one() -> None:
    steps = Lockstep([nn.Linear(1, 1)], lambda step: [step, EVALUATE])
    with pytest.raises(RuntimeError, match="evaluates Linear, but this process never has"):
        steps.meet()
