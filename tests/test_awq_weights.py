"""AWQ and compressed-tensors layers against the formula, with files packed bit by bit in plain Python."""

from __future__ import annotations

import pytest
import torch

from backends.engine.awq_weights import AwqLayout
from backends.engine.compressed_weights import CompressedLayout
from backends.errors import BrokenFile, NotSupported, UnknownFormat, UnsupportedTensor
from backends.kernels import QWeight
from backends.quant_config import Quantization, _values
from tests.quant_maker import awq_rows, packed_columns, packed_rows, random_layer

NAME = "model.layers.0.mlp.up_proj"


def awq(version="gemm", group=32, bits=4, **more) -> Quantization:
    data = {"quant_method": "awq", "bits": bits, "group_size": group, "version": version, "zero_point": True} | more
    return Quantization("awq", data, _values(data, "config.json"), ("config.json",))


def read(layout, tensors: dict) -> QWeight:
    return layout.read(NAME, tensors.get)


def wanted(codes, scale, zero, group):
    index = torch.arange(codes.shape[1]) // group
    return (codes - zero[:, index]).float() * scale.half().float()[:, index]


def gemm(codes, scale, zero) -> dict:
    return {"qweight": awq_rows(codes.T.contiguous()), "qzeros": awq_rows(zero.T.contiguous()),
            "scales": scale.T.contiguous().half()}


def gemv(codes, scale, zero, width) -> dict:
    """Groups are padded to ``width``, a multiple of 8."""
    pad = torch.zeros(codes.shape[0], width - scale.shape[1])
    return {"qweight": packed_rows(codes, 4), "qzeros": packed_rows(torch.cat([zero, pad.long()], 1), 4),
            "scales": torch.cat([scale, pad], 1).half()}


def gemv_fast(codes, scale, zero, width, zeros_name="scaled_zeros") -> dict:
    """AutoAWQ's recipe, place by place: where input k of output n goes."""
    outputs, inputs = codes.shape
    packed = torch.zeros(outputs // 4, inputs, dtype=torch.int32)
    for k in range(inputs):
        block, inside = divmod(k, 32)
        pair, odd = divmod(inside,
                           2)      # 16 pairs, dealt out to four eights in turn
        eight, place = pair % 4, 2 * (pair // 4) + odd
        shuffled = 32 * block + 8 * eight + (place // 2 if place % 2 == 0 else 4 + place // 2)      # evens before odds
        lane64, at = divmod(shuffled, 64)
        for n in range(outputs):
            flat = (n % 4) * 64 + at         # the four outputs' blocks of 64 one after another, cut into words of four
            packed[n // 4, lane64 * 64 + flat // 4] |= int(codes[n, k]) << 4 * (flat % 4)
    pad = torch.zeros(outputs, width - scale.shape[1])
    bias = -(scale.half().float() * zero)
    return {"qweight": packed.to(torch.int16), "scales": torch.cat([scale, pad], 1).T.contiguous().half(),
            zeros_name: torch.cat([bias, pad], 1).T.contiguous().half()}


def test_one_word_of_each_layout():
    """CK-20: columns 0 … 7 hold the codes 0 … 7."""
    eight = torch.arange(8)
    assert awq_rows(eight[None]).item() & 0xFFFFFFFF == 0x75316420
    assert packed_rows(eight[None], 4).item() & 0xFFFFFFFF == 0x76543210
    one = torch.ones(8, 1), torch.zeros(8, 1, dtype=torch.long)
    assert read(AwqLayout(awq(group=8)), gemm(eight[:, None].repeat(1, 8), *one)).codes[:, 0].tolist() == list(range(8))
    assert read(AwqLayout(awq("gemv", group=8)), gemv(eight[None].repeat(8, 1), *one, 8)).codes[0].tolist() == list(range(8))


@pytest.mark.parametrize("version", ["gemm", "gemv", "gemv_fast", "GEMM"])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_every_layout_gives_the_formula(version, group):
    size = 128 if group == -1 else group
    codes, scale, zero = random_layer(64, 128, 4, size, seed=size)
    make = {"gemm": gemm, "gemv": lambda *a: gemv(*a, 8), "gemv_fast": lambda *a: gemv_fast(*a, 8)}[version.lower()]
    weight = read(AwqLayout(awq(version, group)), make(codes, scale, zero))
    torch.testing.assert_close(weight.codes.long(), codes, rtol=0, atol=0)
    # gemv_fast rounds zero * scale to float16 in the file itself
    torch.testing.assert_close(weight.dequantize(), wanted(codes, scale, zero, size), rtol=0,
                               atol=1e-4 if "fast" in version else 1e-7)


def test_gemv_fast_under_its_other_name():
    codes, scale, zero = random_layer(64, 128, 4, 64)
    weight = read(AwqLayout(awq("gemv_fast", 64)), gemv_fast(codes, scale, zero, 8, "qzeros"))
    torch.testing.assert_close(weight.dequantize(), wanted(codes, scale, zero, 64), rtol=0, atol=1e-4)


@pytest.mark.parametrize("stored", [True, False])
def test_without_zero_points_the_zero_is_the_middle(stored):
    codes, scale, _ = random_layer(64, 64, 4, 32)
    tensors = gemm(codes, scale, torch.full((64, 2), 8))
    if not stored:
        del tensors["qzeros"]
    torch.testing.assert_close(read(AwqLayout(awq(zero_point=False)), tensors).dequantize(),
                               wanted(codes, scale, torch.full((64, 2), 8), 32), rtol=0, atol=1e-7)


def test_what_does_not_fit_is_named():
    codes, scale, zero = random_layer(64, 64, 4, 32)
    tensors = gemm(codes, scale, zero)
    for change, match in (({"scales": tensors["scales"][:1]}, r"up_proj.scales.*\[1, 64\].*\[2, 64\]"),
                          ({"qzeros": None}, "lack .*up_proj.qzeros"),
                          ({"qzeros": tensors["qzeros"][:, :2]}, "up_proj.qzeros")):
        with pytest.raises(BrokenFile, match=match):
            read(AwqLayout(awq()), tensors | change)
    with pytest.raises(BrokenFile, match="groups of 48"):
        read(AwqLayout(awq(group=48)), tensors)


def test_other_layouts_and_widths_are_refused_by_name():
    for version in ("marlin", "ipex", "exllamav3"):
        with pytest.raises(UnknownFormat, match=version):
            AwqLayout(awq(version))
    with pytest.raises(UnsupportedTensor, match="3 bits"):
        AwqLayout(awq(bits=3))


# ---------------------------------------------------------------------------------------------- compressed-tensors
def compressed(bits=4, group=32, **weights) -> Quantization:
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group else "channel",
              "group_size": group} | weights
    data = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}}
    return Quantization("compressed-tensors", data, {}, ("config.json",))


def pack(codes, scale, zero=None, bits=4, index=None, packed_zero=True) -> dict:
    """Codes are stored shifted to be unsigned, which ours already are."""
    tensors = {"weight_packed": packed_rows(codes, bits), "weight_scale": scale.half(),
               "weight_shape": torch.tensor(codes.shape)}
    if zero is not None:
        tensors["weight_zero_point"] = packed_columns(zero, bits) if packed_zero else (zero - (1 << bits - 1)).to(torch.int8)
    return tensors | ({} if index is None else {"weight_g_idx": index.int()})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 64, None])
