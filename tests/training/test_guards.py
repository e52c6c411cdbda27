"""Rewards that are watched: a run warns or ends when one falls, and goes on from there to the same numbers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.reporting.reporter import Alarm
from flowgrpo.training.session import Session, start


class Listening(Silent):
    def __init__(self) -> None:
        self.alarms: list[Alarm] = []

    def alarm(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)


@pytest.fixture
def falling(tmp_path: Path, random_language_folder: Path) -> list[str]:
    """A run whose second evaluation reward falls by 1 at every evaluation."""
    reward = tmp_path / "falls.py"
    reward.write_text(
        "import pathlib\n"
        f"COUNT = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "def aim(completions, **columns):\n    return [float(len(t)) for t in completions]\n"
        "def watched(completions, **columns):\n"
        "    seen = int(COUNT.read_text()) if COUNT.exists() else 0\n"
        "    COUNT.write_text(str(seen + 1))\n"
        "    return [10.0 - seen] * len(completions)\n"
    )
    return [
        f"model.path={random_language_folder}", "generation.max_tokens=4", "rollout.prompts=2", "rollout.group=2",
        "rollout.batch=4", f"rewards=[{{name: '{reward}:aim', label: aim}}]", "evaluate.every=1", "evaluate.prompts=2",
        "run.iterations=6", "run.checkpoint_every=100",
        f"evaluate.rewards=[{{name: '{reward}:aim', label: aimed}}, {{name: '{reward}:watched', label: watched}}]",
    ]  # fmt: skip


def train(words: Sequence[str], folder: Path) -> Listening:
    heard = Listening()
    start(load_recipe("text", [*words]), folder).trainer(heard).train()
    return heard


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_warning_and_the_run_goes_on(falling: list[str], tmp_path: Path) -> None:
    heard = train([*falling, "extensions=[{name: guard, reward: watched, fall: 1.5}]"], tmp_path / "run")
    [alarm] = heard.alarms
    # 10, 9, 8: two below the start for the first time at iteration 2.
    assert str(alarm) == "guard: watched fell to 8 at iteration 2, from 10 at the start; that is more than 1.5"
    rows = metrics(tmp_path / "run")
    assert [row["iteration"] for row in rows] == list(range(7))
    assert [row.get("guard/watched") for row in rows] == [None, None, 1.0, None, None, None, None]


@pytest.mark.slow
def test_the_run_ends_and_can_go_on(falling: list[str], tmp_path: Path) -> None:
    guard = "extensions=[{name: guard, reward: watched, fall: 1.5, action: stop}]"
    heard = train([*falling, guard], tmp_path / "run")
    assert [(alarm.metric, alarm.ends) for alarm in heard.alarms] == [("guard/watched", True)]
    folder = RunFolder.open(tmp_path / "run")
    assert [row["iteration"] for row in metrics(folder.path)] == [0, 1, 2]
    assert [path.name for path in folder.list_checkpoints()] == ["iter-000002"]
    assert any((tmp_path / "run" / "model").glob("*.safetensors"))
    # With another patience in its config the run goes on, from where it stood.
    folder.config.write_text(folder.config.read_text().replace("patience: 1", "patience: 100"))
    session = Session(load_recipe(folder.config), folder)
    again = Listening()
    trainer = session.trainer(again)
    trainer.resume()
    assert trainer.next_iteration == 2
    assert trainer.extensions.each["guard"].state_dict()["first"] == [10.0]
    trainer.train()
    assert again.alarms == []
    assert [row["iteration"] for row in metrics(folder.path)] == list(range(7))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("extensions=[{name: guard, reward: other, fall: 1}]", "not measured; name one of aimed, watched"),
        ("extensions=[{name: guard, reward: watched, fall: -1}]", "extensions.0.fall: .*greater than or equal to 0"),
    ],
)  # fmt: skip
def test_guards_that_cannot_watch(falling: list[str], tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(load_recipe("text", [*falling, line]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_optimised_is_no_guard(falling: list[str], tmp_path: Path) -> None:
    words = [*falling, "evaluate.rewards=null", "extensions=[{name: guard, reward: aim, fall: 1}]"]
    with pytest.raises(ValueError, match="'aim', which is optimised"):
        start(load_recipe("text", words), tmp_path / "run")
    with pytest.raises(ValueError, match=r"data\.heldout is left out"):
        start(load_recipe("text", [*words, "data.heldout=null"]), tmp_path / "other")
