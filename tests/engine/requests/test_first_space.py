"""The text of an output goes on behind its prompt: it keeps the space that texts begin without."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from reference import make_llm
from test_detokenizer import BYTES, byte_ids, every_tokenizer, id_lists, make, sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams
from nanovllm.engine.requests.output_text import OutputText, text_of
from nanovllm.engine.requests.prompt_context import MOST, prompt_context
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.openai.logprobs import completion_logprobs
from nanovllm.openai.response import echoed_text

pytestmark = pytest.mark.usefixtures("one_thread")

PIECES = ["▁", "▁a", "a", "b", "▁the", "中", "\n"]
STRIPS = [
    decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]  # fmt: skip
DECODERS = {"llama": decoders.Sequence(STRIPS), "metaspace": decoders.Metaspace()}


def small_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Llama 2's kinds, with few enough tokens for the small model."""
    names = ["<unk>", "<s>", "</s>", *BYTES[:128], *PIECES]
    merges = [("▁", "a")]
    vocab = {name: i for i, name in enumerate(names)}
    vocab |= {f"{a}{b}": len(vocab) + i for i, (a, b) in enumerate(merges) if a + b not in vocab}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    if kind == "llama":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = DECODERS[kind]
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


@pytest.fixture(params=DECODERS)
def llm(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> LLM:
    small_tokenizer(request.param).save_pretrained(tmp_path)
    return make_llm(model_dir, tokenizer=str(tmp_path))


def ids_of(llm: LLM, *names: str) -> list[int]:
    ids: list[int] = llm.tokenizer.convert_tokens_to_ids([*names])
    return ids


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("before", [["▁the"], ["▁the", "<s>"], ["▁the", "<0x41>"], ["<s>"]])
def test_prompt_and_text_are_the_text_of_all_tokens(
    llm: LLM, before: list[str], skips: bool
) -> None:
    """Of whole outputs, streams, echoes and log-probabilities."""
    prompt = ids_of(llm, *before)
    params = SamplingParams(
        max_tokens=6, ignore_eos=True, temperature=2, seed=1, skip_special_tokens=skips,
        logit_bias=dict.fromkeys(ids_of(llm, *PIECES), 40), logprobs=2, prompt_logprobs=0,
    )  # fmt: skip
    (out,) = llm.generate([prompt], params, use_tqdm=False)
    (first,) = llm.generate(
        [prompt], SamplingParams(max_tokens=1, allowed_token_ids=ids_of(llm, "▁a")), use_tqdm=False
    )

    def decode(ids: list[int]) -> str:
        text: str = llm.tokenizer.decode(ids, skip_special_tokens=skips)
        return text

    assert first.outputs[0].text == ("a" if before == ["<s>"] else " a")
    assert decode(prompt) + out.outputs[0].text == decode([*prompt, *out.outputs[0].token_ids])
    streamed = "".join(event["text"] for event in llm.stream([prompt], params))
    assert streamed == out.outputs[0].text
    if not skips:
        echo = echoed_text(None, prompt, params, llm.tokenizer)
        assert echo + streamed == decode([*prompt, *out.outputs[0].token_ids])
        steps = completion_logprobs(
            [*out["prompt_logprobs"], *out["logprobs"]], 2, llm.tokenizer, prompt[0]
        )
        try:
            while True:
                next(steps)
        except StopIteration as end:
            tokens = end.value["tokens"]
        assert "".join(tokens) == echo + streamed


def test_a_stop_string_may_begin_with_the_first_space(llm: LLM) -> None:
    """It stops where the space and its word are the first token."""
    asked = SamplingParams(max_tokens=3, allowed_token_ids=ids_of(llm, "▁a"), stop=[" a"])
    (out,) = llm.generate([ids_of(llm, "▁the")], asked, use_tqdm=False)
    assert [out.outputs[0].text, out.outputs[0].stop_reason] == ["", " a"]


@every_tokenizer
@pytest.mark.parametrize("skips", [True, False])
def test_pieces_behind_a_prompt_join_to_the_rest_of_the_text(name: str, skips: bool) -> None:
    """For all decoders that are known: unless the prompt ends within a character."""
    tokenizer = make(name)

    @settings(max_examples=20, deadline=None)
    @given(id_lists(name, max_size=8).filter(bool), id_lists(name, max_size=8))
    def run(prompt: list[int], ids: list[int]) -> None:
        seq = sequence(prompt, skips)
        text = OutputText(tokenizer, seq.params)
        for token_id in ids:
            seq.token_ids.append(token_id)
            text.update(seq)
        assert text.finish(seq) == text_of(seq, tokenizer)
        before = tokenizer.decode(prompt, skip_special_tokens=skips)
        whole = tokenizer.decode(prompt + ids, skip_special_tokens=skips)
        is_open = before.endswith("\ufffd") or any(
            token.startswith("<0x") for token in tokenizer.convert_ids_to_tokens(prompt) if token
        )
        if prompt_context(tokenizer, skips, seq) and not is_open:
            assert before + text.text == whole

    run()


def sequence(prompt: list[int], skips: bool = True) -> Sequence:
    return Sequence(prompt, SamplingParams(skip_special_tokens=skips, max_tokens=100))


@pytest.mark.parametrize(("data", "text"), [(b"{}", "{}"), (b"\xad{}", "\ufffd{}")])
def test_a_part_of_a_character_at_the_prompts_end_is_in_no_text(data: bytes, text: str) -> None:
    """Its U+FFFD would be before JSON that is valid."""
    seq = sequence(byte_ids("bytes", b"a\xe4\xb8"))
    seq.token_ids += byte_ids("bytes", data)
    assert text_of(seq, make("bytes")) == text


def test_a_prompt_of_many_bytes_is_not_searched_for_its_beginning() -> None:
    """Only its last tokens: a prompt may have a hundred thousand."""
    tokenizer = sentencepiece(*STRIPS)
    byte, piece = tokenizer.convert_tokens_to_ids(["<0x41>", "▁a"])
    for number, most in ((MOST - 1, MOST), (MOST, 0), (10**5, 0)):
        seq = sequence([piece, *[byte] * number])
        assert len(prompt_context(tokenizer, True, seq)) == most
