"""Messages that say whether the file or the command line is wrong."""

from pathlib import Path

import pytest

from flowgrpo.configs.load import RecipeError, load_recipe


@pytest.mark.parametrize(
    "word", ["optimizer.learnin_rate=3", "optimizer={learnin_rate: 3}", "optimizer.learning_rate=abc"]
)
def test_a_wrong_override_is_not_blamed_on_the_file(tmp_path: Path, word: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("base: mixgrpo\nname: mine\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, ["run.seed=2", word])
    assert str(caught.value).startswith(f"{file} with {word}:\n  optimizer.learni")
    file.write_text("base: mixgrpo\nname: mine\nrollout: {group: x}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, ["run.seed=2"])
    assert str(caught.value).startswith(f"{file}:\n  rollout.group: ")


def test_a_name_of_a_file_without_its_ending_is_hinted_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: mixgrpo\n")
    with pytest.raises(RecipeError, match=r"no recipe or file 'mine'; did you mean 'mine.yaml'\?"):
        load_recipe("mine")
    for word in ("mine.yml", "mien.yaml", f"{tmp_path}/mine.yml"):
        meant = str(Path(word).parent / "mine.yaml")
        with pytest.raises(
            RecipeError, match=rf"no recipe or file '{word}'; did you mean '{meant}'\? Else give the path"
        ):
            load_recipe(word)
    with pytest.raises(RecipeError, match=r"no recipe or file 'far.yaml'; give the path of a YAML file"):
        load_recipe("far.yaml")


def test_the_name_of_a_reward_alone_is_told_how_to_be_written() -> None:
    with pytest.raises(
        RecipeError, match=r"rewards.0: a reward has several keys; write \{name: gold\} in place of gold"
    ):
        load_recipe("mixgrpo", ["rewards=[gold]"])
