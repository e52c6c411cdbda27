"""Judges: how answers become scores and preferences, and that an answer without a score never becomes a low one."""

import base64
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowgrpo.rewards import RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.judges.judge import SCORE, Judge
from flowgrpo.rewards.judges.judge_answers import NOTE_CHARACTERS, ScoreReader, Unreadable
from flowgrpo.rewards.judges.judge_client import JudgeClient, JudgeReply
from flowgrpo.rewards.judges.judge_pairs import read_preference
from flowgrpo.rewards.judges.judge_prompts import Template
from tests.rewards.stub_server import FakeClock, Reply, StubServer, failed, question_of, said

Stub = Callable[..., StubServer]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    clock = FakeClock()
    monkeypatch.setattr(JudgeClient, "sleep", staticmethod(clock.sleep))
    monkeypatch.setattr(JudgeClient, "clock", staticmethod(clock))
    made: list[StubServer] = []

    def make(answer: Callable[..., Reply | None]) -> StubServer:
        made.append(StubServer(answer))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def options(server: StubServer, **more: object) -> dict:
    return {"server": {"url": server.url, "model": "m"}, **more}


def rewards(name: str, server: StubServer, **more: object) -> RewardSet:
    return RewardSet([RewardSpec(name, options=options(server, **more))], sleep=lambda seconds: None)


def grey(*levels: int) -> torch.Tensor:
    return (torch.tensor(levels) / 255).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).contiguous()


def levels_of(request: dict) -> list[int]:
    """The grey level of each picture of a question."""
    content = request["body"]["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    files = [io.BytesIO(base64.b64decode(url.partition(",")[2])) for url in urls]
    return [Image.open(file).getpixel((0, 0))[0] for file in files]


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 7", 0.7),
        ("score:10", 1.0),
        ("**Score: 0**", 0.0),
        ("Score: **8**.", 0.8),
        ("Score (0-10): 7", 0.7),
        ("Score (7)", 0.7),
        ("Score: 7/10", 0.7),
        ("Score\n\n  2.5 points", 0.25),
        ("Score: 3, no: Score: 4", 0.4),
        ("Score: 5e-1", 0.05),
        ("Score: .5E1, of ten", 0.5),
        ("Score: 7, 8 would be too much", 0.7),
        ("<think>Score: 1</think>Score: 9", 0.9),
    ],
)
def test_a_score_is_read(text: str, value: float):
    assert ScoreReader("judge", SCORE, None, (0, 10), ours=True).read(JudgeReply(text)) == pytest.approx(value)


@pytest.mark.parametrize(
    "answer",
    [
        JudgeReply(""),
        JudgeReply("It is good."),
        JudgeReply("Score: good"),
        JudgeReply("Score: 11"),
        JudgeReply("Score: -3"),
        JudgeReply("Score: 95"),
        JudgeReply("Score: 1.2.3"),
        JudgeReply("Score: 12345678901234567890"),
        JudgeReply("Score: 1e999"),
        JudgeReply("Score: 1E+999"),
        JudgeReply("Score: -1e999"),
        JudgeReply("Score: 1e99999999999"),
        JudgeReply("Score: 1,000"),
        JudgeReply("Score: Infinity"),
        JudgeReply("Score: nan"),
        JudgeReply("Scoreboard 7"),
        JudgeReply("Score: 7</think>"),
        JudgeReply("<think>Score: 7"),
        JudgeReply("Score: 1", cut=True),
        JudgeReply("Score: 7", refused="filter"),
        JudgeReply("Score: 7" + " " * 100_000),
    ],
)
def test_what_is_no_score_is_none(answer: JudgeReply):
    with pytest.raises(Unreadable):
        ScoreReader("judge", SCORE, None, (0, 10), ours=True).read(answer)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("score", '{"score": 4}', 0.75),
        ("score", 'Well.\n```json\n{"reason": "ok", "score": "2"}\n```', 0.25),
        ("result.score", 'So: {"result": {"score": 5}} I think', 1.0),
        ("score", '{"score": true}', None),
        ("score", '{"score": null}', None),
        ("score", '{"score": NaN}', None),
        ("score", '{"score": "1e999"}', None),
        ("score", '{"score": 1e999}', None),
        ("score", '{"score": -1e999}', None),
        ("score", '{"score": Infinity}', None),
        ("score", '{"score": 1e400, "other": 4}', None),
        ("score", '{"other": 4}', None),
        ("score", '{"score": 4', None),
        ("score", "[" * 50_000, None),
        ("result.score", '{"result": 4}', None),
        ("score", '{"score": 6}', None),
    ],
)
def test_a_field_of_json_is_read(field: str, text: str, value: float | None):
    reader = ScoreReader("judge", None, field, (1, 5))
    if value is None:
        with pytest.raises(Unreadable):
            reader.read(JudgeReply(text))
    else:
        assert reader.read(JudgeReply(text)) == value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "value"), [("so 4 of 5", 4.0), ("so 3e-1", 0.3), ("so 1e999", None), ("so 2E9", None)]
)
def test_a_pattern_of_the_user_cuts_no_number_short(text: str, value: float | None):
    reader = ScoreReader("judge", r"so (\d+)", None, None if value else (0, 10))
    if value is None:
        with pytest.raises(Unreadable):
            reader.read(JudgeReply(text))
    else:
        assert reader.read(JudgeReply(text)) == value
    reader.close()


