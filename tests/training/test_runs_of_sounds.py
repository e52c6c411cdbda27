"""Runs of pipelines of sounds: rewards hear them, files hold them, lyrics differ by prompt, and a run goes on."""

import json
from pathlib import Path

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.media.sound import read_sound
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.training.checking import check
from tests.conftest import Command
from tests.tiny_pipelines import require

REWARD = """
def level(sounds, sampling_rate, prompts, lyrics=None, **columns):
    assert sounds.shape[1:] == (2, 400) and sampling_rate == 400
    return sounds.flatten(1).square().mean(1)
"""
ROWS = (
    {"prompt": "a slow song", "lyrics": "one two"},
    {"prompt": "a slow song", "lyrics": "stars and stars"},
    {"prompt": "a fast song"},
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    require("AceStepPipeline")
    TINY["AceStepPipeline"].fresh().save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "songs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "songs.yaml").write_text(
        """
name: songs
model: {path: model, lora: {rank: 2, alpha: 4}, call: {audio_duration: 1.0, guidance_scale: 1.0}}
data: {train: songs.jsonl, heldout: songs.jsonl}
sampler: {steps: 4, plan: {window: all}}
rollout: {prompts: 3, group: 2, batch: 4}
rewards: [{name: "reward.py:level"}]
optimizer: {learning_rate: 0.02, ema: null}
evaluate: {every: 1}
run: {iterations: 2, checkpoint_every: 1, sample_every: 1}
"""
    )
    return tmp_path / "songs.yaml"


def files(run: Path) -> dict[str, bytes]:
    return {str(file.relative_to(run)): file.read_bytes() for file in (run / "samples").rglob("*") if file.is_file()}


@pytest.mark.slow
def test_a_run_of_sounds_goes_on_to_the_same_files(recipe: Path, command: Command) -> None:
    status, output, errors = command("train", "songs.yaml", "--out", "whole")
    assert status == 0, errors
    assert "3 prompts × 2 sounds an iteration" in output
    assert "sounds/s" in output
    assert "ratio before the first update: exactly 1" in output
    assert command("train", "songs.yaml", "run.iterations=1", "--out", "parts")[0] == 0
    status, _, errors = command("resume", "parts", "run.iterations=2")
    assert status == 0, errors
    whole, parts = files(Path("whole")), files(Path("parts"))
    assert whole.keys() == parts.keys()
    assert [name for name in whole if whole[name] != parts[name]] == []

    lines = [json.loads(line) for line in Path("whole/samples/index.jsonl").read_text().splitlines()]
    first = [line for line in lines if line["phase"] == "eval" and line["iteration"] == 0]
    heard, rate = read_sound(Path("whole/samples") / first[0]["sound"])
    assert (heard.shape, rate, first[0]["sampling_rate"]) == ((2, 400), 400, 400)
    card = Path("whole/lora/README.md").read_text()
    assert "pipeline_tag: text-to-audio" in card
    assert 'with wave.open("sample.wav", "wb") as file:' in card


@pytest.mark.slow
def test_lyrics_of_a_prompt_reach_its_sounds_alone(recipe: Path, command: Command) -> None:
    """With the same words and the same noise, other lyrics make another sound, and an equal row makes an equal one."""
    rows = [ROWS[0], ROWS[1], ROWS[0]]
    Path("asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command("train", "songs.yaml", "--out", "run", "run.iterations=1")[0] == 0
    for k, row in enumerate(rows):
        Path("one.jsonl").write_text(json.dumps(row) + "\n")
        status, _, errors = command("sample", "--file", "one.jsonl", "--model", "run", "--noise", "7", "--out", f"s{k}")
        assert status == 0, errors
    one, two, three = (Path(f"s{k}/000-7.wav").read_bytes() for k in range(3))
    assert one != two
    assert one == three


@pytest.mark.slow
def test_what_a_run_of_sounds_cannot_do_is_said_before_it(recipe: Path, command: Command) -> None:
    status, _, errors = command("plan", "songs.yaml", "rewards=[{name: jpeg_compressibility}]")
    assert status != 0
    assert "scores `images`, but the samples here are sounds; choose a reward of sounds" in errors
    status, _, errors = command("plan", "rewards=[{name: loudness}]")
    assert "scores `sounds`, but the samples here are images" in errors
    Path("songs.jsonl").write_text(json.dumps({"prompt": "a song", "lyrics": [1, 2]}) + "\n")
    status, _, errors = command("plan", "songs.yaml")
    assert "`lyrics` is [1, 2]; write a text" in errors


def test_a_model_of_the_hub_that_is_not_here_may_make_sounds() -> None:
    words = ["model.path=nobody/music", "rewards=[{name: loudness}]", "evaluate.rewards=null", "data.heldout=null"]
    found = check(load_recipe("mixgrpo", words))
    assert not [fault for fault in found.findings if "sounds" in fault.text]
