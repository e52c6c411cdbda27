"""Extension `meta_judge`: versions of a judge's instructions, which sample each has scored, and resuming."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.rewards.judges.judge import Judge
from flowgrpo.rewards.judges.judge_client import JudgeReply
from flowgrpo.rewards.judges.meta_question import about_instructions, read_instructions
from flowgrpo.rewards.judges.served_judge import reading_of
from flowgrpo.training.extensions.extension import Rewards
from flowgrpo.training.extensions.meta_judge import SEEN, MetaJudge
from flowgrpo.training.session import Session
from tests.rewards.stub_server import StubServer, question_of, said
from tests.training.text_runs import trainer_of

PROMPT = "{instructions}|{completion}|Score: 0 to 10"


class Judging:
    """A server that scores the share of 1 to 4 in a completion by version 0, and of 5 to 9 by others.

    The model `meta` answers with the next version.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.server = StubServer(self.answer)

    def answer(self, request: dict[str, Any], number: int) -> Any:
        question = question_of(request)
        if request["body"]["model"] == "meta":
            self.asked.append(question)
            return said(f"Thoughts.\n<instructions>\nversion {len(self.asked)}\n</instructions>")
        instructions, completion, _ = question.split("|")
        wanted = "01234" if instructions == "version 0" else "56789"
        return said(f"Score: {10 * sum(c in wanted for c in completion) / max(len(completion), 1):.3f}")

    def options(self) -> dict[str, Any]:
        server = {"url": self.server.url, "model": "m"}
        return {"server": server, "prompt": PROMPT, "instructions": "version 0"}

    def lines(self, small: list[str], every: int = 2) -> list[str]:
        options = json.dumps(self.options())
        return [
            *small, f"rewards=[{{name: judge, label: taste, options: {options}}}]",
            f"extensions=[{{name: meta_judge, reward: taste, every: {every}, samples: 3, server: {{model: meta}}}}]",
        ]  # fmt: skip


@pytest.fixture
def judging() -> Any:
    made = Judging()
    yield made
    made.server.stop()


def extension_of(trainer: Any) -> MetaJudge:
    found = trainer.extensions.each["meta_judge"]
    assert isinstance(found, MetaJudge)
    return found


def test_instructions_are_refined_on_their_schedule_and_every_sample_tells_its_version(
    judging: Judging, small_text: list[str], tmp_path: Path
) -> None:
    trainer = trainer_of([*judging.lines(small_text), "run.sample_every=1"], tmp_path / "run")
    records = [trainer.iterate(k) for k in range(3)]
    assert [record["ratio/first_error"] for record in records] == [0.0] * 3
    assert [record["meta_judge/version"] for record in records] == [0.0, 1.0, 1.0]
    assert (extension_of(trainer).versions, extension_of(trainer).since) == (["version 0", "version 1"], [0, 2])
    index = [json.loads(line) for line in (tmp_path / "run" / "samples" / "index.jsonl").read_text().splitlines()]
    told = {(row["iteration"], row["columns"]["instructions"], row["columns"]["instructions_version"]) for row in index}
    assert told == {(0, "version 0", 0), (1, "version 0", 0), (2, "version 1", 1)}
    for row in index:
        text, wanted = row["completion"], "01234" if row["iteration"] < 2 else "56789"
        share = sum(c in wanted for c in text) / max(len(text), 1)
        assert row["rewards"]["taste"] == pytest.approx(share, abs=1e-3)


