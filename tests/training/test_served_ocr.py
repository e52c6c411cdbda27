"""A run that OCR rewards from another process, which is killed in the middle of a request and started again."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.gallery.build import build_gallery
from flowgrpo.training.session import start

pytest.importorskip("rapidocr")

# Pictures are 64 pixels wide, and by default the reader makes much larger copies.
ENGINE = "{Det.limit_side_len: 256, Det.limit_type: min}"
# The letters that a reader sees in circles.
PROMPTS = [
    'a red circle above a red circle: "8"',
    'two black circles: ":"',
    'two blue circles: "8"',
    'a green circle below a green circle: "8"',
]


class Server:
    """`flowgrpo rewards serve ocr` in a process of its own."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = self.begun()
        self.statuses: list[int] = []

    def begun(self) -> "subprocess.Popen[bytes]":
        words = ["rewards", "serve", "ocr", "--port", str(self.port), "--options", f"engine={ENGINE}"]
        return subprocess.Popen([sys.executable, "-m", "flowgrpo", *words], stdout=subprocess.DEVNULL)

    def metric(self, name: str) -> float:
        """0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0.0
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"flowgrpo_reward_{name}")), 0.0)

    def die_in_a_request(self, after: int) -> None:
        """By SIGKILL, while it has a request and has answered `after`; then it is started anew at the same address."""
        while self.metric('requests_total{status="200"}') < after or self.metric("admitted") < 1:
            time.sleep(0.01)
        self.process.kill()
        self.statuses.append(self.process.wait())
        time.sleep(0.5)
        self.process = self.begun()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.process.terminate()
    made.statuses.append(made.process.wait(timeout=60))


def overrides(folder: Path, reward: str) -> list[str]:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    return [
        f"data={{train: '{prompts}', heldout: '{prompts}'}}",
        "sampler.steps=6",
        "sampler.plan.window={name: progressive, size: 2, stride: 1, interval: 1, start: 0, stop: 4}",
        "rollout={prompts: 2, group: 4, batch: 8, decode_batch: 8}",
        f"rewards=[{reward}]",
        "evaluate={every: 2, prompts: 4, seeds: 1, rewards: null}",
        "run={iterations: 3, checkpoint_every: 1, sample_every: 1, seed: 0}",
    ]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_run_whose_ocr_server_is_killed_in_the_middle_is_the_run_with_ocr_within(
    server: Server, tmp_path: Path
) -> None:
    remote = f"{{name: remote, options: {{url: '{server.url}', patience: 120}}}}"
    killer = threading.Thread(target=server.die_in_a_request, args=(2,), daemon=True)
    killer.start()
    start(load_recipe("mixgrpo_flash_guard", overrides(tmp_path, remote)), tmp_path / "served").trainer(
        Silent()
    ).train()
    killer.join(timeout=60)
    assert server.statuses == [-signal.SIGKILL]

    local = f"{{name: ocr, options: {{engine: {ENGINE}}}}}"
    start(load_recipe("mixgrpo_flash_guard", overrides(tmp_path, local)), tmp_path / "local").trainer(Silent()).train()
    found, wanted = contents(tmp_path / "served"), contents(tmp_path / "local")
    for one in (found, wanted):
        del one["lora/README.md"]  # the model card names the rewards, which are `remote` and `ocr`
    assert found == wanted

    recorded = lines(tmp_path / "served" / "metrics.jsonl")
    assert [line["iteration"] for line in recorded] == [0, 1, 2, 3]
    assert all("eval/ocr" in recorded[k] for k in (0, 2, 3))
    train = [line for line in lines(tmp_path / "served" / "samples" / "index.jsonl") if line["phase"] == "train"]
    scores = {line["rewards"]["ocr"] for line in train}
    assert {0.0, 1.0} <= scores
    assert all(line["notes"]["ocr"].startswith("read: ") for line in train)
    weights = load_file(tmp_path / "served" / "lora" / "pytorch_lora_weights.safetensors")
    assert any(value.abs().max() > 0 for name, value in weights.items() if "lora_B" in name)

    assert build_gallery(tmp_path / "served").is_file()
    shown = [file.read_text(encoding="utf-8") for file in (tmp_path / "served" / "gallery" / "data").rglob("*.js*")]
    assert any("read: 8" in text for text in shown)
