"""Attention kernels ask for aligned, sometimes padded masks: strides and alignment come back as they were."""
import pytest
import torch
from swapping import check_swapped, new_manager, run_step
from torch.nn.functional import scaled_dot_product_attention

HEADS, TOKENS, WIDTH = 2, 29, 16
PADDED = 32  # rows of the mask are padded to a multiple of 8 elements and sliced


def attention(leaf, mask_leaf):
    def body(layer):
        with layer(1):
            q, k, v = (leaf * 1.25).view(1, HEADS, TOKENS, 3 * WIDTH).chunk(3, dim=-1)
            mask = (mask_leaf * 0.5)[..., :TOKENS]  # stride (.., PADDED, 1)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            del q, k, v, mask
        with layer(2):
            return (out * out.detach().cos()).sum()

    return body


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_04_sdpa_with_a_padded_mask(sim, dtype):
    leaf = torch.randn(1, HEADS, TOKENS, 3 * WIDTH, dtype=dtype, requires_grad=True)
    mask = torch.randn(1, HEADS, TOKENS, PADDED, dtype=dtype)
    mask[..., 7] = -float("inf")
    check_swapped(attention(leaf, mask), [leaf], sim)


def test_case_04_strides_and_alignment(sim):
    """What the hooks hand back, seen from where they are called."""
    leaf = torch.randn(1, HEADS, TOKENS, 3 * WIDTH, requires_grad=True)
    mask = torch.randn(1, HEADS, TOKENS, PADDED)
    manager = new_manager(sim, min_bytes=1)
    saved: list[tuple] = []
    returned: list[tuple] = []
    pack, unpack = manager._pack, manager.unpack

    def note(tensor):
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.data_ptr() % 16

    handles: list[object] = []

    def watched_pack(tensor):
        saved.append(note(tensor))
        handle = pack(tensor)
        handles.append(handle)
        return handle

    def watched_unpack(handle):
        tensor = unpack(handle)
        returned.append((next(i for i, h in enumerate(handles) if h is handle), note(tensor)))
        return tensor

    body = attention(leaf, mask)
    trace = run_step(body, [leaf], manager, record=True).trace
    from swapping import swap_all

    plan = swap_all(trace)
    assert plan.swaps
    manager._pack, manager.unpack = watched_pack, watched_unpack
    outcome = run_step(body, [leaf], manager, plan)
    assert outcome.stats.offloaded_bytes == plan.swap_bytes
    assert len(returned) >= len(saved) - 2
    for index, found in returned:
        assert found == saved[index]
