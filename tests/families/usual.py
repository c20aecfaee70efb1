"""Llama: the form of most families."""

from families.describe import Published, Sample

SAMPLES = {
    "Llama": Sample("LlamaForCausalLM"),
}
PUBLISHED: dict[str, Published] = {}
