"""SeveralCaches: what a layer with two mixers, or with none, keeps. Plain data."""

from dataclasses import dataclass

from nanovllm.layers.cache_spec import CacheSpec


@dataclass(frozen=True)
class SeveralCaches(CacheSpec):
    """What each mixer of a layer keeps, in the order of its modules."""

    caches: tuple[CacheSpec, ...]

    @property
    def each(self) -> tuple[CacheSpec, ...]:
        return self.caches


NOTHING = SeveralCaches(())  # of a layer without a mixer
