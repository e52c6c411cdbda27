"""Rewards served from threads of the test's own process, and ways for such a server to die."""

import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from flowgrpo.rewards import RewardSpec, build
from flowgrpo.rewards.serving.declaration import Declaration
from flowgrpo.rewards.serving.serve import running
from flowgrpo.rewards.serving.server import RewardServer
from flowgrpo.rewards.serving.service import Service
from flowgrpo.rewards.serving.wire import WireLimits

REWARDS = '''
import torch
from flowgrpo.rewards import Scores


def level(images, gain=1.0):
    return gain * images.flatten(1).mean(1)


def rich(images, prompts, taste, extra=None):
    """Has sub-scores and notes, and does not apply to every sample."""
    values = [None if t is None else t * v for t, v in zip(taste, level(images).tolist())]
    peak = images.flatten(1).amax(1)
    peak[0] = float("nan")
    return Scores(values, {"peak": peak}, [f"{p}\\u2028\\U0001f600{e}" for p, e in zip(prompts, extra or prompts)])


class Apart:
    """Distance from the mean of the group; each group comes in a call of its own."""

    whole_group = True
    batch_size = 3

    def __init__(self):
        self.calls = []

    def __call__(self, images):
        self.calls.append(len(images))
        return (images - images.mean(0)).flatten(1).norm(dim=1)


class Ranked(Apart):
    """The same with group ids."""

    batch_size = None

    def __call__(self, images, groups, **columns):
        self.calls.append((groups, sorted(columns.items())))
        return [float(groups.count(group)) + i for i, group in enumerate(groups)]


class Small:
    batch_size = 2
    name = "smallest"

    def __init__(self, offset=0.0):
        self.offset, self.calls = offset, []

    def __call__(self, images, prompts):
        self.calls.append(len(images))
        images -= 0.5
        return level(images) + self.offset


def longest(completions, prompts, wanted):
    return [len(text) - len(str(w)) for text, w in zip(completions, wanted)]


def keyed(completions, noise_key=None, truncated=None, **columns):
    assert "completion_ids" not in columns
    return [float(key) for key in noise_key or [-1] * len(completions)]


def either(prompts, **columns):
    return [1.0] * len(prompts)


def motion(images):
    return images.diff(dim=1).abs().flatten(1).mean(1)


def fails(images, prompts):
    if "b" in prompts:
        raise ZeroDivisionError("no edges")
    return level(images)


def worded(images, prompts):
    return ["good" if prompt == "b" else 1.0 for prompt in prompts]
'''


class Killable(RewardServer):
    """Can close all connections at once, like a killed process."""

    def process_request(self, request: Any, client_address: Any) -> None:
        self.__dict__.setdefault("accepted", []).append(request)
        super().process_request(request, client_address)

    def hang_up(self) -> None:
        for connection in self.__dict__.pop("accepted", ()):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class Served:
    """A reward that is served until `close`."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        *,
        port: int = 0,
        token: str | None = None,
        waiting: int = 4,
        limits: WireLimits | None = None,
        **more: Any,
    ) -> None:
        self.reward, self.reports = build(RewardSpec(name, options=options or {})), []
        self.service = Service(self.reward, waiting=waiting, report=self.reports.append)
        self.declaration = Declaration.of(self.reward, name, options or {})
        self.server = Killable(self.service, self.declaration, port=port, token=token, limits=limits, **more)
        self._ending = ExitStack()
        self._ending.enter_context(running(self.server))
        self.thread = threading.Thread(target=self.service.run)
        self.thread.start()
        self.port = self.server.server_port
        self.url = self.server.url

    def close(self) -> None:
        """End as after SIGTERM: admitted requests are finished."""
        self.service.stop()
        self.thread.join()
        self._ending.close()
        self.reward.close()

    def kill(self) -> None:
        """End as SIGKILL would, as far as clients can see."""
        self.server.socket.close()
        self.server.hang_up()
        self.close()
