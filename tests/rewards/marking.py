"""A program in the place of the person who marks samples."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

Judge = Callable[[Sequence[bytes]], list[int] | None]


def by_content(samples: Sequence[bytes]) -> list[int]:
    """Marks that follow from the bytes of the samples."""
    return [hashlib.sha256(sample).digest()[0] % 2 for sample in samples]


class Marker:
    """Marks everything that a page asks about.

    Args:
        url: address of the page.
        judge: from the bytes of the samples of a prompt to their marks, or None to skip the prompt.

    Attributes:
        seen: what the page sent for each prompt that was marked.
    """

    def __init__(self, url: str, judge: Judge = by_content) -> None:
        self.url, self.judge = url, judge
        self.seen: list[dict[str, Any]] = []
        threading.Thread(target=self._work, daemon=True).start()

    def get(self, address: str) -> Any:
        """The object at an address of the page."""
        return json.loads(self.read(address))

    def read(self, address: str) -> bytes:
        """The bytes at an address of the page."""
        with urllib.request.urlopen(self.url + address, timeout=30) as answer:
            content: bytes = answer.read()
        return content

    def post(self, body: object) -> Any:
        """What the page answers to marks."""
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + "marks", data, kind), timeout=30) as answer:
            return json.loads(answer.read())

    def _work(self) -> None:
        while True:
            try:
                state = self.get("state")
                if state["next"] is None:
                    time.sleep(0.01)
                    continue
                asked = self.get(f"prompts/{state['call']}/{state['next']}")
                samples = [
                    sample["text"].encode() if "text" in sample else self.read(sample["address"])
                    for sample in asked["samples"]
                ]
                self.seen.append(asked)
                self.post({"call": state["call"], "number": state["next"], "marks": self.judge(samples)})
            except (ConnectionError, urllib.error.URLError):
                return
