"""Requests to a server that may be slow, busy, restarting or wrong.

Every request has a deadline and its reply a size limit. Redirects are not followed, so that a token goes nowhere
else, and tokens are read from the environment at each request: they are in no attribute, message or log.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.cookiejar import DefaultCookiePolicy
from typing import Any, TypeVar
from urllib.parse import urlsplit

CONNECT_SECONDS = 10.0
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
LONGEST_ASKED_PAUSE = 300.0
CHUNK_BYTES = 1024
MESSAGE_CHARACTERS = 500
# 500 is no such status: servers of ours say by it that the reward itself failed.
BUSY = frozenset({408, 425, 429, 502, 503, 504})
HIDDEN = "[hidden]"

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ServerError(RuntimeError):
    """A server refused a request or answered something unusable.

    Attributes:
        status: of HTTP, or None if the reply was none.
        body: the start of the reply's body, without the token.
    """

    def __init__(self, message: str, status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.status, self.body = status, body

    @property
    def final(self) -> bool:
        """Whether the server would refuse the same request again, by its status."""
        return self.status in (400, 413)


class Unavailable(ServerError):
    """The server could not be reached, took too long or was busy; the same request may succeed later.

    Attributes:
        pause: seconds after which the server asked to be tried again, or 0.
    """

    def __init__(self, message: str, status: int | None = None, body: str = "", pause: float = 0.0) -> None:
        super().__init__(message, status, body)
        self.pause = pause

    @property
    def final(self) -> bool:
        """It may succeed later, also with a status such as 429."""
        return False


@dataclass(frozen=True)
class Reply:
    """A reply that came in whole: status of HTTP, and body."""

    status: int
    body: bytes


def check_url(reward: str, url: Any) -> str:
    """A server's address without a final slash.

    Raises:
        ValueError: it is no address of a server, or holds a password or a query.
    """
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        usable = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, usable = None, False
    if parts is None or not usable:
        raise ValueError(f"{reward}: url is {url!r}; give the address of a server, such as 'http://127.0.0.1:8000'")
    if "@" in parts.netloc or parts.query or parts.fragment:
        # The address is not repeated: it may hold a secret.
        raise ValueError(
            f"{reward}: the url holds a password, a query or a fragment; leave it out, and name an environment "
            "variable that holds the key instead"
        )
    return str(url).rstrip("/")


def read_token(reward: str, variable: str | None) -> str | None:
    """The token in an environment variable; None without a variable.

    Raises:
        ValueError: the variable is not set, or holds what no header can carry. The value is not repeated.
    """
    if variable is None:
        return None
    if not isinstance(variable, str) or not variable:
        raise ValueError(f"{reward}: {variable!r} names no environment variable; give a name such as JUDGE_API_KEY")
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"{reward}: the environment variable {variable} is not set; export it before you start")
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{reward}: the environment variable {variable} holds spaces or characters that no key has")
    return token


class HttpClient:
    """One server, from any number of threads.

    Args:
        reward: who asks, for messages.
        url: what paths are appended to.
        token_env: environment variable with the token that is sent as a bearer; None sends none.
        timeout: seconds a request may take, from its sending to the end of the reply.
        most_bytes: the largest reply that is read.
        connections: most connections kept open.
        busy: statuses after which the same request may succeed later.
        clock: seconds, for the deadline.

    Raises:
        ValueError: `url` or `token_env` is wrong.
    """

    def __init__(
        self,
        reward: str,
        url: str,
        *,
        token_env: str | None = None,
        timeout: float = 60.0,
        most_bytes: int = 16 << 20,
        connections: int = 1,
        busy: frozenset[int] = BUSY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reward, self.url, self.token_env = reward, check_url(reward, url), token_env
        self.timeout, self.most_bytes, self.connections, self.busy = timeout, most_bytes, connections, busy
        self._clock = clock
        self._lock = threading.Lock()
        self._session: Any = None
        read_token(reward, token_env)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send one request and read its reply.

        Args:
            method: GET or POST.
            path: appended to the url.
            body: what is sent.
            headers: beside the token.

        Returns:
            A reply of status 200 to 299.

        Raises:
            Unavailable: no connection, no reply in time, a connection that broke, or a status among `busy`.
            ServerError: any other status, or a reply that is too large.
        """
        import requests

        token = read_token(self.reward, self.token_env)
        sent = {"Accept-Encoding": "identity", "User-Agent": "flowgrpo", **(headers or {})}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        deadline = self._clock() + self.timeout
        try:
            with self._open().request(
                method,
                self.url + path,
                data=body,
                headers=sent,
                timeout=(min(CONNECT_SECONDS, self.timeout), self.timeout),
                stream=True,
                allow_redirects=False,
                # Without it, a ~/.netrc would replace the token.
                auth=lambda request: request,
            ) as response:
                reply = Reply(response.status_code, self._read(response, deadline))
                wanted = response.headers.get("Retry-After")
        except requests.exceptions.SSLError as error:
            raise ServerError(f"{self.url}: the certificate was not accepted: {_cause(error)}") from None
        except (requests.exceptions.Timeout, TimeoutError):
            raise Unavailable(f"{self.url}: no answer within {self.timeout:g} s") from None
        except (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            raise Unavailable(f"{self.url}: {_cause(error)}") from None
        except requests.exceptions.RequestException as error:
            raise ServerError(f"{self.url}: {hide(_cause(error), token)}") from None
        if 200 <= reply.status < 300:
            return reply
        text = hide(reply.body.decode("utf-8", "replace"), token)
        message = f"{self.url}{path} answered {reply.status}: {text[:MESSAGE_CHARACTERS].strip() or 'nothing more'}"
        if reply.status in self.busy:
            raise Unavailable(message, reply.status, text, asked_pause(wanted))
        if reply.status in (401, 403):
            source = self.token_env or "none was sent: name an environment variable that holds it"
            message += f" (key: {source})"
        raise ServerError(message, reply.status, text)

    def close(self) -> None:
        """Close the connections. A later request opens others."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _open(self) -> Any:
        import requests

        with self._lock:
            if self._session is None:
                session = requests.Session()
                session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
                # Clusters often set a proxy for everything; what runs on this machine is not behind it.
                session.trust_env = not is_local(urlsplit(self.url).hostname or "")
                for scheme in ("http://", "https://"):
                    adapter = requests.adapters.HTTPAdapter(pool_maxsize=self.connections, max_retries=0)
                    session.mount(scheme, adapter)
                self._session = session
            return self._session

    def _read(self, response: Any, deadline: float) -> bytes:
        parts, size = [], 0
        for chunk in response.iter_content(CHUNK_BYTES):
            parts.append(chunk)
            size += len(chunk)
            if size > self.most_bytes:
                raise ServerError(f"{self.url}: the answer is larger than {self.most_bytes} bytes")
            if self._clock() > deadline:
                raise TimeoutError
        return b"".join(parts)


def persist(
    attempt: Callable[[], T],
    patience: float,
    *,
    sleep: Callable[[float], object],
    clock: Callable[[], float] = time.monotonic,
    spread: float = 1.0,
) -> T:
    """The result of `attempt`, repeated while the server is unavailable, with pauses that double.

    Args:
        attempt: one request.
        patience: seconds after which no further attempt begins, counted from the first.
        sleep: what waits, in seconds.
        clock: seconds.
        spread: factor of the pauses, so that many clients do not come back together.

    Raises:
        Unavailable: the patience has run out; says how often it was tried.
    """
    began, pause = clock(), FIRST_PAUSE
    number = 1
    while True:
        try:
            return attempt()
        except Unavailable as error:
            wait = max(pause * spread, error.pause)
            waited = clock() - began
            if waited + wait > patience:
                tried = f"tried {number} times in {waited:.0f} s" if number > 1 else "tried once"
                raise Unavailable(f"{error} ({tried})", error.status, error.body, error.pause) from None
            if number == 1:
                _log.warning("%s; trying again for up to %g s", error, patience)
        sleep(wait)
        number += 1
        pause = min(2 * pause, LONGEST_PAUSE)


def asked_pause(header: str | None) -> float:
    """Seconds in a Retry-After header, which holds a number or a date; 0 without, at most 5 minutes."""
    if not header:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            when = parsedate_to_datetime(header)
        except (TypeError, ValueError):
            return 0.0
        if when.tzinfo is None:
            when = when.replace(tzinfo=timezone.utc)
        seconds = (when - datetime.now(timezone.utc)).total_seconds()
    # Written so that NaN gives 0.
    return min(seconds, LONGEST_ASKED_PAUSE) if seconds > 0 else 0.0


def is_local(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hide(text: str, token: str | None) -> str:
    """A text without the token, which servers like to repeat in their complaints."""
    return text.replace(token, HIDDEN) if token else text


def _cause(error: BaseException) -> str:
    """What a wrapped exception of the HTTP library says, without its object addresses."""
    inner: Any = error.args[0] if error.args else error
    inner = getattr(inner, "reason", inner)
    if isinstance(inner, Exception) and len(inner.args) == 2 and isinstance(inner.args[1], Exception):
        inner = inner.args[1]
    text = str(inner)
    return text.partition(">: ")[2] or text.partition("): ")[2] or text or type(error).__name__
