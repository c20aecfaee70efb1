"""Beam search, callables on logits, cut prompts, and vectors."""

import sys

from vllm import LLM, PoolingParams, SamplingParams
from vllm.sampling_params import BeamSearchParams


def no_four(token_ids, logits):
    logits[ord("4")] = float("-inf")
    return logits


def after_prompt(prompt_token_ids, token_ids, logits):
    assert len(prompt_token_ids) == 6 and len(token_ids) < 9
    return logits


def main() -> None:
    llm = LLM(model=sys.argv[1], max_model_len=64)
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=False, temperature=0.0,
                              length_penalty=1.0)  # fmt: skip
    (output,) = llm.beam_search([{"prompt": "12+34="}], params)
    assert len(output.sequences) == 3
    best = output.sequences[0]
    print(best.text, len(best.tokens), best.cum_logprob > -0.1)

    params = SamplingParams(temperature=0.0, logits_processors=[no_four, after_prompt])
    (output,) = llm.generate("12+34=", params)
    print("4" in output.outputs[0].text)
    params = SamplingParams(temperature=0.0, truncate_prompt_tokens=6)
    (output,) = llm.generate("99912+34=", params)
    print(len(output.prompt_token_ids), output.outputs[0].text)
    params = SamplingParams(temperature=0.0, detokenize=False)
    (output,) = llm.generate("12+34=", params)
    print(repr(output.outputs[0].text), len(output.outputs[0].token_ids))
    (output,) = llm.embed("12+34=")
    print(len(output.outputs.embedding))
    params = PoolingParams(dimensions=16, use_activation=True)
    (output,) = llm.embed("12+34=", pooling_params=params, use_tqdm=False)
    print(len(output.outputs.embedding))


if __name__ == "__main__":
    main()
