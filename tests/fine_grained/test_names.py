"""Names: aliases, patterns level by level, and what is near a name that is not there."""
from __future__ import annotations

import pytest

from mindspeed_swap.fine_grained.names import is_word, levels, matching, near

NAMES = [
    "input_layernorm", "self_attention", "self_attention.linear_qkv", "self_attention.core_attention",
    "self_attention.core_attention.scale_mask_softmax", "self_attention.linear_proj", "pre_mlp_layernorm", "mlp",
    "mlp.linear_fc1", "mlp.linear_fc2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("attention", ["self_attention"]),
        ("self_attention", ["self_attention"]),
        ("feed_forward", ["mlp"]),
        ("attention.flash_attention", ["self_attention.core_attention"]),
        (r"attention\.flash_attention", ["self_attention.core_attention"]),
        ("self_attention.core_attention", ["self_attention.core_attention"]),
        (r".*\.flash_attention", ["self_attention.core_attention"]),
        (".*.flash_attention", ["self_attention.core_attention"]),
        ("flash_attention", []),  # not a part of the layer, but of a part
        ("mlp.linear_fc[12]", ["mlp.linear_fc1", "mlp.linear_fc2"]),
        ("feed_forward.w1", ["mlp.linear_fc1"]),
        (".*norm", ["input_layernorm", "pre_mlp_layernorm"]),
        ("attention_norm|ffn_norm", ["input_layernorm", "pre_mlp_layernorm"]),
        (".*.*", [name for name in NAMES if "." not in name]),  # one level: the dot belongs to the second *
        ("ml", []),
        ("mlp.linear", []),
    ],
)
def test_matching(pattern, expected):
    assert matching(pattern, NAMES) == expected


def test_levels():
    assert levels(r"a.b\.c") == ["a", "b", "c"]
    assert levels(".*x.y+") == [".*x", "y+"]
    assert is_word("attention.flash_attention") and not is_word(".*attention")
    for wrong in ("", "a.", ".a", "a..b", "(", "a.["):
        with pytest.raises(ValueError, match=r"."):
            levels(wrong)


def test_near():
    assert "attention" in near("atention", NAMES)
    assert near("flash_attention", NAMES)[0].endswith("flash_attention")
    assert "mlp.linear_fc1" in near("mlp.linear_fc", NAMES)
    assert near("zzz", NAMES) == [name for name in NAMES if "." not in name]
    assert near("mlp", []) == []
