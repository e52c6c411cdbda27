"""The prompt files of both worlds: those of earlier runs stay as they are."""

import hashlib
from importlib import resources

import pytest

SUMS = {
    ("arithmetic", "train"): "7e763bb2a9babd1f1d816d00a4779552f71e66a2865c919135578a67b570d20b",
    ("arithmetic", "heldout"): "d222c7767d789c351f8d6ff6e5217b72da8a184d8bf108b4733c90c6172ed153",
    ("scenes", "train"): "bc223ff2c19be8d22d298bd3ee846872aa7a51b181f4e263c2757caa0f321583",
    ("scenes", "heldout"): "0d65b158505c3f50ad1114da4c1db0cebf62c8da1aa8bb526828e41cf715d1a5",
}


@pytest.mark.parametrize(("world", "name"), SUMS)
def test_a_file_of_earlier_runs_stays_as_it_is(world: str, name: str) -> None:
    file = resources.files(f"flowgrpo.worlds.{world}") / "data" / f"{name}.jsonl"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SUMS[world, name]
