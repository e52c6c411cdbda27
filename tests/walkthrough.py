"""Follows a walkthrough as a stranger does: writes every file and runs every command, in the order of the page."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import Command
from tests.doc_commands_checkout import environment
from tests.doc_commands_read import FENCE, FILE_NAME, ROOT

LAUNCHERS = {"torchrun", "accelerate"}
# These need the network; it is checked that the program knows the command.
ONLY_KNOWN = {"hf", "pip"}
# The run of a page is the run of any machine: two processes on the CPU, and a port that is free.
HERE = {"8": "2"}


@dataclass
class Walker:
    """A stranger in an empty folder.

    Attributes:
        home: the folder.
        command: runs `flowgrpo` in this process.
        swaps: what the page says for a large model, and what is written here in its place; in commands that load
            something, in programs, and nowhere else.
        small: overrides that make a training short, by the file of its recipe; "" is the default recipe.
        done: first words of the commands that were run.
        planned: what `flowgrpo plan` has printed last.
    """

    home: Path
    command: Command
    swaps: Mapping[str, str]
    small: Mapping[str, Sequence[str]]
    done: list[str] = field(default_factory=list)
    planned: str = ""

    def follow(self, page: Path) -> None:
        """Do everything that the page shows."""
        text = page.read_text(encoding="utf-8")
        for fence in FENCE.finditer(text):
            place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, fence.start()) + 1}"
            try:
                self._fence(fence[3].strip(), fence[4])
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{place}: {type(error).__name__}: {error}\n{fence[4]}") from error
        unused = [word for word in self.swaps if word not in text]
        assert not unused, f"{page.name} no longer says {', '.join(unused)}"

    def _fence(self, language: str, body: str) -> None:
        if language in ("yaml", "python") and (named := FILE_NAME.match(body)) is not None:
            (self.home / named[1]).write_text(body, encoding="utf-8")
        elif language == "python":
            exec(compile(self._swapped(body), "example", "exec"), {"__name__": "example"})
        elif language == "sh":
            for script in scripts(body):
                self._run(script)
        else:
            assert language == "text", f"no rule for a fence of {language or 'nothing'}"
            self._compare(body)

    def _compare(self, body: str) -> None:
        """Some lines of a plan are on the page; they must be what the plan prints."""
        if self.done[-1] == "flowgrpo plan":
            printed = {line.rstrip() for line in self.planned.splitlines()}
            wrong = [line for line in body.splitlines() if line.rstrip() not in printed]
            assert not wrong, f"`flowgrpo plan` does not print {wrong}, but:\n{self.planned}"

    def _run(self, script: str) -> None:
        words = script.split() if "<<" in script else shlex.split(script, comments=True)
        self.done.append(" ".join(words[:2]))
        if words[0] == "flowgrpo":
            self._flowgrpo(words[1:])
        elif words[0] in LAUNCHERS:
            self._launch(words)
        elif words[0] in ONLY_KNOWN:
            self._shell(" ".join([*words[: 3 if words[0] == "hf" else 2], "--help"]))
        else:
            self._shell(script)

    def _flowgrpo(self, words: list[str]) -> None:
        if words[0] == "plan":
            # The plan is of the page's own model: it reads no weights.
            self.planned = self._ended(words)
        else:
            self._ended(self._shorter(words))

    def _shorter(self, words: Sequence[str]) -> list[str]:
        recipe = next((word for word in words if word.endswith(".yaml")), "")
        return [self._swapped(word) for word in words] + (list(self.small[recipe]) if words[0] == "train" else [])

    def _ended(self, words: Sequence[str]) -> str:
        status, output, errors = self.command(*words)
        assert status == 0, f"`flowgrpo {' '.join(words)}` ended with {status}\n{output}{errors}"
        return output

    def _launch(self, words: list[str]) -> None:
        at = words.index("flowgrpo") + 1
        start = [HERE.get(word, word) for word in words[:at]]
        if start[0] == "accelerate":
            start[2:2] = ["--main_process_port", "0"]
        self._shell(shlex.join([*start, *self._shorter(words[at:])]), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")

    def _shell(self, script: str, **variables: str) -> None:
        done = subprocess.run(
            ["bash", "-ec", script], cwd=self.home, env=environment(ROOT, variables), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\nended with {done.returncode}\n{done.stdout}{done.stderr}"

    def _swapped(self, text: str) -> str:
        for page, here in self.swaps.items():
            text = text.replace(page, here)
        return text


def scripts(body: str) -> Iterator[str]:
    """The commands of a shell fence; a here-document belongs to its command, and so does a line after a backslash."""
    rest = body.splitlines()
    while rest:
        line = rest.pop(0)
        while line.endswith("\\"):
            line = line[:-1] + rest.pop(0).lstrip()
        found = re.search(r"<<'(\w+)'$", line)
        while found is not None and not line.endswith(f"\n{found[1]}"):
            line += f"\n{rest.pop(0)}"
        if line.strip():
            yield line
