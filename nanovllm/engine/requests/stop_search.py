"""StopSearch: finds stop strings in texts that come character by character.

It is the automaton of Aho and Corasick, made only as far as texts enter it: a new search costs no
more than sorting its stops, and a text costs a constant number of steps for each character,
whatever the number of stops. It knows no tokens and no sequences.
"""

import bisect
from weakref import WeakValueDictionary


class StopState:
    """The longest end of a text that begins one of the stops. `fail` is the next shorter such end.

    `depth` is its length. The sorted stops from `low` up to `high` begin with it. `stop` is the
    longest stop that the text ends with.
    """

    __slots__ = ("children", "depth", "fail", "high", "low", "stop")

    def __init__(self, depth: int, low: int, high: int, fail: "StopState | None") -> None:
        self.depth, self.low, self.high, self.fail = depth, low, high, fail
        self.stop: str | None = None if fail is None else fail.stop
        self.children: dict[str, StopState] = {}  # by the next character, as far as texts had it


class StopSearch:
    """The states of all texts that are searched for the same stops; a text begins at `start`.

    There are at most as many states as the stops have characters.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = sorted({*stops})
        self._most_held = max(map(len, self._stops)) - 1  # of an incomplete stop
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self.start = StopState(0, 0, len(self._stops), None)

    def advance(self, state: StopState, char: str) -> StopState:
        """The state after one more character."""
        child = state.children.get(char)
        if child is not None:
            return child
        if state is self.start and char not in self._firsts:
            return state
        return self._enter(state, char)

    def passes_over(self, state: StopState, piece: str) -> bool:
        """Whether nothing in `piece` begins a stop, and nothing before it either."""
        return state is self.start and self._firsts.isdisjoint(piece)

    def num_held(self, state: StopState) -> int:
        """How many characters at the end of the text may become part of a longer or later stop."""
        if state.depth > self._most_held and state.fail is not None:
            return state.fail.depth
        return state.depth

    def _enter(self, state: StopState, char: str) -> StopState:
        """The state after `char`; makes those that are missing, the shortest first."""
        shorter: list[StopState] = []
        at: StopState | None = state
        found = self.start
        while at is not None:
            if (child := at.children.get(char)) is not None:
                found = child
                break
            shorter.append(at)
            at = at.fail
        for at in reversed(shorter):
            found = self._child(at, char, found) or found
        return found

    def _child(self, state: StopState, char: str, fail: StopState) -> StopState | None:
        """Make the state for `char` after `state`, if a stop goes on with it."""
        depth, stops = state.depth, self._stops
        low = bisect.bisect_left(
            stops, char, state.low, state.high, key=lambda stop: stop[depth : depth + 1]
        )
        if low == state.high or stops[low][depth : depth + 1] != char:
            return None
        high = bisect.bisect_right(
            stops, char, low, state.high, key=lambda stop: stop[depth : depth + 1]
        )
        child = StopState(depth + 1, low, high, fail)
        if len(stops[low]) == depth + 1:
            child.stop = stops[low]
        state.children[char] = child
        return child


_searches: WeakValueDictionary[tuple[str, ...], StopSearch] = WeakValueDictionary()


def stop_search(stops: tuple[str, ...]) -> StopSearch:
    """The search for these stops, shared by all samples that have them."""
    search = _searches.get(stops)
    if search is None:
        search = _searches[stops] = StopSearch(stops)
    return search
