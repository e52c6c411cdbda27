"""Which pairs people are asked about, in which order, and on which sides."""

from collections import Counter
from pathlib import Path

import pytest

from flowgrpo.gallery.build import read_runs
from flowgrpo.gallery.vote_pairs import ballots_of, sources_of
from flowgrpo.gallery.vote_report import report_on
from flowgrpo.votes.file import read_votes
from tests.gallery.folders import picture, record, write_run
from tests.gallery.voting import asked, booth, write_mine, write_other


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_mine(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_other(tmp_path)


def test_order_is_seeded_and_sides_are_balanced(run: Path, tmp_path: Path) -> None:
    votes = tmp_path / "votes.jsonl"
    orders = [asked(booth([run], votes, session)) for session in ("ann", "ann", "bob")]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(prompt for prompt, *_ in order) == sorted(map(str, range(12)))
        assert {(left, right) for _, left, right in order} == {(0, 10), (10, 0)}
        for end in range(0, 13, 4):
            assert sum(left == 10 for _, left, _ in order[:end]) == end // 2
    first = Counter(asked(booth([run], votes, f"voter-{number}"))[0] for number in range(200))
    assert len(first) == 24  # any prompt, either side
    assert 70 < sum(count for (_, left, _), count in first.items() if left == 10) < 130


def test_all_pairs_of_the_chosen_sets_take_turns(run: Path, other: Path, tmp_path: Path) -> None:
    found = asked(booth([run], tmp_path / "votes.jsonl", sets="base,5, last"))
    kinds = [frozenset(sides) for _, *sides in found]
    assert Counter(kinds) == {frozenset(kind): 12 for kind in ((0, 5), (0, 10), (5, 10))}
    assert all(len(set(kinds[at : at + 3])) == 3 for at in range(0, 36, 3))

    runs = read_runs([run, other])
    ballots, _ = ballots_of(sources_of(runs, "base,last"), "ann")
    names = Counter(frozenset((b.left.source.run.folder.name, b.right.source.run.folder.name)) for b in ballots)
    # Base and last of the first; either against the last of the other, on the 9 prompts that both have.
    assert names == {frozenset({"run"}): 12, frozenset({"run", "other"}): 18}
    assert all(b.left.shot.prompt == b.right.shot.prompt for b in ballots)


def test_pairs_without_a_difference_or_an_image_are_not_asked(run: Path, tmp_path: Path) -> None:
    picture(run / "samples/iter-000000/eval-3-0-0.png", (1, 2, 3))
    picture(run / "samples/iter-000010/eval-3-0-0.png", (1, 2, 3))
    (run / "samples/iter-000010/eval-4-0-0.png").unlink()
    one = booth([run], tmp_path / "votes.jsonl")
    assert one.progress() == {"total": 10, "voted": 0, "next": 0, "same": 1}
    assert not {"3", "4"} & {prompt for prompt, *_ in asked(one)}


@pytest.mark.parametrize(
    ("sets", "words"),
    [("base,0", "only one set"), ("7", "use base, last, or an evaluation: 0, 5, 10"), ("best", "no set 'best'")],
)
def test_sets_that_are_none_are_refused(run: Path, sets: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sources_of(read_runs([run]), sets)


def test_one_set_alone_is_compared_with_itself_by_seed(tmp_path: Path) -> None:
    records = [
        record(at, prompt, seed, 0.5, sample=3 * prompt + seed, prompt=f"{prompt} red circles")
        for at in (0, 10)
        for prompt in range(4)
        for seed in range(3)
    ]
    run = write_run(tmp_path / "run", records)
    path = run / "votes.jsonl"
    one = booth([run], path, sets="10")
    assert {(left, right) for _, left, right in asked(one)} == {(10, 10)}
    pairs = Counter((ballot.left.shot.prompt_id, ballot.seed) for ballot in one.ballots)
    assert pairs == {(str(prompt), seeds): 1 for prompt in range(4) for seeds in ("0, 1", "0, 2", "1, 2")}
    firsts = Counter(ballot.left.shot.seed < ballot.right.shot.seed for ballot in one.ballots)
    assert firsts == {True: 6, False: 6}
    for number in range(8):
        one.choose(number, "left")
    votes, unreadable = read_votes(path)
    assert ([vote.key for vote in votes], unreadable) == ([one.ballots[number].key(run) for number in range(8)], 0)
    assert booth([run], path, sets="10").progress()["voted"] == 8
    report = report_on([*read_runs([run])], path)
    assert report.lines() == [
        "left against right: 100 % of 8 (95 %: 68 to 100 %); ties 0 of 8 (0 %)",
        "the left side was chosen more often than chance explains",
        "8 votes are between samples of one evaluation, and tell no evaluations apart",
    ]


def test_one_set_needs_two_samples_of_a_prompt(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no prompt has two samples in this set \(`evaluate.seeds` of a run"):
        booth([run], tmp_path / "votes.jsonl", sets="base")
