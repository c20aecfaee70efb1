"""Errors of the command in its own spelling: `--max-num-seqs`, not `max_num_seqs`."""

import contextlib
import re
from collections.abc import Iterator

from nanovllm.command.field_options import option_flag
from nanovllm.utils.option import options_of

VERBS = "must|needs?|has|have|cannot|may"  # after a name of one word that begins an error
PLACE = re.compile(r"(prompts\[\d+\]: )?")  # may stand before the beginning of an error
DICT = "speculative_config"  # an option with keys that have names of other options


def spelled(text: str, *kinds: type) -> str:
    """The text with the names of fields of these dataclasses as flags.

    A name of one word may be an ordinary word. It is a name before `=`, and where the text begins
    with it.
    """
    if text.startswith(f"{DICT}: "):  # the rest is about its keys
        return spelled(DICT, *kinds) + text[len(DICT) :]
    begin = PLACE.match(text).end()  # type: ignore[union-attr]
    flags = {
        name: option_flag(kind, name)
        for kind in reversed(kinds)  # the first class has a name that several have
        for name, described in options_of(kind).items()
        if not described.only_python
    }
    flags = {
        name: flag
        for name, flag in flags.items()
        if "_" in name or (not text.startswith(DICT) and _is_named(name, text, begin))
    }
    if not flags:
        return text

    def flag_of(found: "re.Match[str]") -> str:
        flag = flags[found["name"]]
        is_word = "_" not in found["name"] and found.start() != begin
        if is_word and text[found.end("name") :][:1] != "=":
            return found[0]
        if found["truth"] is None:
            return flag
        return flag if found["truth"] == "True" else flag.replace("--", "--no-", 1)

    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))
    # `enable_lora=True (--enable-lora), got False` says the same three times.
    pattern = (
        rf"(?<![\w./'\"-])(?P<name>{names})(?![\w'\"/])"
        r"(=(?P<truth>True|False)( \(--[\w-]+\))?(, got (True|False)$)?)?"
    )
    return re.sub(pattern, flag_of, text)


def _is_named(name: str, text: str, begin: int) -> bool:
    """Whether a text has a name of one word as a name; its sentence starts at `begin`."""
    begins = re.match(rf"{name} ({VERBS})\b", text[begin:])
    return bool(begins or re.search(rf"(?<![\w./'\"-]){name}=", text))


@contextlib.contextmanager
def spelled_errors(*kinds: type) -> Iterator[None]:
    """Give errors about values of these classes the spelling of the command, in the block."""
    try:
        yield
    except (TypeError, ValueError, OSError, RuntimeError, MemoryError) as error:
        text = str(error)
        if error.args == (text,):
            error.args = (spelled(text, *kinds),)
        raise
