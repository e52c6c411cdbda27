"""Prompts that are conversations: which samples are of one prompt, and what the pages show and write of them."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.gallery.build import read_runs
from flowgrpo.gallery.export_rows import rows_of
from tests.gallery.folders import write_run, written
from tests.gallery.voting import booth

ANIMALS = ("cats", "dogs")


def talk(about: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"You know {about}."},
        {"role": "user", "content": f"Tell me about {about}"},
        {"role": "assistant", "content": f"{about} are great"},
        {"role": "user", "content": "continue"},
    ]


def talking(folder: Path, animals: tuple[str, ...] = ANIMALS) -> Path:
    """A run whose conversations differ, and end with one message."""
    rows = [
        written(at, number, f"{folder.name} on {animal} at {at}", prompt="continue", messages=talk(animal))
        for at in (0, 10) for number, animal in enumerate(animals)
    ]  # fmt: skip
    return write_run(folder, rows, name=folder.name)


def test_only_answers_to_one_conversation_are_compared(tmp_path: Path) -> None:
    runs = [talking(tmp_path / "a"), talking(tmp_path / "b", ANIMALS[::-1])]
    one = booth(runs, tmp_path / "votes.jsonl", sets="last")
    assert len(one.ballots) == 2
    for ballot in one.ballots:
        assert ballot.left.shot.messages == ballot.right.shot.messages
    rows = rows_of(read_runs(runs))
    assert len(rows) == 2
    for row in rows:
        [about] = {shot.messages[1]["content"] for shot in row.shots if shot is not None}
        assert all(shot is not None and about.split()[-1] in str(shot.completion) for shot in row.shots)
