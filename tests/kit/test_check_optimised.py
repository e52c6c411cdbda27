"""The commands: exit status, files, and messages in place of tracebacks."""

import json
import re
from pathlib import Path

import pytest

from flowgrpo.kit import check as kit_check
from flowgrpo.kit.entries import parse_range, parse_reward, parse_rewards
from flowgrpo.kit.material import Material
from flowgrpo.rewards.base import RewardSpec
from flowgrpo.training.folder.run_folder import save_image
from tests.conftest import Command

CULPRITS = Path(__file__).with_name("culprits.py")


@pytest.fixture
def pictures(scenes: Material, tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    with (folder / "metadata.jsonl").open("w") as lines:
        for k, image in enumerate(scenes.images[:16]):
            save_image(folder / f"{k}.png", image)
            row = {"file_name": f"{k}.png", "prompt": scenes.prompts[k], "include": scenes.columns["include"][k]}
            lines.write(json.dumps(row) + "\n")
    return folder


def test_entries_of_a_recipe_and_names():
    assert parse_reward("./a.py:b", {"c": 1}) == RewardSpec("./a.py:b", options={"c": 1})
    assert parse_reward("{name: gold, options: {dense: true}, label: soft}", {"x": 2}) == RewardSpec(
        "gold", options={"dense": True, "x": 2}, label="soft"
    )
    for wrong in ("{name: [}", "{name: 3}", "{name: [", "{name: gold, options: dense}"):
        with pytest.raises(ValueError, match="no entry of a recipe"):
            parse_reward(wrong)
    assert parse_range("-1,0.5") == (-1, 0.5)
    for wrong in ("1", "1,0", "a,b", "0,1,2"):
        with pytest.raises(ValueError, match="--range"):
            parse_range(wrong)


def test_options_belong_to_the_only_reward():
    assert parse_rewards(["gold"], ["dense=true"]) == [RewardSpec("gold", options={"dense": True})]
    assert parse_rewards(["gold", "{name: proxy}"], []) == [RewardSpec("gold"), RewardSpec("proxy")]
    with pytest.raises(ValueError, match=r"which of 2 rewards .* '\{name: gold, options: \{dense: true\}\}'"):
        parse_rewards(["{name: proxy}", "gold"], ["dense=true"])
    for wrong in ("dense", "=true", "dense=[1"):
        with pytest.raises(ValueError, match=f"--options '{re.escape(wrong)}'"):
            parse_rewards(["gold"], [wrong])


def test_a_fault_is_the_exit_status(command: Command, pictures: Path, tmp_path: Path):
    words = ("rewards", "check", f"{CULPRITS}:contrast", "--images", str(pictures), "--prompts", "0")
    status, output, errors = command(*words, "--json", "out/report.json")
    assert (status, errors) == (1, "")
    assert output.startswith("contrast: 1 fault, ")
    assert "16 pictures of 64×64, 3 prompts" in output
    record = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [finding["code"] for finding in record["findings"] if finding["severity"] == "fault"] == ["blank"]
    assert command(*words, "--accept", "blank")[0] == 0


def test_other_rewards_and_ranges_are_options(command: Command, pictures: Path):
    status, output, _ = command(
        "rewards", "check", "gold", "--options", "dense=true", "--images", str(pictures), "--prompts", "0",
        "--against", "{name: gold, label: strict}", "--range", "0,1",
    )  # fmt: skip
    assert status == 0
    assert "with strict on 16 pictures" in output
    assert "range" not in output


def test_completions_come_from_a_file(command: Command, tmp_path: Path):
    rows = [{"prompt": f"{k}+1=", "completion": text, "answer": str(k + 1)} for k in (1, 2) for text in ("2", "3", "x")]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, output, _ = command("rewards", "check", "answer", "--data", "mine.jsonl")
    assert status == 0
    assert "6 of mine.jsonl, 2 prompts: mean 0.3333" in output


def test_samples_come_from_the_embedded_models(
    command: Command, monkeypatch: pytest.MonkeyPatch, scenes: Material, tmp_path: Path
):
    asked = []
    monkeypatch.setattr(kit_check, "scene_samples", lambda *words: asked.append(words) or scenes)
    assert command("rewards", "check", f"{CULPRITS}:brightness")[0] == 0
    assert asked == [("scenes:heldout", 6, 8)]
    output = command("rewards", "check", "digit_share", "--prompts", "3", "--seeds", "4")[1]
    assert "12 completions of the embedded language model" in output


def test_compare_names_the_pictures(command: Command, pictures: Path, tmp_path: Path):
    status, output, errors = command(
        "rewards",
        "compare",
        f"{CULPRITS}:brightness",
        "gold",
        "--samples",
        str(pictures),
        "--most",
        "2",
        "--json",
        "c.json",
    )
    assert (status, errors) == (0, "")
    assert "16 pictures, 3 prompts" in output.splitlines()
    assert output.count(str(pictures)) == 2
    record = json.loads((tmp_path / "c.json").read_text())
    assert len(record["samples"]) == 16
    assert len(record["pairs"][0]["differences"]) == 2


def test_a_new_package_says_what_comes_next(command: Command, tmp_path: Path):
    status, output, _ = command("rewards", "new", "glow")
    assert status == 0
    assert "glow/pyproject.toml" in output
    assert "flowgrpo rewards check glow" in output
    assert (tmp_path / "glow" / "src" / "flowgrpo_glow" / "reward.py").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("new", "my-reward"), "my_reward"),
        (("check", "glod"), "did you mean 'gold'"),
        (("check", "gold", "--images", "none"), "none is not a folder"),
        (("check", "gold", "--prompts", "0"), "there is nothing to score"),
        (("check", "gold", "--options", "dense"), "not key=value"),
        (("check", "answer", "--images", "."), "scores completions"),
        (("compare", "gold", "--samples", "."), "holds no picture"),
    ],
)
def test_what_a_user_can_mend_is_one_message(command: Command, words: tuple[str, ...], says: str):
    status, output, errors = command("rewards", *words)
    assert status == 1
    assert errors.startswith("error: ")
    assert says in errors
    assert "Traceback" not in output + errors
