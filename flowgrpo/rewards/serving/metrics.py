"""The counts of a server, in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

PREFIX = "flowgrpo_reward"


class Metrics:
    """Counts since the start of the server. Any thread may call the methods.

    Args:
        reward: name of the served reward.
    """

    def __init__(self, reward: str) -> None:
        self.reward = reward
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    def answered(self, status: int) -> None:
        """Record that a request to score was answered."""
        with self._lock:
            self._requests[str(status)] += 1

    def received(self, size: int) -> None:
        """Record that a request to score of `size` bytes was received."""
        with self._lock:
            self._sums["bytes"] += size

    def scored(self, samples: int, seconds: float, *, failed: bool) -> None:
        """Record that the reward was called for `samples` samples, and took `seconds`."""
        with self._lock:
            self._sums["calls"] += 1
            self._sums["seconds"] += seconds  # type: ignore[assignment]
            self._sums["failures"] += failed
            self._sums["samples"] += 0 if failed else samples

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return all metrics as text.

        Args:
            gauges: additional metrics, name -> (description, current value).
        """
        with self._lock:
            requests, sums = dict(sorted(self._requests.items())), Counter(self._sums)
        lines = _metric("info", "gauge", "The reward that is served.", {f'reward="{_escape(self.reward)}"': 1})
        by_status = {f'status="{status}"': count for status, count in requests.items()}
        lines += _metric("requests_total", "counter", "Requests to score, by status of the answer.", by_status)
        lines += _metric("samples_total", "counter", "Samples scored.", {"": sums["samples"]})
        lines += _metric("failures_total", "counter", "Calls of the reward that failed.", {"": sums["failures"]})
        lines += _metric("received_bytes_total", "counter", "Bytes of requests to score.", {"": sums["bytes"]})
        lines += _metric("scoring_seconds", "summary", "Time in the reward.", {})
        lines += [f"{PREFIX}_scoring_seconds_sum {sums['seconds']}", f"{PREFIX}_scoring_seconds_count {sums['calls']}"]
        for name, (about, value) in gauges.items():
            lines += _metric(name, "gauge", about, {"": value})
        return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, about: str, values: Mapping[str, float]) -> list[str]:
    lines = [f"# HELP {PREFIX}_{name} {about}", f"# TYPE {PREFIX}_{name} {kind}"]
    return lines + [f"{PREFIX}_{name}{f'{{{labels}}}' if labels else ''} {value}" for labels, value in values.items()]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
