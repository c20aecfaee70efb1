"""Digests of request ids, and a set of digests that takes 8 bytes for each."""

import numpy as np
import xxhash


def digest_of(custom_id: str, seed: int = 0) -> int:
    """A 64-bit digest of an id. It is never 0, which the journal uses for "not done"."""
    return xxhash.xxh64_intdigest(custom_id.encode(errors="surrogatepass"), seed) or 1


class Seen:
    """A growing set of digests. Memory: 8 bytes for each.

    The chance that two of a hundred million ids have the same digest is 1 in 3,700.
    """

    MERGE = 1 << 20  # the most digests in `_recent`, where each takes ten times the memory

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._sorted = np.empty(0, np.uint64)

    def add(self, digest: int) -> bool:
        """Add `digest`; return whether it is new."""
        wanted = np.uint64(digest)  # NumPy may compare with a Python int as floats
        place = int(np.searchsorted(self._sorted, wanted))
        is_old = place < len(self._sorted) and self._sorted[place] == wanted
        if is_old or digest in self._recent:
            return False
        self._recent.add(digest)
        if len(self._recent) >= self.MERGE:
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.sort(np.concatenate([self._sorted, recent]))
            self._recent.clear()
        return True
