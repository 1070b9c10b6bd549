"""GPTQ layers against the formula, with files packed bit by bit in plain Python."""

from __future__ import annotations

import pytest
import torch

from backends.engine.gptq_weights import GptqLayout
from backends.errors import BrokenFile, UnknownFormat, UnsupportedTensor
from backends.kernels import QWeight
from backends.quant_config import Quantization
from tests.quant_maker import dense, gptq_layer, packed_columns, packed_rows, random_layer, words


def settings(bits=4, group=-1, **more) -> Quantization:
    from backends.quant_config import _values
    data = {"quant_method": "gptq", "bits": bits, "group_size": group} | more
    return Quantization("gptq", data, _values(data, "quantize_config.json"), ("quantize_config.json",))


def read(tensors: dict, layout: GptqLayout | Quantization, module: str = "model.layers.0.mlp.up_proj") -> QWeight:
    layout = GptqLayout(layout) if isinstance(layout, Quantization) else layout
    return layout.read(module, tensors.get)


def test_v1_and_v2_zeros():
    """CK-01: code 5, scale 0.5, stored nibble 7: the real zero is 8 in v1 and 7 in v2."""
    tensors = {"qweight": packed_columns(torch.full((8, 8), 5), 4), "qzeros": packed_rows(torch.full((1, 8), 7), 4),
               "scales": torch.full((1, 8), 0.5).half(), "g_idx": torch.zeros(8, dtype=torch.int32)}
    assert read(tensors, settings(checkpoint_format="gptq")).dequantize().unique().tolist() == [-1.5]
    assert read(tensors, settings(checkpoint_format="gptq_v2")).dequantize().unique().tolist() == [-1.0]
    assert read(tensors, settings()).dequantize().unique().tolist() == [-1.5]            # no tag: v1


@pytest.mark.parametrize("tag,stored", [("gptq", 8), ("gptq_v2", 7)])
def test_zeros_that_contradict_the_tag_of_a_symmetric_file_are_found(tag, stored):
    """CK-01, third file: tagged v1, symmetric, every stored zero 8. Code 8 is 0.0, and the notes say so."""
    layout = GptqLayout(settings(checkpoint_format=tag, sym=True))
    tensors = {"qweight": packed_columns(torch.full((8, 8), 8), 4), "qzeros": packed_rows(torch.full((1, 8), stored), 4),
               "scales": torch.full((1, 8), 0.5).half()}
    assert read(tensors, layout).dequantize().unique().tolist() == [0.0]
    assert len(layout.notes()) == 1 and "zero points" in layout.notes()[0]


def test_a_zero_of_0_wraps_inside_its_nibble():
    """CK-02: true zeros [8, 0, 8 …] are the word 0x777777F7; 15 comes back as 0."""
    zero = torch.tensor([[8, 0, 8, 8, 8, 8, 8, 8]]).T
    tensors = gptq_layer(torch.zeros(8, 8, dtype=torch.long), torch.ones(8, 1), zero, 4)
    assert tensors["qzeros"].item() & 0xFFFFFFFF == 0x777777F7
    assert read(tensors, settings(sym=False)).zero.flatten().tolist() == [8, 0, 8, 8, 8, 8, 8, 8]


def test_act_order_by_hand():
    """CK-03."""
    index = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0])
    codes, scale, zero = torch.arange(8)[None].repeat(8, 1), torch.tensor([[1.0, 10.0]]).repeat(8, 1), torch.full((8, 2), 8)
    weight = read(gptq_layer(codes, scale, zero, 4, index), settings(group=4, desc_act=True))
    assert weight.perm is not None and weight.group == 4
    assert weight.dequantize()[0].tolist() == [-80, -7, -60, -5, -4, -30, -20, -1]
    x = torch.randn(3, 8)
    reordered = x[:, weight.perm] @ QWeight(weight.codes, weight.scale, weight.zero, None, 4, 4).dequantize().T
    torch.testing.assert_close(reordered, x @ dense(codes, scale, zero, index).T, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, -1])
