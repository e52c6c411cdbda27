"""Serving a reward until a signal comes."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..base import RewardSpec
from ..registry import build
from .declaration import Declaration
from .encryption import server_context
from .hosts import HostNames, check_host
from .http_client import read_token
from .server import RewardServer, check_memory
from .service import Service
from .wire import WireLimits

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    token_env: str | None = None,
    waiting: int = 4,
    limits: WireLimits | None = None,
    memory: int | None = None,
    names: Sequence[str] = (),
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    report: Callable[[str], object] = print,
) -> None:
    """Serve a reward until SIGTERM or SIGINT, then finish the requests that have begun.

    The reward is made and called in this thread. A second signal ends the process at once.

    Args:
        name: name of the reward, as in a recipe.
        options: options of the reward.
        host: address on which the server listens.
        port: port on which the server listens; 0 chooses a free one.
        token_env: environment variable with the token that every request must have.
        waiting: how many requests may wait at most while one is scored.
        limits: limits of a request.
        memory: bytes that all requests may take together; None: twice the largest request, and 64 MiB.
        names: further names for which the server answers; see `HostNames`.
        certificate: PEM file with the certificate of the server; None serves without encryption.
        key: PEM file with the certificate's private key.
        report: function that is called with one line of text for the address, and for each failure.

    Raises:
        ValueError: the reward cannot be made or served, the address needs a token or is in use, or certificate and key
            cannot be used.
        MissingDependency: the reward needs a package that is not installed.
    """
    token = read_token("rewards serve", token_env)
    # These faults are found before a model is loaded.
    check_host(host, token)
    HostNames(host, names)
    check_memory(memory, limits or WireLimits())
    encryption = server_context(certificate, key)
    _check_free(host, port)
    reward = build(RewardSpec(name, options=options or {}))
    try:
        declaration = Declaration.of(reward, name, options or {})
        service = Service(reward, waiting=waiting, report=report)
        server = RewardServer(
            service, declaration, host=host, port=port, token=token, limits=limits, memory=memory, names=names,
            encryption=encryption,
        )  # fmt: skip
        with running(server), _stopped_by_signals(service, report):
            report(f"serving {reward.name} ({' or '.join(declaration.samples)}) at {server.url}")
            service.run()
    finally:
        reward.close()


@contextmanager
def running(server: RewardServer) -> Iterator[None]:
    """Run a server in a separate thread. At the end of the context, all answers have been sent."""
    listening = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="listening")
    listening.start()
    try:
        yield
    finally:
        # If the service has failed, this answers the requests that still wait for it.
        server.service.stop()
        server.shutdown()
        listening.join()
        server.connections.end()
        server.server_close()


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        raise ValueError(
            f"the server cannot listen on {host}:{port} ({error.strerror}); choose another --port"
        ) from None


@contextmanager
def _stopped_by_signals(service: Service, report: Callable[[str], object]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def stop(number: int, frame: Any) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        service.stop()
        if service.admitted:
            report("ending: requests that have begun are finished first; a second signal ends the server at once")

    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