@pytest.mark.slow
def test_a_pattern_of_the_user_is_given_up_when_it_takes_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flowgrpo.rewards.judges.judge_answers.PATTERN_SECONDS", 0.3)
    reader = ScoreReader("judge", r"(?:a+)+=(\d)")
    assert reader.read(JudgeReply("aa=1, AA=2")) == 2.0
    with pytest.raises(Unreadable, match="given up"):
        reader.read(JudgeReply("a" * 60))
    reader.close()


def test_images_are_scored_in_order_with_the_answers_as_notes(stub: Stub):
    server = stub(lambda request, number: said(f"Grey. Score: {levels_of(request)[0] / 20:g}"))
    batch = rewards("judge", server).score(grey(0, 200, 100), ["a", "b", "c"])
    assert batch.names == ("judge",)
    assert torch.equal(batch.values[:, 0], torch.tensor([0.0, 1.0, 0.5]))
    assert batch.notes["judge"] == ["Grey. Score: 0", "Grey. Score: 10", "Grey. Score: 5"]
    assert sorted(question_of(request).count("\na\n") for request in server.requests) == [0, 0, 1]


def test_completions_are_scored_with_columns(stub: Stub):
    server = stub(lambda request, number: said(f'{{"mark": {len(question_of(request))}}}'))
    reward = rewards("judge", server, prompt="{prompt}|{completion}|{hint}", field="mark", scale=None)
    batch = reward.score(["xx", "yyyy"], ["p", "q"], {"hint": ["h", None]})
    assert batch.values[:, 0].tolist() == [6.0, 7.0]
    assert sorted(map(question_of, server.requests)) == ["p|xx|h", "q|yyyy|"]


def test_places_are_filled_once_and_nothing_else_is_touched():
    template = Template("judge", "prompt", 'Say {"score": 1}: {prompt} {} { hint } {hint}')
    assert template.places == ("prompt", "hint")
    values = {"prompt": "{hint}{completion}", "hint": r"\1 $x"}
    assert template.fill(values) == r'Say {"score": 1}: {hint}{completion} {} { hint } \1 $x'
    with pytest.raises(ValueError, match=r"prompt has the place \{hint\}, but there are only prompt"):
        template.fill({"prompt": ""})


def test_a_column_that_the_prompt_names_is_missed_before_anything_is_asked(stub: Stub):
    server = stub(lambda request, number: said("Score: 1"))
    with pytest.raises(ValueError, match="takes `hint`, which the prompts do not have"):
        rewards("judge", server, prompt="{hint}").score(grey(1), ["a"])
    with pytest.raises(ValueError, match="scores `completions`, but the samples here are images"):
        rewards("judge", server, prompt="{completion}").score(grey(1), ["a"])
    assert server.requests == []


