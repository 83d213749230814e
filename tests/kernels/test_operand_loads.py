"""operand_loads.py tells loads of two bytes through registers from asynchronous copies of 16 bytes.

python -m tests.kernels.test_operand_loads TARGET ...   compiles the product below in both ways
"""

import json
import sys

import pytest
import triton
import triton.language as tl

from tests.kernels.operand_loads import NARROW, Graph, bits_loaded, bits_of
from tests.support.elsewhere import compiled_elsewhere


@triton.jit
def _product_kernel(
    out_ptr, a, w, K, BY_DESCRIPTOR: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Write out = a @ w.T, one tile; a and w are [BLOCK, K], described or as pointers."""
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK_K):
        if BY_DESCRIPTOR:
            acc = tl.dot(a.load([0, k]), w.load([0, k]).T, acc)
        else:
            left = tl.load(a + rows[:, None] * K + (k + columns)[None, :])
            right = tl.load(w + rows[:, None] * K + (k + columns)[None, :])
            acc = tl.dot(left, right.T, acc)
    tl.store(out_ptr + rows[:, None] * BLOCK + rows[None, :], acc)


def loads(target: str) -> list:
    """Return the loads by pointers and by descriptors."""
    import torch
    from triton.runtime import driver
    from triton.tools.tensor_descriptor import TensorDescriptor

    from tests.kernels.compile_targets import device
    from tests.kernels.operand_loads import operand_loads

    driver.set_active(device(target))
    a, out = torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(64, 64)
    described = TensorDescriptor.from_tensor(a, [64, 64])
    found = []
    for by_descriptor, operand in ((False, a), (True, described)):
        words = dict(
            BY_DESCRIPTOR=by_descriptor, BLOCK=64, BLOCK_K=64, num_warps=4, num_stages=3, grid=(1,)
        )
        found.append(operand_loads(_product_kernel.warmup(out, operand, operand, 256, **words)))
    return found


@pytest.mark.slow
def test_loads_by_descriptors_are_narrow_without_tma():
    targets = ["sm_80", "gfx942", "gfx950"]
    printed = compiled_elsewhere("-m", "tests.kernels.test_operand_loads", *targets)
    for target, (by_pointers, by_descriptors) in zip(targets, json.loads(printed), strict=True):
        dtype, share, *copied, accesses, _ = by_pointers
        threads = 4 * (32 if target == "sm_80" else 64)
        assert dtype == "bf16" and share == 64 * 64 * 16 // threads, target
        # Triton 3.6 copies no operand asynchronously on AMD's GPUs
        newer = not triton.__version__.startswith("3.6.")
        copies = target == "sm_80" or target == "gfx950" and newer
        assert {*accesses} == {"128"} and copied == ([2, 0] if copies else [0, 2]), target
        _, _, *copied, accesses, _ = by_descriptors
        assert {*accesses} == {"16"} and copied == [0, 2], target


LOOP = """
  tt.func public @k(%a: !tt.ptr<bf16>) {
    %x = tt.load %a : tensor<64x64x!tt.ptr<bf16>> loc(#loc1)
    %acc:2 = scf.for %i = %c0 to %c9 step %c1 iter_args(%sum = %zero, \
%y = %x) -> (tensor<64x64xf32>, tensor<64x64xbf16>)  : i32 {
      %z = tt.load %b : tensor<64x64x!tt.ptr<bf16>> loc(#loc2)
      %t = tt.trans %z {order = array<i32: 1, 0>} : \
tensor<64x64xbf16> -> tensor<64x64xbf16> loc(#loc2)
      %next = tt.dot %y, %t, %sum : tensor<64x64xbf16> * tensor<64x64xbf16> -> tensor<64x64xf32> \
loc(#loc3)
      scf.yield %next, %z : tensor<64x64xf32>, tensor<64x64xbf16> loc(#loc3)
    } loc(#loc3)
    %z = tt.load %c : tensor<64x64x!tt.ptr<bf16>> loc(#loc3)
    %last = tt.dot %acc#1, %z, %acc#0 : tensor<64x64xbf16> * tensor<64x64xbf16> -> \
tensor<64x64xf32> loc(#loc3)
  }
#loc1 = loc("k.py":1:9)
#loc2 = loc("z"(#loc4))
#loc3 = loc("k.py":3:9)
#loc4 = loc(callsite(#loc5 at #loc1))
#loc5 = loc("tile.py":7:9)
"""  # noqa: E501


def test_an_operand_is_followed_through_loops_and_names_used_twice():
    graph = Graph(LOOP)
    within, last = graph.products
    assert [{load.place for load in graph.origins(operand)} for operand in within.operands[:2]] == [
        {("k.py", 1), ("tile.py", 7)},
        {("tile.py", 7)},
    ]
    assert [{load.place for load in graph.origins(operand)} for operand in last.operands[:2]] == [
        {("k.py", 1), ("tile.py", 7)},
        {("k.py", 3)},
    ]
    assert len(within.loops) == 1 and last.loops == ()


@pytest.mark.parametrize(
    ("suffix", "bits"),
    [
        ("dwordx4", 128),
        ("dword", 32),
        ("b128", 128),
        ("u16", 16),
        ("ushort", 16),
        ("sbyte", 8),
        ("i8", 8),
        ("f8E4M3FN", 8),
    ],
)
def test_bits_of_amd_s_loads(suffix, bits):
    assert bits_of(suffix) == bits


def test_gfx950_copies_to_shared_memory_and_transposes_as_it_loads():
    assert bits_loaded("\tglobal_load_lds_dwordx4 v[2:3], off") == 128
    assert bits_loaded("\tbuffer_load_dwordx4 v5, s[8:11], 0 offen lds") == 128
    assert not NARROW.search("ds_read_b64_tr_b16 v[0:1], v2") and NARROW.search(
        "ds_write_b16 v0, v1"
    )


if __name__ == "__main__":
    print(json.dumps([loads(target) for target in sys.argv[1:]]))
