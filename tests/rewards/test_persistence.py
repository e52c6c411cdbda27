"""How long a request is tried again, by what the server says: worked out by hand on a clock that only `sleep` moves."""

import pytest

from flowgrpo.rewards.serving.http_client import Unavailable
from flowgrpo.rewards.serving.persistence import persist
from tests.rewards.stub_server import FakeClock

# A pause of 30 s before each further attempt.
AWAY = Unavailable("nobody is there", pause=30.0)
BUSY = Unavailable("others are served", 503, pause=30.0, busy=True)


def tried(answers: list[Unavailable | str], patience: float, timeout: float) -> tuple[str, float]:
    """What came in the end, and the second at which it came."""
    clock, coming = FakeClock(), iter(answers)

    def attempt() -> str:
        answer = next(coming)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    try:
        return persist(attempt, patience, timeout, advice="wait longer", sleep=clock.sleep, clock=clock), clock.now
    except Unavailable as error:
        return str(error), clock.now


@pytest.mark.parametrize(
    ("answers", "patience", "timeout", "found"),
    [
        # Pauses after a busy answer are no patience, however they lie among the others.
        ([AWAY, BUSY, BUSY, BUSY, AWAY, "here"], 60, 90, ("here", 150)),
        # Patience is the sum of the time without a server: a busy answer does not give it back.
        ([AWAY, BUSY, AWAY, BUSY, AWAY, "late"], 60, 90, ("nobody is there (tried 5 times in 120 s)", 120)),
        # Busy time counts in a row: it begins anew after the server was away.
        ([BUSY, BUSY, AWAY, BUSY, BUSY, "here"], 60, 60, ("here", 150)),
        ([BUSY] * 9, 0, 60, ("others are served (tried 3 times in 60 s); the server is busy: wait longer", 60)),
        # Who waits long for a server that is away waits as long for a busy one.
        ([BUSY] * 5 + ["here"], 150, 60, ("here", 150)),
        ([AWAY] * 9, 0, 600, ("nobody is there (tried once)", 0)),
    ],
)
def test_time_of_a_busy_server_and_time_without_a_server_have_limits_of_their_own(
    answers: list[Unavailable | str], patience: float, timeout: float, found: tuple[str, float]
):
    assert tried(answers, patience, timeout) == found


def test_the_time_that_a_request_takes_counts_as_what_it_ends_in():
    clock = FakeClock()

    def slow(answer: Unavailable) -> None:
        clock.now += 50
        raise answer

    for answer, patience, timeout in ((AWAY, 160, 0), (BUSY, 0, 160)):
        began = clock.now
        with pytest.raises(Unavailable, match="tried 3 times in 210 s"):
            persist(lambda a=answer: slow(a), patience, timeout, advice="", sleep=clock.sleep, clock=clock)
        assert clock.now - began == 210
