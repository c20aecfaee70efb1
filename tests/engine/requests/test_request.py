"""The end of a request."""

import pytest
from conftest import byte_tokenizer

from nanovllm.engine.requests.request import check_no_error, ending
from nanovllm.engine.requests.stop_text import TextUntilStop
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def test_an_error_is_raised_with_its_own_message() -> None:
    seq = Sequence([1], SamplingParams())
    check_no_error(seq)
    seq.finish("stop")
    check_no_error(seq)
    seq.finish("error", "logits_processors: no logits")
    with pytest.raises(ValueError, match=r"^logits_processors: no logits$"):
        check_no_error(seq)


def test_a_stop_in_text_that_was_held_back_is_reported() -> None:
    """The last token is the first byte of a character: what it stands for at the end is a stop."""
    tokenizer = byte_tokenizer()
    params = SamplingParams(stop="\ufffd")
    seq = Sequence([1], params, parts=SequenceParts(text=TextUntilStop(tokenizer, params)))
    seq.token_ids += tokenizer.encode("aé")[:2]
    seq.finish("length")
    assert ending(seq, tokenizer) == ("a", "stop", "\ufffd")
