"""The files of a tokenizer, which transformers loads, from a GGUF file's metadata."""

import json
from typing import Any

from nanovllm.models.gguf.split import GGUFModel

TEMPLATE = "tokenizer.chat_template"
WAY_OUT = "; tokenizer=... names a directory or hub id to load one from"


def tokenizer_files(model: GGUFModel) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json; none if the file has no tokenizer.

    Of a tokenizer that is not supported, tokenizer.json has the reason as its `error`: the model
    can be used with another tokenizer.
    """
    kind = model.metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab") or not model.items("tokenizer.ggml.tokens"):
        return {}
    try:
        return _files(model, kind)
    except Exception as error:  # tokenizers has no class for its own
        reason = f"the tokenizer in {model.path} is not supported: {error}{WAY_OUT}"
        return {"tokenizer.json": json.dumps({"error": reason})}


def _files(model: GGUFModel, kind: Any) -> dict[str, str]:
    from nanovllm.models.gguf.byte_level import byte_level_tokenizer
    from nanovllm.models.gguf.sentencepiece import sentencepiece_tokenizer
    from nanovllm.models.gguf.vocabulary import Vocabulary

    make = {"gpt2": byte_level_tokenizer, "llama": sentencepiece_tokenizer}.get(kind)
    if make is None:
        raise ValueError(f"tokenizer.ggml.model must be gpt2 or llama, got {kind!r}")
    vocabulary = Vocabulary(model)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        if token := vocabulary.special(name):
            config[f"{field}_token"] = token
    if templates := _templates(model):
        config["chat_template"] = templates
    text = make(vocabulary).to_str()
    return {"tokenizer.json": text, "tokenizer_config.json": json.dumps(config)}


def _templates(model: GGUFModel) -> Any:
    """The chat template, or the list of named ones as transformers spells it."""
    default = model.metadata.get(TEMPLATE)
    names = {
        key.removeprefix(f"{TEMPLATE}."): value
        for key, value in model.metadata.items()
        if key.startswith(f"{TEMPLATE}.")
    }
    if not names:
        return default
    named = {"default": default} if default is not None else {}
    return [{"name": n, "template": t} for n, t in (named | names).items() if isinstance(t, str)]
