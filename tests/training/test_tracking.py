"""Trackers: what they start with, a resumed run is one run for them, and none of them can end a training."""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import accelerate.tracking
import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.intake.links import check_links
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.reporting.tracking import Trackers, flat
from flowgrpo.training.session import Session, start

VARIABLES = ("WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_NAME", "WANDB_DIR", "WANDB_RESUME")


class Fake:
    """A tracker as accelerate has them, and the run of the package behind it."""

    name = "wandb"
    requires_logging_directory = False
    made: ClassVar[list["Fake"]]

    def __init__(self, project: str, **options: Any) -> None:
        self.project, self.options, self.given, self.ended = project, options, [], []
        self.config: dict[str, Any] = {}
        self.metrics: list[Any] = []
        self.made.append(self)

    def start(self) -> None:
        self.id = self.options.get("id") or f"made{len(self.made)}"

    @property
    def tracker(self) -> "Fake":
        return self

    @property
    def info(self) -> Any:
        return type("Info", (), {"run_id": self.options.get("run_id") or "mlflow-1"})

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.given.append((values, step))

    def finish(self, exit_code: int = 0) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    """Fakes in the place of wandb, mlflow and comet_ml; the list has each that is made."""
    made: list[Fake] = []
    names = ("wandb", "mlflow", "comet_ml")
    for name in names:
        kind = type("Fake_" + name, (Fake,), {"name": name, "made": made})
        monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, name, kind)
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: list(names))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return made


def trackers_of(folder: Path, names: str, *words: str) -> tuple[Trackers, list[str]]:
    run = RunFolder.open(folder) if folder.exists() else RunFolder.create(folder, "")
    found, notes = Trackers(load_recipe("text", [f"run.trackers={names}", *words]), run), list[str]()
    found.note = notes.append
    run.release()
    return found, notes


def test_a_resumed_run_continues_its_run_of_weights_and_biases(fakes: list[Fake], tmp_path: Path) -> None:
    folder = tmp_path / "first"
    for iteration in (0, 2):
        trackers_of(folder, "[wandb]")[0].start(iteration)
    first, second = fakes
    assert first.project == "flowgrpo"
    assert first.options == {"dir": str(folder), "name": "first"}
    assert second.options == {"dir": str(folder), "id": "made1", "resume": "allow"}
    assert json.loads((folder / "trackers.json").read_text()) == {"wandb": "made1"}


