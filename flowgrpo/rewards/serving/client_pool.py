"""One served reward at several addresses: requests go around, and a server that is away is passed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .http_client import HttpClient, Reply, Unavailable


class ClientPool:
    """Clients of servers that serve the same reward.

    A request goes to the server after the server of the request before. If that server is unavailable, the next one
    gets the request at once. A request fails only if every server is unavailable.

    Args:
        urls: one address or several, each once.
        options: of every `HttpClient`; `reward` first.

    Raises:
        ValueError: there is no address, an address is given twice, or an option is wrong.
    """

    def __init__(self, reward: str, urls: str | Sequence[str], **options: Any) -> None:
        given = [urls] if isinstance(urls, str) or not isinstance(urls, Sequence) else list(urls)
        self.clients = [HttpClient(reward, url, **options) for url in given]
        known = [client.url for client in self.clients]
        if twice := sorted({url for url in known if known.count(url) > 1}):
            raise ValueError(f"{reward}: url has {twice[0]} more than once; give each address once")
        if not known:
            raise ValueError(f"{reward}: url is an empty list; give the address of a server, or several")
        self._next = 0

    @property
    def url(self) -> str:
        """All addresses, for messages."""
        return ", ".join(client.url for client in self.clients)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send one request to a server that is there; arguments and result as of `HttpClient.request`.

        Raises:
            Unavailable: every server is unavailable; the message has the reason of each.
            ServerError: the server that was there refused the request.
        """
        first = self._next
        self._next = (first + 1) % len(self.clients)
        away: list[Unavailable] = []
        for client in (*self.clients[first:], *self.clients[:first]):
            try:
                return client.request(method, path, body, headers)
            except Unavailable as error:
                away.append(error)
        raise _all_away(away)

    def answers(self, path: str) -> dict[str, Reply]:
        """The answers of the servers that are there to a GET request, by address; at least one.

        Raises:
            Unavailable: every server is unavailable.
            ServerError: a server refused the request.
        """
        found: dict[str, Reply] = {}
        away: list[Unavailable] = []
        for client in self.clients:
            try:
                found[client.url] = client.request("GET", path)
            except Unavailable as error:
                away.append(error)
        if not found:
            raise _all_away(away)
        return found

    def close(self) -> None:
        """Close all connections."""
        for client in self.clients:
            client.close()


def _all_away(errors: Sequence[Unavailable]) -> Unavailable:
    """The error of a request that every server left unanswered."""
    if len(errors) == 1:
        return errors[0]
    # The first server that is free again can take the request. If one is busy, the reward is there.
    pause, busy = min(error.pause for error in errors), any(error.busy for error in errors)
    return Unavailable("; ".join(map(str, errors)), errors[-1].status, errors[-1].body, pause, busy)