def test_an_answer_without_score_is_masked_and_the_note_says_why(stub: Stub):
    server = stub(lambda request, number: said("Score: 5" if levels_of(request)[0] else "Lovely! " * 500))
    batch = rewards("judge", server).score(grey(0, 9), ["a", "a"])
    assert math.isnan(batch.values[0, 0])
    assert batch.values[1, 0] == 0.5
    note = batch.notes["judge"][0]
    assert note.startswith("no score (no score in the answer): Lovely!")
    assert len(note) < NOTE_CHARACTERS + 100


def test_a_judge_that_never_gives_a_score_stops_the_run(stub: Stub):
    server = stub(lambda request, number: said("Lovely!"))
    assert rewards("judge", server).score(grey(*range(7)), ["a"] * 7).values.isnan().all()
    with pytest.raises(RewardError, match=r"none of 8 answers has a score.*Lovely!"):
        rewards("judge", server).score(grey(*range(8)), ["a"] * 8)


def test_a_dead_server_stops_the_run_and_the_samples_are_kept(stub: Stub, tmp_path: Path):
    server = stub(lambda request, number: said("Score: 5"))
    server.stop()
    reward = RewardSet([RewardSpec("judge", options=options(server))], quarantine=tmp_path, sleep=lambda seconds: None)
    with pytest.raises(RewardError, match=r"Connection refused.*The call was tried 4 times"):
        reward.score(grey(0, 9), ["a", "a"])
    assert len(list(tmp_path.rglob("*.png"))) == 2


def test_one_failure_of_many_is_repeated_without_asking_the_others_again(stub: Stub):
    failures = iter([failed(404)])
    server = stub(
        lambda request, number: next(failures, said("Score: 5")) if levels_of(request) == [3] else said("Score: 4")
    )
    batch = rewards("judge", server).score(grey(*range(6)), ["a"] * 6)
    assert batch.values[:, 0].tolist() == pytest.approx([0.4] * 3 + [0.5] + [0.4] * 2)
    asked = [levels_of(request)[0] for request in server.requests]
    assert asked.count(3) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pattern": "score"}, r"pattern 'score' has 0 groups"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"pattern": "(.)", "field": "x"}, "give `pattern`, a regular expression, or `field`"),
        ({"field": ""}, "field is ''"),
        ({"scale": [5, 1]}, r"scale is \[5, 1\]"),
        ({"scale": 5}, "scale is 5"),
        ({"prompt": ""}, "prompt is ''"),
    ],
)
def test_wrong_options_are_refused(given: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Judge({"url": "http://a", "model": "m"}, **given)


# -- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Image 1 is better than Image 2.", 1.0),
        ("image 2 is clearly better", 0.0),
        ("Both images are equally good.", 0.5),
        ("It is a tie.", 0.5),
        ("TIE", 0.5),
        ("<think>Image 1 is better</think><answer>Image 2 is better</answer>", 0.0),
        ("Image 1 is better in colour.\n<answer>Image 2 is better</answer> Thanks", 0.0),
        ("Image 1 is better in colour, but overall Image 2 is better.", 0.0),
        ("Video 1 is better", 1.0),
        ("Alignment Score:\n Image 1: 0.6\n Image 2: 0.4\n\nStyle Score:\n Image 1: 0.2\n Image 2: 0.8", 0.4),
        ("Image 1: 3\nImage 2: 1", 0.75),
        ("**Image 1: 6**\n**Image 2: 2**", 0.75),
        ("Image 1: 8 points and Image 2: 2 out of 10", 0.8),
        ("**Image 1** is better", 1.0),
        ("Image #2 is significantly better", 0.0),
        ("Image 1 is far better.", 1.0),
        ("<answer>Image 2</answer>", 0.0),
        ("It's a tie", 0.5),
        ("Image 1: 0\nImage 2: 0", 0.5),
        ("Image 1: 3e-1\nImage 2: 1E-1", 0.75),
    ],
)
def test_a_preference_is_read(text: str, value: float):
    assert read_preference(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Both have merit.",
        "Image 3 is better",
        "Image 1: 0.6",
        "Image 2: 0.6 Image 1: 0.4",
        "Image 1: -1 Image 2: 2",
        "Image 1: 1e999 Image 2: 1",
        "Image 1: 1e999 Image 2: 1e999",
        "Image 1: 1 Image 2: 1,000",
        "Image 1: 1 Image 1: 1 Image 2: 0 Image 2: 0",
        "<answer>neither</answer> Image 1 is better",
    ],
)
def test_what_is_no_preference_is_none(text: str):
    with pytest.raises(Unreadable):
        read_preference(text)


