"""The state spaces of a model's layers: their fields in a `config.json`, their matrices, the mixer.

No PyTorch here until the mixer is made.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.layers.state_space import StateSpace
from nanovllm.models.config import ModelConfig
from nanovllm.models.fields import Fields
from nanovllm.models.shapes import MatrixShape
from nanovllm.utils.checks import check_float, check_int, shorten

if TYPE_CHECKING:
    from nanovllm.layers.layer import Build
    from nanovllm.layers.state_space_mixer import StateSpaceMixer

# The fields of a `StateSpace`'s sizes in hybrids, by our names.
MAMBA_SIZES = {
    "num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "num_groups": "mamba_n_groups",
    "state_size": "mamba_d_state", "width": "mamba_d_conv",
}  # fmt: skip
INFINITIES = (float("inf"), {"__float__": "Infinity"})  # as files spell it


def space_sizes(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    """The sizes of a `StateSpace`, from the fields that `names` maps our names to.

    The groups must divide the heads.
    """
    sizes = {ours: fields.size(theirs) for ours, theirs in names.items()}
    check_int(names["width"], sizes["width"], 2)
    heads, groups = sizes["num_heads"], sizes["num_groups"]
    if heads % groups:
        names_and_sizes = f"{names['num_heads']}={heads}, {names['num_groups']}={groups}"
        raise ValueError(f"the groups of a state space must divide its heads: {names_and_sizes}")
    return sizes


def check_inner(fields: Fields, expand: str, sizes: Mapping[str, int], name: str) -> None:
    """Raise unless the heads have the channels that `expand` times the hidden size says."""
    inner, heads, head_dim = _inner(fields, expand), sizes["num_heads"], sizes["head_dim"]
    if heads * head_dim != inner:
        raise ValueError(
            f"{name}: {heads} heads of {head_dim} channels contradict {expand}={fields[expand]}"
            f" times hidden_size={fields['hidden_size']}"
        )


def _inner(fields: Fields, expand: str) -> int:
    return int(fields.number(expand) * fields.size("hidden_size"))


def head_size(fields: Fields, name: str, num_heads: str, inner: int) -> int:
    """The channels of a head: `name`, which "auto" leaves to the `inner` channels of all heads."""
    if fields[name] != "auto":
        return fields.size(name)
    heads = fields.size(num_heads)
    if inner % heads:
        raise ValueError(f"{num_heads}={heads} must divide the {inner} channels of a state space")
    return inner // heads


def time_limits(value: Any, name: str = "time_step_limit") -> dict[str, Any]:
    """The limits of time steps, of a list of two numbers; the second may be infinite."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{name} must be a list of two numbers, got {shorten(value)}")
    low = check_float(name, value[0], 0.0)
    if any(value[1] == infinite for infinite in INFINITIES):
        return dict(low=low)
    return dict(low=low, high=check_float(name, value[1], low))


def space_matrices(space: StateSpace, hidden_size: int, above: str) -> tuple[MatrixShape, ...]:
    """The matrices of a state space's projections."""
    return (
        MatrixShape(f"{above}.in_proj", sum(space.projected), hidden_size),
        MatrixShape(f"{above}.out_proj", hidden_size, space.inner),
    )


def space_mixer(config: ModelConfig, space: StateSpace, make: "Build") -> "StateSpaceMixer":
    """The mixer of a layer."""
    from nanovllm.layers.state_space_mixer import StateSpaceMixer

    return StateSpaceMixer(make, config.hidden_size, space, config.rms_norm_eps)
