"""Parts of the embedded pipeline's build that need no training."""

from pathlib import Path

from flowgrpo.pipelines.scenes import build_tokenizer
from flowgrpo.scenes.prompts import all_prompts


def test_the_tokenizer_is_the_same_however_often_it_is_made(tmp_path: Path) -> None:
    made = []
    for number in range(4):
        build_tokenizer(tmp_path / str(number))
        files = sorted(p for p in (tmp_path / str(number)).rglob("*") if p.is_file())
        made.append([(file.name, file.read_bytes()) for file in files])
    assert all(files == made[0] for files in made)


def test_every_word_of_the_world_is_one_token(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    for prompt in all_prompts():
        assert len(tokenizer(prompt.text).input_ids) == len(prompt.text.split()) + 2
    spelled = tokenizer("zebra").input_ids
    assert len(spelled) == 7
    assert tokenizer.unk_token_id not in spelled[1:-1]
