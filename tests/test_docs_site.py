"""The documentation site builds in strict mode, has no broken link, and agrees with the code."""

import ast
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from typer.testing import CliRunner

import flowgrpo
from flowgrpo.cli.app import app
from flowgrpo.configs.load import load_recipe
from flowgrpo.parts.choice import options_model
from tests.test_docs import blocks, cells, script

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCES = ("mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "README.md")
PAGES = sorted(path for path in DOCS.rglob("*.md"))
FILLED = "\0"


def built(project: Path, site: Path) -> Path:
    """Build the site of a project; raises Abort if there is any warning."""
    build(load_config(str(project / "mkdocs.yml"), site_dir=str(site)))
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("site"))


FAULTS = (
    "nowhere.md",
    "rewards.md#no-such-heading",
    "#no-such-heading",
    "../NOTES.md",
    "../CONTRIBUTING.md#no-such-heading",
    "/rewards.md",
    "images/nowhere.png",
)
SOUND = """
[readme](../../README.md) [tests](../../CONTRIBUTING.md#tests) [kernels](../recipes.md#kernels)

```md
[shown](../../CONTRIBUTING.md)
```
"""


@dataclass
class Planted:
    """A site with faults, and the warnings about them."""

    site: Path
    warnings: list[str]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """A copy of the sources of the site, with broken links, and with a page that no link leads to."""
    project = tmp_path_factory.mktemp("planted") / "project"
    shutil.copytree(DOCS, project / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, project / name)
    (project / "docs" / "forgotten.md").write_text("# Forgotten\n", encoding="utf-8")
    for name, text in (
        ("docs/gallery.md", "".join(f"\n![gone]({fault}) [gone]({fault})\n" for fault in FAULTS)),
        ("docs/benchmarks/text.md", SOUND),
        ("CONTRIBUTING.md", "\n[gone](docs/gallery.md#no-such-heading)\n"),
    ):
        with (project / name).open("a", encoding="utf-8") as page:
            page.write(text)
    said: list[logging.LogRecord] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("mkdocs").addHandler(listener)
    try:
        with pytest.raises(Abort):
            built(project, project / "site")
    finally:
        logging.getLogger("mkdocs").removeHandler(listener)
    return Planted(project / "site", [record.getMessage() for record in said])


class Reader(HTMLParser):
    """Facts about a page: the files that it loads, the targets of its links, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if (place := named.get("id")) is not None:
            self.places.add(place)
        source = named.get("href") if tag == "link" else named.get("src")
        if source is not None:
            self.loaded.append(source)
        if tag == "a" and named.get("href") is not None:
            self.links.append(str(named["href"]))


def test_every_page_is_on_the_site(site: Path):
    for page in PAGES:
        assert (site / page.relative_to(DOCS).with_suffix(".html")).is_file(), page
    assert (site / "contributing.html").is_file()
    assert (site / "changelog.html").is_file()
    assert len(PAGES) >= 20


def test_site_has_nothing_but_pages_and_what_they_show(site: Path):
    assert not [path for path in site.rglob("*") if path.suffix in (".py", ".pyc", ".yaml", ".md")]


def test_pages_load_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        reader = Reader(page.read_text(encoding="utf-8"))
        assert reader.loaded, page
        assert not [source for source in reader.loaded if re.match(r"(\w+:)?//", source)], page
    for style in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]*)", style.read_text(encoding="utf-8"))
        assert found == [], style


def test_links_of_the_built_pages_lead_somewhere(site: Path):
    """Links are followed as in a browser, with anchors, and with pages made from files in the repository's root."""
    read = {page: Reader(page.read_text(encoding="utf-8")) for page in site.rglob("*.html") if page.name != "404.html"}
    followed = 0
    for page, reader in read.items():
        for link in reader.links:
            path, _, anchor = link.partition("#")
            if re.match(r"\w+:", link) or (not path and not anchor):
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{page.name}: {link}"
            if anchor:
                assert anchor in read[target].places, f"{page.name}: {link}"
            followed += 1
    assert followed > 500


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_link_is_a_fault(planted: Planted, fault: str):
    shown = fault.replace("../CONTRIBUTING.md", "contributing.md")
    assert any("'gallery.md'" in said and f"'{shown}'" in said for said in planted.warnings), planted.warnings


def test_faults_of_the_root_and_of_the_navigation_are_found(planted: Planted):
    said = "\n".join(planted.warnings)
    assert "'contributing.md' contains a link 'gallery.md#no-such-heading'" in said
    assert "forgotten.md" in said


def test_a_sound_page_is_not_blamed(planted: Planted):
    assert planted.warnings
    assert not [said for said in planted.warnings if "benchmarks/text.md" in said]


