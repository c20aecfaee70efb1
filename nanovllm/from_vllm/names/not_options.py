"""Names that are no options of an engine, for the errors of `Config`."""

from nanovllm.from_vllm.names.options import ENGINE
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.option import options_of
from nanovllm.utils.other_names import OtherName


def not_options() -> dict[str, OtherName]:
    """vLLM's names, and the names of SamplingParams, which callers may give by mistake."""
    why = "it is a field of SamplingParams"
    sampling = {name: OtherName(why=why) for name in options_of(SamplingParams) if name != "seed"}
    return sampling | ENGINE
