"""`--served-model-name A B`: several names after one flag, as vLLM's command takes them."""

from collections.abc import Callable, Sequence

FLAG = "--served-model-name"


def flags_for_names(args: Sequence[str], takes_text: Callable[[str], bool]) -> list[str]:
    """The arguments of `serve`, with the flag repeated before each further name.

    Only after the model: before it, the text after a name may be the model. `takes_text` says
    whether a flag has a text after it.
    """
    full: list[str] = []
    flag, has_model = "", False
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
