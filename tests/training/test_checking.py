"""The check of `plan` and every run: presets pass, and what only a network or a file could show is no fault."""

import pytest

from flowgrpo.configs.load import RecipeError, load_recipe, recipe_names
from flowgrpo.training.checking import check


@pytest.mark.parametrize("name", recipe_names())
def test_every_preset_passes_without_a_model_of_its_paper(name: str):
    assert check(load_recipe(name)).texts("fault", "needed", "unknown") == []
    try:
        published = load_recipe(f"{name}@published")
    except RecipeError:
        return
    found = check(published)
    assert found.texts("fault") == []
    assert all(finding.key.startswith(("data.", "rewards", "evaluate.rewards")) for finding in found.findings
               if finding.kind == "needed")  # fmt: skip


def test_what_is_needed_is_a_fault_of_a_run():
    found = check(load_recipe("mixgrpo_flash_guard", ["data.train=none.txt", "rewards=[{name: golf}]"]))
    assert [finding.kind for finding in found.findings] == ["needed", "fault"]
    with pytest.raises(ValueError, match=r"(?s)none.txt.*golf"):
        found.require()
    found.excuse({"data.train"})
    assert [finding.kind for finding in found.findings] == ["excused", "fault"]


@pytest.mark.parametrize(
    ("name", "words", "noted"),
    [
        ("default", ["model.train=full"], True),
        ("default", ["model.train=full", "optimizer.learning_rate=2e-4"], False),
        ("default", [], False),
        ("text_digits", [], False),  # trains an untrained model
    ],
)
def test_a_rate_for_a_lora_is_noted_for_full_weights(name: str, words: list[str], noted: bool):
    notes = check(load_recipe(name, words)).texts("note")
    assert any("optimizer.learning_rate 0.001 is a rate for a LoRA" in note for note in notes) == noted
