"""docs/options.md is what tools/write_options.py writes, and lists every field."""

import dataclasses
import runpy
from pathlib import Path

from nanovllm.config import Config
from nanovllm.from_vllm.names.options import ENGINE, SAMPLING
from nanovllm.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date() -> None:
    """If it fails: python tools/write_options.py."""
    tool = runpy.run_path(str(ROOT / "tools" / "write_options.py"))
    text = tool["page"]()
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == text
    for kind in (Config, SamplingParams):
        for field in dataclasses.fields(kind):
            assert f"\n| `{field.name}` " in text


def test_vllms_names_are_up_to_date() -> None:
    """If it fails: python tools/write_options.py. Every field that vLLM has too is named."""
    tool = runpy.run_path(str(ROOT / "tools" / "write_options.py"))
    text = (ROOT / "docs" / "from_vllm.md").read_text(encoding="utf-8")
    assert tool["from_vllm"]() == text
    for name, other in (ENGINE | SAMPLING).items():
        assert f"\n| `{name}` | " in text
        assert other.ours is None or f"another name of `{other.ours}`" in text
    ours_alone = {"priority", "hidden_states"}
    for field in dataclasses.fields(SamplingParams):
        assert f"`{field.name}`" in text or field.name in ours_alone


def test_the_types_of_options_are_up_to_date() -> None:
    """If it fails: python tools/write_options.py. Every option has a type, for completion."""
    tool = runpy.run_path(str(ROOT / "tools" / "write_options.py"))
    text = (ROOT / "nanovllm" / "engine_options.py").read_text(encoding="utf-8")
    assert tool["engine_types"]() == text
    for line in ("seed: int | None", "tokenizer: str | PathLike[str] | None", "block_size: int |"):
        assert f"\n    {line}" in text


def test_a_row_has_flag_default_range_and_meaning() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_options.py"))
    rows = tool["table"](Config).splitlines()
    assert rows[2].startswith("| `model` | required | a path or a hub id | a directory with ")
    assert "| `max_loras` | `8` | in [1, 1024] | most adapters that running " in "\n".join(rows)
    assert rows[-1].startswith("| `seed` (`--engine-seed`) | `0` | in [0, ")
    (overlap,) = [row for row in rows if row.startswith("| `overlap` ")]
    assert overlap.endswith("; `None`: yes on a GPU, no on a CPU |")