def test_links_between_docs_and_root_are_turned(planted: Planted):
    text = (planted.site / "benchmarks" / "text.html").read_text(encoding="utf-8")
    assert 'href="../index.html">readme<' in text
    assert 'href="../contributing.html#tests">tests<' in text
    assert 'href="../recipes.html#kernels">kernels<' in text
    assert "../../CONTRIBUTING.md" in re.sub("<[^>]+>", "", text)


# -- the command reference ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    return script("make_command_reference")


def test_command_reference_is_what_the_code_says(reference):
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == reference.page(), "run `make docs`"


def test_command_reference_has_what_help_prints(reference):
    """The options are compared with the printed help of each command, which typer makes in its own way."""
    sections = dict(re.findall(r"^## flowgrpo (.+?)\n(.*?)(?=^## |\Z)", reference.page(), re.MULTILINE | re.DOTALL))
    assert {"train", "rewards check", "pipelines check", "build scenes", "gallery"} <= set(sections)
    for name, section in sections.items():
        printed = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "400", "TERM": "dumb"})
        assert printed.exit_code == 0
        listed = set(re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE))
        told = set(re.findall(r"(?<![\w-])(--[\w-]+) (?= |\w)", printed.output)) - {"--help"}
        # Typer adds a flag that switches an option off that is off already.
        assert listed == {flag for flag in told if f"--{flag.removeprefix('--no-')}" not in told - {flag}}, name


def test_command_reference_refuses_a_parameter_without_help(reference):
    def silent(path: str) -> None:
        """A command."""

    with pytest.raises(ValueError, match="silent: path has no help"):
        list(reference.parameters(silent))


# -- what pages claim of the code --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own_model.md", "several_rewards.md"])
def test_recipes_of_the_pages_are_recipes(name: str, tmp_path: Path):
    examples = blocks(DOCS / name, "yaml")
    assert examples
    # A recipe may build on another recipe of the page, which may stand further below.
    for example in examples:
        if named := re.match(r"# (\S+\.yaml)\n", example):
            (tmp_path / named[1]).write_text(example, encoding="utf-8")
    for example in examples:
        (tmp_path / "example.yaml").write_text(example, encoding="utf-8")
        load_recipe(tmp_path / "example.yaml")


def test_guard_keys_are_those_of_the_schema():
    listed = {name.strip("`"): default.strip("`") for name, default in zip(
        cells(DOCS / "several_rewards.md", "Guards", 0), cells(DOCS / "several_rewards.md", "Guards", 1), strict=True
    )}  # fmt: skip
    fields = options_model("extension", "guard").model_fields
    assert listed == {name: "required" if f.is_required() else str(f.default) for name, f in fields.items()}


def test_fields_of_the_diagnostics_are_metrics():
    known = set(re.findall(r"`([^`]+)`", " ".join(cells(DOCS / "architecture.md", "Fields of `metrics.jsonl`", 0))))
    text = (DOCS / "diagnostics.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| field \|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    named = set(re.findall(r"`([^`]+)`", "".join(row.split("|")[1] for row in "".join(tables).splitlines())))
    assert len(named) >= 12
    assert named <= known | {"eval/NAME", "reward/total"}


def constants(tree: ast.AST) -> Iterator[str]:
    """The texts of a program, with a mark where a value is filled in."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [part.value if isinstance(part, ast.Constant) else FILLED for part in node.values]
            yield "".join(str(piece) for piece in pieces)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


@pytest.fixture(scope="module")
def messages() -> set[str]:
    """Every line of every text of the package that has fixed words."""
    found = set()
    for file in Path(flowgrpo.__file__).parent.rglob("*.py"):
        for text in constants(ast.parse(file.read_text(encoding="utf-8"))):
            found |= {line.strip() for line in text.split("\n") if len(re.findall(r"[a-z]{2,}", line)) >= 2}
    return found


def gives(messages: set[str], said: str) -> bool:
    """Whether the program can print this line, from one of its texts."""
    parts = (message.split(FILLED) for message in messages)
    able = (pieces for pieces in parts if all(piece in said for piece in pieces))
    return any(re.fullmatch(".*".join(map(re.escape, pieces)), said) for pieces in able)


def test_quoted_messages_are_those_that_the_code_gives(messages):
    quoted = [text.strip() for text in blocks(DOCS / "troubleshooting.md", "message")]
    quoted += [text.strip() for text in blocks(DOCS / "several_rewards.md", "message")]
    assert len(quoted) >= 20
    for said in quoted:
        assert gives(messages, said), said


def test_a_message_that_the_code_does_not_give_is_found(messages):
    assert gives(messages, "model.path 'sd35' is not a folder; give a pipeline folder, a hub id (owner/name) or scenes")
    assert not gives(
        messages, "model.path 'sd35' is no folder; give a pipeline folder, a hub id (owner/name) or scenes"
    )
    assert not gives(messages, "anything at all, said in passing")
