"""The command as a function, and a random language model with a character tokenizer, small enough for a test."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowgrpo import cli
from flowgrpo.text.arithmetic import build_character_tokenizer, build_model, save_tokenizer
from flowgrpo.text.model import LanguageModel, load_language_model

Command = Callable[..., tuple[int, str, str]]


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
def language(random_language_folder: Path) -> LanguageModel:
    return load_language_model(str(random_language_folder))
