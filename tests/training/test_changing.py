"""A run may go on with another length and other evaluations; its earlier recipes are kept, and nothing else changes."""

import json
import math
import shutil
from pathlib import Path

import pytest

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, dump_recipe, load_recipe, recipe_names
from flowgrpo.configs.yaml_text import parse_yaml
from flowgrpo.training.folder.changing import adopt, changeable, former_ends, with_changes
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session, start
from tests.conftest import Command


class Rates(Silent):
    """Notes, and the learning rate of every iteration."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rates: list[float] = []

    def started(self, trainer: object) -> None:
        self.optimizer = trainer.optimizer._inner  # type: ignore[attr-defined]

    def iteration(self, record: object) -> None:
        self.rates.append(self.optimizer.param_groups[0]["lr"])

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def words(small_text: list[str]) -> list[str]:
    small = ["rollout={prompts: 2, group: 2, batch: 4, tokens: 60}", "generation.max_tokens=3", "evaluate.prompts=2"]
    return [*small_text, *small, "optimizer.schedule=constant"]


def trained(words: list[str], folder: Path, *more: str) -> Path:
    start(load_recipe("text", [*words, *more]), folder).trainer(Silent()).train()
    return folder


def resumed(run: Path, *changes: str) -> Rates:
    folder = RunFolder.open(run)
    recipe = with_changes(folder, changes) if changes else load_recipe(folder.config)
    heard = Rates()
    trainer = Session(recipe, folder).trainer(heard)
    trainer.resume()
    trainer.train()
    return heard


def evaluated(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(len(lines)))
    return [line["iteration"] for line in lines if any(key.startswith("eval/") for key in line)]


def history(run: Path) -> dict[str, int]:
    """The kept recipes, each with its length."""
    files = sorted((run / "recipes").glob("*/config.yaml"))
    return {file.parent.name: parse_yaml(file.read_text(), "")["run"]["iterations"] for file in files}


# -- longer runs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finished_run_that_is_made_longer_equals_the_longer_run(words: list[str], tmp_path: Path) -> None:
    whole = trained(words, tmp_path / "whole")
    run = trained(words, tmp_path / "run", "run.iterations=2")
    assert contents(run) != contents(whole)
    heard = resumed(run, "run.iterations=4")
    assert contents(run) == contents(whole)
    assert (run / "config.yaml").read_text() == (whole / "config.yaml").read_text()
    assert history(run) == {"iter-000000": 2, "iter-000002": 4}
    assert not any("learning rate" in note for note in heard.notes)
    before = {file: file.read_bytes() for file in run.rglob("config.yaml")}
    resumed(run)
    assert contents(run) == contents(whole)
    assert before == {file: file.read_bytes() for file in run.rglob("config.yaml")}
    assert not (whole / "recipes").exists()


@pytest.mark.slow
def test_a_first_run_that_is_made_longer_equals_the_longer_run(random_pipeline: Path, tmp_path: Path) -> None:
    given = [
        f"model.path={random_pipeline}", "model.release_text_encoders=false",
        "rollout={prompts: 2, group: 6, batch: 12, decode_batch: 12}", "evaluate={every: 2, prompts: 2, quick: null}",
    ]  # fmt: skip
    for name, length in (("whole", 4), ("run", 2)):
        run = f"run={{iterations: {length}, checkpoint_every: 2, sample_every: 2}}"
        start(load_recipe("default", [*given, run]), tmp_path / name).trainer(Silent()).train()
    heard = resumed(tmp_path / "run", "run.iterations=4")
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert not any("learning rate" in note for note in heard.notes)


@pytest.mark.slow
def test_the_last_evaluation_of_the_shorter_run_stays(words: list[str], tmp_path: Path) -> None:
    run = trained(words, tmp_path / "run", "run.iterations=3")
    assert evaluated(run) == [0, 2, 3]
    scores = (run / "metrics.jsonl").read_text().splitlines()[3]
    resumed(run, "run.iterations=5")
    assert evaluated(run) == [0, 2, 3, 4, 5]
    again = json.loads((run / "metrics.jsonl").read_text().splitlines()[3])
    assert {key: again[key] for key in json.loads(scores)} == json.loads(scores)
    for name in ("iter-000004", "iter-000005"):
        shutil.rmtree(run / "checkpoints" / name)
    trained(words, tmp_path / "three", "run.iterations=3")
    shutil.copytree(tmp_path / "three" / "checkpoints" / "iter-000003", run / "checkpoints" / "iter-000003")
    resumed(run)
    assert evaluated(run) == [0, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "share"), [("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2), ("linear", lambda x: 1 - x)]
)
def test_the_learning_rate_goes_on_as_the_longer_schedule_says(
    words: list[str], tmp_path: Path, schedule: str, share: object
) -> None:
    run = trained(words, tmp_path / "run", f"optimizer.schedule={schedule}", "run.iterations=2")
    heard = resumed(run, "run.iterations=5")
    assert heard.rates == pytest.approx([0.01 * share(k / 5) for k in (2, 3, 4)])  # type: ignore[operator]
    [note] = [note for note in heard.notes if "learning rate" in note]
    assert f"goes on at {0.01 * share(2 / 5):.3g}; over 2 iterations it would go on at 0." in note  # type: ignore[operator]


@pytest.mark.slow
def test_evaluations_may_change_and_the_training_does_not_notice(words: list[str], tmp_path: Path) -> None:
    whole = trained(words, tmp_path / "whole")
    run = trained(words, tmp_path / "run", "run.iterations=2")
    resumed(run, "run.iterations=4", "evaluate={every: 1, prompts: 1, seeds: 2}", "run.keep=1")
    assert evaluated(run) == [0, 2, 3, 4]
    assert [path.name for path in RunFolder(run).list_checkpoints()] == ["iter-000004"]
    assert contents(run)["lora/adapter_model.safetensors"] == contents(whole)["lora/adapter_model.safetensors"]


# -- what is refused -----------------------------------------------------------------------------------------------


def folder_of(tmp_path: Path, recipe: str, *words: str) -> RunFolder:
    return RunFolder.create(tmp_path / "run", dump_recipe(load_recipe(recipe, words)))


@pytest.mark.parametrize(
    "word",
    ["optimizer.learning_rate=1e-3", "run.seed=1", "run={iterations: 9}", "rewards.0.weight=2"],
)
def test_what_would_change_the_run_is_refused_with_what_may_change(tmp_path: Path, word: str) -> None:
    run = folder_of(tmp_path, "flow_grpo")
    text = run.config.read_text()
    with pytest.raises(ValueError, match=r"would change what the run is.*run\.iterations, .*evaluate\.\*.*--out NEW"):
        with_changes(run, ["run.iterations=500", word])
    assert run.config.read_text() == text


def test_a_key_that_does_not_exist_is_said_to_be_unknown(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"evaluation.*did you mean 'evaluate'"):
        with_changes(folder_of(tmp_path, "flow_grpo"), ["evaluation.every=1"])


def test_a_run_cannot_become_shorter_than_it_is(tmp_path: Path) -> None:
    run = folder_of(tmp_path, "flow_grpo")
    (run.checkpoints / "iter-000040").mkdir()
    with pytest.raises(ValueError, match=r"run\.iterations is 39, and 40 iterations .* give 40 or more"):
        with_changes(run, ["run.iterations=39"])
    assert with_changes(run, ["run.iterations=40"]).run.iterations == 40


def test_batches_that_are_dealt_out_to_the_updates_stay(tmp_path: Path) -> None:
    run = folder_of(tmp_path, "flow_grpo", "optimizer.cut=edges")
    with pytest.raises(ValueError, match=r"rollout\.batch would deal out .* optimizer.cut is edges"):
        with_changes(run, ["rollout.batch=2"])
    assert with_changes(run, ["rollout.decode_batch=2"]).rollout.decode_batch == 2  # type: ignore[union-attr]
    assert "rollout.batch" in changeable(load_recipe("flow_grpo"))


@pytest.mark.parametrize(
    ("rewards", "key"),
    [
        ("[{name: proxy}]", "rewards.proxy.options.batch_size"),
        ("[{name: proxy}]", "rewards.0.options.batch_size"),
        (
            "[{name: relative, options: {reward: proxy, liked: [red], disliked: [blue]}}]",
            "rewards.0.options.reward_options.batch_size",
        ),
    ],
)
def test_a_reward_whose_memory_ran_out_may_take_fewer_samples_in_a_call(rewards: str, key: str, tmp_path: Path) -> None:
    run = folder_of(tmp_path, "draft", f"rewards={rewards}")
    changed = with_changes(run, [f"{key}=2"])
    options = dict(changed.rewards[0].options)
    assert options.get("reward_options", options)["batch_size"] == 2
    with pytest.raises(ValueError, match=r"would change what the run is.*rewards\.\*\.options\.batch_size"):
        with_changes(run, [key.replace("batch_size", "device") + "=cpu"])


def test_every_task_has_keys_that_may_change() -> None:
    for name in recipe_names():
        assert {"run.iterations", "rollout.batch"} <= set(changeable(load_recipe(name, ["optimizer.cut=prompts"])))


# -- the recipes that are kept -------------------------------------------------------------------------------------


def longer(run: RunFolder, iterations: int) -> str:
    return dump_recipe(load_recipe(run.config, [f"run.iterations={iterations}"]))


def checkpoint_of(run: RunFolder, iteration: int) -> Path:
    folder = run.checkpoint(iteration)
    folder.mkdir()
    (folder / "config.yaml").write_text(run.config.read_text())
    return folder


def test_a_change_at_the_same_iteration_keeps_the_change_before_it(tmp_path: Path) -> None:
    run = folder_of(tmp_path, "flow_grpo", "run.iterations=40")
    checkpoint = checkpoint_of(run, 40)
    adopt(run, 40, checkpoint, longer(run, 60))
    assert history(run.path) == {"iter-000000": 40, "iter-000040": 60}
    assert former_ends(run) == {40}
    adopt(run, 40, checkpoint, longer(run, 80))
    assert history(run.path) == {"iter-000000": 40, "iter-000040": 80, "undone-iter-000040": 60}
    # An older checkpoint undoes the change.
    adopt(run, 20, checkpoint_of(run, 20), longer(run, 80))
    names = set(history(run.path))
    assert names == {"iter-000000", "iter-000020", "undone-iter-000040", "undone-iter-000040-2"}
    assert former_ends(run) == set()


def test_a_change_before_the_first_checkpoint_keeps_the_recipe_too(tmp_path: Path) -> None:
    run = folder_of(tmp_path, "flow_grpo", "run.iterations=40")
    adopt(run, 0, None, longer(run, 60))
    assert history(run.path) == {"undone-iter-000000": 40}
    assert load_recipe(run.config).run.iterations == 60


def test_a_change_by_hand_is_kept_as_well_and_its_comments_stay(tmp_path: Path) -> None:
    run = folder_of(tmp_path, "flow_grpo", "run.iterations=40")
    checkpoint = checkpoint_of(run, 20)
    mine = "# mine\n" + run.config.read_text().replace("iterations: 40", "iterations: 50")
    run.config.write_text(mine)
    adopt(run, 20, checkpoint, dump_recipe(load_recipe(run.config)))
    assert run.config.read_text() == mine
    assert history(run.path) == {"iter-000000": 40, "iter-000020": 50}


def test_a_kept_recipe_that_multiplies_is_refused(tmp_path: Path) -> None:
    run = folder_of(tmp_path, "flow_grpo")
    kept = run.path / "recipes" / "iter-000000"
    kept.mkdir(parents=True)
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    (kept / "config.yaml").write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"recipes/iter-000000/config.yaml.*anchors multiply"):
        adopt(run, 0, None, run.config.read_text())


# -- before the first checkpoint -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start_with", "changes", "said"),
    [
        (
            "run={iterations: 100, checkpoint_every: 1000}", ("run.checkpoint_every=2", "run.iterations=4"),
            ["run.iterations 100 → 4", "iterations 0 to 4 are done again, to the same numbers"],
        ),
        (
            "optimizer.schedule=linear", ("run.iterations=2",),
            [
                "run.iterations 100 → 2", "schedule linear falls over 2 iterations from now on, and fell over 100",
                "iterations 0 to 4 are done again, maybe to other numbers",
            ],
        ),
        (
            "run.seed=0", ("rollout.batch=2",),
            ["rollout.batch 4 → 2", "iterations 0 to 4 are done again, maybe to other numbers"],
        ),
    ],
)  # fmt: skip
def test_a_run_that_is_changed_before_its_first_checkpoint_says_what_is_true(
    words: list[str], tmp_path: Path, start_with: str, changes: tuple[str, ...], said: list[str]
) -> None:
    """The new settings have written no checkpoint, and other settings may give other numbers."""
    recipe = load_recipe("text", [*words, "run={iterations: 100, checkpoint_every: 1000}", start_with])
    run = RunFolder.create(tmp_path / "run", dump_recipe(recipe))
    for iteration in range(5):
        run.log({"iteration": iteration})
    heard = Rates()
    trainer = Session(with_changes(run, changes), run).trainer(heard)
    trainer.resume()
    assert trainer.next_iteration == 0
    assert len(heard.notes) == len(said)
    for note, part in zip(heard.notes, said, strict=True):
        assert part in note
    assert "damaged" not in " ".join(heard.notes)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_makes_a_run_longer(words: list[str], tmp_path: Path, command: Command) -> None:
    run = trained(words, tmp_path / "run", "run.iterations=1")
    status, _, errors = command("resume", str(run), "optimizer.learning_rate=0.1")
    assert status == 1
    assert "These keys may change: run.iterations" in errors
    assert not (run / "recipes").exists()
    status, output, errors = command("resume", str(run), "run.iterations=2")
    assert (status, errors) == (0, "")
    assert "run.iterations 1 → 2" in " ".join(output.split())
    assert history(run) == {"iter-000000": 1, "iter-000001": 2}
    assert evaluated(run) == [0, 1, 2]
