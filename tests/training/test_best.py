"""With `evaluate.results=best`, the results of a run are the weights of its best evaluation."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.image_recipe import EvaluateConfig
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.sections import HeldOutConfig
from flowgrpo.training.folder.best import BestWeights
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session, start


class Folder:
    """A keeper that writes a number as weights."""

    def __init__(self, path: Path) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.run = SimpleNamespace(path=path, read_metrics=lambda: self.metrics)
        self.accelerator = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
        self.processes = SimpleNamespace(gather=lambda value: [value])
        self.notes: list[str] = []
        self.reporter = SimpleNamespace(note=self.notes.append)
        self.weights = 0

    def keep_results(self, name: str, average: Any) -> None:
        (self.run.path / name).mkdir(exist_ok=True)
        (self.run.path / name / "weights").write_text(str(self.weights))

    def save_kept(self, kept: str, name: str) -> None:
        (self.run.path / name).mkdir(exist_ok=True)
        (self.run.path / name / "weights").write_text((self.run.path / kept / "weights").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def kept(folder: Folder, **settings: Any) -> BestWeights:
    return BestWeights(HeldOutConfig(**settings), "gold", folder)  # type: ignore[arg-type]


def see(best: BestWeights, folder: Folder, *scores: float | None, first: int = 0) -> None:
    """Evaluations every ten iterations; the weights are the number of iterations."""
    for place, score in enumerate(scores):
        folder.weights = first + 10 * place
        best.evaluated(folder.weights, {"eval/gold": score, "eval/other": 100.0 - place}, None)


def result(best: BestWeights, folder: Folder, done: int) -> int:
    assert best.become_results("lora", done)
    return int((folder.run.path / "lora" / "weights").read_text())


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((0.4, 0.6, 0.5), 10),
        ((0.4, 0.5, 0.6), 20),
        ((0.4, 0.6, 0.6), 10),
        ((0.6, 0.5, 0.4), 0),
        ((0.4, None, 0.3), 0),
        ((float("nan"), -2.0, -1.0), 20),
    ],
)
def test_the_results_are_the_weights_of_the_highest_score(
    scores: tuple[float, ...], expected: int, folder: Folder
) -> None:
    best = kept(folder)
    see(best, folder, *scores)
    assert result(best, folder, 20) == expected
    assert bool(folder.notes) == (expected != 20)


def test_a_note_says_which_weights_they_are(folder: Folder) -> None:
    best = kept(folder)
    see(best, folder, 0.4, 0.625, 0.5)
    result(best, folder, 20)
    (note,) = folder.notes
    assert "weights after 10 of 20 iterations, whose gold on held-out prompts was the highest (0.625)" in note
    assert "`evaluate.results=last`" in note


def test_the_lowest_score_is_the_best_of_a_reward_with_a_negative_weight(folder: Folder) -> None:
    best = BestWeights(HeldOutConfig(), "gold", folder, lower=True)  # type: ignore[arg-type]
    see(best, folder, 0.6, 0.25, 0.5)
    assert result(best, folder, 20) == 10
    assert "whose gold on held-out prompts was the lowest (0.25)" in folder.notes[0]
    # Marks of the other direction are of another measure.
    assert BestWeights(HeldOutConfig(), "gold", folder)._read() is None  # type: ignore[arg-type]
    assert BestWeights(HeldOutConfig(), "gold", folder, lower=True)._read() == best.mark  # type: ignore[arg-type]


def test_a_run_takes_the_direction_of_the_weight(small_text: list[str], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    for weight, lower in ((1.0, False), (-0.5, True)):
        words = [*small_text, f"rewards=[{{name: '{reward}:nines', weight: {weight}}}]", "evaluate.results=best"]
        session = start(load_recipe("text", words), tmp_path / str(weight))
        assert session.trainer(Silent()).best.lower is lower  # type: ignore[union-attr]


def test_without_an_evaluation_nothing_is_kept(folder: Folder) -> None:
    best = kept(folder)
    best.evaluated(0, {}, None)
    best.evaluated(10, {"quick/gold": 0.5}, None)
    assert not best.become_results("lora", 20)


def test_a_repeated_evaluation_gives_the_same_weights(folder: Folder) -> None:
    see(kept(folder), folder, 0.4, 0.6, 0.5)
    again = kept(folder)
    again.resume()
    (folder.run.path / "best" / "weights").write_text("lost")  # a kill between the folder and its note
    see(again, folder, 0.6, 0.5, first=10)
    assert result(again, folder, 20) == 10


def test_scores_of_other_evaluations_are_not_compared(folder: Folder) -> None:
    see(kept(folder), folder, 0.4, 0.9)
    for settings in ({"prompts": 5}, {"seeds": 2}, {"rewards": [{"name": "gold"}]}):
        changed = kept(folder, **settings)
        changed.resume()
        see(changed, folder, 0.5, first=20)
        assert result(changed, folder, 20) == 20
        see(kept(folder), folder, 0.4, 0.9)
    rarer = kept(folder, every=20)
    rarer.resume()
    see(rarer, folder, 0.5, first=20)
    assert result(rarer, folder, 20) == 10


@pytest.mark.parametrize(("settings", "best"), [({}, 10), ({"call": {"guidance_scale": 3.0}}, 20)])
def test_a_score_of_an_earlier_version_had_the_default_of_a_later_setting(settings, best, folder: Folder) -> None:
    def of_images() -> BestWeights:
        return BestWeights(EvaluateConfig(**settings), "gold", folder)  # type: ignore[arg-type]

    see(BestWeights(EvaluateConfig(), "gold", folder), folder, 0.4, 0.9)  # type: ignore[arg-type]
    file = folder.run.path / "best.json"
    note = json.loads(file.read_text())
    assert note["measure"].pop("call") == {}
    file.write_text(json.dumps(note))
    again = of_images()
    again.resume()
    see(again, folder, 0.5, first=20)
    assert result(again, folder, 20) == best


@pytest.mark.parametrize("text", ["", "{", "[]", '{"iteration": 1}', "null"])
def test_a_note_that_cannot_be_read_begins_anew(text: str, folder: Folder) -> None:
    see(kept(folder), folder, 0.9)
    (folder.run.path / "best.json").write_text(text)
    best = kept(folder)
    best.resume()
    see(best, folder, 0.5, first=10)
    assert result(best, folder, 10) == 10


def test_a_run_that_kept_no_weights_so_far_says_so(folder: Folder) -> None:
    folder.metrics = [
        {"iteration": 0, "eval/gold": 0.9},
        {"iteration": 0, "loss": 1.0},
        {"iteration": 8, "eval/gold": 1},
    ]
    kept(folder).resume()
    (note,) = folder.notes
    assert "weights of evaluations up to iteration 8 were not kept" in note
    folder.notes.clear()
    see(kept(folder), folder, 0.4)
    kept(folder).resume()
    assert not folder.notes


# -- whole runs --------------------------------------------------------------------------------------------------------


class Dies(Silent):
    """Ends the run in its fourth iteration."""

    def iteration(self, record: Any) -> None:
        if record["iteration"] == 3:
            raise KeyboardInterrupt


class Notes(Silent):
    """The notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def trained(words: list[str], folder: Path) -> Notes:
    heard = Notes()
    start(load_recipe("text", words), folder).trainer(heard).train()
    return heard


