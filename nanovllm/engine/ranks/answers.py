"""Answers: the ranks' results of a command. Each rank has its own socket to rank 0."""

import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nanovllm.engine.errors import ExchangeError, RankError
from nanovllm.engine.ranks.frames import frame, receive, sendable
from nanovllm.engine.run.other_ranks import Command, run_command
from nanovllm.engine.run.shard import Shard

# How long other ranks may take to answer after one has raised. They may wait for that rank in an
# exchange, which would never end.
LOST_SECONDS = 30.0


class Outcome(NamedTuple):
    """The result of a rank's part of a command, or the error that it raised."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""


def attempt(command: Command, shard: Shard) -> Outcome:
    """Run a rank's part of a command. An error of an exchange is raised, and ends the rank."""
    try:
        return Outcome(run_command(command, shard))
    except (ExchangeError, RankError):
        raise
    except Exception as error:
        return Outcome(error=error, traceback=traceback.format_exc())


def send(link: socket.socket, outcome: Outcome) -> None:
    """Send rank 0 an outcome; in place of one that cannot be pickled, an error that says so."""
    if outcome.error is not None:
        outcome = outcome._replace(error=sendable(outcome.error))
    try:
        message = frame(outcome)
    except Exception as error:
        text = f"a result cannot be sent to rank 0: {type(error).__name__}: {error}"
        message = frame(Outcome(error=RuntimeError(text)))
    link.sendall(message)


class Answers:
    """Collects the outcomes of a command while rank 0 runs its own part.

    When a rank has raised, the others have LOST_SECONDS to answer. Then `lose` is called with the
    reason why they cannot go on together. It ends the ranks, so that no thread waits for them.
    """

    def __init__(
        self, links: Sequence[tuple[str, socket.socket]], lose: Callable[[str], None]
    ) -> None:
        self._lose = lose
        self._names = [name for name, _ in links]
        self._outcomes: list[Outcome | None] = [None] * len(links)
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._receive, args=(i, link), daemon=True)
            for i, (_, link) in enumerate(links)
        ]
        for thread in self._threads:
            thread.start()

    def outcomes(self, own: Outcome) -> list[tuple[str, Outcome]]:
        """All ranks' names and outcomes, rank 0's `own` first; a RankError if a rank has ended."""
        if own.error is not None:
            self._await_others("rank 0", own.error)
        for thread in self._threads:
            thread.join()
        if self._timer is not None:
            self._timer.cancel()
        named = [("rank 0", own)]
        for name, outcome in zip(self._names, self._outcomes, strict=True):
            if outcome is None:
                raise RankError(f"{name} has ended")
            named.append((name, outcome))
        return named

    def _receive(self, index: int, link: socket.socket) -> None:
        try:
            outcome: Outcome = receive(link)
        except (EOFError, OSError):
            return
        except Exception as error:
            outcome = Outcome(error=error)
        self._outcomes[index] = outcome
        if outcome.error is not None:
            self._await_others(self._names[index], outcome.error)

    def _await_others(self, name: str, error: Exception) -> None:
        """Start the time that the other ranks have to answer, unless it has started."""
        reason = f"{name} raised {type(error).__name__} in a command, and others waited for it"
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(LOST_SECONDS, self._lose, [reason])
                self._timer.daemon = True
                self._timer.start()


def results(outcomes: Sequence[tuple[str, Outcome]]) -> list[Any]:
    """The ranks' results; raises the error of the first rank that has one."""
    for name, outcome in outcomes:
        if outcome.error is not None:
            raise _named(outcome, name) if len(outcomes) > 1 else outcome.error
    return [outcome.value for _, outcome in outcomes]


def _named(outcome: Outcome, name: str) -> Exception:
    """The error, with a note that names its rank; Python prints notes from version 3.11 on."""
    assert outcome.error is not None
    note = f"raised by {name}"
    if outcome.error.__traceback__ is None and outcome.traceback:  # it comes from another process
        note += f":\n\n{outcome.traceback}"
    notes = [*getattr(outcome.error, "__notes__", []), note]
    setattr(outcome.error, "__notes__", notes)  # noqa: B010
    return outcome.error
