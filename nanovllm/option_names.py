"""Names of options in commands that take the options of several dataclasses."""

from nanovllm.config import Config

OTHER_NAMES: dict[tuple[type, str], str] = {
    (Config, "seed"): "engine_seed"
}  # there `seed` is a request's or a workload's


def option_name(kind: type, name: str) -> str:
    """The name of a field's option: the field's, unless another class's field has that name."""
    return OTHER_NAMES.get((kind, name), name)
