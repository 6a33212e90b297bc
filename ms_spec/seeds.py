"""The seeds of requests that bring none."""

from __future__ import annotations

import hashlib


def request_seed(seed: int, number: int) -> int:
    """The seed of the request that came as the ``number``-th, from 0, where the engine has one. 0 to 2**64 - 1."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
