"""Trial: the errors of a compiled grammar, also those that appear only when masks are computed."""

import re
from typing import TYPE_CHECKING

from nanovllm.structured.constraint import reason_of
from nanovllm.structured.grammar_text import schemas_of
from nanovllm.structured.schema_errors import explained
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.checks import shorten

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TRIAL_TOKENS, TRIAL_WAYS = 32, 8
PLACE_IN_LARK = re.compile(r"^at \d+\(\d+\): ")


def error_of(matcher: "LLMatcher", tokenizer: "LLTokenizer", asked: StructuredOutputs) -> str:
    """The error of the matcher, or ""."""
    if matcher.is_error():
        error = reason_of(matcher)
        if error.startswith("panic: "):
            return "it has too many parts"
        if asked.grammar is None:  # the error shows a grammar that we have written
            error = PLACE_IN_LARK.sub("", error).partition("\n   1 | ")[0]
        return explained(error, schemas_of(asked))
    return _trial(matcher, tokenizer)


def _trial(matcher: "LLMatcher", tokenizer: "LLTokenizer") -> str:
    """Why masks cannot be computed for the first tokens of some text; "" if they can.

    llguidance checks its limits only then. Results are kept, so nothing is computed twice.
    """
    trial, text = matcher.deep_copy(), b""
    for _ in range(TRIAL_TOKENS):
        mask = trial.compute_bitmask()
        if trial.is_error() or trial.is_stopped():
            break
        few = [(one, tokenizer.decode_bytes([one])) for one in _first_tokens(mask, TRIAL_WAYS)]
        if not few:
            break
        token_id, token = next(
            ((i, t) for i, t in few if t.strip()), few[0]
        )  # rather not white space
        text += token
        trial.consume_token(token_id)
    if trial.is_error() and "NoExtension" not in reason_of(trial):
        return f"it is too complex: {reason_of(trial)}"
    if trial.is_error() or (trial.is_stopped() and not trial.is_accepting()):
        shown = shorten(text.decode(errors="replace"))
        return f"nothing can follow {shown}, which it allows" if text else "no text can begin"
    return ""


def _first_tokens(mask: bytes, most: int) -> list[int]:
    """The first tokens that a mask allows: at least one, if it allows any, and about `most`."""
    found: list[int] = []
    rest = mask.lstrip(b"\0")
    while rest and len(found) < most:
        start = 8 * (len(mask) - len(rest))
        found += (start + bit for bit in range(8) if rest[0] >> bit & 1)
        rest = rest[1:].lstrip(b"\0")
    return found
