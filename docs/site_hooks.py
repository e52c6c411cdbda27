"""Hooks of the documentation site (see mkdocs.yml), so that the same files work on the site and in a code browser.

Pages of the repository's root become pages of the site, and links between the root and docs/ are rewritten. Anchors
follow GitHub's rule, so that a link that works on GitHub works on the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT_FILES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "LICENSE": "LICENSE.txt"}
"""Files of the repository's root, and where they are on the site."""
SITE_PLACES = {**ROOT_FILES, "README.md": "index.md"}

_CODE = re.compile(r"<code>[^<]*</code>")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)#\s:]+)([^)\s]*\))")


def github_anchor(heading: str, separator: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> None:
    """Make anchors by GitHub's rule."""
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": github_anchor}


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the pages of the root, and the styles of code for both colour schemes."""
    root = Path(config.config_file_path).parent
    for name, place in ROOT_FILES.items():
        files.append(File.generated(config, place, abs_src_path=str(root / name)))
    light: Any = HtmlFormatter(style="default")
    dark: Any = HtmlFormatter(style="github-dark")
    colours = light.get_style_defs(".codehilite") + "\n" + dark.get_style_defs("[data-bs-theme=dark] .codehilite")
    files.append(File.generated(config, "pygments.css", content=colours))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between docs/ and the repository's root."""
    docs = PurePosixPath(Path(config.docs_dir).relative_to(Path(config.config_file_path).parent).as_posix())
    here = page.file.src_uri
    source = next((name for name, place in ROOT_FILES.items() if place == here), str(docs / here))

    def turned(link: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(source).parent / link[2])
        inside = PurePosixPath(target).relative_to(docs) if PurePosixPath(target).is_relative_to(docs) else None
        place = SITE_PLACES.get(target) if inside is None else str(inside)
        return link[0] if place is None else f"{link[1]}{os.path.relpath(place, PurePosixPath(here).parent)}{link[3]}"

    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(turned, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, _LINK.sub(turned, markdown[at:])])


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the escape of a bar within code: GitHub needs it in tables, but the site would show it."""
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), html)
