"""Completions cut into parts: where borders are, and to which part each token belongs, by any tokenizer."""

import random
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flowgrpo.text.cutting import CUTS, cut_completions

CORPUS = ["Hello world. This is 3.14 text!\nNew lines\n\nand more 你好。世界！ naïve 😀😃 ok? Yes… fine.\r\n"] * 20
PIECES = ("Hello", "\n", " ", "world.", "你好。", "😀", "é", "! ", "\n\n", "a", "3.14", ' "So." ')


def byte_level() -> PreTrainedTokenizerFast:
    """Tokens are bytes, some of them parts of a character, and merges of them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def spaces_first() -> PreTrainedTokenizerFast:
    """Words begin with their space, which the first token of a text loses; other characters are bytes."""
    merges = [("e", "l"), ("o", "r"), ("▁", "w"), ("l", "d"), ("▁w", "or"), ("d", "."), ("▁", "a"), ("!", "▁")]
    alphabet = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Helowrd.a!314S"]
    vocabulary = {token: k for k, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>")


def decoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[Sequence[int]], str]:
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def cut(text: str, pattern: str) -> list[str]:
    """The parts of a text, of which every character is a token."""
    found = cut_completions([text], [range(len(text))], lambda ids: "".join(text[k] for k in ids), pattern)
    [parts], [ids] = found.texts, found.ids
    assert ids == [number for number, part in enumerate(parts) for _ in part]
    return parts


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb", ["a\n", "b"]),
        ("a\n", ["a\n"]),
        ("a\n\n \nb\n\n", ["a\n\n \n", "b\n\n"]),
        ("\n\na\r\nb", ["\n\na\r\n", "b"]),
        ("", [""]),
        (" \n ", [" \n "]),
    ],
)
def test_lines(text: str, lines: list[str]) -> None:
    assert cut(text, CUTS["lines"]) == lines


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It is 3.14. Is it?! Yes", ["It is 3.14.", " Is it?!", " Yes"]),
        ('He said "no." Then… (it ended.) So', ['He said "no."', " Then…", " (it ended.)", " So"]),
        ("你好。世界！“好。”再", ["你好。", "世界！", "“好。”", "再"]),
        ("One\nTwo. \nThree.", ["One\n", "Two. \n", "Three."]),
        ("e.g.this v1.2", ["e.g.this v1.2"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert cut(text, CUTS["sentences"]) == sentences


def test_a_pattern_ends_a_part_and_one_without_width_cuts() -> None:
    assert cut("a;b;c", ";") == ["a;", "b;", "c"]
    assert cut("1. x 2. y", r"(?=\d\. )") == ["1. x ", "2. y"]
    assert cut("abc", "") == ["a", "b", "c"]


def test_a_token_belongs_to_the_part_in_which_it_begins() -> None:
    """Tokens of several characters, an end without any, and one in the middle without any."""
    tokens = ["ab", "c\nd", "", "e\n", "\n", "f", "<end>"]
    words = {**dict(enumerate(tokens)), 6: ""}

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[k] for k in ids)

    found = cut_completions([decode(range(7))], [list(range(7))], decode, CUTS["lines"])
    assert found.texts == [["abc\n", "de\n\n", "f"]]
    assert found.ids == [[0, 0, 1, 1, 1, 2, 2]]


def test_the_bytes_of_a_character_are_of_one_part() -> None:
    """😀 is four bytes here: the first three decode to no character of the text."""
    tokenizer = byte_level()
    ids = tokenizer("a😀\n好b", add_special_tokens=False).input_ids
    assert len(tokenizer("😀", add_special_tokens=False).input_ids) > 1
    decode = decoder(tokenizer)
    found = cut_completions([decode(ids)], [ids], decode, CUTS["lines"])
    assert found.texts == [["a😀\n", "好b"]]
    border = next(k for k in range(len(ids)) if decode(ids[: k + 1]).endswith("\n"))
    assert found.ids == [[0] * (border + 1) + [1] * (len(ids) - border - 1)]


def by_prefixes(
    text: str, parts: Sequence[str], ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """The part of each token, from a decoding of everything before it."""
    starts = [0, *accumulate(len(part) for part in parts)][:-1]
    found, known = [], 0
    for k in range(len(ids)):
        before = decode(ids[:k])
        # After half a character, some tokenizers do not recognise whole characters either.
        known = max(known, next((n for n, (a, b) in enumerate(zip(before, text)) if a != b), len(before)))
        found.append(bisect_right(starts, known) - 1)
    return found


@pytest.mark.parametrize("make", [byte_level, spaces_first])
@pytest.mark.parametrize("pattern", [*CUTS.values(), "[a-z]", "(?=o)"])
def test_any_tokenizer_and_any_tokens(make: Callable[[], PreTrainedTokenizerFast], pattern: str) -> None:
    """Texts, and tokens at random, of which many are halves of characters."""
    tokenizer, dice = make(), random.Random(0)
    decode = decoder(tokenizer)
    several = 0
    for trial in range(60):
        if trial % 2:
            ids = tokenizer("".join(dice.choices(PIECES, k=dice.randrange(60))), add_special_tokens=False).input_ids
            ids.append(tokenizer.eos_token_id)
        else:
            ids = [dice.randrange(len(tokenizer)) for _ in range(dice.randrange(1, 120))]
        text = decode(ids)
        found = cut_completions([text], [ids], decode, pattern)
        assert "".join(found.texts[0]) == text
        assert found.ids[0] == by_prefixes(text, found.texts[0], ids, decode)
        several += len(found.texts[0]) > 2
    assert several > 15


def test_few_tokens_are_decoded_for_a_long_completion() -> None:
    tokenizer, decoded = byte_level(), 0
    text = "Hello world. This is 3.14 text and more.\n" * 100
    ids = tokenizer(text, add_special_tokens=False).input_ids
    plain = decoder(tokenizer)

    def decode(some: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(some)
        return plain(some)

    found = cut_completions([text], [ids], decode, CUTS["lines"])
    assert len(found.texts[0]) == 100
    assert decoded < 10 * len(ids)
    assert re.fullmatch(r"(Hello.*\n)+", text)
