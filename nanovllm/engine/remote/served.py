"""ServedEngine: the engine of another process."""

from nanovllm.engine.profile import ProfileCalls
from nanovllm.engine.weights.calls import WeightCalls


class ServedEngine(WeightCalls, ProfileCalls):
    """An engine with all methods that `Ask` names."""
