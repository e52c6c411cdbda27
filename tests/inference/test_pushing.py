"""`flowgrpo push` sends the trained weights with their card, and nothing else, to a server that answers as the hub.

The client is the real one of huggingface_hub, but without its `xet` transfer, which speaks to further servers.
"""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.configs.trust import remember_run
from flowgrpo.inference.uploads import collect, public_name
from flowgrpo.training.folder.model_card import CARD, FORMER, former_card
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.model_paths import embedded_pipeline, language_folder
from flowgrpo.training.result_card import Known, write_result_card
from tests.conftest import Command
from tests.inference.hub_server import TOKEN, Hub, serving, use

ADAPTER = {
    "peft_type": "LORA",
    "r": 4,
    "base_model_name_or_path": "/home/jane/hub/models--Qwen--Qwen3-0.6B/snapshots/x",
}
SENT = {CARD, "adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as server:
        use(server, monkeypatch)
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a finished run of text, with all that a run has beside its result."""
    folder = tmp_path / "my-run"
    config = dump_recipe(load_recipe("text", ["model.path=Qwen/Qwen3-0.6B", "model.train=lora", "run.iterations=2"]))
    metrics = [
        {"iteration": 0, "eval/answer": 0.25, "eval_error/answer": 0.0625},
        {"iteration": 0, "reward/answer": 0.5},
        {"iteration": 1, "reward/answer": 0.5},
        {"iteration": 2, "eval/answer": 0.5, "eval_error/answer": 0.125},
    ]
    held = {
        "config.yaml": config,
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in metrics),
        "run.log": "a log",
        "samples/index.jsonl": '{"iteration": 0, "prompt": "private"}\n',
        "checkpoints/iter-000001/optimizer.pt": "moments",
        "checkpoints/iter-000001/trained.safetensors": "weights",
        "best/adapter_model.safetensors": "best",
        "gallery/index.html": "<p>private</p>",
        "lora/adapter_config.json": json.dumps(ADAPTER),
        "lora/adapter_model.safetensors": "the weights",
        "lora/.hidden": "hidden",
        f"lora/{FORMER}": "an older card",
    }
    for name, text in held.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    remember_run(folder, config)
    return folder


def test_the_result_and_its_card_are_sent_and_nothing_else(command: Command, hub: Hub, run: Path) -> None:
    status, output, errors = command("push", str(run), "me/mine", "--yes")
    assert status == 0, errors
    assert set(hub.files["me/mine"]) == SENT
    assert hub.files["me/mine"]["adapter_model.safetensors"] == b"the weights"
    assert hub.private == {"me/mine": False}
    assert f"to {hub.url}/me/mine (new, public)" in output
    assert f"uploaded: {hub.url}/me/mine/commit/" in output
    assert all(name in output for name in SENT)
    assert hub.messages == ["Upload my-run with flowgrpo"]
    card = hub.files["me/mine"][CARD].decode()
    assert "| answer | 0.25 ± 0.062 | 0.5 ± 0.12 |" in card
    assert "| iterations | 2 of 2" in card
    own = (run / "lora" / CARD).read_text()  # the run had none, as runs of older versions have
    assert f'\nRESULT = "{run.resolve() / "lora"}"  # this folder' in own
    assert '\nRESULT = "me/mine"  # this repository' in card
    assert '\nBASE = "Qwen/Qwen3-0.6B"\n' in card
    assert "names folders of this machine" not in output


def test_no_folder_of_the_machine_is_sent(command: Command, hub: Hub, run: Path) -> None:
    _, output, _ = command("push", str(run), "me/mine", "--yes")
    sent = json.loads(hub.files["me/mine"]["adapter_config.json"])
    assert sent == ADAPTER | {"base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    assert "base_model_name_or_path is uploaded as 'Qwen/Qwen3-0.6B'" in output
    assert json.loads((run / "lora" / "adapter_config.json").read_text()) == ADAPTER  # the run keeps its file
    assert not any(b"jane" in held for held in hub.files["me/mine"].values())


@pytest.mark.parametrize("mine", [True, False])
def test_the_program_of_a_pushed_card_names_the_repository(
    command: Command, hub: Hub, run: Path, tmp_path: Path, mine: bool
) -> None:
    (tmp_path / "tiny").mkdir()
    recipe = load_recipe("text", [f"model.path={tmp_path / 'tiny'}", "model.train=lora", "run.iterations=2"])
    write_result_card(run / "lora", "lora", recipe, RunFolder(run), 2, Known())
    own = (run / "lora" / CARD).read_text()
    assert f'\nBASE = "{tmp_path.resolve() / "tiny"}"  # the folder' in own
    if mine:
        own = own.replace("# license: choose one;", "license: mit  #")
        (run / "lora" / CARD).write_text(own)
    _, output, errors = command("push", str(run), "me/mine", "--yes")
    card = hub.files["me/mine"][CARD]
    assert str(tmp_path).encode() not in card, errors
    assert b'\nRESULT = "me/mine"  # this repository, or the path of a folder with its files\n' in card
    assert b'\nBASE = "tiny"  # the base model; write the path of its folder, or its name on the hub\n' in card
    assert (b"license: mit" in card) == mine
    assert "note: README.md: the base model is a folder, so the program names no place where others find it" in output
    assert (run / "lora" / CARD).read_text() == own
    # A card that nobody changed is known as such where it is downloaded.
    (tmp_path / "got").mkdir()
    (tmp_path / "got" / CARD).write_bytes(card)
    assert (former_card(tmp_path / "got") is None) == (not mine)


def test_private(command: Command, hub: Hub, run: Path) -> None:
    status, output, _ = command("push", str(run), "me/mine", "--yes", "--private")
    assert (status, hub.private) == (0, {"me/mine": True})
    assert "(new, private)" in output


def test_of_a_public_repository_private_is_refused(command: Command, hub: Hub, run: Path) -> None:
    command("push", str(run), "me/mine", "--yes")
    (run / "lora" / "adapter_model.safetensors").write_text("changed")
    status, _, errors = command("push", str(run), "me/mine", "--yes", "--private")
    assert status == 1
    assert "exists and is public" in errors
    assert hub.files["me/mine"]["adapter_model.safetensors"] == b"the weights"
    status, output, _ = command("push", str(run), "me/mine", "--yes")
    assert "(exists, public)" in output
    assert hub.files["me/mine"]["adapter_model.safetensors"] == b"changed"
    assert sum(path == "/api/repos/create" for _, path in hub.requests) == 1


def test_what_is_asked_for_is_sent_too(command: Command, hub: Hub, run: Path) -> None:
    _, output, _ = command(
        "push", str(run), "me/mine", "--yes", "--also", "metrics.jsonl", "--also", "checkpoints/iter-000001"
    )
    more = {f"checkpoints/iter-000001/{name}" for name in ("optimizer.pt", "trained.safetensors")}
    assert set(hub.files["me/mine"]) == SENT | more | {"metrics.jsonl"}
    assert "metrics.jsonl" in output


@pytest.mark.parametrize("also", ["../other", "/etc/passwd", "absent.txt", ".", "lora/../../x"])
def test_what_is_not_of_the_run_is_never_sent(command: Command, hub: Hub, run: Path, also: str) -> None:
    (run.parent / "other").write_text("of another")
    status, _, errors = command("push", str(run), "me/mine", "--yes", "--also", also)
    assert status == 1
    assert "is not a file or folder of" in errors
    assert hub.requests == []


def test_a_file_with_folders_of_the_machine_is_said(command: Command, hub: Hub, run: Path) -> None:
    (run / "notes.txt").write_text(f"see {run.resolve()}/samples")
    _, output, _ = command("push", str(run), "me/mine", "--yes", "--also", "notes.txt")
    assert "note: notes.txt names folders of this machine" in output
    assert "metrics.jsonl names" not in output


def test_a_card_of_the_person_is_sent_as_it_is(command: Command, hub: Hub, run: Path) -> None:
    mine = "---\nlicense: mit\n---\nmy words\n"
    (run / "lora" / CARD).write_text(mine)
    _, output, _ = command("push", str(run), "me/mine", "--yes")
    assert hub.files["me/mine"][CARD].decode() == mine
    assert "licence" not in output


def test_a_missing_licence_is_said(command: Command, hub: Hub, run: Path) -> None:
    assert "note: README.md names no licence" in command("push", str(run), "me/mine", "--yes")[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "sent"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_it_asks_first(
    command: Command, hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, answer: str, sent: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    status, output, _ = command("push", str(run), "me/mine")
    assert (status == 0, "me/mine" in hub.files) == (sent, sent)
    assert ("nothing was uploaded" in output) == (not sent)


def test_without_a_terminal_it_shows_and_sends_nothing(command: Command, hub: Hub, run: Path) -> None:
    status, output, errors = command("push", str(run), "me/mine")
    assert status == 1
    assert "adapter_model.safetensors" in output
    assert "add --yes" in errors
    assert hub.files == {}


def test_without_a_token_nothing_is_asked_of_the_hub(
    command: Command, hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    status, output, errors = command("push", str(run), "me/mine", "--yes")
    assert status == 1
    assert "there is no token for the hub" in errors
    assert "hf auth login" in errors
    assert "adapter_model.safetensors" in output
    assert hub.requests == []


def test_offline(command: Command, hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    status, _, errors = command("push", str(run), "me/mine", "--yes")
    assert status == 1
    assert "the hub is switched off by HF_HUB_OFFLINE" in errors


@pytest.mark.parametrize("name", ["mine", "a/b/c", "me/..", "me/a b", "/mine", "me/", "https://huggingface.co/me/mine"])
def test_the_name_of_the_repository(command: Command, hub: Hub, run: Path, name: str) -> None:
    status, _, errors = command("push", str(run), name, "--yes")
    assert status == 1
    assert "is not the name of a repository" in errors
    assert hub.requests == []


def test_a_token_that_is_wrong_or_may_only_read(
    command: Command, hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.readers = True
    status, _, errors = command("push", str(run), "me/mine", "--yes")
    assert status == 1
    assert "cannot upload to me/mine" in errors
    assert "this token may only read" in errors
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    status, _, errors = command("push", str(run), "me/mine", "--yes")
    assert status == 1
    assert "Invalid credentials" in errors
    assert "hf_wrong" not in errors
    assert hub.files == {}


def test_a_hub_that_does_not_answer(command: Command, hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    status, _, errors = command("push", str(run), "me/mine", "--yes")
    assert status == 1
    assert errors.startswith("error: cannot look at me/mine on http://127.0.0.1:1: ")


# -- what is collected -------------------------------------------------------------------------------------------------


def test_a_run_without_a_result(run: Path) -> None:
    (run / "lora").rename(run / "elsewhere")
    with pytest.raises(ValueError, match=r"no trained weights yet; .*--checkpoint 1 .*flowgrpo export"):
        collect(run, "me/mine")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a run folder"):
        collect(tmp_path, "me/mine")


def test_a_folder_that_export_wrote(run: Path, tmp_path: Path) -> None:
    (run / "lora").rename(tmp_path / "mine")
    assert set(collect(tmp_path / "mine", "me/mine").files) == SENT - {CARD}
    with pytest.raises(ValueError, match="leave --also out"):
        collect(tmp_path / "mine", "me/mine", ["adapter_config.json"])


def test_a_link_cannot_bring_in_what_is_no_part_of_the_result(run: Path) -> None:
    os.symlink("../checkpoints/iter-000001/optimizer.pt", run / "lora" / "more.pt")
    with pytest.raises(ValueError, match="links that lead out"):
        collect(run, "me/mine")


def test_names_of_models() -> None:
    assert public_name(str(embedded_pipeline())) == "scenes"
    assert public_name(language_folder("arithmetic")) == "arithmetic"
    assert public_name("/home/jane/models/sd3/transformer") == "transformer"


def test_a_template_is_no_path(run: Path) -> None:
    config = {
        "chat_template": "/{{ x }}/y/z", "eos_token": "</s>", "escape": "/a\n/b", "slash": "/", "one": "/one",
        "two": "//", "three": "// /",
        "vocab_file": "/home/jane/a b/vocab.json", "files": ["C:\\Users\\jane\\merges.txt", "~/mine/too"],
        "nested": {"name_or_path": "./mine", "other": "owner/name"},
    }  # fmt: skip
    tokens = run / "lora" / "tokenizer.json"
    tokens.write_text(json.dumps({"merges": ["/usr/bin/env x", ["/a/b/c", "/"]]}))
    (run / "lora" / "tokenizer_config.json").write_text(json.dumps(config))
    files = collect(run, "me/mine").files
    assert files["tokenizer.json"] == tokens
    sent = files["tokenizer_config.json"]
    assert isinstance(sent, bytes)
    kept = {key: config[key] for key in ("chat_template", "eos_token", "escape", "slash", "one", "two", "three")}
    nested = {"name_or_path": "mine", "other": "owner/name"}
    assert json.loads(sent) == kept | {"vocab_file": "vocab.json", "files": ["merges.txt", "too"], "nested": nested}


@pytest.mark.slow
def test_as_a_user_starts_it(hub: Hub, run: Path, tmp_path: Path) -> None:
    of_the_hub = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-m", "flowgrpo", "push", str(run), "me/mine", "--private", "--yes"],
        env={**os.environ, **of_the_hub, "HF_HUB_OFFLINE": "0"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(hub.files["me/mine"]) == SENT
    assert hub.private == {"me/mine": True}
