"""A reward in another process or on another machine, which `flowgrpo rewards serve` serves."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .base import InvalidScores, Scores
from .inputs import Inputs
from .options import check_positive
from .scores import normalise
from .serving import wire
from .serving.client_pool import ClientPool
from .serving.declaration import SAMPLES, Declaration
from .serving.http_client import ServerError, Unavailable, check_url, check_variable, server_in_words
from .serving.persistence import persist
from .waiting import pause

MOST_REPLY_BYTES = 256 << 20
IF_BUSY = (
    "list more servers in `url`, give a larger `timeout`, or let more requests wait with `flowgrpo rewards serve "
    "--waiting`"
)


class NeverSent(ValueError):
    """A sample or a group that no request can hold; it would be refused again."""

    final = True


class Remote:
    """A reward that another process serves with `flowgrpo rewards serve`, with the very same results.

    It first asks the server which reward it serves. Then it is called exactly as that reward would be: with the same
    columns, in batches of the same size, and with whole groups if the reward compares them. While the server cannot be
    reached or is busy, a call waits and asks again. So nothing is lost if the server is killed and started again. A
    server that comes back with another reward, or with other options, is refused.

    Args:
        url: the server's address, such as "http://127.0.0.1:8765", or a list of addresses of servers of the same
            reward. Requests go to the servers in turn, and past a server that cannot be reached or is too busy.
        token_env: environment variable that holds the token, if the server asks for one.
        ca_file: PEM file with the certificate of the server or of its authority, if `url` begins with https:// and the
            system does not trust that certificate.
        reward: expected name of the served reward in the metrics; a server with another reward is refused.
        timeout: seconds for one request in all: connecting, sending, its turn in the queue, scoring, the reply. A
            server may also answer for as long that it is busy, or for `patience` if that is longer.
        patience: for how many seconds a call tries to reach the server. Time in which the server answers that it is
            busy is not counted.
        encoding: how images are sent. "float32" keeps every bit. "uint8" takes a quarter of the size, and "png" still
            less; both round to the 256 levels of a picture file.
        batch_size: largest number of samples in one request, in place of the batch size of the served reward.

    Raises:
        ValueError: an option is wrong, no server answers, or it serves another reward than `reward`.
    """

    remote = True
    sleep: Callable[[float], object] = staticmethod(pause)
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(
        self,
        url: str | list[str],
        *,
        token_env: str | None = None,
        ca_file: str | None = None,
        reward: str | None = None,
        timeout: float = 600.0,
        patience: float = 150.0,
        encoding: str = "float32",
        batch_size: int | None = None,
    ) -> None:
        self.check_options("remote", {"url": url, "timeout": timeout, "patience": patience, "encoding": encoding})
        self.patience, self.timeout, self.encoding = patience, timeout, encoding
        self._client = ClientPool(
            "remote", url, token_env=token_env, ca_file=ca_file, timeout=timeout, most_bytes=MOST_REPLY_BYTES,
            token_option="token_env", ca_option="ca_file",
        )  # fmt: skip
        self.declaration, self.limits = self._ask_what_it_serves()
        if reward is not None and reward != self.declaration.reward:
            raise ValueError(
                f"remote: {url} serves the reward {self.declaration.reward!r}, and not {reward!r}; "
                f"set the option `reward` to {self.declaration.reward!r}, or serve the other reward there"
            )
        self.name, self.whole_group = self.declaration.reward, self.declaration.whole_group
        self.batch_size = self.declaration.batch_size if batch_size is None else batch_size
        self.__signature__ = self.declaration.signature

    @staticmethod
    def check_options(name: str, options: Mapping[str, Any]) -> None:
        """Refuse options that are wrong whatever the server says.

        Raises:
            ValueError: an option is wrong.
        """
        url = options["url"]
        for one in url if isinstance(url, list) else [url]:
            check_url(name, one)
        check_variable(name, options.get("token_env"))
        for key in ("timeout", "patience"):
            if key in options:
                check_positive(name, key, options[key], "60")
        if (encoding := options.get("encoding", wire.ENCODINGS[0])) not in wire.ENCODINGS:
            raise ValueError(f"{name}: encoding is {encoding!r}; give one of {', '.join(wire.ENCODINGS)}")

    @staticmethod
    def served_at(options: Mapping[str, Any]) -> list[str]:
        """The server of these options, in words."""
        return [server_in_words(options["url"], options.get("token_env"))]

    def __call__(self, **arguments: Any) -> Scores:
        """Scores of the served reward.

        Args:
            arguments: the arguments that the served reward takes: `images` [B, 3, H, W] or [B, F, 3, H, W] in [0, 1],
                or `completions`, with `prompts`, columns and `groups`.

        Returns:
            What the served reward returned, with the same float32 values.

        Raises:
            InvalidScores: the served reward returned something unusable, or the server now serves another reward.
            RuntimeError: the served reward raised, or the server could not be reached.
            ValueError: the request is larger than the server allows, or a column cannot be sent.
        """
        inputs = self._inputs(arguments)
        parts = [(rows, self._send(inputs, rows)) for rows in self._parts(inputs)]
        count = len(inputs.prompts)
        if len(parts) == 1:
            return parts[0][1]
        values = [math.nan] * count
        subs: dict[str, list[float]] = {}
        notes = [""] * count
        answers: list[str | None] = [None] * count
        of_parts: list[Sequence[float | None] | None] = [None] * count
        rendered: dict[str, list[Sequence[Tensor] | None]] = {}
        for rows, scores in parts:
            for name in scores.sub_scores:
                subs.setdefault(name, [math.nan] * count)
            for name in scores.rendered:
                rendered.setdefault(name, [None] * count)
            for place, row in enumerate(rows):
                values[row] = scores.values[place].item()
                notes[row] = scores.notes[place] if scores.notes else ""
                answers[row] = scores.answers[place] if scores.answers else None
                of_parts[row] = scores.parts[place] if scores.parts else None
                for name, column in scores.sub_scores.items():
                    subs[name][row] = column[place]
                for name, made in scores.rendered.items():
                    rendered[name][row] = made[place]
        said = any(scores.answers for _, scores in parts)
        cut = any(scores.parts for _, scores in parts)
        return Scores(
            values, subs, notes if any(notes) else (), answers=answers if said else (), parts=of_parts if cut else (),
            rendered=rendered,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connection. The server keeps running."""
        self._client.close()

    def _inputs(self, arguments: Mapping[str, Any]) -> Inputs:
        columns = {name: value for name, value in arguments.items() if name not in (*SAMPLES, "prompts", "groups")}
        # A column that is None was not given: None is the default in the signature.
        columns = {name: list(column) for name, column in columns.items() if column is not None}
        images, groups = arguments.get("images"), arguments.get("groups")
        samples = list(arguments.get("completions") or ()) if images is None else images
        return Inputs(samples, list(arguments["prompts"]), columns, None if groups is None else list(groups))

    def _parts(self, inputs: Inputs) -> Iterator[list[int]]:
        """Yield the rows of each request, in as few requests as the limits allow; groups stay whole if they must."""
        count = len(inputs.prompts)
        each = wire.sample_bytes(inputs.samples) + _text_bytes(inputs)
        empty = len(self._packed(inputs, []))
        most = min(self.limits.most_samples, max(self.limits.most_bytes - empty, 0) // max(each, 1))
        if count <= most:
            yield list(range(count))
            return
        pieces: Sequence[list[int]] = [[row] for row in range(count)]
        if self.whole_group:
            members: dict[int, list[int]] = {}
            for row, group in enumerate(inputs.groups or ()):
                members.setdefault(group, []).append(row)
            pieces = list(members.values())
        rows: list[int] = []
        for piece in pieces:
            if len(piece) > most:
                raise NeverSent(
                    f"{'a group' if self.whole_group else 'a sample'} of {len(piece) * each} bytes is more than "
                    f"{self._client.url} accepts ({self.limits.most_bytes}); start that server with a larger --max-mb"
                )
            if len(rows) + len(piece) > most:
                yield rows
                rows = []
            rows = rows + piece
        yield rows

    def _packed(self, inputs: Inputs, rows: list[int]) -> bytes:
        samples, prompts, columns, groups = inputs.take(rows)
        return wire.pack(Inputs(samples, prompts, columns, groups), self.declaration.fingerprint, self.encoding)

    def _send(self, inputs: Inputs, rows: list[int]) -> Scores:
        body = self._packed(inputs, rows)
        headers = {"Content-Type": wire.CONTENT_TYPE}
        try:
            reply = self._persist(lambda: self._client.request("POST", "/score", body, headers))
        except Unavailable:
            raise
        except ServerError as error:
            raise self._failure(error, rows) from None
        return normalise(wire.unpack_scores(reply.body), len(rows), self.name)

    def _failure(self, error: ServerError, rows: list[int]) -> Exception:
        """Return the exception to raise here for a failure of the served reward."""
        try:
            told = json.loads(error.body)
            message, index = str(told["error"]), told.get("index")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return error
        if error.status == 409:
            return InvalidScores(
                f"{self._client.url} serves another reward than at the start, or this one with other options; "
                "start it as it was and resume the run"
            )
        if error.status == 422:
            known = isinstance(index, int) and 0 <= index < len(rows)
            return InvalidScores(message, rows[index] if known else None)
        return RuntimeError(f"{self._client.url}: {message}") if error.status == 500 else error

    def _ask_what_it_serves(self) -> tuple[Declaration, wire.WireLimits]:
        url = self._client.url
        try:
            replies = self._persist(lambda: self._client.answers("/info"))
            found = {each: _what_is_served(reply.body) for each, reply in replies.items()}
            (first, (declaration, _)), *others = found.items()
            for other, (served, _) in others:
                if served.fingerprint != declaration.fingerprint:
                    raise ValueError(
                        f"{first} serves {declaration.reward!r}, and {other} serves {served.reward!r} or has other "
                        "options; start the same reward with the same options at every address"
                    )
            limits = [each for _, each in found.values()]
            least = (min(one.most_bytes for one in limits), min(one.most_samples for one in limits))
            return declaration, replace(limits[0], most_bytes=least[0], most_samples=least[1])
        except Unavailable as error:
            mend = "" if error.busy else "; start `flowgrpo rewards serve NAME` there"
            raise ValueError(f"remote: {error}{mend}") from None
        except (ServerError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"remote: {url} is not a usable server of a reward: {error}") from None

    def _persist(self, attempt: Callable[[], Any]) -> Any:
        return persist(attempt, self.patience, self.timeout, advice=IF_BUSY, sleep=self.sleep, clock=self.clock)


def _what_is_served(body: bytes) -> tuple[Declaration, wire.WireLimits]:
    """The reward and the limits that a server has told."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or "version" not in told:
        raise ValueError("another program answers there; give the address that `flowgrpo rewards serve` printed")
    if told["version"] != wire.VERSION:
        raise ValueError(f"it speaks version {told['version']!r}, but this client speaks version {wire.VERSION}")
    return Declaration.from_json(told["declaration"]), wire.WireLimits(**told["limits"])


def _text_bytes(inputs: Inputs) -> int:
    """Return the largest number of bytes that the prompt and the columns of one sample take."""
    columns = zip(*inputs.columns.values()) if inputs.columns else [()] * len(inputs.prompts)
    # Between two values of a list JSON has a comma and a space.
    apart = 2 * len(inputs.columns)
    sizes = (len(json.dumps([text, *row], default=repr)) + apart for text, row in zip(inputs.prompts, columns))
    return max(sizes, default=0) + 64
