"""Small models of the families in `nanovllm/models`, for test_families.py: a module a kind."""

from families.describe import Published, Sample
from families.gpt_oss import PUBLISHED as GPT_OSS_PUBLISHED
from families.gpt_oss import SAMPLES as GPT_OSS_SAMPLES
from families.usual import PUBLISHED as USUAL_PUBLISHED
from families.usual import SAMPLES as USUAL_SAMPLES

SAMPLES: dict[str, Sample] = {
    **USUAL_SAMPLES,
    **GPT_OSS_SAMPLES,
}
PUBLISHED: dict[str, Published] = {
    **USUAL_PUBLISHED,
    **GPT_OSS_PUBLISHED,
}
