"""Compiled grammars: which ones are kept, and how many constraints share one."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from nanovllm.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_KEPT = 256
MOST_BYTES = 8 << 20  # of the texts of all kept grammars, which llguidance keeps several times
# The most seconds of all kept grammars, if there are several. This bounds their memory: a second is
# at most about 100 MiB. It is the thread's own time, which other threads do not change.
MOST_SECONDS = 3.0
SHARING = 8  # constraints that share one matcher's states; only one of them is used at a time
MOST_MATCHERS = 8  # matchers of a CHEAP grammar
CHEAP = 0.03  # a grammar that compiles in less than these seconds

Compile = Callable[[StructuredOutputs], "LLMatcher"]


class Compiled:
    """A compiled grammar; it is compiled again for more constraints if many use it.

    llguidance's matchers and their copies share states, which only one thread at a time can use.
    With several matchers, several threads can work.
    """

    def __init__(self, compile_one: Compile, asked: StructuredOutputs) -> None:
        self._compile_one, self._asked = compile_one, asked
        self.size = asked.size
        self.seconds = 0.0  # to compile all matchers
        self._matchers = [self._compile()]
        self._most = MOST_MATCHERS if self.seconds < CHEAP else 1
        self._numbers = count()

    def matcher(self) -> "LLMatcher":
        """A matcher for the next constraint, at its start."""
        index = next(self._numbers) // SHARING % self._most
        if index < len(self._matchers):
            return self._matchers[index]
        self._matchers.append(self._compile())
        return self._matchers[-1]

    def _compile(self) -> "LLMatcher":
        start = time.thread_time()
        matcher = self._compile_one(self._asked)
        self.seconds += time.thread_time() - start
        return matcher


class CompiledGrammars:
    """Keeps the grammars that were used last. For use by several threads."""

    def __init__(self, compile_one: Compile) -> None:
        self._compile_one = compile_one
        self._kept: OrderedDict[StructuredOutputs, Compiled] = OrderedDict()
        self._lock = threading.Lock()  # free while a grammar is compiled

    def matcher(self, asked: StructuredOutputs) -> "LLMatcher":
        """A matcher at the start of the grammar. Raises the errors of `compile_one`."""
        with self._lock:
            compiled = self._kept.get(asked)
        if compiled is None:
            compiled = Compiled(self._compile_one, asked)
        with self._lock:
            self._kept[asked] = compiled
            self._kept.move_to_end(asked)
            self._drop()
        return compiled.matcher()

    def has(self, asked: StructuredOutputs) -> bool:
        """Whether the grammar is kept."""
        with self._lock:
            return asked in self._kept

    def _drop(self) -> None:
        """Drop the least recently used grammars, down to the bounds; the last one stays."""
        seconds = sum(compiled.seconds for compiled in self._kept.values())
        size = sum(compiled.size for compiled in self._kept.values())
        while len(self._kept) > 1 and (
            len(self._kept) > MOST_KEPT or seconds > MOST_SECONDS or size > MOST_BYTES
        ):
            _, dropped = self._kept.popitem(last=False)
            seconds -= dropped.seconds
            size -= dropped.size
