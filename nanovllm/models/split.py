"""Check how many ranks can split a model, from the shapes of its layers."""

from collections.abc import Iterable

from nanovllm.config import MAX_RANKS
from nanovllm.layers.cache_spec import CacheSpec, KeysAndValues, TokenCache
from nanovllm.layers.state_space import GroupedState
from nanovllm.models.shapes import LayerShape


class Split:
    """The sizes that ranks divide. With `whole_experts`, each rank has some of the experts."""

    def __init__(self, layers: Iterable[LayerShape], whole_experts: bool) -> None:
        kinds = sorted(layers, key=lambda layer: layer.experts is None)  # experts come first
        self.whole_experts = whole_experts
        self.caches = [*dict.fromkeys(cache for kind in kinds for cache in kind.cache.each)]
        self.num_experts = min((kind.experts.total for kind in kinds if kind.experts), default=0)
        self.widths: dict[str, int] = {}
        for kind in kinds:
            self.widths |= {} if whole_experts else kind.split_experts
            self.widths |= kind.split

    def fits(self, size: int) -> bool:
        """Whether `size` ranks can split the model."""
        enough = not self.whole_experts or self.num_experts >= size
        even = all(width % size == 0 for width in self.widths.values())
        return enough and even and all(_splits(cache, size) for cache in self.caches)

    @property
    def names(self) -> str:
        """The heads and widths, and the number of experts if the ranks divide that."""
        names = self.widths | ({"num_experts": self.num_experts} if self.whole_experts else {})
        sizes = [f"{name}={size}" for name, size in names.items()]
        kept = [cache for cache in self.caches if isinstance(cache, TokenCache | GroupedState)]
        return " and ".join([*dict.fromkeys(map(_heads, kept)), *sizes])


def check_split(layers: Iterable[LayerShape], size: int, whole_experts: bool) -> None:
    """Raise a ValueError if `size` ranks cannot split the layers."""
    kinds = [*{(layer.cache, layer.matrices): layer for layer in layers}.values()]
    split = Split(kinds, whole_experts)
    if whole_experts and not split.num_experts:
        raise ValueError("enable_expert_parallel=True: this model has no experts")
    if split.fits(size):
        return
    fit = ", ".join(str(n) for n in range(1, MAX_RANKS + 1) if split.fits(n))
    hint = ""
    if split.num_experts and not whole_experts and Split(kinds, whole_experts=True).fits(size):
        hint = f", and {size} can with enable_expert_parallel=True"
    raise ValueError(f"tensor_parallel_size={size} cannot split {split.names}; {fit} can{hint}")


def _heads(cache: TokenCache | GroupedState) -> str:
    """The heads of attention that ranks split, by the names in a config; or the groups of heads."""
    if isinstance(cache, GroupedState):
        return f"groups={cache.num_groups}"
    num_heads, num_kv_heads, _ = cache.heads
    heads = f"num_attention_heads={num_heads}"
    has_keys = isinstance(cache, KeysAndValues)
    return f"{heads}, num_key_value_heads={num_kv_heads}" if has_keys else heads


def _splits(cache: CacheSpec, size: int) -> bool:
    """Whether ranks can split what a layer keeps.

    Fewer key heads, or groups of a state, than ranks are replicated.
    """
    if isinstance(cache, GroupedState):
        return cache.num_groups % size == 0 or size % cache.num_groups == 0
    if not isinstance(cache, TokenCache):
        return True
    num_heads, kv_heads, _ = cache.heads
    return num_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
