"""The end of a request."""

import pytest

from nanovllm.engine.requests.request import check_no_error
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def test_an_error_is_raised_with_its_own_message() -> None:
    seq = Sequence([1], SamplingParams())
    check_no_error(seq)
    seq.finish("stop")
    check_no_error(seq)
    seq.finish("error", "logits_processors: no logits")
    with pytest.raises(ValueError, match=r"^logits_processors: no logits$"):
        check_no_error(seq)
