"""A run folder of a stranger runs nothing, sends nothing, and leads no command out of it, until somebody trusts it."""

import http.server
import json
import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowgrpo.intake import ledger
from tests.conftest import Command
from tests.hostile.case import STARTS

READING = {
    "train": "train run/config.yaml --out new",
    "plan": "plan run/config.yaml",
    "resume": "resume run",
    "evaluate": "evaluate run",
    "sample": "sample 'a red cup' --model run --out new",
}
"""Commands that read the recipe of a run."""
SHOWING = {
    "gallery": "gallery run",
    "elsewhere": "gallery run --out new",
    "report": "gallery run --report",
    "single": "gallery run --single new.html",
    "watch": "gallery run --watch",
    "follow": "watch run",
}
"""Commands that show a run."""
COMMANDS = READING | SHOWING
BOMB = "name: x\na0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
DOCUMENTS = {
    "multiplying anchors": (BOMB, "anchors multiply"),
    "an anchor within itself": ("name: x\nrun: &a {b: *a}\n", "contains itself"),
    "depth": ("name: " + "[" * 300 + "]" * 300, "levels deep"),
    "endless depth": ("name: " + "[" * 100_000, "levels deep"),
    "base 60": ("name: 1" + ":59" * 200_000, "digits"),
    "not YAML": ("name: [", "not YAML"),
    "a list": ("- 1\n", "not a mapping"),
    "no text": (b"name: \xff", "UTF-8"),
}


