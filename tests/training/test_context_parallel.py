"""Context parallelism: processes that share the tokens of a sample give the run of one process; and errors."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.recipe_launches import check_ranks
from tests.training.family_runs import overrides
from tests.training.test_processes import Runs, lines, printed, run_all, statuses
from tests.training.test_sharding import FSDP, require_equal, resumed

# Of a group, only the first process may be asked.
REWARD = """
import os

def level(images, **columns):
    assert int(os.environ["RANK"]) % 2 == 0
    return images.double().flatten(1).mean(1) + images.double().flatten(1).std(1)
"""
SHARED = [
    "optimizer={updates: 2, eps: 0.01, learning_rate: 0.1, weight_decay: 0.0, ema: {decay: 0.5, every: 1}}",
    "rollout={prompts: 2, group: 3, batch: 3, decode_batch: 3}",
    "run={iterations: 2, checkpoint_every: 1, keep: 9, sample_every: 1, seed: 0}",
    "evaluate={every: 2, seeds: 1}",
    "penalties.kl.weight=0.1",
]  # fmt: skip
NAMES = {"flux": ("FluxPipeline", "lora"), "wan": ("WanPipeline", "full")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    found, jobs = Runs(logs=tmp_path_factory.mktemp("context")), []
    for name, (family, train) in NAMES.items():
        folder = found.logs / name
        folder.mkdir()
        words = [*overrides(family, folder, train), *SHARED, "model.gradient_checkpointing=true"]
        (folder / "reward.py").write_text(REWARD)
        launched = {"one": (1, 1, {}), "two": (2, 2, {}), "four": (4, 2, FSDP if train == "full" else {})}
        for kind, (count, context, environment) in launched.items():
            recipe = load_recipe("mixgrpo_flash_guard", [*words, f"model.context_parallel={context}"])
            source = folder / f"{kind}.yaml"
            source.write_text(dump_recipe(recipe))
            out = found.two[f"{name}-{kind}"] = folder / kind
            job = {"words": ["train", str(source), "--out", str(out)], "log": f"{name}-{kind}"}
            jobs.append({**job, "count": count, "environment": environment})
    run_all(jobs, found.logs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two", "four"])
@pytest.mark.parametrize("name", NAMES)
def test_processes_that_share_tokens_give_the_run_of_one(runs: Runs, name: str, kind: str) -> None:
    count = {"two": 2, "four": 4}[kind]
    log = f"{name}-{kind}"
    assert statuses(runs, log) == [0] * count, "".join(printed(runs, log, rank) for rank in range(count))
    assert statuses(runs, f"{name}-one") == [0], printed(runs, f"{name}-one", 0)
    assert "the tokens of each sample on 2 of them" in printed(runs, log, 0)
    require_equal(runs.two[log], runs.two[f"{name}-one"])
    assert lines(runs.two[log], "metrics.jsonl")[0]["ratio/first_error"] == 0.0
