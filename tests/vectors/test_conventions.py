"""The files of sentence-transformers, Qwen3's prompts, and checkpoints of the decoder alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import byte_tokenizer, edit_config, make_model
from reference import make_llm
from tokenizers import processors
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from nanovllm import SamplingParams
from nanovllm.vectors.rerank import AFTER, BEFORE

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["a", "What is the capital of China?", "Gravity attracts two bodies. " * 7, "é漢"]
MODULE = "sentence_transformers.models."
MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}  # fmt: skip


def add_modules(path: Path, pooling: dict[str, Any], *further: str) -> Path:
    """Write the files that say how a vector is made."""
    kinds = ["Transformer", "Pooling", *further]
    modules = [
        dict(idx=i, name=str(i), path=f"{i}_{kind}" if i else "", type=f"{MODULE}{kind}")
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@torch.inference_mode()
def vectors_of(path: Path, texts: list[str], pooling: str, dimensions: int | None) -> torch.Tensor:
    """What transformers makes of each text on its own."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path)
    vectors = []
    for text in texts:
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=True)])
        states = model(ids).last_hidden_state[0]
        vectors.append({"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling])
    return torch.stack(vectors)[:, :dimensions]


def embed(path: Path, texts: list[str], **options: Any) -> torch.Tensor:
    with make_llm(path) as llm:
        outputs = llm.embed(texts, use_tqdm=False, **options)
    return torch.tensor([output.embedding for output in outputs])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder alone, with a tokenizer that appends its end token, as Qwen3-Embedding has."""
    path = make_model(tmp_path_factory.mktemp("decoder"), seed=5)
    AutoModel.from_pretrained(path).save_pretrained(path)
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    return path


@pytest.fixture
def model(decoder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(decoder, tmp_path / "model"))


def test_a_decoder_alone_has_vectors_and_generates_nothing(decoder: Path) -> None:
    expected = F.normalize(vectors_of(decoder, TEXTS, "last", 24), dim=-1)
    with make_llm(decoder) as llm:
        outputs = llm.embed(TEXTS, dimensions=24, use_tqdm=False)
        assert all(o.prompt_token_ids[-1] == llm.tokenizer.eos_token_id for o in outputs)
        assert_close(torch.tensor([o.embedding for o in outputs]), expected)
        for call in (llm.generate, llm.add_request):
            with pytest.raises(ValueError, match="this model has no head"):
                call("a", SamplingParams(max_tokens=1))
        with pytest.raises(ValueError, match="this model has no head"):
            llm.score("a", "b", method="yes_no")
        assert llm.is_finished()


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen3Model"])
@pytest.mark.parametrize("shards", [False, True])
def test_names_of_both_kinds_are_loaded(name: str, shards: bool, tmp_path: Path) -> None:
    """With tied weights there is a head, whatever the tensors are called."""
    whole = make_model(tmp_path / "whole", tie_word_embeddings=True, seed=2)
    bare = Path(shutil.copytree(whole, tmp_path / "bare"))
    (bare / "model.safetensors").unlink()
    size = "100KB" if shards else "1GB"
    AutoModel.from_pretrained(whole).save_pretrained(bare, max_shard_size=size)
    edit_config(bare, architectures=[name])
    assert_close(embed(bare, TEXTS), embed(whole, TEXTS))
    with make_llm(bare) as llm, make_llm(whole) as other:
        params = SamplingParams(temperature=0, max_tokens=8)
        outputs = [one.generate("a", params, use_tqdm=False)[0] for one in (llm, other)]
        assert outputs[0].token_ids == outputs[1].token_ids


def test_a_missing_head_is_still_an_error_in_a_whole_checkpoint(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", tie_word_embeddings=True)
    edit_config(path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"the files lack lm_head\.weight"):
        make_llm(path)


@pytest.mark.parametrize("flag", MODES)
@pytest.mark.parametrize("further", [(), ("Normalize",)])
def test_pooling_is_that_of_the_files(flag: str, further: tuple[str, ...], model: Path) -> None:
    add_modules(model, {"word_embedding_dimension": 64, flag: True}, *further)
    vectors = vectors_of(model, TEXTS, MODES[flag], None)
    assert_close(embed(model, TEXTS), F.normalize(vectors, dim=-1) if further else vectors)
    assert_close(embed(model, TEXTS, normalize=True), F.normalize(vectors, dim=-1))
    last = vectors_of(model, TEXTS, "last", None)
    assert_close(embed(model, TEXTS, pooling="last", normalize=False), last)


def test_vectors_are_those_of_sentence_transformers(model: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    prompts = {"query": "Instruct: Find passages\nQuery:", "document": ""}
    (model / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    add_modules(
        model, {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}, "Normalize"
    )
    peer = library.SentenceTransformer(str(model), device="cpu")
    peer.save(str(tmp_path / "saved"))
    for path in (model, tmp_path / "saved"):
        assert_close(embed(path, TEXTS), torch.tensor(peer.encode(TEXTS)))
        queries = torch.tensor(peer.encode(TEXTS, prompt_name="query"))
        assert_close(embed(path, TEXTS, prompt_name="query"), queries)
        assert_close(embed(path, TEXTS, instruction="Find passages"), queries)
        cut = peer.encode(TEXTS, truncate_dim=20, normalize_embeddings=True)
        assert_close(embed(path, TEXTS, dimensions=20), torch.tensor(cut))
        with make_llm(path) as llm:
            scores = [o.score for o in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        expected = peer.similarity(queries[:1], torch.tensor(peer.encode(TEXTS)))[0]
        assert_close(torch.tensor(scores), expected)


def test_a_default_prompt_comes_before_texts(model: Path) -> None:
    prompts = {"prompts": {"x": "X: ", "y": "Y: "}, "default_prompt_name": "x"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with make_llm(model) as llm:
        outputs = llm.embed(["a", {"prompt": "b"}, [5]], use_tqdm=False)
        assert [o.prompt for o in outputs] == ["X: a", "X: b", None]
        assert llm.embed("a", prompt_name="y", use_tqdm=False)[0].prompt == "Y: a"
        with pytest.raises(ValueError, match=r"one of the model's \('x', 'y'\), got 'z'"):
            llm.embed("a", prompt_name="z")


BAD_FILES = {
    "modules.json": [
        ("{", "is not valid JSON"),
        ("{}", "must be a list of modules"),
        ("[3]", "must be a list of modules, each with a type"),
        (json.dumps([{"type": MODULE + "Dense"}]), "module sentence_transformers.models.Dense is"),
    ],
    "1_Pooling/config.json": [
        ('{"pooling_mode": "max"}', "pooling_mode must be one of 'cls', 'mean', 'lasttoken'"),
        ('{"pooling_mode_max_tokens": true}', "pooling_mode must be one of"),
        ('{"pooling_mode": ["cls", "mean"]}', "pooling_mode must be one of"),
        ('{"embedding_dimension": 63}', "embedding_dimension must be the model's hidden_size 64"),
        ('{"include_prompt": 1}', "include_prompt must be True or False"),
    ],
    "config_sentence_transformers.json": [
        ('{"prompts": ["a"]}', "prompts must be texts by name"),
        ('{"default_prompt_name": "a"}', "default_prompt_name must be one of prompts, got 'a'"),
    ],
}


def test_files_that_are_not_supported_are_errors(model: Path) -> None:
    """They are read when vectors are first asked for, and name the file."""
    with make_llm(model) as llm:
        for name, contents in BAD_FILES.items():
            for content, message in contents:
                add_modules(model, {"pooling_mode": "mean"})
                (model / name).write_text(content)
                with pytest.raises((OSError, TypeError, ValueError), match=message) as error:
                    llm.embed("a")
                assert name in str(error.value)
            (model / name).unlink()
        add_modules(model, {"pooling_mode": "cls", "include_prompt": False})
        prompts = {"prompts": {"x": "X: "}}
        (model / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        with pytest.raises(ValueError, match="include_prompt is false"):
            llm.embed("a", prompt_name="x")


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_to_later_tokens_is_refused(field: dict[str, Any], model: Path) -> None:
    edit_config(model, **field)
    with pytest.raises(ValueError, match="attention to later tokens"):
        make_llm(model)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tokens for its two answers."""
    path = tmp_path_factory.mktemp("models") / "Tiny-Reranker"
    make_model(path, vocab_size=261, max_position_embeddings=2048)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(path)
    return path


@torch.inference_mode()
def answers_of(path: Path, instruction: str, pairs: list[tuple[str, str]]) -> list[float]:
    """The probabilities of "yes" against "no", as the model's authors compute them."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(path),
    )
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    scores = []
    for query, document in pairs:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        ids = [i for t in (BEFORE, text, AFTER) for i in tokenizer(t).input_ids]
        logits = model(torch.tensor([ids])).logits[0, -1, [no, yes]]
        scores.append(logits.log_softmax(0).exp()[1].item())
    return scores


@pytest.mark.parametrize(
    "options", [{}, dict(max_num_batched_tokens=64), dict(tensor_parallel_size=2)]
)
def test_rerankers_score_by_their_answer(reranker: Path, options: dict[str, Any]) -> None:
    default = "Given a web search query, retrieve relevant passages that answer the query"
    pairs = [("a", text) for text in TEXTS]
    with make_llm(reranker, **options) as llm:
        for _ in range(2):  # again, with what is cached
            outputs = llm.score("a", TEXTS, use_tqdm=False)
            assert_close(
                torch.tensor([o.outputs.score for o in outputs]),
                torch.tensor(answers_of(reranker, default, pairs)),
            )
        outputs = llm.score(TEXTS, TEXTS[::-1], instruction="Find", use_tqdm=False)
        expected = answers_of(reranker, "Find", list(zip(TEXTS, TEXTS[::-1], strict=True)))
        assert_close(torch.tensor([o.score for o in outputs]), torch.tensor(expected))
        assert len({round(o.score, 3) for o in outputs}) == len(TEXTS)
        (cosine,) = llm.score("a", "a", method="cosine", use_tqdm=False)
        assert cosine.score == pytest.approx(1.0)
        assert cosine.num_prompt_tokens == len(cosine.prompt_token_ids)
        with pytest.raises(TypeError, match=r"documents\[1\] must be a text, got \[1, 2\]"):
            llm.score("a", ["b", [1, 2]])


def test_an_answer_may_follow_as_many_tokens_as_the_model_has(reranker: Path) -> None:
    with make_llm(reranker) as llm:
        (short,) = llm.score("a", "b", use_tqdm=False)
        with pytest.raises(ValueError, match=r"documents\[1\]: prompt .* got more: 120\d\d\d char"):
            llm.score("a", ["b", "b" * 120_000])  # refused before it is tokenized
        document = "b" * (1 + -short.num_prompt_tokens % 4)
        (want,) = llm.score("a", document, use_tqdm=False)
    longest = want.num_prompt_tokens
    full: dict[str, Any] = dict(
        max_model_len=longest, kvcache_block_size=4, num_kvcache_blocks=longest // 4
    )
    for overlap in (False, True):
        with make_llm(reranker, overlap=overlap, **full) as llm:
            (found,) = llm.score("a", document, use_tqdm=False)
            assert found.score == pytest.approx(want.score, abs=1e-6)


def test_the_answers_may_be_those_of_the_files(reranker: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(reranker, tmp_path / "model"))
    module = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    (path / "modules.json").write_text(json.dumps([{"type": module, "path": "1_LogitScore"}]))
    (path / "1_LogitScore").mkdir()
    tokens = {"true_token_id": 259, "false_token_id": 260}
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    with make_llm(reranker) as llm, make_llm(path) as other:
        scores = [one.score("a", TEXTS, use_tqdm=False) for one in (llm, other)]
        assert [o.score for o in scores[0]] == [o.score for o in scores[1]]
    tokens["false_token_id"] = None
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    with make_llm(path) as llm, pytest.raises(ValueError, match="a score of one token alone"):
        llm.score("a", "b")
