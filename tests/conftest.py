"""What is `slow`, the command as a function, and a random language model with a character tokenizer, all small."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# One thread for each of several workers, from the start: they would get in each other's way.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import torch

from flowgrpo import cli
from flowgrpo.text.arithmetic import build_character_tokenizer, build_model, save_tokenizer
from flowgrpo.text.model import LanguageModel, load_language_model

Command = Callable[..., tuple[int, str, str]]

# What only a test with the mark `slow` may call: module, class and method.
SLOW = (
    ("flowgrpo.training.trainer", "Trainer", "train"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "register_modules"),
    ("multiprocessing.process", "BaseProcess", "start"),
    ("subprocess", "Popen", "__init__"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever works on the pipeline of tests/training/conftest.py is slow."""
    for item in items:
        if "random_pipeline" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Nobody forgets the mark: a test without it that trains, builds a pipeline or starts a process fails."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("slow") is None:
            for module, kind, method in SLOW:
                if module in sys.modules:
                    patch.setattr(getattr(sys.modules[module], kind), method, _needs_the_mark)
        return (yield)


def _needs_the_mark(*args: Any, **kwargs: Any) -> None:
    pytest.fail("this trains, builds a pipeline or starts a process: mark the test with `pytest.mark.slow`")


def pytest_collection_finish() -> None:
    """What is imported by now stays, so the collector of garbage need not look through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> None:
    """What starts the tests may ignore signals, as `nohup` and a shell's `&` do; a run then ignores them too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs the entry point as the installed script does, in an empty folder: (exit status, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flowgrpo", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output, errors = capsys.readouterr()
        return int(ended.value.code or 0), output, errors

    return run


@pytest.fixture(scope="session")
def random_language_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language") / "model"
    tokenizer = build_character_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = build_model(len(tokenizer), width=32, layers=2, heads=2)
    # Larger than a new model's, so that its distributions are far from uniform and differ by prompt.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture
def small_text(random_language_folder: Path, tmp_path: Path) -> list[str]:
    """Overrides that make the recipe for text run in seconds on the random language model."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def nines(completions, prompts, **columns):\n"
        "    return [text.count('9') - 0.1 * len(text) for text in completions]\n"
    )
    return [
        f"model.path={random_language_folder}", f"rewards=[{{name: '{reward}:nines'}}]",
        "rollout={prompts: 3, group: 4, batch: 8, tokens: 60}", "generation.max_tokens=6", "model.train=lora",
        "evaluate={every: 2, prompts: 5}", "run={iterations: 4, checkpoint_every: 1, sample_every: 2}",
        "optimizer.learning_rate=0.01",
    ]  # fmt: skip


@pytest.fixture
def language(random_language_folder: Path) -> LanguageModel:
    return load_language_model(str(random_language_folder))
