"""Compiled grammars: which are kept, and how many constraints share one. It knows no grammar."""

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
# Of all that are kept, if they are more than one: a bound of their memory, as each second is at
# most about 100 MiB. It is the thread's own time, which other threads do not change.
MOST_SECONDS = 3.0
SHARING = 8  # constraints that share one matcher's states, one of which is used at a time
MOST_MATCHERS = 8  # of a grammar that is CHEAP
CHEAP = 0.03  # less seconds than these to compile

Compile = Callable[[StructuredOutputs], "LLMatcher"]


class Compiled:
    """A compiled grammar; it is compiled again for other constraints if many use it.

    llguidance's matchers and their copies share states, which one thread at a time reads and adds
    to. Several matchers let several threads work.
    """

    def __init__(self, compile_one: Compile, asked: StructuredOutputs) -> None:
        self._compile_one, self._asked = compile_one, asked
        self.seconds = 0.0  # of all that were compiled
        self._matchers = [self._compile()]
        self._most = MOST_MATCHERS if self.seconds < CHEAP else 1
        self._numbers = count()

    def matcher(self) -> "LLMatcher":
        """The matcher of the next constraint, at its start."""
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
    """The grammars that were asked for last. For use by several threads."""

    def __init__(self, compile_one: Compile) -> None:
        self._compile_one = compile_one
        self._kept: OrderedDict[StructuredOutputs, Compiled] = OrderedDict()
        self._lock = threading.Lock()  # not held while a grammar is compiled

    def matcher(self, asked: StructuredOutputs) -> "LLMatcher":
        """A matcher at the start of the grammar. What `compile_one` raises is raised."""
        with self._lock:
            compiled = self._kept.get(asked)
        if compiled is None:
            compiled = Compiled(self._compile_one, asked)
        with self._lock:
            self._kept[asked] = compiled
            self._kept.move_to_end(asked)
            self._drop()
        return compiled.matcher()

    def _drop(self) -> None:
        """Drop those that were not asked for longest, down to the bounds; the last one stays."""
        seconds = sum(compiled.seconds for compiled in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > MOST_KEPT or seconds > MOST_SECONDS):
            _, dropped = self._kept.popitem(last=False)
            seconds -= dropped.seconds
