"""A remembered success takes the place of a failure where a group has no success."""

from dataclasses import replace

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.credit.pooling import Batch
from flowgrpo.training.data import PromptRow
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.extensions import Replay
from flowgrpo.training.text.text_policy import Completions

ROWS = [PromptRow(7, "one"), PromptRow(9, "two")]


def completions(*texts: str) -> Completions:
    ids = [[ord(c) for c in text] for text in texts]
    sampled = Sampled(ids, [[-1.0] * len(one) for one in ids], [True] * len(texts))
    return Completions([[1], [2]], sampled, list(texts), [0, 0, 1, 1])


def scores(*values: float) -> RewardBatch:
    return RewardBatch(
        torch.tensor(values)[:, None], ("right",), torch.ones(1), {"right": {"size": [1.0] * 4}},
        {"right": ["said"] * 4}, {},
    )  # fmt: skip


def replay(keep: int = 2) -> Replay:
    found = Replay(keep=keep)
    found.begin(None, Processes(), None)  # type: ignore[arg-type]
    return found


def mended(one: Replay, completions: Completions, scores: RewardBatch) -> tuple[Completions, RewardBatch]:
    batch = one.samples_scored(Batch([0, 1], ROWS, completions, scores))
    return batch.experience, batch.scores


def test_a_success_comes_back() -> None:
    memory = replay()
    first, kept = mended(memory, completions("ab", "c", "de", "f"), scores(1, 0, 0, 0))
    assert first.samples == ["ab", "c", "de", "f"]
    assert memory.record() == {}
    assert kept.values[:, 0].tolist() == [1, 0, 0, 0]
    second, better = mended(memory, completions("x", "yy", "z", "u"), scores(0.2, 0.1, 0, 1))
    # The worst of the group of prompt 7; prompt 9 has a success of its own.
    assert second.samples == ["x", "ab", "z", "u"]
    assert second.sampled.ids[1] == [ord("a"), ord("b")]
    assert memory.record() == {"replayed": 1.0}
    assert better.values[:, 0].tolist() == pytest.approx([0.2, 1, 0, 1])
    assert better.notes["right"] == ["said", "", "said", "said"]
    assert better.sub_scores["right"]["size"][1] != better.sub_scores["right"]["size"][1]


def test_a_success_brings_its_answer() -> None:
    memory = replay()
    first = replace(scores(1, 0, 0, 0), answers={"right": ["7", "8", None, "9"]})
    mended(memory, completions("ab", "c", "de", "f"), first)
    given: dict[str, list[str | None]] = {"right": ["1", "2", "3", "4"], "other": ["x"] * 4}
    found = mended(memory, completions("x", "yy", "z", "u"), replace(scores(0.2, 0.1, 0, 1), answers=given))
    # The other reward was not called when the success was new.
    assert found[1].answers == {"right": ["1", "7", "3", "4"], "other": ["x", None, "x", "x"]}
    assert given["right"] == ["1", "2", "3", "4"]


def test_what_is_remembered_survives_a_checkpoint(tmp_path) -> None:  # type: ignore[no-untyped-def]
    memory, again = replay(), replay()
    mended(memory, completions("ab", "c", "de", "f"), scores(1, 0, 0, 0))
    torch.save(memory.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.successes.of(7) == memory.successes.of(7)


def test_a_budget_and_a_replay_are_refused() -> None:
    with pytest.raises(ValueError, match="extension replay changes"):
        load_recipe("text", ["extensions=[replay]", "rollout.budget={}"])


def test_a_success_that_comes_back_has_no_teacher_of_the_failure() -> None:
    one = replay()
    mended(one, completions("a", "b", "c", "d"), scores(1, 0, 0, 0))
    taught = replace(completions("e", "f", "g", "h"), teachers=[[1], [2], [3], None])
    back, _ = mended(one, taught, scores(0, 0, 0, 0))
    assert "a" in back.samples
    assert back.teachers is not None
    for text, before, teacher in zip(back.samples, taught.samples, back.teachers):
        known = dict(zip(taught.samples, taught.teachers or []))
        assert teacher == (known[before] if text == before else None)
