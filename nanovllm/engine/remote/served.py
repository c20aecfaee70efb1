"""ServedEngine: the engine of another process."""

from nanovllm.engine.profile import ProfileCalls
from nanovllm.engine.weights.sleep_calls import SleepCalls


class ServedEngine(SleepCalls, ProfileCalls):
    """An engine with all methods that `Ask` names."""

    _warns = False  # the caller's process loads the tokenizer too, and warns