def win_rates(stub: Stub, answer: Callable[[int, int], str], **more: object) -> tuple[StubServer, object]:
    """Win rates of three greys, by a judge that is told both levels; `more` goes to `win_rate`."""
    server = stub(lambda request, number: said(answer(*levels_of(request))))
    judge = options(server, pair_prompt="Which fits {prompt}?")
    spec = RewardSpec("win_rate", options={"judge": "judge", "judge_options": judge, **more})
    return server, RewardSet([spec]).score(grey(10, 200, 100), ["a"] * 3, groups=[0, 0, 0])


def test_pairs_are_asked_in_both_orders_and_become_win_rates(stub: Stub):
    server, batch = win_rates(stub, lambda one, other: f"Image {1 if one > other else 2} is better")
    assert batch.values[:, 0].tolist() == [0.0, 1.0, 0.5]
    pairs = sorted(tuple(levels_of(request)) for request in server.requests)
    assert pairs == [(10, 100), (10, 200), (100, 10), (100, 200), (200, 10), (200, 100)]
    assert {question_of(request) for request in server.requests} == {"Which fits a?"}


def test_a_liking_for_a_position_cancels(stub: Stub):
    _, batch = win_rates(stub, lambda one, other: "Image 1 is better")
    assert batch.values[:, 0].tolist() == [0.5, 0.5, 0.5]
    _, once = win_rates(stub, lambda one, other: "Image 1 is better", both_orders=False)
    assert once.values[:, 0].tolist() == [1.0, 0.5, 0.0]


def test_a_tie_and_an_unreadable_answer_count_one_half(stub: Stub):
    def answer(one: int, other: int) -> str:
        if {one, other} == {10, 200}:
            return "What a question."
        return "Both images are equally good" if 10 in (one, other) else f"Image {1 if one > other else 2} is better"

    _, batch = win_rates(stub, answer)
    assert batch.values[:, 0].tolist() == [0.5, 0.75, 0.25]
    assert batch.sub_scores["win_rate"]["undecided"] == [0.5, 0.5, 0.0]


def test_texts_are_compared(stub: Stub):
    server = stub(lambda request, number: said("Answer 1 is better" if "long|" in question_of(request) else "tie"))
    judge = options(server, pair_prompt="{prompt}: {first}|{second}")
    spec = RewardSpec("win_rate", options={"judge": "judge", "judge_options": judge, "both_orders": False})
    batch = RewardSet([spec]).score(["very long", "short"], ["p", "p"], groups=[0, 0])
    assert batch.values[:, 0].tolist() == [1.0, 0.0]
    assert question_of(server.requests[0]) == "p: very long|short"


def test_without_a_prompt_for_pairs_the_scores_are_compared(stub: Stub):
    server = stub(lambda request, number: said(f"Score: {levels_of(request)[0] // 20}"))
    spec = RewardSpec("win_rate", options={"judge": "judge", "judge_options": options(server)})
    batch = RewardSet([spec]).score(grey(10, 200, 100), ["a"] * 3, groups=[0, 0, 0])
    assert batch.values[:, 0].tolist() == [0.0, 1.0, 0.5]
    assert len(server.requests) == 3
