"""Prompts of other scripts in contact sheets: a font that has the letters, or a note."""

import logging
from pathlib import Path

import matplotlib
import pytest
from PIL import Image, ImageDraw

from flowgrpo.gallery import lettering
from flowgrpo.gallery.exports import INK, _letter
from flowgrpo.gallery.lettering import font_for, note_on

FONTS = [Path(matplotlib.get_data_path()) / "fonts" / "ttf"]


def drawn(text: str) -> bytes:
    sheet = Image.new("RGB", (120, 24), "white")
    _letter(ImageDraw.Draw(sheet), (2, 2), text, 116, INK)
    return sheet.tobytes()


@pytest.mark.parametrize("text", ["café", "кот", "γάτα", "שלום", "naïve Größe"])
def test_an_installed_font_draws_what_pillows_own_font_lacks(text: str) -> None:
    assert font_for("a red circle, 3 of 4", 12, FONTS).getname()[0] == "Aileron"
    found = font_for(text, 12, FONTS)
    assert found.getname()[0].startswith("DejaVu Sans")
    assert lettering._lacking(found, lettering._letters(text)) == set()


def test_two_prompts_of_another_script_look_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lettering, "font_folders", lambda: [])
    assert drawn("кот") == drawn("дом")
    monkeypatch.setattr(lettering, "font_folders", lambda: FONTS)
    assert drawn("кот") != drawn("дом")


def test_letters_that_no_font_has_are_noted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    monkeypatch.setattr(lettering, "font_folders", lambda: [tmp_path, *FONTS])
    with caplog.at_level(logging.WARNING):
        note_on(["a red circle", "кот"])
        assert caplog.text == ""
        note_on(["猫 on a sofa", "犬"])
    assert "no font of this machine has 犬 猫, so a box is drawn for each" in caplog.text
    # What can be drawn of such a prompt is drawn by the first font that lacks the fewest letters.
    assert font_for("猫 on a sofa", 12).getname()[0] == "Aileron"


def test_fonts_are_looked_for_where_the_system_and_matplotlib_keep_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_DIRS", f"{tmp_path}/share:{tmp_path}/absent")
    (tmp_path / "share" / "fonts").mkdir(parents=True)
    (tmp_path / ".fonts").mkdir()
    assert lettering.font_folders() == [tmp_path / ".fonts", tmp_path / "share" / "fonts", *FONTS]
