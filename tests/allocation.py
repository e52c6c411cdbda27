"""Measures the memory that PyTorch's allocator on the CPU really allocates."""

import json
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def most_bytes(work: Callable[[], object], trace: Path) -> int:
    """Peak bytes that `work` allocated, above what was allocated before; `trace` is a file to write."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    found.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most
