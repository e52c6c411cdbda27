"""People's choices: the file, the report, and the preferences read from it."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowgrpo.gallery.build import read_runs
from flowgrpo.gallery.vote_dataset import write_preferences
from flowgrpo.gallery.vote_report import make_report, report_on
from flowgrpo.votes.file import append_vote, latest, read_votes
from flowgrpo.votes.interval import wilson
from flowgrpo.votes.preferences import read_preferences
from tests.gallery.folders import HOSTILE, picture, record, write_films, write_run, written
from tests.gallery.voting import SKILLS, asked, booth, make_vote, write_mine, write_other


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_mine(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_other(tmp_path)


# The file


def test_choices_are_kept_and_the_session_goes_on_where_it_was_left(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "votes.jsonl"
    one = booth([run], path, None)
    for number, choice in ((0, "left"), (1, "skip"), (0, "tie"), (3, "right")):  # once back, to choose again
        one.choose(number, choice)
    assert one.progress() == {"total": 12, "voted": 3, "next": 2, "same": 0}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["choice"] for row in rows] == ["left", "skip", "tie", "right"]
    ballot = one.ballots[3]
    for side in ("left", "right"):
        row, its = rows[3][side], getattr(ballot, side)
        assert (row["folder"], row["run"], row["iteration"]) == ("../run", f"mine {HOSTILE}", its.source.iteration)
        assert (path.parent / row["folder"] / row["image"]).read_bytes() == its.file.read_bytes()
    assert (rows[3]["prompt"], rows[3]["seed"]) == (ballot.left.shot.prompt, "0")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", rows[3]["time"])

    resumed = booth([run], path, None)
    assert (resumed.session, asked(resumed)) == (one.session, asked(one))
    assert resumed.progress() == {"total": 12, "voted": 3, "next": 2, "same": 0}
    assert [resumed.show(number)["choice"] for number in range(4)] == ["tie", "skip", None, "right"]
    assert booth([run], path, None, again=True).progress()["next"] == 0
    assert booth([run], path, "somebody-else").progress()["voted"] == 0
    votes, _ = read_votes(path)
    assert [vote.choice for vote in latest(votes)] == ["tie", "skip", "right"]


WRITER = """
import sys
from pathlib import Path
from flowgrpo.votes.file import append_vote
from tests.gallery.voting import make_vote
for number in range(60):
    append_vote(Path(sys.argv[1]), make_vote(session=sys.argv[2], prompt=f"{number} " + sys.argv[2] * 20000))
