"""Servers of rewards for the tests of both ends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.served import REWARDS, Served


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    path = tmp_path / "served_rewards.py"
    path.write_text(REWARDS)
    return str(path)


@pytest.fixture
def served(plugins: str) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(name: str = "level", **more: Any) -> Served:
        made.append(Served(f"{plugins}:{name}", **more))
        return made[-1]

    yield make
    for server in made:
        if server.thread.is_alive():
            server.close()