def scores(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["eval/nines"] for line in lines if "eval/nines" in line]


@pytest.mark.slow
def test_the_results_are_the_weights_that_were_evaluated(small_text: list[str], tmp_path: Path) -> None:
    # With this learning rate, the model forgets how to answer.
    words = [*small_text, "optimizer.learning_rate=3", "evaluate={every: 1, prompts: 5, results: best}"]
    heard = trained(words, tmp_path / "run")
    every = scores(tmp_path / "run")
    place = every.index(max(every))
    assert 0 < place < len(every) - 1
    assert any(f"weights after {place} of 4 iterations" in note for note in heard.notes)
    trained([*words, f"run.iterations={place}", "evaluate.results=last"], tmp_path / "short")
    trained([*words, "evaluate.results=last"], tmp_path / "long")
    best, short, long = (
        load_file(tmp_path / name / "lora" / "adapter_model.safetensors") for name in ("run", "short", "long")
    )
    assert all((best[name] == short[name]).all() for name in best)
    assert any((best[name] != long[name]).any() for name in best)


@pytest.mark.slow
def test_an_interrupted_run_has_the_same_results(small_text: list[str], tmp_path: Path) -> None:
    words = [*small_text, "evaluate={every: 1, prompts: 5, results: best}", "run.checkpoint_every=2"]
    trained(words, tmp_path / "whole")
    run = start(load_recipe("text", words), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run.trainer(Dies()).train()
    assert run.run is not None
    run.run.release()
    folder = RunFolder.open(tmp_path / "run")
    trainer = Session(load_recipe(folder.config), folder).trainer(Silent())
    trainer.resume()
    trainer.train()
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert (tmp_path / "run" / "best.json").read_text() == (tmp_path / "whole" / "best.json").read_text()
