"""The `flowgrpo` command: what it prints, and one message, not a traceback, for an error that a user can mend."""

import logging
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest

import flowgrpo
from flowgrpo.cli import app as cli
from flowgrpo.cli.warnings_shown import warnings_shown
from flowgrpo.configs.layers import parts
from flowgrpo.configs.load import recipe_names
from flowgrpo.rewards.registry import available
from flowgrpo.training.folder.run_log import RunLog
from tests.conftest import Command


def refused(answer: tuple[int, str, str]) -> str:
    """The message of a command that was refused; the form of the message is checked."""
    status, output, errors = answer
    assert status == 1
    assert "Traceback" not in output + errors
    assert errors.startswith("error: ")
    return errors.removeprefix("error: ").rstrip("\n")


def test_recipes_are_listed(command: Command):
    status, output, errors = command("recipes")
    assert (status, errors) == (0, "")
    *listed, below = output.split("\n\n")
    for block, task, said in zip(
        listed, ("images", "text", "masked"), ("images", "language models", "masked"), strict=True
    ):
        title, *rows = block.splitlines()
        assert said in title
        assert [line.split()[0] for line in rows] == list(recipe_names(task))
        assert all(line.endswith(text) for line, text in zip(rows, recipe_names(task).values()))
    assert sum(len(block.splitlines()) - 1 for block in listed) == len(recipe_names())
    rows = below.splitlines()[1:]
    assert [line.split()[:2] for line in rows] == [[part.name, part.kind] for part in parts().values()]
    assert all(line.endswith(part.line) for line, part in zip(rows, parts().values()))


def test_the_version_is_told_with_those_of_the_libraries_that_matter(command: Command):
    status, output, errors = command("--version")
    assert (status, errors) == (0, "")
    parts = [part.split() for part in output.split(",")]
    assert [name for name, _ in parts] == ["flowgrpo", "torch", "diffusers", "transformers", "Python"]
    assert parts[0][1] == flowgrpo.__version__ == version("flowgrpo")


def test_rewards_are_listed(command: Command):
    status, output, _ = command("rewards")
    assert status == 0
    names = [line.split()[0] for line in output.splitlines()]
    assert names == list(available())
    assert "gold" in names


def test_plan_prints_the_costs_of_each_window(command: Command):
    window = "sampler.plan.window={name: progressive, size: 4, stride: 1, interval: 10, start: 0, stop: 6}"
    overrides = (window, "sampler.plan.shared_noise=true", "rollout.prompts=2", "rollout.group=4", "run.iterations=25")
    status, output, errors = command("plan", "mixgrpo_guard", *overrides)
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0].startswith("mixgrpo_guard: MixGRPO")
    assert lines[1] == "2 prompts × 4 images = 8 images an iteration, 25 iterations"
    assert lines[2].startswith("1 optimizer step(s) an iteration, 1 of them")
    assert "±0.5 nats" in output
    header = next(k for k, line in enumerate(lines) if line.split()[:1] == ["iterations"])
    rows = [line.replace("(", "").replace(")", "").split() for line in lines[header + 1 : header + 4]]
    # Windows from step 0, 1 and 2: s + 1 shared states, then four chains of the remaining 9 - s.
    assert rows == [
        ["10", "0–3", "37", "40", "4", "40", "16", "13"],
        ["10", "1–4", "34", "40", "4", "37", "16", "13"],
        ["5", "2–5", "31", "40", "4", "34", "16", "13"],
    ]


def test_plan_without_a_recipe_is_the_default_and_takes_overrides(command: Command):
    assert command("plan", "run.iterations=3") == command("plan", "default", "run.iterations=3")


