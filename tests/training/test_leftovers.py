"""Files that killed processes leave in a run folder are removed at the next start; all other files stay."""

from pathlib import Path

import pytest

from flowgrpo.training.folder.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run", "name: test\n")
    made.release()
    return made


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def tree(run: RunFolder) -> set[str]:
    return {str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()}


def test_temporaries_go_and_nothing_else(run: RunFolder) -> None:
    for name in (
        ".config.yaml.7.tmp", ".metrics.jsonl.7.tmp", "samples/.index.jsonl.7.tmp",
        "samples/iter-000003/.eval-0001.png.tmp", "checkpoints/.tmp-000004/optimizer.pt", ".lora.ab_cd012/new/x",
        ".model.abcd0123/new/x", ".pipeline.abcd0123/new/x", "failed/.ocr-1-2.partial/sample-0000.json",
        "checkpoints/.drop-iter-000001/optimizer.pt",
    ):  # fmt: skip
        put(run.path / name)
    kept = {
        "config.yaml", ".flowgrpo-lock", ".env", ".lora.mine", ".notes.txt", "samples/iter-000003/eval-0001.png",
        "checkpoints/iter-000002/state.json", "checkpoints/.mine/x", "failed/ocr-0000/sample-0000.json", "lora/w",
        ".lorax.abcd0123/x", "votes.jsonl", ".votes.jsonl.7.tmp",
    }  # fmt: skip
    for name in kept - {"config.yaml", ".flowgrpo-lock"}:
        put(run.path / name)
    run.claim()
    assert tree(run) == kept


def test_what_was_moved_aside_and_not_replaced_is_put_back(run: RunFolder) -> None:
    put(run.checkpoints / ".old-000002" / "state.json", "old")
    put(run.checkpoints / ".tmp-000002" / "state.json", "new")
    put(run.path / ".lora.abcd0123" / "old" / "w", "old")
    run.claim()
    assert tree(run) == {"config.yaml", ".flowgrpo-lock", "checkpoints/iter-000002/state.json", "lora/w"}
    assert (run.checkpoints / "iter-000002" / "state.json").read_text(encoding="utf-8") == "old"


def test_what_was_replaced_is_not_put_back(run: RunFolder) -> None:
    for name in (".old-000002", "iter-000002"):
        put(run.checkpoints / name / "state.json", name)
    run.claim()
    assert tree(run) == {"config.yaml", ".flowgrpo-lock", "checkpoints/iter-000002/state.json"}
    assert (run.checkpoints / "iter-000002" / "state.json").read_text(encoding="utf-8") == "iter-000002"
