"""Questions to a model behind any OpenAI-compatible server (vLLM, SGLang, llama.cpp, hosted ones).

A temperature and `max_tokens` are always sent, because with a server's own defaults a model may sample, or may never
stop. The temperature is 0 unless a reward asks for several votes.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor

from ...parts.plugins import nearest
from ..options import check_positive
from ..serving.http_client import BUSY, HttpClient, ServerError, Unavailable, check_url, check_variable
from ..serving.persistence import persist
from ..waiting import Unwanted, pause
from .judge_images import data_urls

APIS = {"chat": "/chat/completions", "completions": "/completions"}
OURS = ("model", "messages", "prompt", "temperature", "max_tokens", "stream", "n", "logprobs", "top_logprobs")
ALTERNATIVES = 20
MOST_REPLY_BYTES = 4 << 20
REMEMBERED = 4096
IF_BUSY = "give a larger `server.timeout` or a smaller `server.concurrency`, or a server with more GPUs"
# Error codes with which hosted servers refuse a certain picture or text, not the request itself.
FILTERED = ("content_filter", "content_policy_violation", "moderation_blocked")


@dataclass(frozen=True)
class JudgeServer:
    """The `server` option of every judge.

    Attributes:
        url: the address to which `/chat/completions` is appended, such as "http://127.0.0.1:8000/v1".
        model: the server's name of the model.
        key_env: environment variable with the API key; None sends no key.
        api: "chat", or "completions" for a language model without a chat template.
        concurrency: how many questions are asked at the same time, at most.
        timeout: seconds for one answer. A server may also reply for as long that it is busy, or for `patience` if that
            is longer.
        patience: for how many seconds a question is tried again if the server is unavailable. Time in which the server
            replies that it is busy is not counted.
        max_tokens: largest number of tokens of an answer; None uses the default of the reward.
        side: images are shrunk until their longest side has at most this many pixels; None sends them unchanged.
        frames: how many frames of a video are sent at most, evenly spaced.
        extra: additional fields of the request, such as {seed: 0}.
    """

    url: str
    model: str
    key_env: str | None = None
    api: str = "chat"
    concurrency: int = 16
    timeout: float = 120.0
    patience: float = 120.0
    max_tokens: int | None = None
    side: int | None = None
    frames: int = 8
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, reward: str, given: Any) -> JudgeServer:
        """Read the option as it is written in a recipe.

        Raises:
            ValueError: a field is unknown, missing or wrong.
        """
        known = [entry.name for entry in fields(cls)]
        if isinstance(given, JudgeServer):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"{reward}: server is {given!r}; give {{url: http://127.0.0.1:8000/v1, model: NAME}}")
        for name in given:
            if name not in known:
                raise ValueError(
                    f"{reward}: server has no field {name!r}{nearest(str(name), known)} Fields: {', '.join(known)}."
                )
        missing = [name for name in ("url", "model") if name not in given]
        if missing:
            raise ValueError(f"{reward}: server needs {' and '.join(missing)}, such as 'http://127.0.0.1:8000/v1'")
        server = cls(**given)
        server._check(reward)
        return server

    def _check(self, reward: str) -> None:
        check_url(reward, self.url)
        check_variable(reward, self.key_env)
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"{reward}: server.model is {self.model!r}; give the name that the server knows it by")
        if self.api not in APIS:
            raise ValueError(f"{reward}: server.api is {self.api!r}; give one of {', '.join(APIS)}")
        for name in ("concurrency", "frames", "max_tokens", "side"):
            value = getattr(self, name)
            optional = name in ("max_tokens", "side") and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{reward}: server.{name} is {value!r}; give a whole number of 1 or more")
        for name in ("timeout", "patience"):
            check_positive(reward, f"server.{name}", getattr(self, name), "60")
        if not isinstance(self.extra, Mapping):
            raise ValueError(f"{reward}: server.extra is {self.extra!r}; give fields of the request, such as seed: 0")
        taken = [name for name in self.extra if name in OURS]
        if taken:
            raise ValueError(f"{reward}: server.extra has {taken[0]!r}, which every request has already; leave it out")


@dataclass(frozen=True)
class Question:
    """A question to a judge about one sample or one pair.

    Attributes:
        text: the question.
        media: images [3, H, W] or videos [F, 3, H, W] in [0, 1], shown before the text; or data URLs of images that
            many questions share, so that they are packed once.
        begun: the start of the answer, which the model continues.
        temperature: of the answer; 0 takes the likeliest token at every place.
        vote: tells the votes on one question apart; above 0, it is added to the seed of the request.
    """

    text: str
    media: tuple[Tensor | str, ...] = ()
    begun: str = ""
    temperature: float = 0.0
    vote: int = 0


def media_of(row: int, images: Tensor | None) -> tuple[Tensor, ...]:
    """Return the media of a question about a sample: the image or video; none if the samples are completions."""
    return () if images is None else (images[row],)


@dataclass(frozen=True)
class JudgeReply:
    """The answer of a judge.

    Attributes:
        text: text of the answer.
        cut: whether the answer was cut off at `max_tokens`.
        refused: why the server refused to judge this sample, or "".
        first: alternatives for the first token with their log-probs, if they were requested.
    """

    text: str
    cut: bool = False
    refused: str = ""
    first: tuple[tuple[str, float], ...] = ()


class JudgeClient:
    """Asks one model many questions at the same time.

    The latest 4096 answers are remembered. If a call fails half-way, its repetition asks only the questions that have
    no answer yet.

    Args:
        reward: name of the reward that asks, for messages.
        server: the server, as a `JudgeServer` or as the option of a recipe.
        max_tokens: largest number of tokens of an answer, if `server` does not set it.
        system: the system message, or "".
        logprobs: whether to request the alternatives to the first token.
    """

    sleep: Callable[[float], object] | None = None
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, reward: str, server: Any, *, max_tokens: int, system: str = "", logprobs: bool = False) -> None:
        self.server = JudgeServer.read(reward, server)
        self.reward, self.system, self.logprobs = reward, system, logprobs
        self.max_tokens = self.server.max_tokens or max_tokens
        self._http = HttpClient(
            reward, self.server.url, token_env=self.server.key_env, timeout=self.server.timeout,
            most_bytes=MOST_REPLY_BYTES, connections=self.server.concurrency, busy=BUSY | {500},
        )  # fmt: skip
        self._known: OrderedDict[bytes, JudgeReply] = OrderedDict()

    @property
    def batch_size(self) -> int:
        """Number of samples in one call: enough to keep the server busy, and to notice if no answer has a score."""
        return max(4 * self.server.concurrency, 8)

    def ask(self, questions: Sequence[Question]) -> list[JudgeReply]:
        """Return the answers in the order of the questions.

        Raises:
            Unavailable: the server could not be reached or failed for longer than the patience, or stayed busy.
            ServerError: the server refused a question, or its reply is not an answer.
        """
        if not questions:
            return []
        stop = threading.Event()
        with ThreadPoolExecutor(min(self.server.concurrency, len(questions))) as pool:
            answers = [pool.submit(self._answer, question, stop) for question in questions]
            done, _ = wait(answers, return_when=FIRST_EXCEPTION)
            if any(answer.exception() for answer in done):
                # Questions that are already being asked end soon, and the others are not asked.
                stop.set()
                for answer in answers:
                    answer.cancel()
        failed = [error for answer in answers if not answer.cancelled() and (error := answer.exception())]
        if failed:
            raise min(failed, key=lambda error: (not isinstance(error, Unwanted), isinstance(error, _Stopped)))
        return [answer.result() for answer in answers]

    def body(self, question: Question) -> dict[str, Any]:
        """Return the body of the request that asks a question."""
        if self.server.api == "completions":
            return self._completion(question)
        content: Any = question.text
        if question.media:
            urls = [url for media in question.media for url in self._urls(media)]
            content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content.append({"type": "text", "text": question.text})
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": content})
        body = {"model": self.server.model, "messages": messages, **self._sampling(question)}
        if question.begun:
            messages.append({"role": "assistant", "content": question.begun})
            # These fields make vLLM and SGLang continue that message.
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": ALTERNATIVES}
        return {**body, **self._extra(question)}

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _urls(self, media: Tensor | str) -> list[str]:
        return [media] if isinstance(media, str) else data_urls(media, self.server.side, self.server.frames)

    def _completion(self, question: Question) -> dict[str, Any]:
        if question.media:
            raise ValueError(f"{self.reward}: server.api completions takes no images; use chat")
        parts = [part for part in (self.system, question.text) if part]
        prompt = "\n\n".join(parts) + (f"\n{question.begun}" if question.begun else "")
        body = {"model": self.server.model, "prompt": prompt, **self._sampling(question)}
        if self.logprobs:
            body["logprobs"] = ALTERNATIVES
        return {**body, **self._extra(question)}

    def _sampling(self, question: Question) -> dict[str, Any]:
        return {"temperature": question.temperature or 0, "max_tokens": self.max_tokens}

    def _extra(self, question: Question) -> dict[str, Any]:
        extra = dict(self.server.extra)
        # Without seeds of their own, the votes on a question would be one request, and one remembered answer.
        return extra | {"seed": extra.get("seed", 0) + question.vote} if question.vote else extra

    def _answer(self, question: Question, stop: threading.Event) -> JudgeReply:
        if stop.is_set():
            raise _Stopped
        body = json.dumps(self.body(question)).encode()
        key = hashlib.sha256(body).digest()
        # No lock is needed: single operations on a dictionary are atomic, and the order of the entries hardly matters.
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._request(body, key, stop)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return known

    def _request(self, body: bytes, key: bytes, stop: threading.Event) -> JudgeReply:
        def attempt() -> JudgeReply:
            if stop.is_set():
                raise _Stopped
            try:
                reply = self._http.request(
                    "POST", APIS[self.server.api], body, {"Content-Type": "application/json"}
                )  # fmt: skip
            except Unavailable:
                raise
            except ServerError as error:
                if _is_filtered(error.body):
                    return JudgeReply("", refused="the server's content filter")
                raise
            return self._read(reply.body)

        # Questions that failed at the same time must not be repeated at the same time.
        spread = 0.75 + key[0] / 512
        sleep = self.sleep or partial(pause, sleep=stop.wait)
        server = self.server
        return persist(
            attempt, server.patience, server.timeout, advice=IF_BUSY, sleep=sleep, clock=self.clock, spread=spread
        )

    def _read(self, body: bytes) -> JudgeReply:
        try:
            choice = json.loads(body)["choices"][0]
            if self.server.api == "chat":
                message = choice["message"]
                text, refusal = message.get("content"), message.get("refusal")
            else:
                text, refusal = choice["text"], None
            if not isinstance(text, (str, type(None))):
                raise TypeError(f"the answer is a {type(text).__name__}")
            reason = choice.get("finish_reason")
            first = _first_token(choice.get("logprobs"), self.server.api) if self.logprobs else ()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            shown = body[:200].decode("utf-8", "replace")
            raise ServerError(
                f"{self._http.url} sent a reply that is not an answer ({type(error).__name__}: {error}): {shown!r}"
            ) from None
        if refusal or reason == "content_filter":
            return JudgeReply(text or "", refused=str(refusal or "the server's content filter"))
        return JudgeReply(text or "", cut=reason == "length", first=first)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": OrderedDict()}


class _Stopped(Exception):
    """Another question of the call has failed."""


def _is_filtered(body: str) -> bool:
    """Whether an HTTP error is about this sample alone."""
    try:
        return json.loads(body)["error"]["code"] in FILTERED
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def _first_token(logprobs: Any, api: str) -> tuple[tuple[str, float], ...]:
    """Return the alternatives for the first token, the most probable first; none if the server returns none.

    Raises:
        LookupError, TypeError, ValueError: the log-probs have an unknown form.
    """
    if logprobs is None:
        return ()
    if api == "chat":
        tokens = logprobs["content"] or [{"top_logprobs": []}]
        found = [(entry["token"], entry["logprob"]) for entry in tokens[0]["top_logprobs"]]
    else:
        tokens = logprobs["top_logprobs"] or [{}]
        found = list((tokens[0] or {}).items())
    return tuple(sorted(((str(token), float(value)) for token, value in found), key=lambda pair: -pair[1]))
