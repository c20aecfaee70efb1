"""What checkpoints call tensors, and what they are here."""

import pytest

from nanovllm.formats.names import USUAL_NAMES, Names
from nanovllm.layers.experts import Experts

PREFIXED = Names(
    prefixes={"model.language_model.": "model.", "language_model.lm_head.": "lm_head."},
    skipped=("model.visual.", "mtp."),
)
MIXTRAL = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head", "lm_head"),
        ("language_model.lm_head.weight", "lm_head.weight"),
    ],
)
def test_prefixes_are_exchanged_both_ways(theirs: str, ours: str) -> None:
    assert PREFIXED.ours(theirs) == ours and PREFIXED.theirs(ours) == theirs
    assert USUAL_NAMES.ours(theirs) == theirs and USUAL_NAMES.theirs(ours) == ours


def test_a_name_that_only_begins_alike_is_another() -> None:
    assert PREFIXED.ours("model.language_models.x") == "model.language_models.x"
    assert PREFIXED.ours("model.norm.weight") == "model.norm.weight", "our own names are known"


def test_skipped_tensors_are_told_by_their_beginning() -> None:
    names = ("model.visual.patches", "mtp.fc.weight", "model.layers.0.mtp.weight")
    assert [PREFIXED.is_skipped(name) for name in names] == [True, True, False]
    assert not any(USUAL_NAMES.is_skipped(name) for name in names)


def test_parts_of_names_are_replaced_whole_and_once() -> None:
    names = Names(pieces={"block_sparse_moe": "mlp", "w1": "gate_proj", "attn.c_attn": "w1"})
    for theirs, ours in (
        ("h.0.block_sparse_moe.experts.1.w1.weight", "h.0.mlp.experts.1.gate_proj.weight"),
        ("attn.c_attn", "w1"),
        ("h.w10.my_w1.block_sparse_moe_w1", "h.w10.my_w1.block_sparse_moe_w1"),
    ):
        assert names.ours(theirs) == ours
        assert names.theirs(ours) == theirs


def test_rules_for_fused_layers_have_their_names() -> None:
    part = "model.layers.0.self_attn.k_proj"
    fused = Names(stores_fused=True)
    assert fused.theirs(part) == "model.layers.0.self_attn.qkv_proj"
    assert fused.theirs("model.layers.0.mlp.down_proj") == "model.layers.0.mlp.down_proj"
    assert USUAL_NAMES.theirs(part) == part


def test_experts_have_the_names_of_their_files() -> None:
    experts = Experts(2, 8, 4, projections=MIXTRAL)
    weights = [f"{i}.{name}.weight" for i in range(2) for name in ("w1", "w3")]
    assert experts.parts("gate_up_proj") == weights
    assert experts.parts("down_proj") == ["0.w2.weight", "1.w2.weight"]
