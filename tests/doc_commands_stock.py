"""The material that the commands of the documentation are tried on: small runs, votes, pictures and prompt files."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from flowgrpo.cli.app import app
from flowgrpo.gallery.build import read_runs
from flowgrpo.gallery.vote_pairs import sources_of
from flowgrpo.gallery.vote_server import Booth
from flowgrpo.training.data import read_prompts
from flowgrpo.training.folder.run_folder import RunFolder
from tests.doc_commands_checkout import Checkout, make_checkout

SMALL = ("rollout.prompts=2", "rollout.group=4", "evaluate.prompts=4", "evaluate.seeds=1")
WORDS = ' with the words "to be read"'
ASKED = ("evaluate.prompts=6", "evaluate.seeds=2")  # two samples of a prompt, so that people can choose between them
LENGTH = ("run.iterations=2", "run.checkpoint_every=1", "run.sample_every=1")


@dataclass(frozen=True)
class Stock:
    """Finished runs of two iterations, one of pictures (with votes) and one of text, and a copy of the checkout."""

    pictures: Path
    text: Path
    checkout: Checkout

    def put_run(self, folder: Path, *, text: bool = False) -> None:
        """Copy a run to the folder, unless the folder exists; a second run beside the first gets other pictures."""
        if folder.exists():
            return
        others = len(list(folder.parent.glob("*/config.yaml")))
        shutil.copytree(self.text if text else self.pictures, folder)
        for picture in folder.glob("samples/*/*.png") if others else ():
            before = hashlib.sha256(picture.read_bytes()).hexdigest()
            with Image.open(picture) as image:
                image.putpixel((others, 0), (255, 0, 255))
                image.save(picture)
            # The choices of the first run are choices between these pictures.
            votes = folder / "votes.jsonl"
            if votes.is_file():
                after = hashlib.sha256(picture.read_bytes()).hexdigest()
                votes.write_text(votes.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")

    def put_pictures(self, folder: Path) -> None:
        """Make a folder of pictures with prompts and columns, as the kit reads it, unless the folder exists."""
        if folder.exists():
            return
        folder.mkdir(parents=True)
        rows = [json.loads(line) for line in RunFolder(self.pictures).index.read_text(encoding="utf-8").splitlines()]
        with (folder / "metadata.jsonl").open("w", encoding="utf-8") as listed:
            for number, row in enumerate(rows):
                shutil.copy(self.pictures / "samples" / row["image"], folder / f"{number}.png")
                own = {"file_name": f"{number}.png", "prompt": row["prompt"], **row["columns"]}
                listed.write(json.dumps(own) + "\n")


def make_stock(folder: Path) -> Stock:
    """Make the stock: train the runs, and vote on the pictures."""
    stock = Stock(folder / "pictures", folder / "text", make_checkout(folder / "checkout"))
    rewards = "evaluate.rewards=[{name: gold}, {name: proxy}]"
    flowgrpo("train", "default", "model.train=lora", *SMALL, *LENGTH, *ASKED, rewards, "--out", str(stock.pictures))
    flowgrpo("train", "text", *SMALL, *LENGTH, "generation.max_tokens=4", "--out", str(stock.text))
    _let_one_cheat(RunFolder(stock.pictures).index)
    runs = read_runs([stock.pictures])
    booth = Booth(runs, sources_of(runs, "base,last"), stock.pictures / "votes.jsonl", "ann")
    assert len(booth.ballots) >= 2
    for number in range(len(booth.ballots)):
        booth.choose(number, ("left", "right")[number % 2])
    return stock


def _let_one_cheat(index: Path) -> None:
    """Change the last evaluation of a prompt as if the proxy had been gained at the cost of gold."""
    rows = [json.loads(line) for line in index.read_text(encoding="utf-8").splitlines()]
    last = next(row for row in rows if (row["phase"], row["iteration"], row["seed"]) == ("eval", 2, 0))
    last["rewards"] = {"gold": -1.0, "proxy": 2.0}
    index.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def flowgrpo(*words: str) -> None:
    """Run a command; a failure is raised as an exception."""
    app(list(words), standalone_mode=False)


def interrupted(folder: Path) -> None:
    """Turn a finished run into a run that was interrupted after its first iteration."""
    run = RunFolder.open(folder)
    for later in run.list_checkpoints():
        if later.name > "iter-000001":
            shutil.rmtree(later)
    run.rewind(1)
    for result in ("lora", "pipeline", "model", "gallery"):
        shutil.rmtree(folder / result, ignore_errors=True)


def put_prompts(file: Path, *, text: bool = False, completions: Sequence[str] = (), words: bool = False) -> None:
    """Write a small prompt file with the columns of the embedded prompts, unless it exists.

    With `words`, its prompts ask for pictures that show some words.
    """
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = read_prompts("arithmetic:heldout" if text else "scenes:heldout")[:8]
    if file.suffix == ".txt":
        file.write_text("".join(f"{row.text}{WORDS if words else ''}\n" for row in rows), encoding="utf-8")
        return
    with file.open("w", encoding="utf-8") as lines:
        for row in rows:
            for completion in completions or (None,):
                own = {} if completion is None else {"completion": completion}
                lines.write(json.dumps({"prompt": row.text, **row.columns, **own}) + "\n")