def test_plan_loads_no_weight_and_writes_nothing(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from flowgrpo.training import model_paths as loading

    def loaded(*_: object) -> None:
        raise AssertionError("a pipeline was loaded")

    monkeypatch.setattr(loading, "load_pipeline", loaded)
    (tmp_path / "heavy.py").write_text(
        "class Heavy:\n    def __init__(self): raise AssertionError('made')\n    def __call__(self, images): ...\n"
    )
    assert command("plan")[0] == 0
    assert command("plan", "rewards=[{name: 'heavy.py:Heavy'}]")[0] == 0
    assert command("plan", "model.path=somebody/something")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["heavy.py"]


def test_plan_and_train_refuse_the_same_in_the_same_words(command: Command, tmp_path: Path):
    words = ("default", "data.train=none.txt", "model.call.hieght=3", "rewards=[{name: golf}]", "run.trackers=[wandb]")
    said = refused(command("plan", *words))
    assert said == refused(command("train", *words, "--out", "run"))
    assert [part in said for part in ("none.txt", "hieght", "golf", "wandb")] == [True] * 4
    assert list(tmp_path.iterdir()) == []


def test_plan_draws_the_tree_of_an_iteration(command: Command, tmp_path: Path):
    window = "sampler.plan.window={name: progressive, size: 2, stride: 1, interval: 5, start: 0, stop: 5}"
    words = ("plan", "mixgrpo_guard", window, "sampler.plan.shared_noise=true", "rollout.group=4", "run.iterations=20")
    plain = command(*words)[1]
    status, output, errors = command(*words, "--draw", "--iteration", "10")
    assert (status, errors) == (0, "")
    assert output.startswith(plain)
    drawn = output.removeprefix(plain)
    # The third window: two steps without noise, then four samples.
    assert "\n1 noise      ○╌╌╌╌╌╌╌●╌╌╌╌╌╌╌●━━×4━━━●━━━━━━━●╌╌╌╌╌╌╌●" in drawn
    assert "mixgrpo_guard, iteration 10\n" in drawn
    assert "own shift" in drawn
    assert "\n1 noise      ○━━×4━━━●━━━━━━━●╌╌╌╌╌╌╌●" in command(*words, "--draw")[1]
    assert "own shift" not in command(*words, "--draw", "sampler.sigmas=[1, 0.8, 0.6, 0.5, 0.4, 0.2, 0]")[1]
    assert list(tmp_path.iterdir()) == []

    status, output, errors = command(*words, "--svg", "new/tree.svg", "--iteration", "10")
    assert (status, output, errors) == (0, f"{plain}drawing: new/tree.svg\n", "")
    picture = ElementTree.parse(tmp_path / "new" / "tree.svg").getroot()
    assert picture.findtext("{*}title") == "mixgrpo_guard, iteration 10"
    assert sum(path.tag.endswith("path") for group in picture.iterfind("{*}g") for path in group) == 34
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tree.svg"]

    assert "recipe has iterations 0 to 19" in refused(command(*words, "--draw", "--iteration", "20"))
    assert command(*words, "--draw", "--iteration", "-1")[0] == 2


def test_a_recipe_of_text_is_planned_without_a_tree(command: Command):
    status, output, errors = command("plan", "text")
    assert (status, errors) == (0, "")
    assert "32 prompts × 16 completions = 512 completions an iteration, at most 6 tokens each" in output
    assert "at most 3,072 tokens sampled an iteration, and scored 1 time(s)" in output
    searched = ("objective={surrogate: bapo, balance: {}}", "optimizer.epochs=2")
    assert "objective.balance scores them 1 more time(s), without gradients" in command("plan", "text", *searched)[1]
    assert "no tree of denoising steps" in refused(command("plan", "text", "--draw"))
    assert "takes no recipe" in refused(command("bench", "shared-prefix", "text"))
    assert "text is a recipe of task text; this works only on recipes of task images" in refused(
        command("bench", "prefix", "text")
    )


@pytest.mark.parametrize("name", [name for name in recipe_names("images") if name != "diffusion_dpo"])
def test_every_recipe_that_samples_can_be_drawn(command: Command, name: str):
    status, output, errors = command("plan", name, "--draw", "--svg", "tree.svg")
    assert (status, errors) == (0, "")
    assert f"{name}, iteration 0\none prompt: " in output


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["plan", "defualt"], "did you mean 'default'?"),
        (["plan", "run.iterations"], "no recipe or file 'run.iterations'"),
        (["plan", "default", "run.iterations"], "is not key=value"),
        (["train", "nothing.yaml"], "no recipe or file 'nothing.yaml'"),
        (["resume", "no-run"], "no-run is not a run folder"),
        (["gallery", "no-run"], "no-run is not a run folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(command: Command, tmp_path: Path, words: list[str], part: str):
    said = refused(command(*words))
    assert part in said
    assert "\n" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_bad_value_names_recipe_key_and_mend(command: Command):
    said = refused(command("plan", "default", "optimizer.updtes=2", "run.seed=-1"))
    assert said.splitlines()[0] == "default with optimizer.updtes=2 run.seed=-1:"
    assert "did you mean 'updates'?" in said
    assert "run.seed" in said


@pytest.mark.parametrize("name", ["train", "plan", "evaluate", "resume", "bench"])
def test_a_key_that_is_written_as_an_option_is_told_how_to_be_written(command: Command, name: str):
    status, _, errors = command(name, "--seed", "3")
    assert status == 2
    # Some versions of click put the option into quotation marks.
    assert re.search(r"No such option:? '?--seed'?\. Keys of a recipe are written without dashes:", errors)
    assert "run.seed=3" in errors


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt", "a red circle"], "Prompts are written without an option: 'a red circle'"),
        (["--num-inference-steps", "20"], "Write --steps 20"),
        (["--guidance-scale=4"], "Write --guidance 4"),
        (["--resolution", "512"], "A key of a recipe is set as --set model.call.height=512"),
        (["--lora", "x"], "A run is named with --model, and its LoRA is loaded with it"),
        (["--foo"], "--foo"),
    ],
)
def test_an_option_of_another_tool_is_told_its_name_here(command: Command, words: list[str], told: str):
    status, _, errors = command("sample", *words)
    assert status == 2
    assert "No such option" in errors
    assert told in " ".join(errors.replace("│", " ").split())


