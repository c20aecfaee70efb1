"""Gemma 3 270M as it is published, in GGUF's Q4_K_M, beside what transformers makes of it.

Its file has matrices in four types of blocks, a SentencePiece tokenizer of 262,144 tokens, windows
in five of six layers, and heads of 256. `make test-real` downloads it.
"""

from pathlib import Path

import pytest
from published import (
    NUM_TOKENS,
    conversations,
    make_llm,
    published_file,
    reference_of,
    transformers_of,
)

from nanovllm import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def file() -> Path:
    return published_file("gemma3-270m", "test-real")


def test_tokens_equal_transformers(file: Path) -> None:
    """The base model has no chat template: it continues the last words of the conversations."""
    texts = [talk[-1]["content"] for talk in conversations()]
    tokenizer, model = transformers_of(file)
    theirs = reference_of(model, tokenizer, [tokenizer(text)["input_ids"] for text in texts])
    del model
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with make_llm("gemma3-270m") as llm:
        for _ in range(2):  # again, with the prefixes that are cached
            outputs = llm.generate(texts, params, use_tqdm=False)
            assert [output.prompt_token_ids for output in outputs] == theirs.prompts
            decisive = [i for i, is_decisive in enumerate(theirs.is_decisive) if is_decisive]
            assert len(outputs) == 50 and len(decisive) >= 40
            assert {i: outputs[i].token_ids for i in decisive} == {
                i: theirs.tokens[i] for i in decisive
            }
