"""ResponseStore: responses in memory that clients can continue, read and delete."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

OVERHEAD = 512  # bytes of an entry in addition to its JSON


class Stored(NamedTuple):
    """A response, and the messages of its conversation up to its answer, as JSON."""

    body: bytes
    messages: bytes

    @property
    def size(self) -> int:
        """The bytes that it takes."""
        return len(self.body) + len(self.messages) + OVERHEAD


class ResponseStore:
    """The responses that were last used, as many as `max_entries` and `max_bytes` allow.

    None has more than `max_each` bytes, as a conversation is read whenever it goes on. Each belongs
    to an owner, the key that it was asked with: for others it does not exist. Bodies are parsed in
    threads, so calls may come from several.
    """

    def __init__(self, max_entries: int, max_bytes: int, max_each: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._max_each = min(max_each, max_bytes)
        self._entries: OrderedDict[tuple[Any, str], Stored] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    @property
    def is_off(self) -> bool:
        """Whether it takes no response at all."""
        return not self._max_entries

    def put(self, owner: Any, name: str, body: Any, messages: Sequence[Any]) -> bool:
        """Keep a response, and drop those that were not used for longest.

        Returns whether the response is kept: it is not if it is too large.
        """
        new = Stored(orjson.dumps(body), orjson.dumps(messages))
        if self.is_off or new.size > self._max_each:
            return False
        with self._lock:
            self._entries[owner, name] = new
            self.num_bytes += new.size
            while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
                _, dropped = self._entries.popitem(last=False)
                self.num_bytes -= dropped.size
        return True

    def get(self, owner: Any, name: str) -> Stored | None:
        """A response of this owner, which counts as used now."""
        with self._lock:
            found = self._entries.get((owner, name))
            if found is not None:
                self._entries.move_to_end((owner, name))
            return found

    def delete(self, owner: Any, name: str) -> bool:
        """Drop a response; whether there was one."""
        with self._lock:
            found = self._entries.pop((owner, name), None)
            self.num_bytes -= 0 if found is None else found.size
            return found is not None

    def __len__(self) -> int:
        return len(self._entries)
