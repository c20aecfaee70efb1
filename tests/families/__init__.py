"""Small models of the families in `nanovllm/models`, for test_families.py: a module a kind."""

from families import dense, dense_published, experts, layer_norms, usual
from families.describe import Published, Sample

SAMPLES: dict[str, Sample] = {
    **usual.SAMPLES,
    **experts.SAMPLES,
    **dense.SAMPLES,
    **layer_norms.SAMPLES,
}
PUBLISHED: dict[str, Published] = {
    **usual.PUBLISHED,
    **experts.PUBLISHED,
    **dense_published.PUBLISHED,
    **layer_norms.PUBLISHED,
from families.gemma3n import PUBLISHED as GEMMA3N_PUBLISHED
from families.gemma3n import SAMPLES as GEMMA3N_SAMPLES
from families.gemma4 import PUBLISHED as GEMMA4_PUBLISHED
from families.gemma4 import SAMPLES as GEMMA4_SAMPLES
from families.usual import PUBLISHED as USUAL_PUBLISHED
from families.usual import SAMPLES as USUAL_SAMPLES

SAMPLES: dict[str, Sample] = {
    **USUAL_SAMPLES,
    **GEMMA3N_SAMPLES,
    **GEMMA4_SAMPLES,
}
PUBLISHED: dict[str, Published] = {
    **USUAL_PUBLISHED,
    **GEMMA3N_PUBLISHED,
    **GEMMA4_PUBLISHED,
}
