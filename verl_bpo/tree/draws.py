"""Random numbers that belong to a place, whatever else runs."""

from __future__ import annotations

from hashlib import blake2b


def drawn(seed: int, place: str) -> int:
    """A number below 2**32, always the same one for a seed and a place. Numbers of different places are independent for
    all purposes, those of neighbouring depths and trajectories too: a checksum's would be linear in the place."""
    return int.from_bytes(blake2b(f"{seed}/{place}".encode(), digest_size=4).digest(), "big")
