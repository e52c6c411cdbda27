"""Questions to a model behind any OpenAI-compatible server (vLLM, SGLang, llama.cpp, hosted ones).

Temperature 0 and `max_tokens` are always sent: a server's own defaults may sample, or write for ever.
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
from typing import Any

from torch import Tensor

from ...parts.plugins import nearest
from ..options import check_seconds
from ..serving.http_client import BUSY, HttpClient, ServerError, Unavailable, check_url, persist
from .judge_images import data_urls

APIS = {"chat": "/chat/completions", "completions": "/completions"}
OURS = ("model", "messages", "prompt", "temperature", "max_tokens", "stream", "n", "logprobs", "top_logprobs")
ALTERNATIVES = 20
MOST_REPLY_BYTES = 4 << 20
REMEMBERED = 4096
# Codes by which hosted servers refuse a single picture or text, and not the request as such.
FILTERED = ("content_filter", "content_policy_violation", "moderation_blocked")


@dataclass(frozen=True)
class JudgeServer:
    """The `server` option of every judge.

    Attributes:
        url: what `/chat/completions` is appended to, such as "http://127.0.0.1:8000/v1".
        model: name under which the server knows the model.
        key_env: environment variable with the API key; None sends none.
        api: "chat", or "completions" for a language model without a chat template.
        concurrency: most questions at a time.
        timeout: seconds for one answer.
        patience: seconds for which a question that could not be asked is tried again.
        max_tokens: most tokens of an answer; None leaves it to the judge.
        side: images are shrunk until their longest side has so many pixels; None sends them as they are.
        frames: most frames of a video that are sent, evenly spaced.
        extra: further fields of the request, such as {seed: 0}.
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
        """The option as it stands in a recipe.

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
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"{reward}: server.model is {self.model!r}; give the name that the server knows it by")
        if self.api not in APIS:
            raise ValueError(f"{reward}: server.api is {self.api!r}; give one of {', '.join(APIS)}")
        for name in ("concurrency", "frames", "max_tokens", "side"):
            value = getattr(self, name)
            optional = name in ("max_tokens", "side") and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{reward}: server.{name} is {value!r}; give a whole number of 1 or more")
        for seconds in (self.timeout, self.patience):
            check_seconds(f"{reward}: server.timeout or server.patience", seconds)
        if not isinstance(self.extra, Mapping):
            raise ValueError(f"{reward}: server.extra is {self.extra!r}; give fields of the request, such as seed: 0")
        taken = [name for name in self.extra if name in OURS]
        if taken:
            raise ValueError(f"{reward}: server.extra has {taken[0]!r}, which every request has already; leave it out")


@dataclass(frozen=True)
class Question:
    """What a judge is asked about one sample or pair.

    Attributes:
        text: the question.
        media: images [3, H, W] or videos [F, 3, H, W] in [0, 1], shown before the text.
        begun: the start of the answer, which the model continues.
    """

    text: str
    media: tuple[Tensor, ...] = ()
    begun: str = ""


@dataclass(frozen=True)
class JudgeReply:
    """What came back.

    Attributes:
        text: the answer.
        cut: it ended at `max_tokens`.
        refused: why the server would not look at this sample, or "".
        first: alternatives for the first token with their log-probabilities, where they were asked for.
    """

    text: str
    cut: bool = False
    refused: str = ""
    first: tuple[tuple[str, float], ...] = ()


class JudgeClient:
    """Asks one model, many questions at a time.

    An answer is remembered (the latest 4096 of them): when a call fails half-way, its repetition asks only for what is
    missing.

    Args:
        reward: who asks, for messages.
        server: where.
        max_tokens: of an answer, if `server` does not say.
        system: a system message, or "".
        logprobs: ask for the alternatives to the first token.
    """

    sleep: Callable[[float], object] | None = None
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, reward: str, server: Any, *, max_tokens: int, system: str = "", logprobs: bool = False) -> None:
        self.server = JudgeServer.read(reward, server)
        self.reward, self.system, self.logprobs = reward, system, logprobs
        self.max_tokens = self.server.max_tokens or max_tokens
        self._http = HttpClient(
            reward, self.server.url, token_env=self.server.key_env, timeout=self.server.timeout,
            most_bytes=MOST_REPLY_BYTES, connections=self.server.concurrency, busy=BUSY | {500}, clock=self.clock,
        )  # fmt: skip
        self._known: OrderedDict[bytes, JudgeReply] = OrderedDict()

    @property
    def batch_size(self) -> int:
        """Samples in one call of the reward: enough to keep the server busy, and to see that no answer is usable."""
        return max(4 * self.server.concurrency, 8)

    def ask(self, questions: Sequence[Question]) -> list[JudgeReply]:
        """Answers, in the order of the questions.

        Raises:
            Unavailable: the server could not be reached, was busy or failed for longer than the patience.
            ServerError: it refused a question, or answered something other than an answer.
        """
        if not questions:
            return []
        stop = threading.Event()
        with ThreadPoolExecutor(min(self.server.concurrency, len(questions))) as pool:
            answers = [pool.submit(self._answer, question, stop) for question in questions]
            done, _ = wait(answers, return_when=FIRST_EXCEPTION)
            if any(answer.exception() for answer in done):
                # Those under way end soon, and the others are not begun.
                stop.set()
                for answer in answers:
                    answer.cancel()
        failed = [error for answer in answers if not answer.cancelled() and (error := answer.exception())]
        if failed:
            raise next((error for error in failed if not isinstance(error, _Stopped)), failed[0])
        return [answer.result() for answer in answers]

    def body(self, question: Question) -> dict[str, Any]:
        """The request that asks a question."""
        if self.server.api == "completions":
            return self._completion(question)
        content: Any = question.text
        if question.media:
            urls = [url for media in question.media for url in data_urls(media, self.server.side, self.server.frames)]
            content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content.append({"type": "text", "text": question.text})
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": content})
        body = {"model": self.server.model, "messages": messages, **self._sampling()}
        if question.begun:
            messages.append({"role": "assistant", "content": question.begun})
            # vLLM's and SGLang's words for going on with that message.
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.logprobs:
            body |= {"logprobs": True, "top_logprobs": ALTERNATIVES}
        return {**body, **self.server.extra}

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _completion(self, question: Question) -> dict[str, Any]:
        if question.media:
            raise ValueError(f"{self.reward}: server.api completions takes no images; use chat")
        parts = [part for part in (self.system, question.text) if part]
        prompt = "\n\n".join(parts) + (f"\n{question.begun}" if question.begun else "")
        body = {"model": self.server.model, "prompt": prompt, **self._sampling()}
        if self.logprobs:
            body["logprobs"] = ALTERNATIVES
        return {**body, **self.server.extra}

    def _sampling(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": self.max_tokens}

    def _answer(self, question: Question, stop: threading.Event) -> JudgeReply:
        if stop.is_set():
            raise _Stopped
        body = json.dumps(self.body(question)).encode()
        key = hashlib.sha256(body).digest()
        # A dictionary's own operations are atomic; the order matters little.
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

        # Questions that failed together must not come back together.
        spread = 0.75 + key[0] / 512
        pause = self.sleep or stop.wait
        return persist(attempt, self.server.patience, sleep=pause, clock=self.clock, spread=spread)

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
                f"{self._http.url} answered something other than an answer ({type(error).__name__}: {error}): {shown!r}"
            ) from None
        if refusal or reason == "content_filter":
            return JudgeReply(text or "", refused=str(refusal or "the server's content filter"))
        return JudgeReply(text or "", cut=reason == "length", first=first)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": OrderedDict()}


class _Stopped(Exception):
    """Another question of the call has failed."""


def _is_filtered(body: str) -> bool:
    """Whether an error of HTTP is about this one sample."""
    try:
        return json.loads(body)["error"]["code"] in FILTERED
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def _first_token(logprobs: Any, api: str) -> tuple[tuple[str, float], ...]:
    """Alternatives for the first token, most probable first; none if the server gives none.

    Raises:
        LookupError, TypeError, ValueError: they have another form.
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
