"""Small models of the families in `nanovllm/models`, for test_families.py: a module a kind."""

from families.describe import Published, Sample
from families.gemma import PUBLISHED as GEMMA_PUBLISHED
from families.gemma import SAMPLES as GEMMA_SAMPLES
from families.usual import PUBLISHED as USUAL_PUBLISHED
from families.usual import SAMPLES as USUAL_SAMPLES

SAMPLES: dict[str, Sample] = {
    **USUAL_SAMPLES,
    **GEMMA_SAMPLES,
}
PUBLISHED: dict[str, Published] = {
    **USUAL_PUBLISHED,
    **GEMMA_PUBLISHED,
}
