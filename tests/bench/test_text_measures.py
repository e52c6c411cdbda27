"""The measurement of the shared prefix, at a size for a test."""

import sys

import pytest

from flowgrpo.bench import text_measures as bench_text


def test_the_two_paths_agree_and_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {True: 10.0, False: 30.0}
    monkeypatch.setattr(bench_text, "_peak", lambda shared, sizes: peaks[shared])
    lines: list[str] = []
    sizes = bench_text.Sizes(group=3, prompt=24, completion=5, width=16, layers=2, heads=2)
    found = bench_text.shared_prefix(lines.append, repeats=3, sizes=sizes)
    assert lines[0] == "2 prompts of 24 tokens, 3 completions of 5 tokens each, forward and backward"
    assert found["loss"]["plain"] == pytest.approx(found["loss"]["shared"], rel=1e-5)
    assert abs(found["loss"]["plain"]) > 1e-3
    assert 0 <= found["gradient_difference"] < 1e-5
    assert [len(found["seconds"][name]) for name in ("plain", "shared")] == [3, 3]
    assert found["peak_megabytes"] == {"plain": 30.0, "shared": 10.0}
    assert lines[-1] == "peak memory 30 MB plain, 10 MB shared: 0.33×"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_is_read() -> None:
    assert 10_000 < bench_text._status("VmRSS") <= bench_text._status("VmHWM")
    with pytest.raises(ValueError, match="has no VmNothing"):
        bench_text._status("VmNothing")
