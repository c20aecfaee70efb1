"""`--served-model-name A B`: several names after one flag, as vLLM's command takes them."""

from collections.abc import Callable, Sequence

FLAG = "--served-model-name"


def flags_for_names(args: Sequence[str], takes_text: Callable[[str], bool]) -> list[str]:
    """The arguments of `serve`, with the flag repeated before each further name.

    Only after the model, which may be that of `--model`: before it, the text after a name may be
    the model. `takes_text` says whether a flag has a text after it.
    """
    full: list[str] = []
    flag, has_model = "", any(arg.partition("=")[0] == "--model" for arg in args)
    for place, arg in enumerate(args):
        if arg.startswith("-"):
            flag = arg
        elif flag and args[place - 1] == flag and takes_text(flag):
            pass  # the flag's own text
        elif has_model and flag.partition("=")[0] == FLAG:
            full.append(FLAG)
        else:
            has_model, flag = True, ""
        full.append(arg)
    return full


def names_hint(args: Sequence[str]) -> str:
    """What to do about texts that no argument takes, if the flag may have been meant to."""
    given = [place for place, arg in enumerate(args) if arg.partition("=")[0] == FLAG]
    if not given:
        return ""
    return f"; give the model before {FLAG} and its names, or the flag again for each name"
