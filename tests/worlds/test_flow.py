"""Parts of the embedded pipeline's build that need no long training."""

import json
import shutil
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from flowgrpo.worlds.scenes import flow as scenes
from flowgrpo.worlds.scenes.flow import (
    BuildSettings,
    build_pipeline,
    continue_flow,
    draw_scenes,
    train_flow,
    write_pipeline,
)
from flowgrpo.worlds.scenes.networks import build_tokenizer, build_vae
from flowgrpo.worlds.scenes.scene_prompts import ScenePrompt, all_prompts
from flowgrpo.worlds.training_states import TrainingStates

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")


def test_the_tokenizer_is_the_same_however_often_it_is_made(tmp_path: Path) -> None:
    made = []
    for number in range(4):
        build_tokenizer(tmp_path / str(number))
        files = sorted(p for p in (tmp_path / str(number)).rglob("*") if p.is_file())
        made.append([(file.name, file.read_bytes()) for file in files])
    assert all(files == made[0] for files in made)


def test_every_word_of_the_world_is_one_token(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    for prompt in all_prompts():
        assert len(tokenizer(prompt.text).input_ids) == len(prompt.text.split()) + 2
    spelled = tokenizer("zebra").input_ids
    assert len(spelled) == 7
    assert tokenizer.unk_token_id not in spelled[1:-1]


@pytest.mark.slow
@needs_muon
@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_the_second_schedule_begins_where_the_first_ended(tmp_path: Path, rate: float) -> None:
    """A rate of 0 leaves the weights of the source; any other moves the denoiser and the text encoders alone."""
    settings = BuildSettings(scenes=8, batch=4, second_steps=3, second_rate=rate)
    _write_first(tmp_path, settings)
    continue_flow(tmp_path / "first", tmp_path / "second", settings, lambda line: None)
    first, second = (_weights(tmp_path / name) for name in ("first", "second"))
    assert first.keys() == second.keys()
    moved = {part for part, weights in first.items() if not torch.equal(weights.half(), second[part])}
    assert moved == (set() if rate == 0 else {"transformer", "text_encoder", "text_encoder_2"})
    with pytest.raises(ValueError, match="already holds a pipeline"):
        continue_flow(tmp_path / "first", tmp_path / "second", settings, lambda line: None)


@pytest.mark.slow
@needs_muon
def test_the_second_schedule_has_scenes_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BuildSettings(scenes=8, batch=4, second_steps=1, seed=3)
    _write_first(tmp_path, settings)
    drawn = []

    def draw(count: int, seed: int) -> tuple[list[ScenePrompt], torch.Tensor]:
        drawn.append((count, seed))
        return draw_scenes(count, seed)

    monkeypatch.setattr(scenes, "draw_scenes", draw)
    continue_flow(tmp_path / "first", tmp_path / "second", settings, lambda line: None)
    assert [count for count, _ in drawn] == [8]
    assert drawn[0][1] != settings.seed


@pytest.mark.slow
@needs_muon
def test_an_interrupted_training_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is interrupted after its first state, so every step but the first begins from a state."""
    monkeypatch.setattr(scenes, "EVERY", 1)
    settings = BuildSettings(scenes=8, batch=4, vae_steps=3, vae_batch=4, steps=3, second_steps=2, warmup=1)
    train_flow(tmp_path / "whole", settings, lambda line: None)
    continue_flow(tmp_path / "whole", tmp_path / "whole second", settings, lambda line: None)

    whole_save, calls = TrainingStates.save, 0

    def save(states: TrainingStates, stage: str, state: dict[str, Any]) -> None:
        whole_save(states, stage, state)
        raise KeyboardInterrupt

    lines: list[str] = []
    parts, kept = tmp_path / "parts", tmp_path / "states"
    kept.mkdir()
    for source, folder in ((None, parts), (parts, tmp_path / "parts second")):
        while not (folder / "model_index.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            calls += 1
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(TrainingStates, "save", save)
                if source is None:
                    train_flow(folder, settings, lines.append, kept)
                else:
                    continue_flow(source, folder, settings, lines.append, kept)
    assert calls == (3 + 3 + 1) + (2 + 1)
    assert "vae: continues after 2 steps" in lines
    assert "denoiser: continues after 3 steps" in lines
    for name in ("", " second"):
        one, other = (
            {f.relative_to(tmp_path / n): f.read_bytes() for f in (tmp_path / n).rglob("*") if f.is_file()}
            for n in (f"whole{name}", f"parts{name}")
        )
        assert one == other


def test_a_state_of_other_settings_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    states = TrainingStates(tmp_path, {"steps": 3})
    assert states.load("vae") is None
    states.save("vae", {"step": 2})
    assert states.load("vae") == {"step": 2}
    with pytest.raises(ValueError, match=r"other settings.*remove it.*vae\.pt"):
        TrainingStates(tmp_path, {"steps": 4}).load("vae")
    (tmp_path / "vae.pt").write_bytes((tmp_path / "vae.pt").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"cannot be read.*remove it.*vae\.pt"):
        states.load("vae")


@pytest.mark.slow
def test_every_tokenizer_of_a_folder_has_the_files_of_older_versions(tmp_path: Path) -> None:
    settings = BuildSettings()
    write_pipeline(build_pipeline(build_vae(), tmp_path / "fresh", settings), tmp_path / "made", settings)
    embedded = Path(str(resources.files("flowgrpo.worlds.scenes") / "pipeline"))
    # transformers before 5 writes only the two files; the tokenizer is always the same.
    learned = json.loads((embedded / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    for folder in (tmp_path / "made", embedded):
        for name in ("tokenizer", "tokenizer_2"):
            vocab = json.loads((folder / name / "vocab.json").read_text(encoding="utf-8"))
            merges = (folder / name / "merges.txt").read_text(encoding="utf-8").splitlines()
            assert vocab == learned["vocab"]
            assert len(merges) == 1 + len(learned["merges"])


def _write_first(folder: Path, settings: BuildSettings) -> None:
    """A pipeline whose training has not begun, as the first schedule would leave it."""
    torch.manual_seed(0)
    vae = build_vae().requires_grad_(False)
    vae.register_to_config(shift_factor=0.0)
    write_pipeline(build_pipeline(vae, folder / "fresh", settings), folder / "first", settings)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {name: torch.cat([p.flatten() for p in part.parameters()]) for name, part in parts.items()}