def test_the_second_judge_sees_the_best_and_the_worst(judging: Judging, small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(judging.lines(small_text, every=1), tmp_path / "run")
    batch, everyone, _ = trainer._compared(trainer._sampled(0))
    trainer.extensions.update_done(everyone, {})
    values = sorted(batch.scores.values[:, 0].tolist(), reverse=True)
    (question,) = judging.asked
    shown = [float(line.split()[-1]) for line in question.splitlines() if line.startswith("---- score")]
    assert shown == pytest.approx([values[0], values[1], values[-1]], rel=1e-2)
    assert "----\nversion 0\n----" in question
    assert "Reason: Score: " in question


def test_a_resumed_run_goes_on_with_its_instructions(judging: Judging, small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(judging.lines(small_text), tmp_path / "run")
    for k in range(2):
        trainer.run.log(trainer.iterate(k))
        trainer.next_iteration = k + 1
        trainer.keeper.write(trainer.next_iteration)
    again = Session(trainer.recipe, trainer.run).trainer(Silent())
    again.resume()
    assert extension_of(again).state_dict() == extension_of(trainer).state_dict()
    mine, theirs = again._sampled(2), trainer._sampled(2)
    assert mine.rows[0].columns["instructions"] == "version 1"
    assert torch.equal(mine.scores.values, theirs.scores.values)


@pytest.mark.parametrize(("count", "shown"), [(3, [2, 4, 3]), (4, [2, 4, 5, 3]), (9, [2, 4, 0, 5, 3])])
def test_the_best_are_shown_first_and_a_sample_without_a_score_never(
    judging: Judging, count: int, shown: list[int]
) -> None:
    entry = SimpleNamespace(name="judge", label="taste", options=judging.options())
    rewards = Rewards([entry], ["taste"])  # type: ignore[list-item]
    extension = MetaJudge(reward="taste", samples=count, server={"model": "meta"}, rewards=rewards)
    scores = SimpleNamespace(names=["taste"], values=torch.tensor([[0.5], [math.nan], [0.9], [0.1], [0.9], [0.3]]))
    columns = {SEEN: [("task", f"answer {k}", "") for k in range(6)]}
    assert extension._asked(SimpleNamespace(scores=scores, columns=columns)) == "version 1"  # type: ignore[arg-type]
    (question,) = judging.asked
    answers = [line.split()[-1] for line in question.splitlines() if line.startswith("Answer: ")]
    assert answers == [str(k) for k in shown]


def test_the_second_judge_may_have_a_server_of_its_own(judging: Judging) -> None:
    entry = SimpleNamespace(name="judge", label=None, options=judging.options())
    rewards = Rewards([entry], ["judge"])  # type: ignore[list-item]
    for server, url, model in [
        (None, judging.server.url, "m"),
        ({"model": "large"}, judging.server.url, "large"),
        ({"url": "http://127.0.0.1:9/v1"}, "http://127.0.0.1:9/v1", "m"),
    ]:
        used = MetaJudge(reward="judge", server=server, rewards=rewards).client.server
        assert (used.url, used.model) == (url, model)
    with pytest.raises(ValueError, match="meta_judge: server has no field 'modl'"):
        MetaJudge(reward="judge", server={"modl": "large"}, rewards=rewards)


def test_all_processes_take_what_the_first_was_told(judging: Judging, small_text: list[str], tmp_path: Path) -> None:
    """The second process does not ask, and an answer without instructions changes nothing."""

    class Second:
        rank = 1

        def __init__(self, told: str | None) -> None:
            self.told = told

        def gather(self, mine: Any) -> list[Any]:
            assert mine is None
            return [self.told, mine]

    trainer = trainer_of(judging.lines(small_text, every=1), tmp_path / "run")
    _, everyone, _ = trainer._compared(trainer._sampled(0))
    extension = extension_of(trainer)
    for told, versions, failed in (("told", 2, 0), (None, 2, 1), ("told", 2, 1)):
        extension.processes = Second(told)  # type: ignore[assignment]
        extension.update_done(everyone, {})
        assert (len(extension.versions), extension.record()["meta_judge/unread"]) == (versions, failed)
    assert judging.asked == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<instructions>a</instructions> or <instructions> b\nc </instructions>.", "b\nc"),
        ("<instructions>a", None),
        ("<instructions> </instructions>", None),
        ("a</instructions>", None),
        ("", None),
        (f"<instructions>{'a' * 9000}</instructions>", None),
    ],
)
def test_the_last_instructions_of_an_answer_count(text: str, found: str | None) -> None:
    assert reading_of(read_instructions, JudgeReply(text)).answer == found
    assert reading_of(read_instructions, JudgeReply("<instructions>a</instructions>", cut=True)).answer is None


def test_braces_in_samples_stay() -> None:
    question = about_instructions("be {instructions}", [(0.5, "{task}", "", "{why}")])
    assert "----\nbe {instructions}\n----\n" in question
    assert "---- score 0.5\nTask: {task}\nReason: {why}\n----" in question


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["extensions=[{name: meta_judge, reward: answer}]"], "and answer has none; give it options such as"),
        (["extensions=[{name: meta_judge, reward: taste}]"], "asks reward 'taste'"),
    ],
)
def test_what_cannot_be_refined_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", lines)


def test_a_later_extension_must_not_draw_the_prompts_anew(judging: Judging) -> None:
    lines = judging.lines([])
    with pytest.raises(ValueError, match="curriculum draws prompts after it; write it before"):
        load_recipe("text", [lines[0], "extensions=[{name: meta_judge, reward: taste}, curriculum]"])
    load_recipe("text", [lines[0], "extensions=[curriculum, {name: meta_judge, reward: taste}]"])


def test_instructions_need_their_place() -> None:
    server = {"url": "http://a", "model": "m"}
    with pytest.raises(ValueError, match=r"replaces \{instructions\} in `prompt`, which has no such place"):
        Judge(server, "{prompt} Score", instructions="Be strict.")
    with pytest.raises(ValueError, match="instructions is ''; give a text"):
        Judge(server, PROMPT, instructions="")