@pytest.mark.parametrize("version", [1, 2])
def test_every_width_and_group(bits, group, version):
    """CK-09 for the widths: qweight has K·bits/32 rows, also where a code crosses words."""
    size = 96 if group == -1 else group
    codes, scale, zero = random_layer(64, 96, bits, size, seed=bits)
    tensors = gptq_layer(codes, scale, zero, bits, torch.arange(96) // size, version)
    assert tensors["qweight"].shape[0] == 96 * bits // 32
    weight = read(tensors, settings(bits, group, sym=False, checkpoint_format="gptq" if version == 1 else "gptq_v2"))
    assert weight.perm is None and weight.bits == bits
    torch.testing.assert_close(weight.codes.long(), codes, rtol=0, atol=0)
    torch.testing.assert_close(weight.dequantize(), dense(codes, scale, zero, torch.arange(96) // size), rtol=0, atol=1e-7)


def test_three_bit_words_by_hand():
    """CK-09."""
    assert [word & 0xFFFFFFFF for word in words([i % 8 for i in range(32)], 3)] == [0x88FAC688, 0xC688FAC6, 0xFAC688FA]
    tensors = gptq_layer(torch.arange(32)[None].repeat(32, 1) % 8, torch.ones(32, 1), torch.full((32, 1), 4), 3)
    assert read(tensors, settings(3)).codes[0].tolist() == [i % 8 for i in range(32)]


@pytest.mark.parametrize("dtype,bits", [(torch.int64, 4), (torch.int16, 4), (torch.int8, 4), (torch.int16, 2),
                                        (torch.int64, 8)])
def test_other_word_types(dtype, bits):
    """GPTQModel's pack_dtype."""
    codes, scale, zero = random_layer(32, 64, bits, 32)
    weight = read(gptq_layer(codes, scale, zero, bits, torch.arange(64) // 32, dtype=dtype), settings(bits, 32, sym=False))
    torch.testing.assert_close(weight.dequantize(), dense(codes, scale, zero, torch.arange(64) // 32), rtol=0, atol=1e-7)


def test_one_group_over_all_inputs():
    """CK-05: scales [1, N] are read, [N, 1] are refused with both shapes."""
    codes, scale, zero = random_layer(96, 64, 4, 64)
    tensors = gptq_layer(codes, scale, zero, 4)
    assert read(tensors, settings()).group == 64
    tensors["scales"] = tensors["scales"].T.contiguous()
    with pytest.raises(BrokenFile, match=r"up_proj.scales .*\[96, 1\].*\[1, 96\]"):
        read(tensors, settings())


def test_act_order_with_one_group_needs_no_permutation():
    codes, scale, zero = random_layer(32, 64, 4, 64)
    assert read(gptq_layer(codes, scale, zero, 4), settings(desc_act=True)).perm is None


def test_ragged_last_group():
    """CK-06: K = 208 in groups of 32 has 7 groups, the last one half full."""
    codes, scale, zero = random_layer(32, 208, 4, 32)
    index = torch.arange(208) // 32
    weight = read(gptq_layer(codes, scale, zero, 4, index), settings(group=32, sym=False))
    assert weight.scale.shape == (32, 7)
    torch.testing.assert_close(weight.dequantize(), dense(codes, scale, zero, index), rtol=0, atol=1e-7)


def test_ragged_last_group_in_act_order():
    codes, scale, zero = random_layer(32, 208, 4, 32)
    index = (torch.arange(208) // 32)[torch.randperm(208, generator=torch.Generator().manual_seed(1))]
    weight = read(gptq_layer(codes, scale, zero, 4, index), settings(group=32, sym=False, desc_act=True))
    assert weight.group == 32 and weight.perm is not None
    torch.testing.assert_close(weight.dequantize(), dense(codes, scale, zero, index), rtol=0, atol=1e-7)


def test_groups_of_unequal_size():
    """Any g_idx is exact: what divides all group sizes becomes the group."""
    codes, scale, zero = random_layer(32, 64, 4, 16)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    index = torch.tensor([0] * 24 + [1] * 8 + [2] * 24 + [3] * 8)[order]
    weight = read(gptq_layer(codes, scale, zero, 4, index), settings(group=16, sym=False, desc_act=True))
    assert weight.group == 8
    torch.testing.assert_close(weight.dequantize(), dense(codes, scale, zero, index), rtol=0, atol=1e-7)


def test_outputs_that_no_fast_kernel_likes():
    """CK-08: 48 outputs are 6 words of zeros a group."""
    codes, scale, zero = random_layer(48, 64, 4, 32)
    tensors = gptq_layer(codes, scale, zero, 4, torch.arange(64) // 32)
    assert tensors["qzeros"].shape == (2, 6)
    torch.testing.assert_close(read(tensors, settings(group=32, sym=False)).dequantize(),
                               dense(codes, scale, zero, torch.arange(64) // 32), rtol=1e-3, atol=1e-7)


def test_an_empty_index_of_older_tools_is_no_act_order():
    codes, scale, zero = random_layer(32, 64, 4, 16)
    layout = GptqLayout(settings(group=16, sym=False, desc_act=False))
    weight = read(gptq_layer(codes, scale, zero, 4, torch.zeros(64, dtype=torch.int32)), layout)
    torch.testing.assert_close(weight.dequantize(), dense(codes, scale, zero, torch.arange(64) // 16), rtol=0, atol=1e-7)
    assert "g_idx is empty" in layout.notes()[0]


def test_no_index_means_in_order_unless_act_order_was_promised():
    codes, scale, zero = random_layer(32, 64, 4, 16)
    tensors = gptq_layer(codes, scale, zero, 4, torch.arange(64) // 16)
    del tensors["g_idx"]
    torch.testing.assert_close(read(tensors, settings(group=16, sym=False)).dequantize(),
                               dense(codes, scale, zero, torch.arange(64) // 16), rtol=0, atol=1e-7)
    with pytest.raises(BrokenFile, match="g_idx is missing"):
        read(tensors, settings(group=16, desc_act=True))


def test_layers_of_different_inputs_are_not_fused():
    """CK-19: q, k and v with three g_idx stay apart; with one they are stacked, and give the same products."""
    made = []
    for seed in range(3):
        codes, scale, zero = random_layer(16, 64, 4, 16, seed)
        index = (torch.arange(64) // 16)[torch.randperm(64, generator=torch.Generator().manual_seed(seed))]
        made.append((read(gptq_layer(codes, scale, zero, 4, index), settings(group=16, sym=False, desc_act=True)),
                     dense(codes, scale, zero, index)))
    assert QWeight.cat([weight for weight, _ in made]) is None
    same = QWeight.cat([made[0][0], made[0][0]])
    torch.testing.assert_close(same.dequantize(), torch.cat([made[0][1]] * 2), rtol=0, atol=1e-7)


def test_dynamic_rules_of_gptqmodel():
    layout = GptqLayout(settings(4, 32, sym=False, dynamic={"-:.*lm_head": {},
                                                            r"+:.*\.down_proj": {"bits": 8, "group_size": 16},
                                                            r".*\.up_proj": {"bits": 2}}))
    assert layout.settings("model.layers.3.mlp.down_proj") == (8, 16)
    assert layout.settings("model.layers.3.mlp.up_proj") == (2, 32)
    assert layout.settings("model.layers.3.self_attn.q_proj") == (4, 32)
    codes, scale, zero = random_layer(32, 64, 8, 16)
    weight = read(gptq_layer(codes, scale, zero, 8, torch.arange(64) // 16), layout, "model.layers.0.mlp.down_proj")
    torch.testing.assert_close(weight.dequantize(), dense(codes, scale, zero, torch.arange(64) // 16), rtol=0, atol=1e-7)


# ---------------------------------------------------------------------------------------------- refusals
def good() -> dict:
    codes, scale, zero = random_layer(32, 64, 4, 16)
    return gptq_layer(codes, scale, zero, 4, torch.arange(64) // 16)


@pytest.mark.parametrize("change,words", [
    (lambda t: t.pop("scales"), "lack .*up_proj.scales"), (lambda t: t.pop("qzeros"), "lack .*up_proj.qzeros"),
    (lambda t: t.update(scales=t["scales"][:2]), r"up_proj.scales.*\[2, 32\].*\[4, 32\]"),
    (lambda t: t.update(qzeros=t["qzeros"][:, :3]), "up_proj.qzeros"),
    (lambda t: t.update(g_idx=t["g_idx"] + 1), "g_idx names a group"),
    (lambda t: t.update(g_idx=t["g_idx"] - 1), "g_idx names a group")])
def test_what_does_not_fit_is_named(change, words):
    tensors = good()
    change(tensors)
    with pytest.raises(BrokenFile, match=words):
        read(tensors, settings(group=16))


def test_other_layouts_and_widths_are_refused_by_name():
    for more, word in (({"checkpoint_format": "marlin"}, "marlin"), ({"is_marlin_format": True}, "marlin"),
                       ({"format": "bitblas"}, "bitblas")):
        with pytest.raises(UnknownFormat, match=word):
            GptqLayout(settings(**more))
    with pytest.raises(UnsupportedTensor, match="up_proj has 5 bits"):
        read(good(), settings(5))


