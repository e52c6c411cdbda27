"""Sounds in the gallery: a picture of the spectrum with a player, from a WAV file that lies beside it."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.gallery import exports
from flowgrpo.gallery.build import build_gallery
from flowgrpo.gallery.exports import write_dataset, write_single
from flowgrpo.gallery.run_reading import read_run
from flowgrpo.gallery.scored_pairs import write_scored_pairs
from flowgrpo.gallery.vote_pairs import sources_of
from flowgrpo.media.sound import HEIGHT, WIDTH, read_sound, spectrogram, write_sound
from flowgrpo.training.folder.run_folder import RunFolder, save_sample
from flowgrpo.votes.samples import read_samples

RATE = 8000


def tone(hertz: float) -> torch.Tensor:
    return (0.5 * torch.sin(2 * torch.pi * hertz * torch.arange(RATE) / RATE))[None]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "run", "name: heard\n")
    for iteration, hertz in ((0, 2000.0), (4, 200.0)):
        record = {
            "prompt": "a hum", "prompt_id": 0, "seed": 0, "sample": 0, "sampling_rate": RATE,
            "rewards": {"low": -hertz}, "sub_scores": {}, "notes": {}, "columns": {},
        }  # fmt: skip
        folder.save_samples("eval", iteration, tone(hertz)[None], [record])
    return tmp_path / "run"


def test_a_sound_comes_back_from_its_file(tmp_path: Path):
    sound = torch.rand(2, 999) * 2.4 - 1.2
    write_sound(tmp_path / "a.wav", sound.numpy(), 44100)
    found, rate = read_sound(tmp_path / "a.wav")
    assert (found.shape, rate, found.dtype) == ((2, 999), 44100, np.float32)
    assert np.abs(found - sound.clamp(-1, 1).numpy()).max() <= 0.5001 / (2**15 - 1)
    assert [file.name for file in tmp_path.iterdir()] == ["a.wav"]


def test_files_that_are_no_sounds_of_16_bits_are_refused(tmp_path: Path):
    file = tmp_path / "a.wav"
    write_sound(file, tone(100.0).numpy(), RATE)
    whole = file.read_bytes()
    for content, message in (
        (b"", "is not a WAV file"),
        (b"RIFF" + whole[4:20], "is not a WAV file"),
        (whole[:-100], "is cut short"),
        (whole[:34] + b"\x08" + whole[35:], "8 bits a sample"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_sound(file)


def test_the_spectrum_shows_pitch_upwards_and_time_to_the_right():
    half = torch.cat([tone(200.0)[:, : RATE // 2], tone(2000.0)[:, : RATE // 2]], dim=1)
    picture = np.asarray(spectrogram(half.numpy(), RATE)).sum(-1)
    assert picture.shape == (HEIGHT, WIDTH)
    low, high = picture[:, WIDTH // 4].argmax(), picture[:, 3 * WIDTH // 4].argmax()
    octaves = HEIGHT / np.log2(4000 / 40) * np.log2(2000 / 200)
    assert abs((low - high) - octaves) <= 3
    assert np.asarray(spectrogram(np.zeros((1, 5)), RATE)).sum() > 0  # black, which is not quite 0


def test_a_sample_of_a_sound_has_both_files_and_the_index_names_them(run: Path):
    samples, skipped = read_samples(run / "samples" / "index.jsonl")
    assert skipped == 0
    assert [(one.image, one.sound) for one in samples] == [
        ("iter-000000/eval-0000.png", "iter-000000/eval-0000.wav"),
        ("iter-000004/eval-0000.png", "iter-000004/eval-0000.wav"),
    ]
    with Image.open(run / "samples" / str(samples[0].image)) as picture:
        assert picture.size == (WIDTH, HEIGHT)
    assert read_sound(run / "samples" / str(samples[1].sound))[1] == RATE


def test_a_sound_outside_of_the_folder_is_refused(run: Path):
    index = run / "samples" / "index.jsonl"
    record = json.loads(index.read_text().splitlines()[0])
    for path, message in (("../../secret.wav", "leads outside"), ("a.exe", "is not one of .wav")):
        index.write_text(json.dumps({**record, "sound": path}) + "\n")
        with pytest.raises(ValueError, match=message):
            read_samples(index)


def test_the_gallery_names_the_sounds_and_says_what_they_are(run: Path, tmp_path: Path):
    build_gallery([run], tmp_path / "gallery")
    data = {file.name: file.read_text() for file in (tmp_path / "gallery" / "data").glob("*.js")}
    assert '\\"sound\\":true' in data["site.js"]
    assert '\\"sounds\\":[\\"iter-000004/eval-0000.wav\\"]' in data["r0-eval-000004.js"]


def test_a_data_set_has_the_sounds(run: Path, tmp_path: Path):
    write_dataset([run], tmp_path / "data")
    rows = [json.loads(line) for line in (tmp_path / "data" / "metadata.jsonl").read_text().splitlines()]
    assert [(row["file_name"], row["sound"]) for row in rows] == [
        (f"images/{k:06d}.png", f"sounds/{k:06d}.wav") for k in range(2)
    ]
    assert read_sound(tmp_path / "data" / rows[1]["sound"])[1] == RATE


def test_what_would_take_the_spectrum_for_the_sample_is_refused(run: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="has sounds, and the page of votes cannot play them"):
        sources_of([read_run(run)], "base,last")
    with pytest.raises(ValueError, match="a run cannot train on pairs of sounds"):
        write_scored_pairs(run, tmp_path / "pairs", None, 0.0)
    assert not (tmp_path / "pairs").exists()


def test_a_missing_sound_leaves_its_picture(run: Path):
    (run / "samples" / "iter-000000" / "eval-0000.wav").unlink()
    samples, _ = read_samples(run / "samples" / "index.jsonl")
    assert [one.sound is None for one in samples] == [True, False]
    assert samples[0].image is not None


def test_no_half_of_a_sample_is_left_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import wave

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wave.Wave_write, "writeframes", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a\.wav"):
        save_sample(tmp_path / "a.png", tone(100.0), RATE)
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]


def embedded(page: Path) -> dict[str, bytes]:
    """The sounds in a gallery of one file, by name."""
    [found] = re.findall(r'id="data-thumbs">(.*?)</script>', page.read_text("utf-8"), re.S)
    return {name: base64.b64decode(content) for name, content in json.loads(found)["sounds"]}


def test_a_gallery_of_one_file_has_the_sounds(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {f"0/iter-{at:06d}/eval-0000.wav": run / f"samples/iter-{at:06d}/eval-0000.wav" for at in (0, 4)}
    found = embedded(write_single([run], tmp_path / "one.html"))
    assert found == {name: file.read_bytes() for name, file in files.items()}
    # Without room for both, the sound of the last iteration is there.
    monkeypatch.setattr(exports, "SOUND_ROOM", 20_000)
    assert list(embedded(write_single([run], tmp_path / "small.html"))) == ["0/iter-000004/eval-0000.wav"]
