"""LLMParts: the parts that only some calls of an LLM need, imported when first asked for."""

import functools
from typing import TYPE_CHECKING
from weakref import proxy

if TYPE_CHECKING:
    from nanovllm.beams.beams import Beams
    from nanovllm.chat.chats import Chats
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.run.profile import Profiles
    from nanovllm.vectors.vectors import Vectors
    from nanovllm.weights.sleep_mode import SleepMode
    from nanovllm.weights.weights import Weights


class LLMParts:
    """The parts that an LLM delegates to. They refer to it weakly, so that `del llm` closes it."""

    def __init__(self, engine: "LLMEngine") -> None:
        self.engine = proxy(engine)

    @functools.cached_property
    def chats(self) -> "Chats":
        """Answers conversations."""
        from nanovllm.chat.chats import Chats

        return Chats(self.engine)

    @functools.cached_property
    def vectors(self) -> "Vectors":
        """Computes vectors and scores of prompts, without generating tokens."""
        from nanovllm.vectors.vectors import Vectors

        return Vectors(self.engine)

    @functools.cached_property
    def beams(self) -> "Beams":
        """Searches for the most likely outputs."""
        from nanovllm.beams.beams import Beams

        return Beams(self.engine)

    @functools.cached_property
    def weights(self) -> "Weights":
        """Reads and replaces weights."""
        from nanovllm.weights.weights import Weights

        return Weights(self.engine)

    @functools.cached_property
    def sleep_mode(self) -> "SleepMode":
        """Frees the device's memory for a while."""
        from nanovllm.weights.sleep_mode import SleepMode

        return SleepMode(self.weights)

    @functools.cached_property
    def profiles(self) -> "Profiles":
        """Records what the ranks do."""
        from nanovllm.engine.run.profile import Profiles

        return Profiles(self.engine)
