"""The architectures that nanovllm runs, by the name that checkpoints give them."""

from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def get_model_class(architecture: str) -> type[Qwen3ForCausalLM]:
    """Find an architecture; one that is not here is refused, never run as a relative."""
    if architecture not in MODELS:
        raise ValueError(
            f"architecture {architecture!r} is not supported; {', '.join(MODELS)} is what there is"
        )
    return MODELS[architecture]
