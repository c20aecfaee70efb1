"""Small models of the families in `nanovllm/models`, for test_families.py: a module a kind."""

from families.dense import SAMPLES as DENSE_SAMPLES
from families.dense_published import PUBLISHED as DENSE_PUBLISHED
from families.describe import Published, Sample
from families.layer_norms import PUBLISHED as LAYER_NORMS_PUBLISHED
from families.layer_norms import SAMPLES as LAYER_NORMS_SAMPLES
from families.usual import PUBLISHED as USUAL_PUBLISHED
from families.usual import SAMPLES as USUAL_SAMPLES

SAMPLES: dict[str, Sample] = {
    **USUAL_SAMPLES,
    **DENSE_SAMPLES,
    **LAYER_NORMS_SAMPLES,
}
PUBLISHED: dict[str, Published] = {
    **USUAL_PUBLISHED,
    **DENSE_PUBLISHED,
    **LAYER_NORMS_PUBLISHED,
}
