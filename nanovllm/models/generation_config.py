"""The sampling parameters that a model's `generation_config.json` recommends."""

from pathlib import Path
from typing import Any

from nanovllm.models.checkpoint import read_json
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.option import options_of

# The file's names, and ours.
FIELDS = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
FIELDS["max_new_tokens"] = "max_tokens"


def recommended_params(path: Path) -> SamplingParams:
    """The parameters that the model in the directory `path` recommends, else our defaults."""
    file = path / "generation_config.json"
    given = read_json(file) if file.exists() else {}
    values = {ours: given[name] for name, ours in FIELDS.items() if given.get(name) is not None}
    if given.get("do_sample") is False:
        values["temperature"] = 0
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def recommended_fields(recommended: SamplingParams) -> dict[str, Any]:
    """The fields of a model's parameters that differ from our defaults."""
    plain = SamplingParams()
    return {
        name: getattr(recommended, name)
        for name in options_of(SamplingParams)
        if getattr(recommended, name) != getattr(plain, name)
    }
