"""Small models of the families in `nanovllm/models`, for test_families.py: a module a kind."""

from families.describe import Published, Sample
from families.experts import PUBLISHED as EXPERTS_PUBLISHED
from families.experts import SAMPLES as EXPERTS_SAMPLES
from families.usual import PUBLISHED as USUAL_PUBLISHED
from families.usual import SAMPLES as USUAL_SAMPLES

SAMPLES: dict[str, Sample] = {
    **USUAL_SAMPLES,
    **EXPERTS_SAMPLES,
}
PUBLISHED: dict[str, Published] = {
    **USUAL_PUBLISHED,
    **EXPERTS_PUBLISHED,
}
