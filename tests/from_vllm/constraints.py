"""Structured outputs of every kind, with n-gram speculation; embeddings and scores."""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

SQL = """
root ::= "SELECT " column " from " table
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
"""
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["sedan", "SUV"]}, "fast": {"type": "boolean"}},
    "required": ["kind", "fast"],
    "additionalProperties": False,
}
KINDS = {
    "choice": StructuredOutputsParams(choice=["Positive", "Negative"]),
    "regex": StructuredOutputsParams(regex=r"[0-9]+@[0-9]+\.com\n"),
    "json": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    "grammar": StructuredOutputsParams(grammar=SQL),
}


def main() -> None:
    llm = LLM(
        model=sys.argv[1],
        max_model_len=100,
        task="auto",
        runner="auto",
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
        },
    )
    for kind, structured_outputs in KINDS.items():
        params = SamplingParams(
            structured_outputs=structured_outputs, temperature=0.0, max_tokens=60, stop=["\n"]
        )
        text = llm.generate(prompts="12+34=", sampling_params=params)[0].outputs[0].text
        print(kind, json.dumps(text))
    total = sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:spec_decode_num_draft_tokens"
    )
    print("drafted", total > 0)


def pooling() -> None:
    llm = LLM(model=sys.argv[1], runner="pooling", convert="embed", enforce_eager=True)
    prompts = ["12+34=", "7+8="]
    for prompt, output in zip(prompts, llm.embed(prompts), strict=True):
        print(prompt, len(output.outputs.embedding))
    scores = llm.score(prompts[0], prompts)
    print([0.0 <= abs(output.outputs.score) <= 1.001 for output in scores])
    print(hasattr(llm, "classify"))


if __name__ == "__main__":
    main()
    pooling()
