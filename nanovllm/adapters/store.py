"""AdapterStore: the adapters in the host's memory. Threads read files during the engine's steps."""

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanovllm.adapters.adapter import Adapter, number_of
from nanovllm.engine.errors import NotReadyError
from nanovllm.lora_request import LoRARequest


class AdapterStore:
    """Up to `most` adapters' tensors, in the order of their last use.

    Any thread may call `accept`; only the engine's thread calls the other methods. An adapter that
    the scheduler waits for is wanted, and stays; of the other adapters, the least recently used one
    is dropped first. If a request waits for an adapter that was dropped, it is read again in the
    background. `read(path, number)` returns an adapter's tensors. It raises an error if something
    is wrong with its files, or if they no longer have this number. They are kept in `tensors`, by
    number; the last used comes last.
    """

    def __init__(
        self,
        read: Callable[[Path, int], Any],
        most: int,
        tensors: OrderedDict[int, Any] | None = None,
    ) -> None:
        self._read, self.most = read, most
        self.tensors = OrderedDict() if tensors is None else tensors
        self._known: weakref.WeakValueDictionary[int, Adapter] = weakref.WeakValueDictionary()
        self._wanted: frozenset[int] = frozenset()
        self._loading: set[int] = set()
        self._refusal: NotReadyError | None = None  # the reason why nothing is read now
        self._lock = threading.Lock()  # for the fields above
        self._reading = threading.Lock()  # one adapter is read at a time
        self._loaded = threading.Event()  # in the background, or failed
        self._thread: ThreadPoolExecutor | None = None

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being read in the background."""
        return bool(self._loading)

    def accept(self, request: LoRARequest) -> Adapter:
        """The adapter of a request. If it was not read before, it is read and checked now."""
        self._check_allowed()
        path = Path(request.lora_path).expanduser().resolve()
        number = number_of(path)
        if (adapter := self._find(number, path)) is not None:
            return adapter
        with self._reading:
            if (adapter := self._find(number, path)) is not None:  # by another thread
                return adapter
            self._check_allowed()
            adapter = Adapter(number, path)
            try:
                tensors = self._read(path, number)
            except NotADirectoryError:
                raise ValueError(
                    f"lora_request {request.lora_name!r}: {_no_directory(request.lora_path)}"
                ) from None
            except (OSError, TypeError, ValueError) as error:
                raise ValueError(f"lora_request {request.lora_name!r}: {error}") from error
            with self._lock:
                self._known[number] = adapter
                self._keep(number, tensors)
        return adapter

    def _find(self, number: int, path: Path) -> Adapter | None:
        """The adapter, if it has been read."""
        with self._lock:
            adapter = self._known.get(number)
            if adapter is not None and adapter.error is None:
                return adapter
            if number in self.tensors:
                self._known[number] = adapter = Adapter(number, path)
                return adapter
        return None

    def is_ready(self, adapter: Adapter) -> bool:
        """Whether its tensors are in memory. If not, start to read them, unless that has failed."""
        with self._lock:
            if adapter.number in self.tensors:
                self.tensors.move_to_end(adapter.number)
                return True
            if adapter.error is None and adapter.number not in self._loading:
                self._loading.add(adapter.number)
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-adapters")
                self._thread.submit(self._load, adapter)
        return False

    def want(self, adapters: Iterable[Adapter]) -> None:
        """Keep these adapters until the next call: the first ones if there is no room for all."""
        with self._lock:
            wanted = itertools.islice(adapters, self.most)
            self._wanted = frozenset(adapter.number for adapter in wanted)

    def wait(self, seconds: float) -> None:
        """Wait until an adapter was read in the background, at most `seconds`."""
        self._loaded.wait(seconds)
        self._loaded.clear()

    def refuse(self, reason: NotReadyError | None) -> None:
        """Read no adapters while there is a reason, because reading compares files with weights.

        Waits for an adapter that is being read.
        """
        with self._reading:
            self._refusal = reason

    def _check_allowed(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def close(self) -> None:
        """Read no more, and drop the tensors."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self.tensors.clear()

    def _load(self, adapter: Adapter) -> None:
        """Read an adapter again. An error ends the requests that use it."""
        try:
            with self._reading:
                self._check_allowed()
                tensors = self._read(adapter.path, adapter.number)
            with self._lock:
                self._keep(adapter.number, tensors)
        except NotReadyError:
            pass  # it is read when a step asks for it again
        except Exception as error:
            adapter.error = error
        finally:
            with self._lock:
                self._loading.discard(adapter.number)
            self._loaded.set()

    def _keep(self, number: int, tensors: Any) -> None:
        """Keep an adapter that was read, in place of the least recently used ones."""
        self.tensors[number] = tensors
        for other in list(self.tensors):
            if len(self.tensors) <= self.most:
                return
            if other not in self._wanted:
                del self.tensors[other]


def _no_directory(path: str) -> str:
    """The error for a path that is not a directory; it may be an id of the Hugging Face Hub."""
    hint = ""
    if path.count("/") == 1 and path.strip("/.~") == path:
        hint = (
            "; download adapters of the Hugging Face Hub first"
            f" (`hf download {path} --local-dir ...`)"
        )
    return f"lora_path must be a local directory, got {path!r}{hint}"