def test_what_the_user_sets_for_weights_and_biases_counts(
    fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in zip(VARIABLES[:4], ("mine", "own-id", "own name", "/elsewhere")):
        monkeypatch.setenv(variable, value)
    for _ in range(2):
        trackers_of(tmp_path / "run", "[wandb]")[0].start(0)
    assert [fake.project for fake in fakes] == ["mine", "mine"]
    assert [fake.options for fake in fakes] == [{"resume": "allow"}] * 2


def test_weights_and_biases_gets_iterations_as_values(fakes: list[Fake], tmp_path: Path) -> None:
    trackers = trackers_of(tmp_path / "run", "[wandb, comet_ml]")[0]
    trackers.start(0)
    for iteration in (5, 3):
        trackers.log({"iteration": iteration, "loss": 0.5, "steps": {"0": {}}, "none": None})
    wandb, other = fakes
    assert wandb.metrics == [("iteration", None), ("*", "iteration")]
    numbers = [{"iteration": 5, "loss": 0.5}, {"iteration": 3, "loss": 0.5}]
    assert wandb.given == [(values, None) for values in numbers]
    assert other.given == [(values, values["iteration"]) for values in numbers]


def test_trackers_get_the_whole_recipe_without_secrets(fakes: list[Fake], tmp_path: Path) -> None:
    reward = "{name: remote, options: {url: 'grpc://me:hush@host:1', api_key: hush}}"
    trackers_of(tmp_path / "run", "[wandb]", f"rewards=[{reward}]", "optimizer.learning_rate=0.25")[0].start(0)
    config = fakes[0].config
    assert config["optimizer.learning_rate"] == 0.25
    assert config["optimizer.betas"] == "[0.9, 0.999]"
    assert config["run.trackers"] == '["wandb"]'
    assert {type(value) for value in config.values()} <= {int, float, str, bool}
    assert config["rewards.0.options.url"] == "grpc://host:1"
    assert config["rewards.0.options.api_key"] == "(hidden)"


def test_keys_of_a_configuration_are_dotted() -> None:
    found = dict(flat({"a": {"b": [1, "x"], "c": None}, "d": [{"e": True}, "f"], "g": []}))
    assert found == {"a.b": '[1, "x"]', "d.0.e": True, "d.1": "f", "g": "[]"}


def test_a_resumed_run_continues_its_run_of_mlflow_and_keeps_its_parameters(fakes: list[Fake], tmp_path: Path) -> None:
    for iteration in (0, 2):
        trackers_of(tmp_path / "run", "[mlflow]")[0].start(iteration)
    assert [fake.options["run_id"] for fake in fakes] == [None, "mlflow-1"]
    assert [bool(fake.config) for fake in fakes] == [True, False]


def test_a_link_of_weights_and_biases_into_the_home_does_not_stop_a_resume(
    fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core.log").write_text("")
    folder = tmp_path / "run"

    def links(self: Fake) -> None:
        self.id = "a"
        logs = folder / "wandb" / "run-a" / "logs"
        logs.mkdir(parents=True)
        (logs / "debug-core.log").symlink_to(tmp_path / "core.log")
        (folder / "wandb" / "latest-run").symlink_to("run-a")

    monkeypatch.setattr(Fake, "start", links)
    trackers_of(folder, "[wandb]")[0].start(0)
    check_links(folder)
    assert (folder / "wandb" / "latest-run" / "logs").is_dir()


def raises(*args: Any, **options: Any) -> None:
    raise OSError("no\n route")


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_left_out(
    fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    trackers, notes = trackers_of(tmp_path / "run", "[comet_ml, mlflow]")
    trackers.start(0)
    failing, other = fakes
    monkeypatch.setattr(failing, method, raises)
    for iteration in (41, 42):
        trackers.log({"iteration": iteration, "loss": 1})
    trackers.samples("eval", 42, ["a"], [{"prompt": "p", "rewards": {}}])
    trackers.end()
    [note] = notes
    when = "at iteration 41" if method == "log" else "at the end"
    assert note == (
        f"tracker comet_ml failed {when} (no route); the run goes on without it, and metrics.jsonl has everything"
    )
    assert [step for _, step in other.given] == [41, 42]
    assert other.ended == [0]


def test_samples_that_a_tracker_refuses_end_no_run(
    fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers, notes = trackers_of(tmp_path / "run", "[comet_ml]")
    trackers.start(0)
    monkeypatch.setattr(fakes[0], "log", raises)
    trackers.samples("eval", 7, ["a"], [{"prompt": "p", "rewards": {}}])
    assert [note[:40] for note in notes] == ["tracker comet_ml failed at iteration 7 ("]


def test_a_recipe_that_a_tracker_refuses_ends_no_run(
    fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "store_init_configuration", raises)
    trackers, notes = trackers_of(tmp_path / "run", "[mlflow]")
    trackers.start(0)
    trackers.log({"iteration": 0})
    assert notes == ["tracker mlflow does not take the recipe (no route); config.yaml has it"]
    assert fakes[0].given


def test_only_the_main_process_has_trackers(fakes: list[Fake], tmp_path: Path) -> None:
    trackers = Trackers(load_recipe("text", ["run.trackers=[wandb]"]), RunFolder.create(tmp_path / "run", ""), False)
    trackers.start(0)
    trackers.log({"iteration": 0})
    assert fakes == []


@pytest.mark.parametrize("text", ["[]", "{", '{"wandb": 3}'])
def test_a_damaged_list_of_trackers_is_named(fakes: list[Fake], tmp_path: Path, text: str) -> None:
    trackers = trackers_of(tmp_path / "run", "[wandb]")[0]
    (tmp_path / "run" / "trackers.json").write_text(text)
    with pytest.raises(ValueError, match=r"trackers\.json is not what a run writes; remove it"):
        trackers.start(0)


def test_a_tracker_that_does_not_start_says_what_to_do(
    fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers_of(tmp_path / "run", "[mlflow]")[0].start(0)
    monkeypatch.setattr(Fake, "start", raises)
    with pytest.raises(
        ValueError, match=r"^tracker mlflow does not start: no route; remove .*trackers\.json so that it "
    ):
        trackers_of(tmp_path / "run", "[mlflow]")[0].start(2)
    with pytest.raises(ValueError, match=r"^tracker comet_ml does not start: no route; leave it out of run\.trackers$"):
        trackers_of(tmp_path / "other", "[comet_ml]")[0].start(0)


def test_a_new_run_asks_its_trackers_before_it_loads_anything(
    fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_text: list[str]
) -> None:
    def waits(self: Session) -> None:
        raise AssertionError("the rewards are loaded")

    monkeypatch.setattr(Session, "_make_rewards", waits)
    monkeypatch.setattr(Fake, "start", raises)
    with pytest.raises(
        ValueError,
        match=r"tracker wandb does not start: no route; log in with `wandb login`, set WANDB_MODE=offline, or leave it "
        r"out of run\.trackers",
    ):
        start(load_recipe("text", [*small_text, "run.trackers=[wandb]"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_begin_leaves_no_files_of_trackers(
    fakes: list[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_text: list[str]
) -> None:
    folder = tmp_path / "run"

    def writes(self: Fake) -> None:
        self.id = "a"
        (folder / "wandb" / "run-a").mkdir(parents=True)

    def fails(self: Session) -> None:
        assert (folder / "trackers.json").exists()
        raise ValueError("no such reward")

    monkeypatch.setattr(Fake, "start", writes)
    monkeypatch.setattr(Session, "_make_rewards", fails)
    with pytest.raises(ValueError, match="no such reward"):
        start(load_recipe("text", [*small_text, "run.trackers=[wandb]"]), folder)
    assert fakes[0].ended == [1]
    assert not folder.exists()


@pytest.mark.slow
def test_a_run_whose_tracker_fails_in_the_last_evaluation_has_its_result(
    fakes: list[Fake], tmp_path: Path, small_text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def log(self: Fake, values: dict[str, Any], step: int | None = None) -> None:
        if step == 2:
            raises()

    monkeypatch.setattr(Fake, "log", log)
    words = [*small_text, "run.iterations=2", "run.trackers=[comet_ml]"]
    start(load_recipe("text", words), tmp_path / "run").trainer(Silent()).train()
    assert (tmp_path / "run" / "lora").is_dir()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("left", ["a damaged one", "none"])
def test_tensorboard_has_each_iteration_once(tmp_path: Path, small_text: list[str], left: str) -> None:
    """The checkpoint that a run goes on from need not be the newest one, and there may be none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    every = 1 if left == "a damaged one" else 9
    words = [*small_text, "run.trackers=[tensorboard]", f"run.checkpoint_every={every}", "run.keep=3"]
    folder = tmp_path / "run"
    start(load_recipe("text", [*words, "run.iterations=3"]), folder).trainer(Silent()).train()
    newest = folder / "checkpoints" / "iter-000003"
    if left == "none":
        # The run was to be longer, so it has written no checkpoint.
        shutil.rmtree(newest)
        (folder / "config.yaml").write_text(dump_recipe(load_recipe("text", words)))
    else:
        (newest / "trained.safetensors").write_bytes(b"")
    trainer = Session(load_recipe("text", words), RunFolder.open(folder)).trainer(Silent())
    trainer.resume()
    assert trainer.next_iteration == (2 if left == "a damaged one" else 0)
    trainer.train()
    found = EventAccumulator(str(folder / "flowgrpo")).Reload()
    assert [event.step for event in found.Scalars("reward/total")] == [0, 1, 2, 3]
    for tag in found.Tags()["scalars"]:
        steps = [event.step for event in found.Scalars(tag)]
        assert steps == sorted(set(steps)), tag
