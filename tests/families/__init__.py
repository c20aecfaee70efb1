"""Small models of the families in `nanovllm/models`, for test_families.py: a module a kind."""

from families import (
    dense,
    dense_published,
    experts,
    gemma,
    gemma3n,
    gemma4,
    gpt_oss,
    hybrids,
    layer_norms,
    lfm2,
    mistral3,
    sigmoid_experts,
    spaces,
    usual,
)
from families.describe import Published, Sample

SAMPLES: dict[str, Sample] = {
    **usual.SAMPLES,
    **experts.SAMPLES,
    **dense.SAMPLES,
    **layer_norms.SAMPLES,
    **gemma.SAMPLES,
    **gemma3n.SAMPLES,
    **gemma4.SAMPLES,
    **gpt_oss.SAMPLES,
    **mistral3.SAMPLES,
    **hybrids.SAMPLES,
    **lfm2.SAMPLES,
    **spaces.SAMPLES,
    **sigmoid_experts.SAMPLES,
}
PUBLISHED: dict[str, Published] = {
    **usual.PUBLISHED,
    **experts.PUBLISHED,
    **dense_published.PUBLISHED,
    **layer_norms.PUBLISHED,
    **gemma.PUBLISHED,
    **gemma3n.PUBLISHED,
    **gemma4.PUBLISHED,
    **gpt_oss.PUBLISHED,
    **mistral3.PUBLISHED,
    **hybrids.PUBLISHED,
    **lfm2.PUBLISHED,
    **spaces.PUBLISHED,
    **sigmoid_experts.PUBLISHED,
}
