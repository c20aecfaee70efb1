"""Errors of one sequence: no token can be drawn, or the work for it raises an exception.

The work is done again, and only what is raised again is an error of the sequence. Otherwise the
exception may come from a signal's handler, and is for the caller. Imported at the first error.
"""

from collections.abc import Callable
from typing import Any

FOR_CALLERS = (KeyboardInterrupt, SystemExit)  # a panic of llguidance is no Exception

NOT_FINITE = "the model's logits are not finite"
NONE_LEFT = (
    "the parameters, such as structured_outputs, logits_processors, min_tokens, allowed_token_ids"
    f" and bad_words, leave no token to draw, or {NOT_FINITE}"
)


def fail(seq: Any, index: int) -> None:
    """End a Sequence for which no token could be drawn at `index`."""
    del seq.token_ids[index:]
    default = NONE_LEFT if seq.is_narrowed else NOT_FINITE
    seq.finish("error", seq.parts.errors.get(index, default))


def shown(error: BaseException) -> str:
    """The type and the text of an exception, if it has one that can be made."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_repeated(error: BaseException, again: Callable[[], object]) -> None:
    """Raise `error`, unless `again` raises an exception, too."""
    if isinstance(error, FOR_CALLERS):
        raise error
    try:
        again()
    except FOR_CALLERS:
        raise
    except BaseException:
        return
    raise error


def reason_of_failed(follower: Any, seq: Any, error: BaseException) -> str:
    """Why a Sequence ends with a Follower that has raised `error`."""

    def again() -> None:
        follower.reset()
        follower.update(seq)

    check_repeated(error, again)
    return f"{type(follower).__name__} raised {shown(error)}"
