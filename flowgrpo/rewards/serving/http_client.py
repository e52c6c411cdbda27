"""Requests to a server that may be slow, busy, restarting or faulty.

Every request has a deadline for the whole exchange, and every reply has a size limit. Redirects are not followed, so a
token is not sent to another server. Tokens are read from the environment at each request, so they are in no attribute,
message or log.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import BadStatusLine
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from .exchange import Exchange

CONNECT_SECONDS = 10.0
LONGEST_ASKED_PAUSE = 300.0
CHUNK_BYTES = 1 << 16
MESSAGE_CHARACTERS = 500
# 500 is not in this set, because `flowgrpo rewards serve` answers 500 if the reward itself failed.
BUSY = frozenset({408, 425, 429, 502, 503, 504})
WORKING = frozenset({429, 503})
"""Statuses that tell, together with a header Retry-After, that the server works on other requests."""
HIDDEN = "[hidden]"


class ServerError(RuntimeError):
    """A server refused a request, or its answer cannot be used.

    Attributes:
        status: HTTP status, or None if there was no valid reply.
        body: the start of the reply's body, without the token.
    """

    def __init__(self, message: str, status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.status, self.body = status, body

    @property
    def final(self) -> bool:
        """Whether the status says that the server would refuse the same request again."""
        return self.status in (400, 413)


class Unavailable(ServerError):
    """The server could not be reached, took too long or was busy; the same request may succeed later.

    Attributes:
        pause: seconds that the server asked the client to wait before it tries again, or 0.
        busy: whether the server said that it works on other requests.
    """

    def __init__(
        self, message: str, status: int | None = None, body: str = "", pause: float = 0.0, busy: bool = False
    ) -> None:
        super().__init__(message, status, body)
        self.pause, self.busy = pause, busy

    @property
    def final(self) -> bool:
        """Always false: the request may succeed later, whatever the status is."""
        return False


@dataclass(frozen=True)
class Reply:
    """A complete reply: HTTP status and body."""

    status: int
    body: bytes


def check_url(reward: str, url: Any) -> str:
    """Return the address of a server without a final slash.

    Raises:
        ValueError: the url is not the address of a server, or contains a password, a query or a fragment.
    """
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        usable = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, usable = None, False
    if parts is None or not usable:
        raise ValueError(f"{reward}: url is {url!r}; give the address of a server, such as 'http://127.0.0.1:8000'")
    if "@" in parts.netloc or parts.query or parts.fragment:
        # The message does not repeat the address, because it may contain a secret.
        raise ValueError(
            f"{reward}: the url holds a password, a query or a fragment; leave it out, and name an environment "
            "variable that holds the key instead"
        )
    return str(url).rstrip("/")


def check_variable(reward: str, variable: Any) -> None:
    """Refuse what cannot name an environment variable; None names none.

    Raises:
        ValueError: it is no text, or an empty one.
    """
    if variable is not None and (not isinstance(variable, str) or not variable):
        raise ValueError(
            f"{reward}: {variable!r} is not the name of an environment variable; give one such as JUDGE_API_KEY"
        )


def server_in_words(url: str | list[str], token_env: str | None) -> str:
    """The address of a server, or the addresses, and whether its token is missing here; nothing is asked."""
    where = ", ".join(url) if isinstance(url, list) else url
    if token_env is None or os.environ.get(token_env, "").strip():
        return where
    return f"{where} (its token is missing here: export {token_env} where the run starts)"


def read_token(reward: str, variable: str | None) -> str | None:
    """Return the token in an environment variable; None if no variable is given.

    Raises:
        ValueError: the variable is not set, or has characters that a header cannot have. The message does not repeat
            the value.
    """
    if variable is None:
        return None
    check_variable(reward, variable)
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"{reward}: the environment variable {variable} is not set; export it before you start")
    if not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{reward}: the environment variable {variable} holds spaces or characters that no key has")
    return token


class HttpClient:
    """A client of one server, for any number of threads.

    Args:
        reward: name of the reward that sends requests, for messages.
        url: address of the server; paths are appended to it.
        token_env: environment variable with the token that is sent as a bearer token; None sends no token.
        ca_file: PEM file with the certificates of authorities that are trusted, in place of the usual ones; for https.
        timeout: seconds that a request may take in all: connecting, sending, waiting, and the reply to its last byte.
        most_bytes: size in bytes of the largest reply that is read.
        connections: how many connections are kept open at most.
        busy: HTTP statuses after which the same request may succeed later.
        token_option: what a recipe calls `token_env`, for messages.
        ca_option: what a recipe calls `ca_file`, for messages; None if a recipe cannot give one.

    Raises:
        ValueError: `url`, `token_env` or `ca_file` is wrong.
    """

    def __init__(
        self,
        reward: str,
        url: str,
        *,
        token_env: str | None = None,
        ca_file: str | None = None,
        timeout: float = 60.0,
        most_bytes: int = 16 << 20,
        connections: int = 1,
        busy: frozenset[int] = BUSY,
        token_option: str = "server.key_env",
        ca_option: str | None = None,
    ) -> None:
        self.reward, self.url, self.token_env = reward, check_url(reward, url), token_env
        self._token_option, self._ca_option = token_option, ca_option
        self.timeout, self.most_bytes, self.connections, self.busy = timeout, most_bytes, connections, busy
        self.ca_file = _check_ca_file(reward, self.url, ca_file)
        self._lock = threading.Lock()
        self._session: Any = None
        read_token(reward, token_env)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send one request and read its reply.

        Args:
            method: GET or POST.
            path: path that is appended to the url.
            body: body of the request.
            headers: headers in addition to the token.

        Returns:
            A reply with a status from 200 to 299.

        Raises:
            Unavailable: there was no connection, no whole reply in time, a broken connection, or a status in `busy`.
            ServerError: the status is any other one, or the reply is too large.
        """
        from .exchange import Exchange

        token = read_token(self.reward, self.token_env)
        sent = {"Accept-Encoding": "identity", "User-Agent": "flowgrpo", **(headers or {})}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"

        def work(exchange: Exchange[tuple[Reply, str | None]]) -> tuple[Reply, str | None]:
            return self._exchange(exchange, method, path, body, sent, token)

        try:
            reply, wanted = Exchange(work).within(self.timeout)
        except TimeoutError:
            raise Unavailable(f"{self.url}: no answer within {self.timeout:g} s") from None
        if 200 <= reply.status < 300:
            return reply
        text = hide(reply.body.decode("utf-8", "replace"), token)
        message = f"{self.url}{path} answered {reply.status}: {text[:MESSAGE_CHARACTERS].strip() or 'nothing more'}"
        if reply.status in self.busy:
            busy = reply.status in WORKING and wanted is not None
            raise Unavailable(message, reply.status, text, asked_pause(wanted), busy)
        if reply.status in (401, 403):
            message += (
                f"; no key was sent: name the environment variable that holds it as {self._token_option}"
                if token is None
                else f"; the key in {self.token_env} was sent: export one that the server takes, where the run starts"
            )
        raise ServerError(message, reply.status, text)

    def _exchange(
        self,
        exchange: Exchange[Any],
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        token: str | None,
    ) -> tuple[Reply, str | None]:
        """Send a request, and return its reply with the header Retry-After."""
        import requests
        import urllib3

        try:
            with self._open().request(
                method,
                self.url + path,
                data=body,
                headers=headers,
                timeout=(min(CONNECT_SECONDS, self.timeout), self.timeout),
                stream=True,
                allow_redirects=False,
                verify=self.ca_file or True,
                # Without this, a ~/.netrc file would replace the token.
                auth=lambda request: request,
            ) as response:
                return Reply(response.status_code, self._read(response, exchange)), response.headers.get("Retry-After")
        except requests.exceptions.SSLError as error:
            hint = self._scheme_hint(_inner(error))
            what = "no encrypted connection" if hint else "the certificate was not accepted"
            hint = hint or self._certificate_hint(_cause(error))
            raise ServerError(f"{self.url}: {what}: {_cause(error)}{hint}") from None
        except requests.exceptions.Timeout:
            raise TimeoutError from None
        except (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            cause = _inner(error)
            if isinstance(cause, (TimeoutError, urllib3.exceptions.ReadTimeoutError)):
                # While a request is sent or a body is read, requests reports the time limit of a socket as a broken
                # connection.
                raise TimeoutError from None
            raise Unavailable(f"{self.url}: {_cause(error)}{self._scheme_hint(cause)}") from None
        except requests.exceptions.RequestException as error:
            raise ServerError(f"{self.url}: {hide(_cause(error), token)}") from None

    def close(self) -> None:
        """Close the connections. A later request opens new ones."""
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

        from .exchange import ClosableAdapter

        with self._lock:
            if self._session is None:
                session = requests.Session()
                session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
                # Clusters often set a proxy for all addresses, but a server on this machine is not behind the proxy.
                session.trust_env = not is_local(urlsplit(self.url).hostname or "")
                for scheme in ("http://", "https://"):
                    adapter = ClosableAdapter(pool_maxsize=self.connections, max_retries=0)
                    session.mount(scheme, adapter)
                self._session = session
            return self._session

    def _scheme_hint(self, cause: Any) -> str:
        """What to write if the server speaks https and the address says http, or the other way round."""
        encrypted = self.url.startswith("https://")
        # OpenSSL names the fault by the library's version: `wrong version number`, later `record layer failure`.
        if encrypted and re.search(r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|UNEXPECTED_EOF", str(cause), re.I):
            return "; the server may not be encrypted: if it is not, write http:// in url"
        if not encrypted and isinstance(cause, ConnectionResetError | BadStatusLine):
            return "; if the server is encrypted, write https:// in url"
        return ""

    def _certificate_hint(self, cause: str) -> str:
        """What to write if the certificate is for another name, or if nothing here trusts it."""
        if "mismatch" in cause:
            return "; write a name that the certificate has in url, or make a certificate for the name in url"
        if not re.search(r"self.signed|unable to get (local )?issuer", cause) or self._ca_option is None:
            return ""
        if self.ca_file is None:
            return f"; if it is your own certificate, name its PEM file as {self._ca_option}"
        return f"; {self._ca_option} {self.ca_file} is another certificate: name the one that the server has"

    def _read(self, response: Any, exchange: Exchange[Any]) -> bytes:
        parts, size = [], 0
        for chunk in response.iter_content(CHUNK_BYTES):
            parts.append(chunk)
            size += len(chunk)
            if size > self.most_bytes:
                raise ServerError(f"{self.url}: the answer is larger than {self.most_bytes} bytes")
            if exchange.over:
                raise TimeoutError
        return b"".join(parts)


def asked_pause(header: str | None) -> float:
    """Return the seconds in a Retry-After header (a number or a date), at most 5 minutes; 0 if there is no header."""
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
    # The comparison is written so that NaN gives 0.
    return min(seconds, LONGEST_ASKED_PAUSE) if seconds > 0 else 0.0


def is_local(host: str) -> bool:
    """Whether a host name or address is the loopback of this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hide(text: str, token: str | None) -> str:
    """Return a text without the token, because servers may repeat the token in their error messages."""
    return text.replace(token, HIDDEN) if token else text


def _check_ca_file(reward: str, url: str, ca_file: Any) -> str | None:
    if ca_file is None:
        return None
    if not url.startswith("https://"):
        raise ValueError(f"{reward}: ca_file has no effect without encryption; write https:// in url, or leave it out")
    if not isinstance(ca_file, str) or not Path(ca_file).is_file():
        raise ValueError(f"{reward}: there is no file {ca_file!r}; give the path of a PEM file as ca_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca_file)
    except OSError as error:
        raise ValueError(
            f"{reward}: {ca_file} has no certificate that can be read ({error}); give a PEM file as ca_file"
        ) from None
    return ca_file


def _inner(error: BaseException) -> Any:
    """Return what an exception of the HTTP library wraps, or its text."""
    inner: Any = error.args[0] if error.args else error
    inner = getattr(inner, "reason", inner)
    if isinstance(inner, Exception) and len(inner.args) == 2 and isinstance(inner.args[1], Exception):
        return inner.args[1]
    return inner


def _cause(error: BaseException) -> str:
    """Return the message of a wrapped exception of the HTTP library, without the addresses of objects."""
    text = str(_inner(error))
    return text.partition(">: ")[2] or text.partition("): ")[2] or text or type(error).__name__