"""


@pytest.mark.slow
def test_two_processes_append_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    root = Path(__file__).resolve().parents[2]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], cwd=root) for name in "ab"]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    votes, unreadable = read_votes(path)
    assert unreadable == 0
    for name in "ab":
        prompts = [vote.prompt for vote in votes if vote.session == name]
        assert prompts == [f"{number} " + name * 20000 for number in range(60)]


def test_a_line_is_whole_on_the_disk_before_the_next_writer_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    path, lock, seen = tmp_path / "votes.jsonl", fcntl.flock, []

    def watched(descriptor: int, how: int) -> None:
        lock(descriptor, how)
        seen.append((how, path.stat().st_size))

    monkeypatch.setattr(fcntl, "flock", watched)
    append_vote(path, make_vote())
    append_vote(path, make_vote())
    size = path.stat().st_size // 2
    assert seen == [(fcntl.LOCK_EX, 0), (fcntl.LOCK_UN, size), (fcntl.LOCK_EX, size), (fcntl.LOCK_UN, 2 * size)]


def test_a_line_cut_short_costs_only_itself_and_nothing_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    append_vote(path, make_vote())
    append_vote(path, make_vote(seed="1"))
    path.write_bytes(path.read_bytes()[:-40])
    before = path.read_bytes()
    append_vote(path, make_vote(seed="2"))
    assert path.read_bytes().startswith(before + b"\n")
    votes, unreadable = read_votes(path)
    assert ([vote.seed for vote in votes], unreadable) == (["0", "2"], 1)
    assert votes[1] == make_vote(seed="2")


def test_lines_that_are_no_votes_are_left_out_and_other_files_untouched(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    append_vote(path, make_vote())
    good = json.loads(path.read_text())
    image = {"image": "samples/a.png", "completion": None}
    sides = [{"iteration": True}, {"folder": 3}, {"completion": 1}, {"image": "samples/a.png"}] + [
        image | {"image": name}
        for name in ("/etc/a.png", "samples/../../a.png", "a.png", "samples/a.txt", "samples/a\\b.png")
    ]
    bad = [good | {"left": {k: v for k, v in (good["left"] | side).items() if v is not None}} for side in sides]
    bad += [good | {"choice": "both"}, good | {"columns": {"a": 1}}, good | {"right": good["left"]}, {"phase": "eval"}]
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in bad)
    votes, unreadable = read_votes(path)
    assert (votes, unreadable) == ([make_vote()], len(bad))
    index = run / "samples" / "index.jsonl"
    with pytest.raises(ValueError, match=r"has no votes, but 36 other lines; name another file with --votes"):
        booth([run], index)


# What the choices say


def test_wilson_interval_has_its_closed_forms() -> None:
    z = 1.959963984540054
    assert wilson(0, 0) == (0.0, 1.0)
    for count in (1, 7, 40, 1000):
        assert wilson(0, count) == pytest.approx((0, z * z / (count + z * z)), abs=1e-12)
        assert wilson(count, count) == pytest.approx((count / (count + z * z), 1), abs=1e-12)
        half = z / (2 * math.sqrt(2 * count + z * z))
        assert wilson(count, 2 * count) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-12)
        for bound in wilson(count // 3, count):  # both ends solve the score equation
            assert (count // 3 / count - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / count, abs=1e-12)
    # Newcombe (1998), 81 of 263, and 15 of 148: to four digits.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """The run of `make_vote`."""
    return write_run(tmp_path / "texts", [written(at, 1, f"text {at}") for at in (0, 10)])


def test_report_counts_wins_of_the_later_set_whatever_its_side(texts: Path) -> None:
    run, runs = texts, read_runs([texts])
    votes = [make_vote("left", seed=str(n), at=(10, 0)) for n in range(6)]  # tuned, on the left
    votes += [make_vote("right", seed=str(n), at=(0, 10), columns={"skill": "x"}) for n in range(6, 9)]  # tuned
    votes += [make_vote("right", seed=str(n), at=(10, 0)) for n in range(9, 12)]  # base
    votes += [make_vote("tie", seed=str(n)) for n in range(12, 16)] + [make_vote("skip", seed="16")]
    votes += [make_vote("tie", seed="0"), make_vote("left", seed="0", at=(10, 0))]  # taken back and forth
    votes += [make_vote("left", seed="0", left=replace(make_vote().left, folder="../elsewhere"))]
    report = make_report(votes, runs, run)
    (one,) = report.comparisons
    assert (one.first, one.second) == ("iteration 0", "iteration 10")
    found = one.tally.as_json()
    assert (found["wins"], found["losses"], found["ties"], found["skipped"]) == (9, 3, 4, 1)
    assert (found["rate"], tuple(found["interval"])) == (0.75, wilson(9, 12))
    assert list(one.parts) == [("skill", "count")]  # 13 votes; the other value has 3
    assert (report.position.wins, report.position.losses, report.elsewhere) == (6, 6, 1)
    text = "\n".join(report.lines())
    assert "iteration 10 against iteration 0: 75 % of 12 (95 %: 47 to 91 %); ties 4 of 16 (25 %); skipped 1" in text


def test_report_names_a_preference_for_a_side(texts: Path) -> None:
    run = texts
    votes = [make_vote("left", seed=str(n), at=((0, 10), (10, 0))[n % 2]) for n in range(10)]
    report = make_report(votes, read_runs([run]), run)
    assert report.comparisons[0].tally.as_json()["rate"] == 0.5
    assert "the left side was chosen more often than chance explains" in report.notes()
    assert not make_report(votes[:3], read_runs([run]), run).notes()


def test_a_voter_who_sees_the_difference_shows_in_the_rate(run: Path, tmp_path: Path) -> None:
    path, dice = tmp_path / "votes.jsonl", random.Random(3)
    for session in ("ann", "bob", "eve"):
        one = booth([run], path, session)
        for number, ballot in enumerate(one.ballots):
            better = "left" if ballot.left.source.iteration == 10 else "right"
            one.choose(number, better if dice.random() < 0.9 else "tie")
    report = report_on(read_runs([run]), path)
    (one_set,) = report.comparisons
    assert (one_set.tally.losses, one_set.tally.votes, one_set.tally.wins > 25) == (0, 36, True)
    assert sorted(one_set.parts) == [("skill", "colour"), ("skill", "count")]
    assert report.notes() == ["3 sessions; the intervals take all votes as independent"]


@pytest.mark.parametrize("kind", ["pictures", "texts"])
def test_votes_on_samples_that_a_new_run_has_replaced_do_not_count(kind: str, tmp_path: Path) -> None:
    def make(mark: int) -> Path:
        if kind == "texts":
            return write_run(tmp_path / "run", [written(at, p, f"{mark} {at} {p}") for at in (0, 10) for p in (1, 2)])
        rows = [record(at, p, 0, 0.5) for at in (0, 10) for p in (1, 2)]
        made = write_run(tmp_path / "run", rows)
        for number, row in enumerate(rows):
            picture(made / "samples" / row["image"], (number, mark, 1))
        return made

    path, folder = tmp_path / "votes.jsonl", make(1)
    one = booth([folder], path)
    for number in range(2):
        one.choose(number, "left")
    assert booth([folder], path).progress()["voted"] == 2
    shutil.rmtree(folder)
    make(2)
    assert booth([folder], path).progress() == {"total": 2, "voted": 0, "next": 0, "same": 0}
    report = report_on(read_runs([folder]), path)
    assert (report.comparisons, report.changed, report.elsewhere) == ((), 2, 0)
    assert report.notes() == ["2 votes are on samples that these runs no longer have, and do not count"]
    booth([folder], path).choose(0, "right")
    assert report_on(read_runs([folder]), path).comparisons[0].tally.votes == 1


def test_columns_keep_their_types(tmp_path: Path) -> None:
    columns = {"answer": "42", "price": "1.50", "word": "true", "count": 3, "box": [1, "2"], "none": None}
    rows = [written(at, 1, f"text {at}", columns=columns) for at in (0, 10)]
    path, run = tmp_path / "votes.jsonl", write_run(tmp_path / "run", rows)
    booth([run], path).choose(0, "left")
    [vote], unreadable = read_votes(path)
    assert (vote.values, unreadable) == (columns, 0)
    assert vote.columns == {**columns, "count": "3", "box": '[1, "2"]', "none": "null"}
    # A line of an earlier version has all values as text.
    row = json.loads(path.read_text())
    del row["typed"]
    path.write_text(json.dumps(row | {"columns": vote.columns}) + "\n")
    [old], unreadable = read_votes(path)
    assert (old.values, old.columns, unreadable) == (None, vote.columns, 0)


# As a data set


def test_preferences_are_what_was_chosen(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    one = booth([run], path)
    for number, choice in enumerate(("left", "right", "tie", "skip", "left")):
        one.choose(number, choice)
    one.choose(4, "tie")
    found = read_preferences(path)
    expected = [(one.ballots[0].left, one.ballots[0].right), (one.ballots[1].right, one.ballots[1].left)]
    assert [prompt for prompt, *_ in found] == [chosen.shot.prompt for chosen, _ in expected]
    for (_, *paths, _), sides in zip(found, expected, strict=True):
        assert [Path(p).resolve() for p in paths] == [its.file.resolve() for its in sides if its.file]

    # An option of a recipe is a text, and a folder is a run.
    assert read_preferences(str(path)) == read_preferences(str(tmp_path)) == read_preferences(tmp_path) == found

    out, notes = write_preferences([run], path, tmp_path / "pairs")
    rows = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    assert notes == []
    for row, (chosen, rejected) in zip(rows, expected, strict=True):
        assert (row["prompt"], row["seed"], row["session"]) == (chosen.shot.prompt, "0", "ann")
        for word, its in (("chosen", chosen), ("rejected", rejected)):
            assert its.file is not None
            assert (out / row[f"{word}_file_name"]).read_bytes() == its.file.read_bytes()
            assert row[f"{word}_iteration"] == its.source.iteration
    assert {row["column_skill"] for row in rows} <= set(SKILLS)
    with pytest.raises(ValueError, match="exists; name a new folder"):
        write_preferences([run], path, out)


def test_preferences_of_changed_images_and_other_runs_are_left_out(run: Path, other: Path, tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    for folder in (run, other):
        one = booth([folder], path)
        for number in range(3):
            one.choose(number, "left")
    changed = booth([run], path).ballots[1].right.file
    assert changed is not None
    picture(changed, (9, 9, 9))
    out, notes = write_preferences([run], path, tmp_path / "pairs")
    assert len((out / "metadata.jsonl").read_text().splitlines()) == 2
    assert [re.sub(r"\D+", " ", note).strip() for note in notes] == ["3", "1"]
    assert report_on(read_runs([run]), path).elsewhere == 3


def test_preferences_among_videos_say_the_frames_of_both(tmp_path: Path) -> None:
    long, short = write_films(tmp_path / "long", 12), write_films(tmp_path / "short", 5)
    path = tmp_path / "votes.jsonl"
    one = booth([long, short], path, sets="last")
    one.choose(0, "left")
    out, _ = write_preferences([long, short], path, tmp_path / "pairs")
    (row,) = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    frames = [side.shot.frames for side in (one.ballots[0].left, one.ballots[0].right)]
    assert sorted(frames) == [5, 12]
    assert [row["chosen_frames"], row["rejected_frames"]] == frames


def test_preferences_of_texts_are_rows_of_prompt_chosen_and_rejected(tmp_path: Path) -> None:
    texts = {0: f"one {HOSTILE}", 5: "two \ud800"}
    run = write_run(tmp_path / "run", [written(at, 1, text, prompt=HOSTILE) for at, text in texts.items()])
    one = booth([run], run / "votes.jsonl")
    one.choose(0, "left")
    shown = one.show(0)
    assert {shown[side]["completion"] for side in ("left", "right")} == set(texts.values())
    out, _ = write_preferences([run], run / "votes.jsonl", tmp_path / "pairs")
    (row,) = [json.loads(line) for line in (out / "data.jsonl").read_text().splitlines()]
    assert (row["prompt"], row["chosen"], row["rejected"]) == (
        HOSTILE, shown["left"]["completion"], shown["right"]["completion"],
    )  # fmt: skip
    assert list(out.iterdir()) == [out / "data.jsonl"]
