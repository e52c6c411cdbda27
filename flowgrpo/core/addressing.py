"""A seed for every tuple of integers, the place of a draw, so that no generator state is carried along."""

from __future__ import annotations

import hashlib
import struct


def address(*parts: int) -> int:
    """A 63-bit seed for a tuple of integers: distinct tuples draw independent noise, in any order of drawing."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
