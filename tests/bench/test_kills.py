"""A run that ends at any file operation, in any way, goes on to the same bits, or says clearly why it does not."""

import json
import subprocess
import sys

import pytest

from flowgrpo.bench.kills import HOW
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.worlds.arithmetic.problems import build_character_tokenizer, build_model, save_tokenizer
from tests.training.ranks import LOADED

pytestmark = pytest.mark.slow

# A new process, which has not used torch; otherwise its children would wait for threads that they do not have.
SCRIPT = """
import gc, json, sys
from importlib import import_module
from pathlib import Path
from PIL import Image
from flowgrpo.configs.load import load_recipe
from flowgrpo.bench.kills import kills
recipe, folder, every, *loaded = sys.argv[1:]
# Done once, so that not every child repeats it: imports, finding names, and searching the imports for garbage.
for name in loaded:
    import_module(name)
Image.init()
gc.freeze()
print(json.dumps(kills(load_recipe(recipe), Path(folder), lambda text: None, every=int(every))))
"""
EVERY = 31
"""All cases are `flowgrpo bench kills`; a prime number, so that places differ between iterations."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("kills")
    tokenizer = build_character_tokenizer()
    build_model(len(tokenizer), width=16, layers=1, heads=2).save_pretrained(folder / "model")
    save_tokenizer(tokenizer, folder / "model")
    reward = folder / "reward.py"
    reward.write_text(
        "def nines(completions, **columns):\n    return [t.count('9') - 0.1 * len(t) for t in completions]\n"
    )
    words = [
        f"model.path={folder / 'model'}", f"rewards=[{{name: '{reward}:nines'}}]", "optimizer.learning_rate=0.01",
        "rollout={prompts: 2, group: 2, batch: 4, tokens: 60}", "generation.max_tokens=3", "model.train=lora",
        "evaluate={every: 2, prompts: 1}", "run={iterations: 2, checkpoint_every: 1, keep: 1, sample_every: 2}",
    ]  # fmt: skip
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe("text", words)), encoding="utf-8")
    command = [sys.executable, "-c", SCRIPT, str(folder / "recipe.yaml"), str(folder / "runs"), str(EVERY), *LOADED]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_every_case_goes_on_to_the_last_bit(found: dict) -> None:
    assert found["failed"] == []


def test_every_way_and_kind_of_operation_is_among_the_places(found: dict) -> None:
    assert set(found["cases"]) == set(HOW)
    assert set(found["operations"]) == {"open", "fsync", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
    assert sum(found["operations"].values()) > 100
