"""SPO's tracker forgets a prompt by how far the policy has moved since it last saw it."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.credit.pooling import Batch
from flowgrpo.training.credit.remembering import Tracked
from flowgrpo.training.data import PromptRow
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.extensions import Visits
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.reporting.clock import Clock
from flowgrpo.training.session import Session
from flowgrpo.training.text.text_policy import Completions
from tests.training.test_processes import Threads
from tests.training.test_text import made_up, task_of
from tests.training.test_text_processes import launched, lines_of
from tests.training.text_runs import trainer_of

ROWS = [PromptRow(4, "a"), PromptRow(9, "b")]
LINES = [
    "advantage=tracked", "clamp=null", "extensions=[visits]", "rollout.group=2",
    "data.heldout=null",
]  # fmt: skip


class Fixed:
    """A policy whose tokens have a log-prob of minus their id, times a factor."""

    def __init__(self, recipe: Any, factor: float = 1.0) -> None:
        self.recipe, self.factor, self.calls = recipe, factor, 0

    def statistics(self, completions: Completions, rows: list[int], *, entropy: bool) -> SimpleNamespace:
        self.calls += 1
        ids = [completions.sampled.ids[row] for row in rows]
        width = max(map(len, ids))
        padded = torch.tensor([one + [0] * (width - len(one)) for one in ids])
        return SimpleNamespace(log_probs=-self.factor * padded.float())


def completions(*ids: list[int], owner: list[int]) -> Completions:
    found = made_up([len(one) for one in ids], [True] * len(ids), owner)
    found.sampled.ids[:] = [list(one) for one in ids]
    return found


def visits_of(policy: Fixed, processes: Processes | None = None) -> Visits:
    visits = Visits()
    task = SimpleNamespace(policy=policy, update_part="scoring")
    visits.begin(task, processes or Processes(), Clock(torch.device("cpu"), ("scoring", "rest")))
    return visits


def distances(visits: Visits, rows: list[PromptRow], found: Completions, places: Sequence[int]) -> list[float]:
    batch = visits.samples_scored(Batch(places, rows, found, scores=None))  # type: ignore[arg-type]
    return list(batch.columns["divergence"])


def test_the_distance_is_that_of_the_last_visits_completion() -> None:
    """Ids 1, 3 and then a factor of 1.5: distances of 0.5 and 1.5, 1 in the mean. The second visit had id 8 alone."""
    policy = Fixed(load_recipe("text"))
    visits = visits_of(policy)

    def moved(*ids: list[int], rows: list[PromptRow] = ROWS) -> list[float]:
        owner = [p for p in range(len(rows)) for _ in range(2)]
        return distances(visits, rows, completions(*ids, owner=owner), range(len(rows)))

    assert all(map(math.isnan, moved([1, 3], [7], [2], [5])))
    policy.factor = 1.5
    assert moved([8], [9, 9], [6], [6]) == pytest.approx([1.0, 1.0, 1.0, 1.0])
    policy.factor = 1.75
    # Only the first prompt comes: of id 8, which had a log-prob of -12.
    assert moved([1], [1], rows=ROWS[:1]) == pytest.approx([2.0, 2.0])
    policy.factor = 2.5
    assert moved([1], [1], [1], [1]) == pytest.approx([0.75, 0.75, 6.0, 6.0])


def test_visits_survive_a_checkpoint(tmp_path: Path) -> None:
    visits, again = Visits(), Visits()
    visits.load_state_dict({"items": {3: [torch.tensor([5, 6]), torch.tensor([-0.25, -1.5])]}})
    torch.save(visits.state_dict(), tmp_path / "visits.pt")
    again.load_state_dict(torch.load(tmp_path / "visits.pt", weights_only=True))
    ids, log_probs = again.last(3) or ()
    assert (ids.tolist(), log_probs.tolist()) == ([5, 6], [-0.25, -1.5])
    assert again.last(4) is None


def test_all_processes_remember_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("text")

    def work(mine: Processes) -> list[tuple[list[int], list[float]]]:
        visits, places = visits_of(Fixed(recipe), mine), mine.share(3)
        rows = [PromptRow(10 + place, "p") for place in places]
        own = completions(*[[place + 1] for place in places], owner=list(range(len(places))))
        distances(visits, rows, own, places)
        found = [visits.last(10 + place) for place in range(3)]
        return [(ids.tolist(), values.tolist()) for ids, values in found]  # type: ignore[misc]

    for count in (1, 2):
        for found in Threads(count, monkeypatch).run(work):
            assert found == [([1], [-1.0]), ([2], [-2.0]), ([3], [-3.0])]


@pytest.fixture
def right(tmp_path: Path) -> str:
    reward = tmp_path / "right.py"
    reward.write_text(
        "from flowgrpo.rewards import Scores\n"
        "def right(completions, prompts, **columns):\n"
        "    values = [float(len(text) % 2) for text in completions]\n"
        "    sizes = [len(text) for text in completions]\n"
        "    return Scores(values, {'size': sizes}, answers=[text[:1] for text in completions])\n"
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1+2=\n47-85=\n9\n30+4=\n")
    return str(reward)


def lines(right: str) -> list[str]:
    prompts = Path(right).with_name("prompts.txt")
    return [*LINES, f"rewards=[{{name: '{right}:right'}}]", f"data.train={prompts}", "data.heldout=null"]


def test_the_tracker_forgets_by_it(small_text: list[str], tmp_path: Path, right: str) -> None:
    """Three of four prompts an iteration: in the second the policy has moved from those that come again."""
    trainer = trainer_of(
        small_text,
        tmp_path / "run",
        *lines(right),
        "optimizer.learning_rate=0.05",
        "advantage.half_life=1.0",
        "advantage.low=0.1",
        "advantage.high=0.99",
    )
    assert "divergence" not in trainer.iterate(0)
    remembers = trainer.credit._advantage
    assert isinstance(remembers, Tracked)
    tracker = remembers._tracker
    before = {int(k): row.clone() for k, row in zip(tracker._table.ids, tracker._table.rows)}
    rows, e = trainer.collect(1)
    scores = trainer.score(trainer.rewards, rows, e)
    visits = trainer.extensions.each["visits"]
    assert isinstance(visits, Visits)
    expected = {}
    for p, row in enumerate(rows):
        if (known := visits.last(row.id)) is not None:
            one = Completions([e.prompts[p]], type(e.sampled)([known[0].tolist()], [[]], [True]), [""], [0])
            with torch.no_grad():
                now = task_of(trainer).policy.log_probs(one, [0])[0][0].cpu()
            expected[row.id] = float((known[1] - now).abs().mean())
    assert expected
    _, everyone, _ = trainer._compared(Batch(trainer.collector.places, rows, e, scores))
    for k, row in zip(tracker._table.ids.tolist(), tracker._table.rows):
        mine = scores.values[[r for r, p in enumerate(e.prompt_of_sample) if rows[p].id == k], 0]
        if k in expected:
            factor = min(max(2 ** (-expected[k] / tracker.half_life), tracker.low), tracker.high)
            new = torch.tensor([mine.sum(), (1 - mine).sum()], dtype=torch.float64)
            assert torch.allclose(row, factor * before[k] + new, atol=1e-5)
    assert all(0.02 < distance < 3.0 for distance in expected.values())
    visits.update_done(everyone, {})
    assert visits.record()["divergence"] == pytest.approx(sum(expected.values()) / len(expected), rel=1e-4)


@pytest.mark.slow
def test_a_run_resumes_to_the_last_bit(small_text: list[str], tmp_path: Path, right: str) -> None:
    recipe = load_recipe("text", [*small_text, *lines(right)])
    folders = [tmp_path / name for name in ("whole", "cut")]
    Session(recipe, RunFolder.create(folders[0], "")).trainer(Silent()).train()
    first = Session(recipe, RunFolder.create(folders[1], "")).trainer(Silent())
    for iteration in range(2):
        first.run.log(first.iterate(iteration))
        first.next_iteration = iteration + 1
    first.keeper.write(first.next_iteration)
    assert (folders[1] / "checkpoints" / "iter-000002" / "extensions" / "visits.pt").is_file()
    again = Session(recipe, RunFolder.open(folders[1])).trainer(Silent())
    again.resume()
    again.train()
    mine, theirs = (
        [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines_of(f / "metrics.jsonl")]
        for f in folders
    )
    assert mine[:4] == theirs[:4]
    assert any("divergence" in line for line in mine[2:4])


@pytest.mark.slow
def test_two_processes_forget_and_read_alike(small_text: list[str], tmp_path: Path, right: str) -> None:
    small = [line for line in small_text if not line.startswith("optimizer")]
    more = [
        *small, *lines(right), "optimizer={learning_rate: 0.01, eps: 1.0e-3}", "run.iterations=3",
        "extensions=[visits, {name: uncertainty, reward: right, alpha: 0.5}, {name: shaping, reward: right, "
        "sub_score: size}, {name: curriculum, diversity: {reward: right}}]",
    ]  # fmt: skip
    records = []
    for count in (1, 2):
        folder = tmp_path / str(count) / "run"
        folder.parent.mkdir()
        launched(more, folder, count, {})
        records.append(lines_of(folder / "metrics.jsonl"))
    assert [set(line) for line in records[0]] == [set(line) for line in records[1]]
    for mine, theirs in zip(*records, strict=True):
        for name in ("divergence", "certainty", "diversity", "loss", "grad_norm"):
            if name in mine:
                assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-6), name
    assert sum("divergence" in line for line in records[0]) >= 2
    assert all(line["certainty"] < 1 and line["diversity"] > 0 for line in records[0])


@pytest.mark.parametrize(
    ("base", "more", "message"),
    [
        ("text", ["advantage=group"], "tells an advantage how fast to forget, and advantage group does not ask for it"),
        ("mixgrpo_flash_guard", [], "the latents of an image cannot"),
        ("text", ["rollout.budget={}"], "samples a prompt in several rounds"),
        ("text", ["data.templates=['{prompt}', 'Say: {prompt}']"], "samples a prompt in several rounds"),
        ("text", ["extensions=[visits, replay]"], "puts back completions of an older policy"),
    ],
)
def test_where_the_divergence_is_not_known_it_is_refused(base: str, more: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(base, ["advantage=tracked", "extensions=[visits]", *more])
