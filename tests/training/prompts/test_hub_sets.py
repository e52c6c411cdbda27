"""Data sets of the hub: from the cache of this machine, and from a server here that answers as the hub does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.prompt_source import prompt_source
from flowgrpo.training.checking import check
from flowgrpo.training.data import read_prompts
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.prompts.hub_sets import NotFetched, pinned
from flowgrpo.training.recipe_prompts import read_heldout, with_revisions
from tests.training.prompts.simulated_hub import COMMIT, SimulatedHub

LATER = "b" * 40
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with two commits of owner/name, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "datasets--owner--name"
    for commit, text in ((COMMIT, "old"), (LATER, "new")):
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "README.md").write_text(CARD)
        (snapshot / "train.jsonl").write_text(f'{{"prompt": "{text}", "n": 1}}\n' * 40)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(LATER)
    (folder / "refs" / "v1").write_text(COMMIT)
    return folder


def texts(source: str) -> set[str]:
    return {row.text for row in read_prompts(source)}


def test_a_revision_is_a_branch_a_tag_or_a_commit(cache: Path):
    assert texts("hub:owner/name?split=train") == {"new"}
    assert texts("hub:owner/name?split=train&revision=v1") == {"old"}
    assert texts(f"hub:owner/name?split=train&revision={COMMIT}&column=prompt") == {"old"}


def test_without_a_network_the_message_says_what_to_do(cache: Path):
    for source in ("hub:owner/other?revision=v2", "hub:owner/name?split=test"):
        with pytest.raises(ValueError, match="is not on this machine, and HF_HUB_OFFLINE is set: unset it") as caught:
            read_prompts(source)
        assert "--repo-type dataset" in str(caught.value)
        assert ("--revision v2" in str(caught.value)) == ("v2" in source)
        with pytest.raises(NotFetched):
            read_prompts(source, fetch=False)
    with pytest.raises(ValueError, match="has no split 'dev'; it has train, test"):
        read_prompts("hub:owner/name?split=dev")


def test_a_run_keeps_the_commit_that_it_began_with(cache: Path):
    overrides = [
        "data.train=hub:owner/name?split=train", "data.heldout=hub:owner/name?split=train&revision=v1",
        "data.test=hub:owner/none",
    ]  # fmt: skip
    recipe = load_recipe("default", overrides)
    found = with_revisions(recipe, Processes()).data
    assert found.train == f"hub:owner/name?split=train&revision={LATER}"
    assert found.heldout == f"hub:owner/name?split=train&revision={COMMIT}"
    assert found.test == "hub:owner/none"
    # The main branch moves on, and the run does not.
    (cache / "refs" / "main").write_text(COMMIT)
    assert texts(found.train) == {"new"}
    assert str(pinned(prompt_source(found.train))) == found.train
    assert with_revisions(load_recipe("default"), Processes()).data == load_recipe("default").data


def test_the_images_beside_a_rollout_keep_their_commit_too(cache: Path):
    images = "{name: data, source: 'hub:owner/name?split=train', weight: 0.1}"
    recipe = load_recipe("default", [f"penalties=[{{name: kl, weight: 0.1}}, {images}]"])
    first, second = with_revisions(recipe, Processes()).penalties
    assert first == recipe.penalties[0]
    assert second["source"] == f"hub:owner/name?split=train&revision={LATER}"
    assert (second["weight"], second["column"]) == (0.1, "image")


def test_looking_at_a_recipe_downloads_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refused)
    recipe = load_recipe("default", ["data={train: 'hub:owner/name?split=train', heldout: 'hub:owner/none'}"])
    found = check(recipe, reads_test=True, fetches=False)
    assert found.texts("fault", "needed") == []
    assert found.texts("unknown") == ["hub:owner/none is not on this machine; it is downloaded when a run starts"]
    with pytest.raises(NotFetched):
        read_heldout(recipe)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[SimulatedHub]:
    for name in ("train", "test"):
        for k in range(2):
            file = tmp_path / "repository" / "data" / f"{name}-{k:05d}-of-00002.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f'{{"caption": "{name} {k}", "n": {k}}}\n')
    (tmp_path / "repository" / "name.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with SimulatedHub(tmp_path / "repository") as served:
        yield served


def asked_for(hub: SimulatedHub, home: Path, *sources: str, online: bool = True) -> list[str]:
    """What a process prints that reads sources with its own cache."""
    code = (
        "import sys\nfrom flowgrpo.training.data import read_prompts\nfor source in sys.argv[1:]:\n"
        "    try:\n        print([row.text for row in read_prompts(source)])\n"
        "    except ValueError as error:\n        print(error)\n"
    )
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": str(int(not online)),
    }
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run([sys.executable, "-c", code, *sources], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_only_the_files_of_the_split_are_downloaded(hub: SimulatedHub, tmp_path: Path):
    source, home = "hub:owner/name?split=test&column=caption", tmp_path / "home"
    assert asked_for(hub, home, source) == ["['test 0', 'test 1']"]
    assert set(hub.sent) == {"data/test-00000-of-00002.jsonl", "data/test-00001-of-00002.jsonl"}
    assert not (tmp_path / "ran").exists()
    # From now on the hub is not needed, and it is not asked.
    hub.asked.clear()
    found, other = asked_for(hub, home, source, "hub:owner/name?split=train", online=False)
    assert found == "['test 0', 'test 1']"
    assert "is not on this machine" in other
    assert hub.asked == []


@pytest.mark.slow
def test_what_the_hub_refuses_is_explained(hub: SimulatedHub, tmp_path: Path):
    expected = {
        "hub:owner/none": "the hub has no data set owner/none, or you may not read it",
        "hub:owner/name?split=test&revision=v9": "owner/name has no revision 'v9'",
        "hub:owner/name?split=dev": "has no split 'dev'; it has train, test",
        "hub:owner/closed": "accept the terms on its page, and sign in",
        "hub:owner/broken": "is not on this machine, and the hub gives no answer",
    }
    for (source, said), line in zip(expected.items(), asked_for(hub, tmp_path / "home", *expected), strict=True):
        assert source in line
        assert said in line
