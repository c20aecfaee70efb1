"""Write the table of the core's files into docs/architecture.md.

    python tools/write_architecture.py

The core is the path of `LLM.generate` through the code with plain PyTorch kernels, in the order in
which to read it. Lines are those with code: no blank lines, comments or docstrings.
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- table: core -->\n", "<!-- end -->"
NOT_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
)  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
CORE: dict[str, list[str]] = {
    "what users import": ["llm", "config", "sampling_params", "outputs", "utils/checks"],
    "requests": ["engine/llm_engine", "engine/requests/intake", "engine/requests/engine_requests",
                 "engine/requests/request"],
    "who runs": ["engine/schedule/sequence", "engine/schedule/scheduler",
                 "engine/cache/block_manager",
                 "engine/cache/prefixes", "engine/schedule/batch"],
    "a step": ["engine/run/model_runner", "engine/run/other_ranks", "engine/run/step_inputs",
               "engine/run/ledger",
               "engine/run/device_table", "engine/run/transfer", "engine/run/shard",
               "engine/run/prefill", "engine/run/decode", "engine/run/forward", "engine/run/draws",
               "engine/run/step_part",
               "engine/run/computed", "engine/run/draw_inputs", "engine/run/launched"],
    "the model": ["models/llama", "models/parts", "models/decoder", "layers/block",
                  "layers/mixer", "layers/feed_forward",
                  "layers/cache_spec", "layers/embed_head", "layers/rms_norm", "layers/linear",
                  "layers/rotary_embedding", "layers/context", "layers/attention", "layers/backend",
                  "layers/sampler"],
    "plain kernels": ["kernels/table", "kernels/kv_layer", "kernels/plain/read_table",
                      "kernels/plain/rms_norm", "kernels/plain/norm_rope_store",
                      "kernels/plain/store_kvcache",
                      "kernels/plain/prefill_attention", "kernels/plain/decode_attention",
                      "kernels/plain/silu_and_mul", "kernels/plain/noise", "kernels/plain/sample"],
    "startup": ["engine/start/startup", "engine/start/load", "engine/engine_config",
                "engine/start/placement", "engine/start/sizing",
                "engine/cache/pools", "engine/cache/groups", "models/config", "models/fields",
                "models/checkpoint", "models/family", "models/loader",
                "layers/layer", "layers/ranks"],
}  # fmt: skip


def code_lines(source: str) -> int:
    """Lines of Python with code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def core() -> dict[str, dict[str, int]]:
    """Lines of the core's files, by part."""
    return {
        part: {name: code_lines((ROOT / f"nanovllm/{name}.py").read_text()) for name in names}
        for part, names in CORE.items()
    }


def table() -> str:
    """The core's files in Markdown."""
    parts = core()
    rows = ["| part | files, with their lines of code | lines |", "|---|---|---|"]
    for part, lines in parts.items():
        files = ", ".join(f"[{name}](../nanovllm/{name}.py) {size}" for name, size in lines.items())
        rows.append(f"| {part} | {files} | {sum(lines.values()):,} |")
    total = sum(sum(lines.values()) for lines in parts.values())
    rows.append(f"| **together** | | **{total:,}** |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page with the table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
