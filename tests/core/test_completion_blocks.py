"""Which block of a completion is open, and which tokens a token sees."""

import torch

from flowgrpo.core.completion_blocks import open_block, seen_in_blocks


def test_the_open_block_is_the_first_with_a_mask() -> None:
    masked = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]]).bool()
    assert open_block(masked, 2).tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    assert open_block(masked, 6).tolist() == [list(range(6))] * 4


def test_a_token_sees_its_block_and_all_before_it() -> None:
    # A prompt of three tokens, whose last two are a block, and a completion of two blocks.
    seen = seen_in_blocks(torch.tensor([[-2, -1, -1, 0, 0, 1, 1]]))[0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1],
    ]


def test_a_copy_sees_its_own_block_of_the_copy_and_the_first_form_of_the_blocks_before_it() -> None:
    number, noised = torch.tensor([[-1, 0, 1, 0, 1]]), torch.tensor([[False, False, False, True, True]])
    assert seen_in_blocks(number, noised)[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]
