"""Seeds by place. The exact numbers are tested, since every published figure and every resumed run depends on them."""

from flowgrpo.core.addressing import address


def test_the_numbers_stay() -> None:
    # BLAKE2b of the little-endian 64-bit integers, 8 bytes of it, without the lowest bit.
    assert address() == 6510301506637419378
    assert address(0) == 893442142816765029
    assert address(1, 2, 3) == 6520558355739401531
    assert address(-1) == 1623352975185328750


def test_seeds_fill_63_bits() -> None:
    seeds = [address(k) for k in range(2000)]
    assert len(set(seeds)) == 2000
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63


def test_places_differ_by_order_and_length() -> None:
    assert len({address(1, 2), address(2, 1), address(1, 2, 0), address(12), address(0, 1, 2)}) == 5
