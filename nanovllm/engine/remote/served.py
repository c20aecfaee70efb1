"""ServedEngine: the engine of another process, and what that process may ask."""

from collections.abc import Callable
from typing import Any
from weakref import proxy

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.profile import Profiles
from nanovllm.engine.remote.messages import Question
from nanovllm.features import AllFeatures
from nanovllm.weights.sleep_mode import SleepMode
from nanovllm.weights.weights import Weights


class ServedEngine(LLMEngine):
    """An engine of which another process reads the texts."""

    features = AllFeatures()
    _warns = False  # the caller's process loads the tokenizer too, and warns


def answers_of(engine: LLMEngine) -> dict[Question, Callable[..., Any]]:
    """What is called for each question."""
    engine = proxy(engine)
    weights, profiles = Weights(engine), Profiles(engine)
    sleep_mode = SleepMode(weights)
    return {
        "stats": engine.stats,
        "get_metrics": engine.get_metrics,
        "check_adapter": engine.check_adapter,
        "reset_prefix_cache": engine.reset_prefix_cache,
        "begin_update": weights.begin_update,
        "load_weights": weights.load_weights,
        "end_update": weights.end_update,
        "cancel_update": weights.cancel_update,
        "reload_weights": weights.reload_weights,
        "get_weights": weights.get_weights,
        "apply_model": weights.apply_model,
        "sleep": sleep_mode.sleep,
        "wake_up": sleep_mode.wake_up,
        "is_sleeping": lambda: sleep_mode.is_sleeping,
        "start_profile": profiles.start,
        "stop_profile": profiles.stop,
    }