def test_a_model_or_a_file_is_not_taken_for_a_prompt(command: Command, tmp_path: Path):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "config.yaml").write_text("name: x\n")
    (tmp_path / "mine.txt").write_text("a red circle\n")
    assert "prompt 1 is the folder of a model; name the model with --model runs/x" in refused(
        command("sample", "runs/x", "a red circle")
    )
    assert "prompt 2 is a file; name a prompt file with --file mine.txt" in refused(
        command("sample", "a red circle", "mine.txt")
    )
    assert not (tmp_path / "samples").exists()
    # A long prompt is no path.
    assert "x" * 5000 not in refused(command("sample", "x" * 5000, " "))


def test_brackets_in_a_message_are_printed_as_they_are(command: Command):
    assert "'[red]no[/red]'" in refused(command("plan", "[red]no[/red]"))


def test_training_stops_before_anything_is_made_when_a_file_is_missing(command: Command, tmp_path: Path):
    said = refused(command("train", "data.train=missing.txt", "--out", "run"))
    assert "no prompt file 'missing.txt'" in said
    assert list(tmp_path.iterdir()) == []


def test_what_writes_alone_is_not_started_by_a_launcher(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command("rewards")[0] == 0  # some clusters say this much
    monkeypatch.setenv("LOCAL_RANK", "0")
    for words in (["rewards", "score", "jpeg_compressibility", "--samples", "x"], ["bench", "first-run"]):
        status, _, errors = command(*words)
        assert status == 1
        assert f"`flowgrpo {words[0]}` takes one process, and a launcher started several; start it by itself" in errors
    assert command("recipes")[0] == 0
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert command("rewards")[0] == 0


@pytest.mark.parametrize("words", [["plan"], ["plan", "--yaml"], ["recipes"], ["parts"]])
def test_of_several_processes_the_first_alone_prints(
    command: Command, words: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("RANK", rank)
        status, printed, errors = command(*words)
        assert status == 0
        assert errors == ""
        assert bool(printed) == (rank == "0")


def test_a_file_where_a_folder_belongs_is_no_traceback(command: Command, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    refused(command("resume", "file"))
    refused(command("gallery", "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["../../evil", "a/b", "."])
def test_a_run_folder_is_not_named_after_a_path(command: Command, tmp_path: Path, name: str):
    assert "write a name without /" in refused(command("train", f"name={name}"))
    assert not list(tmp_path.iterdir())


def test_a_fault_of_the_program_keeps_its_traceback(command: Command, monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(KeyError):
        cli.main()


def test_an_interrupt_is_no_traceback(command: Command, monkeypatch: pytest.MonkeyPatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    assert command() == (130, "", "interrupted\n")


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
@pytest.mark.parametrize("stands", [False, True, "with samples"])
def test_a_signal_while_a_model_loads_says_how_to_go_on(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, status: int, stands: bool | str
):
    def load(recipe: object, folder: Path, made: object, doing: object) -> None:
        if stands:
            folder.mkdir()
            (folder / "config.yaml").write_text("")
        if stands == "with samples":
            (folder / "samples").mkdir()
            (folder / "samples" / "index.jsonl").write_text("")
        os.kill(os.getpid(), getattr(signal, name))

    monkeypatch.setattr("flowgrpo.training.session.start", load)
    told, _, errors = command("train", "default", "--out", "run")
    onward = "go on with `flowgrpo resume run`" if stands else "there is no run yet; start it again"
    if stands == "with samples":
        onward += ", or look at its samples with `flowgrpo gallery run`"
    assert (told, errors) == (status, f"stopped by {name}; {onward}\n")


def test_unknown_options_are_usage_errors(command: Command):
    assert command("plan", "--nothing")[0] == 2
    assert command("nothing")[0] == 2


@pytest.mark.slow
def test_the_package_runs_as_a_module_and_help_loads_no_tensor_library():
    words = [sys.executable, "-X", "importtime", "-m", "flowgrpo", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "train" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "flowgrpo.cli" in loaded
    assert not {"torch", "numpy", "diffusers"} & loaded


def test_what_exits_within_a_command_is_a_failure_of_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Status 0 must mean that a command has done its work."""

    def exits() -> dict[str, str]:
        raise SystemExit(0)

    monkeypatch.setattr("flowgrpo.rewards.registry.available", exits)
    monkeypatch.setattr(sys, "argv", ["flowgrpo", "rewards"])
    with pytest.raises(RuntimeError, match=r"raised SystemExit\(0\) before the command had ended"):
        cli.main()
    assert command("rewards", "--help")[0] == 0
    assert command("rewards", "--nonsense")[0] == 2


def test_warnings_of_the_package_are_shown_while_a_run_waits(tmp_path: Path) -> None:
    said: list[str] = []
    with RunLog() as log, warnings_shown(said.append):
        log.open(tmp_path)
        logging.getLogger("flowgrpo.rewards.serving.http_client").warning("%s does not answer", "it")
        logging.getLogger("flowgrpo.other").info("nothing")
        logging.getLogger("somebody").warning("else")
    logging.getLogger("flowgrpo").warning("afterwards")
    assert said == ["it does not answer"]
    assert (tmp_path / "run.log").read_text().endswith("warning: somebody: else\n")
    assert "does not answer" not in (tmp_path / "run.log").read_text()


@pytest.mark.slow
def test_a_run_without_held_out_prompts_says_how_its_gallery_is_made(command: Command) -> None:
    small = ["data.heldout=null", "rollout.prompts=1", "rollout.group=2", "run.iterations=1"]
    status, output, _ = command("train", "text", *small, "--out", "run")
    assert status == 0
    assert "gallery: not made without held-out prompts; `flowgrpo gallery run` makes one" in " ".join(output.split())
    assert command("gallery", "run")[0] == 0
    assert Path("run/gallery/index.html").exists()