@pytest.fixture(autouse=True)
def _new_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins on a machine that remembers nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(ledger, "_here", set())


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run` of a stranger, and with files that are none of its business."""
    folder = tmp_path_factory.mktemp("stranger")
    STARTS["run"](folder)
    (folder / "run" / "checkpoints").mkdir()
    (folder / "secret.txt").write_text("secret")
    (folder / "mine").mkdir()
    return folder


@pytest.fixture
def home(tmp_path: Path, stranger: Path) -> Path:
    """A copy of `stranger`."""
    shutil.copytree(stranger, tmp_path, dirs_exist_ok=True)
    return tmp_path


def pairs(commands: Iterable[str], cases: Iterable[str], whole: Iterable[str]) -> list[tuple[str, str]]:
    """Each command with some case, each case with some command, and the commands in `whole` with all cases."""
    names, found = list(commands), list(cases)
    dealt = {(names[k % len(names)], found[k % len(found)]) for k in range(max(len(names), len(found)))}
    return sorted(dealt | {(name, case) for name in whole for case in found})


def change(home: Path, **keys: Any) -> None:
    file = home / "run" / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | keys))


def refused(command: Command, words: str, *says: str) -> str:
    status, output, errors = command(*shlex.split(words))
    assert status == 1, output + errors
    assert errors.startswith("error: "), errors
    assert "Traceback" not in errors
    assert [word for word in says if word not in errors] == [], errors
    return errors


@pytest.mark.parametrize(("name", "document"), pairs(COMMANDS, DOCUMENTS, ["resume", "sample", "gallery"]))
def test_a_hostile_recipe_ends_in_one_sentence(home: Path, command: Command, name: str, document: str):
    content, said = DOCUMENTS[document]
    (home / "run" / "config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    errors = refused(command, COMMANDS[name], "config.yaml", said)
    assert len(errors) < 500


LINKS = {
    "votes": ("votes.jsonl", "secret.txt"),
    "a file that does not exist yet": ("votes.jsonl", "mine/new.txt"),
    "data of the gallery": ("gallery/data", "mine"),
    "the recipe": ("config.yaml", "mine/config.yaml"),
    "checkpoints": ("checkpoints", "mine"),
    "the lock": (".flowgrpo-lock", "secret.txt"),
    "an image": ("samples/iter-000000/eval-0-5-0.png", "secret.txt"),
    "up and away": ("run.log", "../secret.txt"),
}


@pytest.mark.parametrize(
    ("name", "link"), pairs(["resume", "evaluate", "sample", *SHOWING], LINKS, ["resume", "sample", "gallery"])
)
def test_a_link_that_leads_out_is_refused_and_nothing_outside_changes(
    home: Path, command: Command, name: str, link: str
):
    place, target = LINKS[link]
    path = home / "run" / place
    path.parent.mkdir(exist_ok=True)
    if target == "mine/config.yaml":
        path.rename(home / target)
    elif path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target if target.startswith("..") else home / target)
    before = contents(home)
    refused(command, COMMANDS[name], str(Path("run") / place), "lead out", "--trust", "remove")
    assert contents(home) == before


def contents(home: Path) -> dict[str, bytes]:
    """The files of the user, without the run."""
    files = (path for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", ["resume", "evaluate", "sample", "gallery", "watch", "follow"])
def test_a_named_pipe_does_not_stop_a_command_for_ever(home: Path, command: Command, name: str):
    (home / "run" / "metrics.jsonl").unlink()
    os.mkfifo(home / "run" / "metrics.jsonl")
    refused(command, COMMANDS[name], "metrics.jsonl is a named pipe", "remove it")


def test_links_within_the_run_and_a_run_behind_a_link_are_fine(home: Path, command: Command):
    (home / "run" / "latest.png").symlink_to("samples/iter-000000/eval-0-5-0.png")
    (home / "disk").mkdir()
    (home / "run").rename(home / "disk" / "run")
    (home / "run").symlink_to(home / "disk" / "run")
    status, output, errors = command("gallery", "run")
    assert (status, errors) == (0, ""), output


def test_links_of_ones_own_are_remembered_until_one_is_added(home: Path, command: Command):
    votes = home / "run" / "votes.jsonl"
    votes.symlink_to(home / "mine" / "votes.jsonl")
    refused(command, "gallery run", "votes.jsonl")
    assert command("gallery", "run", "--trust")[0] == 0
    assert command("gallery", "run")[0] == 0
    (home / "run" / "run.log").symlink_to(home / "secret.txt")
    refused(command, "gallery run", "run.log")


def test_a_folder_for_the_gallery_is_looked_at_too(home: Path, command: Command):
    assert command("gallery", "run", "--out", "page")[0] == 0
    data = home / "page" / "data"
    data.rename(home / "mine" / "data")
    data.symlink_to(home / "mine" / "data")
    refused(command, "gallery run --out page", "page/data")


def test_a_new_run_is_not_made_over_a_link(home: Path, command: Command):
    (home / "new").mkdir()
    (home / "new" / ".flowgrpo-lock").symlink_to(home / "secret.txt")
    refused(command, "train default --out new", ".flowgrpo-lock", "lead out")
    assert (home / "secret.txt").read_text() == "secret"


REWARD = {"name": "evil.py:score", "weight": 1.0, "options": {}}
MARKED = "open('ran', 'w').close()\ndef score(images, prompts): return [0.0] * len(prompts)\n"
FOREIGN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a file": ({"rewards": [REWARD]}, ["run the reward evil.py:score"]),
    "a file without a name": ({"rewards": [{"name": "evil.py"}]}, ["evil.py"]),
    "a file with an empty name": ({"rewards": [{"name": "evil.py:"}]}, ["evil.py:"]),
    "a file for evaluations": ({"evaluate": {"rewards": [REWARD]}}, ["evil.py:score"]),
    "a module": ({"rewards": [{"name": "evil:score"}]}, ["run the reward evil:score"]),
    "a program": (
        {"rewards": [{"name": "subprocess:Popen", "options": {"args": ["touch", "ran"]}}]},
        ["subprocess:Popen", "touch"],
    ),
    "a judge": (
        {"rewards": [{"name": "win_rate", "options": {"judge": "evil.py:score"}}]},
        ["run the reward evil.py:score"],
    ),
    "a judge without a name": ({"rewards": [{"name": "win_rate", "options": {"judge": "evil.py"}}]}, ["evil.py"]),
    "a judge with a wrong name": ({"rewards": [{"name": "win_rate", "options": {"judge": "evil: x"}}]}, ["evil: x"]),
    "a reward within a reward": (
        {"rewards": [{"name": "length", "options": {"mode": "cosine", "limit": 9, "correct": "evil.py:score"}}]},
        ["evil.py:score"],
    ),
    "a reward of styles": (
        {"rewards": [{"name": "relative", "options": {"reward": "evil.py:f", "liked": ["a"], "disliked": ["b"]}}]},
        ["run the reward evil.py:f"],
    ),
    "an address": (
        {"rewards": [{"name": "remote", "options": {"url": "http://127.0.0.1:1", "token_env": "MY_SECRET"}}]},
        ["send prompts and samples and the environment variable MY_SECRET to http://127.0.0.1:1"],
    ),
    "an address of a judge": (
        {
            "rewards": [
                {
                    "name": "win_rate",
                    "options": {
                        "judge": "remote",
                        "judge_options": {"url": "http://127.0.0.1:1", "token_env": "MY_SECRET"},
                    },
                }
            ]
        },
        ["MY_SECRET", "http://127.0.0.1:1"],
    ),
    "a data set of the hub": (
        {"data": {"train": "hub:evil/set?split=train", "heldout": None}},
        ["download the data set evil/set from the hub"],
    ),
    "an address that hides the line above": (
        {
            "rewards": [
                REWARD,
                {"name": "remote", "options": {"url": "http://127.0.0.1:1/\x1b[1A\x1b[M\nNothing else."}},
            ]
        },
        ["run the reward evil.py:score", r"http://127.0.0.1:1/\x1b[1A\x1b[M\nNothing else."],
    ),
    "no box": ({"rewards": [{"name": "code", "options": {"unsafe": True}}]}, ["without a box"]),
}
PARTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a kernel": ({"sampler": {"kernel": "evil.py:score"}}, ["run the part evil.py:score"]),
    "a kernel without a name": ({"sampler": {"kernel": "evil.py"}}, ["evil.py"]),
    "a kernel with an empty name": ({"sampler": {"kernel": "evil.py:"}}, ["evil.py:"]),
    "a kernel with a wrong name": ({"sampler": {"kernel": "evil:a b"}}, ["evil:a b"]),
    "a library": ({"sampler": {"kernel": "http://x/evil.so:f"}}, ["evil.so"]),
    "a kernel with options": ({"sampler": {"kernel": {"name": "evil.py:score", "level": 1}}}, ["evil.py:score"]),
    "a window in a plan": (
        {"sampler": {"plan": {"name": "window", "window": {"name": "./evil.py:score"}}}},
        ["./evil.py:score"],
    ),
    "an extension": ({"extensions": ["evil.py:score"]}, ["evil.py:score"]),
    "a penalty": ({"penalties": [{"name": "evil:score", "weight": 1.0}]}, ["evil:score"]),
    "a surrogate": ({"objective": {"name": "transition", "surrogate": "evil.py:score"}}, ["evil.py:score"]),
    "a base": ({"base": "evil.yaml"}, ["evil.py:score"]),
    "attention of the hub": ({"model": {"path": "scenes", "attention": "sage_hub"}}, ["sage_hub"]),
}


SAMPLED = [("sample", what) for what in PARTS]
"""`sample` makes no reward."""


def foreign(home: Path, keys: dict[str, Any]) -> None:
    change(home, **keys)
    if "base" in keys:
        (home / "run" / "config.yaml").write_text(yaml.safe_dump(keys))
    (home / "evil.py").write_text(MARKED)
    (home / "run" / "evil.yaml").write_text("base: default\nextensions: [evil.py:score]\n")


@pytest.mark.parametrize(
    ("name", "what"), pairs([name for name in READING if name != "sample"], FOREIGN | PARTS, ["train"]) + SAMPLED
)
def test_code_and_addresses_are_listed_and_nothing_runs(
    home: Path, command: Command, monkeypatch: pytest.MonkeyPatch, name: str, what: str
):
    monkeypatch.syspath_prepend(home)
    keys, says = (FOREIGN | PARTS)[what]
    foreign(home, keys)
    refused(command, READING[name], "run/config.yaml", "--trust", *says)
    assert not (home / "ran").exists()
    assert not (home / "new").exists()


@pytest.mark.parametrize("what", [*PARTS, *DOCUMENTS])
@pytest.mark.parametrize("words", ["push run OWNER/NAME --yes", "export run --out new"])
def test_the_result_of_a_foreign_run_is_given_on_without_its_code(home: Path, command: Command, words: str, what: str):
    (home / "run" / "lora").mkdir()
    (home / "run" / "lora" / "pytorch_lora_weights.safetensors").write_bytes(b"weights")
    if what in PARTS:
        keys, says = PARTS[what]
        foreign(home, keys)
        refused(command, words, "run/config.yaml", "--trust", *says)
    else:
        content, said = DOCUMENTS[what]
        (home / "run" / "config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        refused(command, words, "config.yaml", said)
    assert not (home / "ran").exists()
    assert not (home / "new").exists()


@pytest.mark.parametrize("name", SHOWING)
def test_a_gallery_runs_nothing_of_a_foreign_run(home: Path, command: Command, name: str):
    foreign(home, {"rewards": [REWARD], "extensions": ["evil.py:score"], "run": {"iterations": 2}})
    (home / "run" / "metrics.jsonl").write_text(json.dumps({"iteration": 2}) + "\n")
    status, _, errors = command(*shlex.split(SHOWING[name]))
    assert status == 0, errors
    assert not (home / "ran").exists()


@pytest.mark.parametrize("options", [{"args": ["touch", "ran"]}, {}])
@pytest.mark.parametrize("name", ["subprocess:Popen", "subprocess:run", "os:system", "shutil:rmtree", "torch.hub:load"])
@pytest.mark.parametrize("words", ["plan run/config.yaml --trust", "resume run --trust"])
def test_what_is_no_reward_is_not_called_even_with_trust(
    home: Path, command: Command, words: str, name: str, options: dict[str, Any]
):
    change(home, rewards=[{"name": name, "options": options}])
    refused(command, words, name, "reward")
    assert not (home / "ran").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"extensions": ["subprocess:Popen"]},
        {"sampler": {"kernel": "os:system"}},
        {"advantage": "subprocess:run"},
        {"objective": "subprocess:Popen"},
    ],
)
def test_what_is_no_part_is_not_called_even_with_trust(home: Path, command: Command, keys: dict[str, Any]):
    change(home, **keys)
    refused(command, "plan run/config.yaml --trust", "is a part of Python")


class Asked(http.server.BaseHTTPRequestHandler):
    """A server of somebody else, which keeps what it is told."""

    seen: list[str]

    def do_GET(self) -> None:
        type(self).seen.append(str(self.headers))
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    Asked.seen = []
    with http.server.HTTPServer(("127.0.0.1", 0), Asked) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join()


def test_no_environment_variable_is_sent_before_trust(
    home: Path, command: Command, server: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_SECRET", "a-secret-of-mine")
    change(home, rewards=[{"name": "remote", "options": {"url": server, "token_env": "MY_SECRET", "patience": 0.1}}])
    for words in ("evaluate run", "resume run", "train run/config.yaml --out new"):
        refused(command, words, server, "MY_SECRET", "--trust")
    assert Asked.seen == []
    refused(command, "resume run --trust", "remote")
    assert "a-secret-of-mine" in Asked.seen[0]
    before = len(Asked.seen)
    refused(command, "resume run", "remote")
    assert len(Asked.seen) > before


def test_a_recipe_of_the_package_alone_needs_no_trust(home: Path, command: Command):
    status, output, errors = command("plan", "run/config.yaml")
    assert (status, errors) == (0, ""), output
    assert not (home / "state").exists()
    assert not list((home / "temporary").iterdir())


def test_a_recipe_that_the_user_names_is_the_users_own(home: Path, command: Command):
    (home / "evil.py").write_text(MARKED)
    (home / "mine.yaml").write_text("base: default\nrewards: [{name: 'evil.py:score'}]\n")
    assert command("plan", "mine.yaml")[0] == 0
    assert (home / "ran").exists()


def test_words_of_the_command_line_are_the_users_own(home: Path, command: Command):
    (home / "mine.py").write_text(MARKED)
    status, output, errors = command("plan", "run/config.yaml", "rewards=[{name: 'mine.py:score'}]")
    assert (status, errors) == (0, ""), output


@pytest.mark.parametrize("source", ["run/config.yaml", "link.yaml", "run/checkpoints/iter-000001/config.yaml"])
def test_no_other_name_hides_a_recipe_of_a_run(home: Path, command: Command, source: str):
    foreign(home, {"rewards": [REWARD]})
    checkpoint = home / "run" / "checkpoints" / "iter-000001"
    checkpoint.mkdir()
    (checkpoint / "config.yaml").write_text((home / "run" / "config.yaml").read_text())
    (home / "link.yaml").symlink_to(home / "run" / "config.yaml")
    refused(command, f"plan {source}", "evil.py:score")
    refused(command, f"evaluate scenes {source}", "evil.py:score")


def test_trust_is_given_once_and_for_the_very_same_thing(home: Path, command: Command):
    """Code is known by its path or its content; another option is another thing, and another weight is not."""
    code = "def score(images, prompts, scale=1.0): return [scale] * len(prompts)\n"
    (home / "evil.py").write_text(code)
    change(home, rewards=[REWARD])
    plan = ("plan", "run/config.yaml")
    refused(command, "plan run/config.yaml", "evil.py:score")
    assert command(*plan, "--trust")[0] == 0
    assert command(*plan)[0] == 0
    change(home, rewards=[REWARD | {"weight": 3.0}])
    (home / "evil.py").write_text(code + "# changed\n")
    assert command(*plan)[0] == 0
    change(home, rewards=[REWARD | {"options": {"scale": 2.0}}])
    refused(command, "plan run/config.yaml", "evil.py:score", "scale")


def test_a_moved_project_is_known_by_the_content_of_its_code(
    home: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    (home / "evil.py").write_text(MARKED)
    change(home, rewards=[REWARD])
    assert command("plan", "run/config.yaml", "--trust")[0] == 0
    (home / "moved").mkdir()
    for name in ("run", "evil.py"):
        (home / name).rename(home / "moved" / name)
    monkeypatch.chdir(home / "moved")
    assert command("plan", "run/config.yaml")[0] == 0
    with (home / "moved" / "evil.py").open("a") as file:
        file.write("# changed\n")
    refused(command, "plan run/config.yaml", "evil.py:score")


def test_code_within_the_run_is_known_by_its_content_only(home: Path, command: Command):
    (home / "run" / "evil.py").write_text(MARKED)
    change(home, rewards=[REWARD | {"name": "run/evil.py:score"}])
    assert command("plan", "run/config.yaml", "--trust")[0] == 0
    assert command("plan", "run/config.yaml")[0] == 0
    with (home / "run" / "evil.py").open("a") as file:
        file.write("# changed\n")
    refused(command, "plan run/config.yaml", "run/evil.py:score")


def test_sampling_asks_about_parts_only_and_its_trust_is_for_parts_only(home: Path, command: Command):
    foreign(home, {"rewards": [REWARD], "sampler": {"kernel": "evil.py:kernel"}})
    errors = refused(command, READING["sample"], "evil.py:kernel")
    assert "evil.py:score" not in errors
    command(*shlex.split(READING["sample"]), "--trust")
    errors = refused(command, "resume run", "evil.py:score")
    assert "evil.py:kernel" not in errors


def test_a_gallery_with_trust_trusts_no_code(home: Path, command: Command):
    foreign(home, {"rewards": [REWARD]})
    assert command("gallery", "run", "--trust")[0] == 0
    refused(command, "resume run", "evil.py:score")


def test_a_home_that_cannot_be_written_is_said_and_the_command_goes_on(
    home: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    foreign(home, {"rewards": [REWARD]})
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "secret.txt"))
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    status, output, errors = command("plan", "run/config.yaml", "--trust")
    assert (status, errors) == (0, ""), output
    assert "trusted.jsonl cannot be written" in output
    assert "temporary files" in output
    monkeypatch.setattr(ledger, "_here", set())
    assert command("plan", "run/config.yaml")[0] == 0