@pytest.mark.parametrize("asymmetric", [False, "packed", "int8"])
def test_pack_quantized_gives_the_formula(bits, group, asymmetric):
    size = group or 128
    codes, scale, zero = random_layer(64, 128, bits, size, symmetric=not asymmetric)
    tensors = pack(codes, scale, zero if asymmetric else None, bits, packed_zero=asymmetric == "packed")
    weight = read(CompressedLayout(compressed(bits, group, symmetric=not asymmetric)), tensors)
    torch.testing.assert_close(weight.dequantize(), wanted(codes, scale, zero, size), rtol=0, atol=1e-7)


def test_padded_rows_and_reordered_groups():
    codes, scale, zero = random_layer(16, 52, 4, 13, symmetric=True)          # 52 codes end inside a word
    index = (torch.arange(52) // 13)[torch.randperm(52, generator=torch.Generator().manual_seed(0))]
    weight = read(CompressedLayout(compressed(4, 13, actorder="group")), pack(codes, scale, index=index))
    torch.testing.assert_close(weight.dequantize(), (codes - 8).float() * scale.half().float()[:, index], rtol=0, atol=1e-7)


def test_groups_of_the_settings_by_target():
    quantization = compressed(4, 32)
    eight = {"targets": ["re:.*up_proj"], "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True}}
    groups = dict(quantization.data["config_groups"]) | {"eight": eight}
    layout = CompressedLayout(Quantization("compressed-tensors", quantization.data | {"config_groups": groups}, {},
                                           ("config.json",)))
    assert layout.scheme(NAME)["num_bits"] == 8 and layout.scheme("model.layers.0.mlp.down_proj")["num_bits"] == 4


def test_what_compressed_tensors_has_besides_is_refused():
    base = compressed().data
    group = base["config_groups"]["group_0"]
    for data, error, match in (
            (base | {"format": "float-quantized"}, UnknownFormat, "float-quantized"),
            (base | {"transform_config": {"x": 1}}, NotSupported, "rotations"),
            (base | {"config_groups": {"g": group | {"input_activations": {"num_bits": 8}}}}, NotSupported, "activations"),
            (base | {"config_groups": {"g": group | {"weights": {"num_bits": 4, "type": "float"}}}}, UnsupportedTensor,
             "float"),
            (base | {"config_groups": {}}, BrokenFile, "config_groups")):
        with pytest.raises(error, match=match):
            CompressedLayout(Quantization("compressed-tensors", data, {}, ("config.json",)))
