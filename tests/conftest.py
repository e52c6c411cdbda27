"""The rules for `slow` tests, the command as a function, and random models with recipes small enough for a test."""

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Modules and tests stay until the end: while they are loaded, the garbage collector would only take time.
if gc.isenabled():
    gc.disable()

# Each of several workers gets one thread from the start, because with more threads they slow each other down.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

# Everybody gets the numbers of a CPU, also on a machine with a GPU. `ACCELERATE_USE_CPU=false` tests there.
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch

from flowgrpo.cli import app as cli
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.text.model import LanguageModel, load_language_model
from flowgrpo.worlds.arithmetic.problems import build_character_tokenizer, build_model
from tests.random_language import save_random

Command = Callable[..., tuple[int, str, str]]

# Only a test with the mark `slow` may call these: module, class and method.
SLOW = (
    ("flowgrpo.training.trainer", "Trainer", "train"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "register_modules"),
    ("multiprocessing.process", "BaseProcess", "start"),
    ("subprocess", "Popen", "__init__"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses the random pipeline as slow, and put files with slow tests first."""
    for item in items:
        if "random_pipeline" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    # Files that take long come first, so that with `-n` no worker is left alone with one of them at the end.
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Make a test without the mark `slow` fail if it trains, builds a pipeline or starts a process."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("slow") is None:
            for module, kind, method in SLOW:
                if module in sys.modules:
                    patch.setattr(getattr(sys.modules[module], kind), method, _needs_the_mark)
        return (yield)


def _needs_the_mark(*args: Any, **kwargs: Any) -> None:
    pytest.fail("this trains, builds a pipeline or starts a process: mark the test with `pytest.mark.slow`")


def pytest_collection_finish() -> None:
    """Freeze all objects after the imports, so that the garbage collector does not search them again and again."""
    gc.collect()
    gc.freeze()
    # Tests load more modules. With the usual 10, half of the collector's time would go into searching these.
    gc.set_threshold(700, 10, 50)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> None:
    """Handle signals again: under `nohup` or a shell's `&` they are ignored, and a run would ignore them as well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _a_memory_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests remember the runs that they make in a folder of their own, not in the home of whoever runs them."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """A function that runs the entry point like the installed script, in an empty folder; (status, output, errors)."""
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
    tokenizer = build_character_tokenizer()
    folder = tmp_path_factory.mktemp("language") / "model"
    return save_random(folder, tokenizer, lambda: build_model(len(tokenizer), width=32, layers=2, heads=2))


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
        "optimizer={learning_rate: 0.01, warmup: 0, ema: null}",
    ]  # fmt: skip


@pytest.fixture
def language(random_language_folder: Path) -> LanguageModel:
    return load_language_model(str(random_language_folder))


@pytest.fixture(scope="session")
def random_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedded pipeline with random weights."""
    # Imported only here, because it imports diffusers, which most tests do not need.
    from flowgrpo.worlds.scenes.flow import CALL, BuildSettings, build_pipeline
    from flowgrpo.worlds.scenes.networks import build_vae

    folder = tmp_path_factory.mktemp("model") / "pipeline"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        vae = build_vae()
    vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    pipeline = build_pipeline(vae, folder, BuildSettings())
    # Half the layers and a quarter of the width, because a short run spends most of its time in the denoiser.
    less = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "caption_projection_dim": 32}
    pipeline.register_modules(transformer=type(pipeline.transformer).from_config(pipeline.transformer.config, **less))
    pipeline.save_pretrained(folder)
    (folder / "flowgrpo.json").write_text(json.dumps({"call": CALL}))
    return folder


@pytest.fixture(scope="session")
def small(random_pipeline: Path) -> list[str]:
    """Overrides that make the default recipe run in seconds on the random pipeline."""
    return [
        f"model.path={random_pipeline}",
        "model.release_text_encoders=false",
        "sampler.steps=4",
        "sampler.plan.window={name: progressive, size: 2, stride: 1, interval: 1, start: 0, stop: 3}",
        "rollout={prompts: 2, group: 3, batch: 6, decode_batch: 6}",
        "rewards=[{name: gold, options: {dense: true}, label: dense}, {name: jpeg_compressibility, weight: 0.1}]",
        "evaluate.every=2",
        "evaluate.prompts=3",
        "run={iterations: 4, checkpoint_every: 1, sample_every: 2, seed: 0}",
    ]


@pytest.fixture
def recipe(small: list[str]) -> Recipe:
    return load_recipe("mixgrpo_flash_guard", small)
