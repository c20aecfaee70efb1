"""Reads messages from stdin. In a terminal a message may have several lines.

A pasted text is one message: terminals mark where it begins and ends (bracketed paste). Alt+Enter
begins a line, and so does Enter behind a backslash. Without GNU readline, only the backslash does.
"""

import sys

from nanovllm.command.answer_writer import has_codes

PROMPT, MORE = ">>> ", "... "
PASTE = "set enable-bracketed-paste on"  # Python turns it off
BINDINGS = (
    r'"\e\C-m": "\C-v\C-j"',  # Alt+Enter
    r'"\e\C-j": "\C-v\C-j"',
)


class MessageInput:
    """Reads one message after another."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        if self.is_terminal:
            _bind_keys()

    def read(self) -> str:
        """The next message, stripped. EOFError at the end of the input."""
        if not self.is_terminal:
            return input().strip()
        text = input(PROMPT)
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{input(MORE)}"
        return text.strip()


def _bind_keys() -> None:
    try:
        import readline  # also arrow keys and history, for `input`
    except ImportError:
        return
    if "libedit" not in (readline.__doc__ or ""):
        for binding in (*BINDINGS, *([PASTE] if has_codes() else [])):
            readline.parse_and_bind(binding)
