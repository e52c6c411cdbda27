"""Every command, program and recipe of the documentation is tried as a reader would, page by page and in order."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgrpo.rewards import registry
from tests.conftest import Command
from tests.doc_commands_programs import NOT_RUN, PACKAGES, SHORTER, follow
from tests.doc_commands_read import PAGES, ROOT, Example, examples
from tests.doc_commands_reader import Reader
from tests.doc_commands_rules import RULES
from tests.doc_commands_stock import Stock, make_stock


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return make_stock(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def done() -> set[str]:
    return set()


@pytest.fixture
def reader(
    stock: Stock, done: set[str], command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Reader]:
    """A reader in an empty folder, who has only the files of other pages."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    modules = set(sys.modules)
    yield Reader(tmp_path, stock, command, monkeypatch, done, RULES)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def faults(reader: Reader, shown: list[Example]) -> list[str]:
    """The examples that do not work, each with its place; after a fault, the rest of the page is still tried."""
    found = []
    for other in (other for page in PAGES for other in examples(page)):
        if other.file is not None and not (reader.home / other.file).exists():
            (reader.home / other.file).write_text(other.text, encoding="utf-8")
    for own in reversed([own for own in shown if own.file is not None]):
        (reader.home / str(own.file)).write_text(own.text, encoding="utf-8")
    for example in shown:
        try:
            follow(reader, example)
        except (Exception, SystemExit) as error:
            found.append(f"{example.place}: {example.text.strip()}\n{type(error).__name__}: {error}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_works(page: Path, reader: Reader) -> None:
    found = faults(reader, examples(page))
    assert not found, "\n\n".join(found)


def test_the_documentation_is_found() -> None:
    shown = [example for page in PAGES for example in examples(page)]
    assert len(PAGES) > 15
    assert sum(example.kind == "command" for example in shown) > 60
    assert {example.kind for example in shown} == {"command", "span", "python", "yaml", "script"}


PAGE = """# Try it

```sh
flowgrpo plan my.yaml --draw   # a remark
flowgrpo train my.yaml \\
    run.seed=1; flowgrpo recipes && make docs
```

- In a list `flowgrpo
  resume RUN` and `make` and ``flowgrpo plan "a\\|b"``:

  ```console
  $ pip install 'one[two]'
  Collecting one
  ```

```text
Usage: flowgrpo gallery
flowgrpo gallery RUNS... [OPTIONS]
```

```python
# mine.py
x = 1
```
"""


def test_commands_are_found_with_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    found = examples(page)
    assert [(example.line, example.kind, *example.words) for example in found] == [
        (4, "command", "flowgrpo", "plan", "my.yaml", "--draw"),
        (5, "command", "flowgrpo", "train", "my.yaml", "run.seed=1"),
        (5, "command", "flowgrpo", "recipes"),
        (5, "command", "make", "docs"),
        (9, "span", "flowgrpo", "resume", "RUN"),
        (10, "span", "flowgrpo", "plan", "a|b"),
        (13, "command", "pip", "install", "one[two]"),
        (19, "command", "flowgrpo", "gallery", "RUNS...", "[OPTIONS]"),
        (23, "python"),
    ]
    assert found[-1].file == "mine.py"
    assert found[0].place == "page.md:4"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```sh\nflowgrpo fly\n```", "page.md:2: flowgrpo fly\nNoRule: there is no command `flowgrpo fly`"),
        ("```sh\nfrobnicate runs\n```", "page.md:2: frobnicate runs\nNoRule: no rule"),
        ("See `flowgrpo rewards serv X`.", "page.md:1: flowgrpo rewards serv X\nNoRule: there is no command"),
        ("Use `flowgrpo sample --nose`.", "`flowgrpo sample` has no option --nose"),
        ("Use `flowgrpo train RECIPE --nose`.", "`flowgrpo train` has no option --nose"),
        ("```sh\nflowgrpo plan defualt\n```", "did you mean 'default'?"),
        ("```sh\nflowgrpo plan run.sed=1\n```", "did you mean 'seed'?"),
        ("```sh\nflowgrpo gallery runs/mine --out a | tee b\n```", "pipes and redirections are not tried"),
        ("```sh\npip install flowgrpo[text,gpu]\n```", "has no extra gpu"),
        ("```sh\npip install leftpad\n```", "leftpad is neither a dependency"),
        ("```sh\nmake tea\n```", "no target tea"),
        ("```sh\npython docs/make_tea.py\n```", "there is no docs/make_tea.py"),
        ("```sh\naccelerate launch --num_processes 2 train.py\n```", "it starts train.py"),
        ("```sh\ntorchrun --nproc-per-node 2 train.py\n```", "it starts train.py"),
        ("```python\nfrom flowgrpo.rewards import nothing\n\nx = elsewhere\n```", "cannot import name 'nothing'"),
        ("```python\nx = elsewhere\n```", "NameError: name 'elsewhere' is not defined"),
        ("```python\nassert 1 == 2\n```", "page.md:2: assert 1 == 2\nAssertionError"),
        ("```yaml\nrewards:\n  - {nam: gold}\n```", "did you mean 'name'?"),
        ("```yaml\nservices: {}\n```", "this YAML is no recipe"),
    ],
)
def test_what_does_not_work_is_told_with_its_place(text: str, says: str, reader: Reader) -> None:
    page = reader.home / "page.md"
    page.write_text(text, encoding="utf-8")
    (found,) = faults(reader, examples(page))
    assert found.startswith("page.md:")
    assert says in found


def test_every_exception_is_still_needed() -> None:
    shown = [example.words for page in PAGES for example in examples(page)]
    for start in NOT_RUN:
        assert any(words[: len(start)] == start for words in shown), " ".join(start)
    for script in SHORTER:
        assert ("python", script) in {words[:2] for words in shown}, script
    for package in PACKAGES:
        assert any(word.startswith(package) for words in shown for word in words[2:]), package
