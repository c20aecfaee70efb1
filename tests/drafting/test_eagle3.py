"""EAGLE-3 heads: their guesses are those of their definition, and what does not fit is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import edit_config, make_model
from heads import Definition, make_head, residuals
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.drafting.eagle3_config import LAYER_IDS, NESTED, HeadConfig
from nanovllm.drafting.eagle3_files import load_head
from nanovllm.drafting.eagle3_head import Eagle3Head
from nanovllm.kernels.table import PLAIN
from nanovllm.layers.backend import Backend, TorchBackend
from nanovllm.layers.context import Context, attending
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [(11 * i) % 251 for i in range(30)]
FAMILIES = {"Qwen3": {}, "Llama": dict(family="Llama", head_dim=None)}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight layers."""
    path: Path = tmp_path_factory.mktemp(request.param)
    return make_model(path, num_hidden_layers=8, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def head_dir(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    return make_head(tmp_path_factory.mktemp("head"), model_dir)


@pytest.fixture
def copy_of_head(head_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """A private copy with other tensors; None deletes one."""

    def copy(**changes: torch.Tensor | None) -> Path:
        (tmp_path / "config.json").write_bytes((head_dir / "config.json").read_bytes())
        weights: Any = load_file(head_dir / "model.safetensors") | {
            name.replace("__", "."): tensor for name, tensor in changes.items()
        }
        kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        return tmp_path

    return copy


def load(path: Path) -> Eagle3Head:
    head = load_head(path, HeadConfig.from_dir(path), max_positions=128)
    head.bind(Backend(TorchBackend(), PLAIN))
    return head


def embedding_of(model: Path) -> VocabParallelEmbedding:
    config = ModelConfig.from_dir(model)
    embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
    weights = load_file(model / "model.safetensors")
    embedding.weight.data.copy_(weights["model.embed_tokens.weight"])
    return embedding


@torch.inference_mode()
def drafts_of(
    head: Eagle3Head, embed: Any, tokens: list[int], tapped: list[torch.Tensor], number: int
) -> list[int]:
    """The head's guesses, each from a prefill of all tokens before it, without a cache."""
    fused, ids = head.fuse([x[:-1] for x in tapped]), list(tokens[1:])
    while len(ids) < len(tokens) - 1 + number:
        ends = torch.tensor([0, len(ids)], dtype=torch.int32)
        context = Context(
            True, torch.full((len(ids),), -1), cu_seqlens_q=ends, cu_seqlens_k=ends,
            max_seqlen_q=len(ids), max_seqlen_k=len(ids),
        )  # fmt: skip
        with attending(context, TorchBackend()):
            normed, states = head.guess(embed(torch.tensor(ids)), torch.arange(len(ids)), fused)
        ids.append(int(head.compute_logits(normed[-1:]).argmax()))
        fused = torch.cat([fused, states[-1:]])
    return ids[len(tokens) - 1 :]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(draft_vocab_size=259),
        dict(norm_before_residual=True),
        dict(head_dim=8, num_key_value_heads=4, own=True),
        dict(hidden_size=48, target_hidden_size=64, own=True),
    ],
    ids=str,
)
def test_guesses_are_those_of_the_definition(
    target: Path, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = make_head(tmp_path, target, **fields)
    taps = HeadConfig.from_dir(path).taps(ModelConfig.from_dir(target))
    assert taps == (2, 4, 5)
    tapped = residuals(target, TOKENS, taps)
    definition, head = Definition(path, target), load(path)
    embed = head.embed_tokens or embedding_of(target)
    assert (head.embed_tokens is not None) == ("own" in fields)
    seen = set()
    for length in (2, 3, 9, 17, 30):
        known = [x[:length] for x in tapped]
        expected = definition.drafts(TOKENS[:length], known, 4)
        assert drafts_of(head, embed, TOKENS[:length], known, 4) == expected
        seen |= set(expected)
    assert len(seen) > 4, "the head says always the same"


def test_other_published_forms_are_the_same_head(head_dir: Path, tmp_path: Path) -> None:
    """The speculators library nests the config and counts layers; some files are pickled."""
    config = json.loads((head_dir / "config.json").read_text())
    weights = load_file(head_dir / "model.safetensors")
    layer = {name: value for name, value in config.items() if name != "draft_vocab_size"}
    nested = dict(
        architectures=["Eagle3Speculator"], draft_vocab_size=40, norm_before_residual=False,
        speculators_model_type="eagle3", target_hidden_size=None,
    ) | {NESTED: layer | {"architectures": ["LlamaForCausalLM"]}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(nested))
    renamed = {name.replace("midlayer.", "layers.0."): x for name, x in weights.items()}
    torch.save(renamed, tmp_path / "pytorch_model.bin")
    assert HeadConfig.from_dir(tmp_path) == HeadConfig.from_dir(head_dir)
    others = dict(load(tmp_path).named_buffers())
    for name, buffer in load(head_dir).named_buffers():
        assert torch.equal(others[name], buffer)
    (tmp_path / "pytorch_model.bin").write_bytes(b"broken")
    with pytest.raises(OSError, match=r"pytorch_model\.bin is damaged"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("ids", "taps"),
    [(None, (2, 4, 5)), ([1, 3, 6], (2, 4, 7)), ([2, 3, 6], (2, 3, 6)), ([3, 1, 0], (3, 1, 0))],
)
@pytest.mark.parametrize("nested", [False, True])
def test_layers_are_counted_by_their_inputs(
    ids: list[int] | None, taps: tuple[int, ...], nested: bool, head_dir: Path
) -> None:
    """A first layer of 1 says that they are counted by their outputs."""
    raw = json.loads((head_dir / "config.json").read_text())
    raw |= {"eagle_config": {LAYER_IDS: ids}} if nested else {LAYER_IDS: ids}
    fields = {name: value for name, value in raw.items() if name != "draft_vocab_size"}
    model: Any = ModelConfig.parse(
        fields | dict(num_hidden_layers=8, architectures=["LlamaForCausalLM"])
    )
    assert HeadConfig._parse(raw).taps(model) == taps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architectures=["LlamaForCausalLMEagle"]), "architecture of an EAGLE-3 head must be"),
        (dict(num_hidden_layers=2), "num_hidden_layers=2 is not supported"),
        (dict(norm_before_fc=True), "norm_before_fc=True is not supported"),
        (dict(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state=False is not"),
        (dict(eagle_config=[1]), r"eagle_config must be an object, got \[1\]"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config=.* not supported"),
        (dict(draft_vocab_size=300), "draft_vocab_size=300 is above vocab_size=259"),
        (dict(draft_vocab_size=0), "draft_vocab_size must be >= 1, got 0"),
        (dict(target_hidden_size=0), "target_hidden_size must be >= 1, got 0"),
        (dict(draft_vocab_size=0.5), "draft_vocab_size must be an int"),
        (dict(norm_before_residual=1), "norm_before_residual must be True or False, got 1"),
        ({LAYER_IDS: [1, 2]}, rf"{LAYER_IDS} must be a list of 3 layers, got \[1, 2\]"),
        ({LAYER_IDS: []}, rf"{LAYER_IDS} must be a list of 3 layers, got \[\]"),
        ({LAYER_IDS: 0}, f"{LAYER_IDS} must be a list of 3 layers, got 0"),
        (dict(eagle_config={LAYER_IDS: []}), rf"{LAYER_IDS} must be a list of 3 layers, got \[\]"),
        ({LAYER_IDS: [1, 2, -3]}, f"{LAYER_IDS} must be >= 0, got -3"),
        (dict(rms_norm_eps=-1), "rms_norm_eps must be"),
    ],
    ids=str,
)
def test_what_a_config_cannot_say_is_refused_by_name(
    changes: dict[str, Any], message: str, copy_of_head: Callable[..., Path]
) -> None:
    path = copy_of_head()
    edit_config(path, **changes)
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        HeadConfig.from_dir(path)
    assert str(raised.value).startswith(f"{path / 'config.json'}: ")


@pytest.mark.parametrize("changes", [{}, dict(architectures=["LlamaForCausalLM"])], ids=str)
def test_a_head_is_no_draft_model(
    changes: dict[str, Any], copy_of_head: Callable[..., Path], model_dir: Path
) -> None:
    """Some heads have the architecture of a whole model."""
    path = copy_of_head()
    edit_config(path, **changes)
    with pytest.raises(ValueError, match=r'an EAGLE-3 head; its method .* is "eagle3"$') as raised:
        LLM(model_dir, device="cpu", speculative_config={"model": str(path)})
    assert str(raised.value).startswith(f"speculative_config, draft model {str(path)!r}: ")
    HeadConfig.from_dir(path)


def test_a_whole_model_is_no_head(target: Path) -> None:
    with pytest.raises(ValueError, match=r'a whole model, .* its method .* is "draft_model"$'):
        HeadConfig.from_dir(target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=32), "its target_hidden_size is 32, the model's is 64"),
        (dict(target_hidden_size=32), "its target_hidden_size is 32, the model's is 64"),
        (dict(vocab_size=260), "its vocab_size is 260, the model's is 259"),
        (
            {LAYER_IDS: [0, 1, 2]},
            rf"with {LAYER_IDS}=\[0, 1, 2\] the head reads the residuals before layers \(0, 1, 2\)"
            " of the model, which has 2 layers",
        ),
        ({LAYER_IDS: [1, 0, 1]}, rf"with {LAYER_IDS}=\[1, 0, 1\] .* before layers \(2, 1, 2\) of"),
        ({}, rf"without {LAYER_IDS} the head .* before layers \(2, 1, -1\) of the model, which"),
    ],
    ids=str,
)
def test_a_model_that_the_head_is_not_made_for_is_refused(
    changes: dict[str, Any], message: str, copy_of_head: Callable[..., Path], model_dir: Path
) -> None:
    path = copy_of_head()
    edit_config(path, **changes)
    with pytest.raises(ValueError, match=message):
        HeadConfig.from_dir(path).taps(ModelConfig.from_dir(model_dir))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(fc__weight=None), "the files lack fc.weight"),
        (dict(d2t=None), r"the files lack d2t$"),
        (dict(lm_head__weight=None), "the files lack lm_head.weight"),
        (dict(midlayer__mlp__up_proj__weight=None), "the files lack midlayer.mlp.up_proj.weight"),
        (
            dict(fc__weight=torch.ones(64, 128)),
            r"'fc.weight' has shape \(64, 128\), .* \(64, 192\)",
        ),
        (dict(fc__bias=torch.ones(64)), "unexpected tensor 'fc.bias'"),
        (
            dict(d2t=torch.ones(39, dtype=torch.long)),
            r"'d2t' has shape \(39,\), the model needs \(40",
        ),
        (
            dict(d2t=torch.full((40,), 220)),
            r"'d2t' has offsets to ids that are not distinct and in \[0, 259\)",
        ),
        (dict(d2t=-torch.arange(40)), "not distinct"),
        (dict(d2t=torch.ones(40)), "'d2t' has type F32, a model needs one of I64"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_files_that_contradict_the_config_are_refused(
    changes: dict[str, Any], message: str, copy_of_head: Callable[..., Path]
) -> None:
    path = copy_of_head(**changes)
    with pytest.raises(ValueError, match=message) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["layers.0.", "midlayer."])
def test_errors_have_the_names_of_the_files(name: str, copy_of_head: Callable[..., Path]) -> None:
    path = copy_of_head(midlayer__mlp__up_proj__weight=None)
    weights = load_file(path / "model.safetensors")
    renamed = {old.replace("midlayer.", name): tensor for old, tensor in weights.items()}
    save_file(renamed, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"the files lack {name}mlp.up_proj.weight$"):
        load(path)


def test_a_head_of_another_size_needs_an_embedding(tmp_path: Path, model_dir: Path) -> None:
    path = make_head(tmp_path, model_dir, hidden_size=48, target_hidden_size=64)
    with pytest.raises(ValueError, match=r"files lack embed_tokens\.weight, and the model's has"):
        load(path)
