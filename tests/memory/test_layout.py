"""Tensors of a block lie aligned, without overlap, and every element has its hyper-parameters."""

from __future__ import annotations

import torch

from megatrain.memory.layout import (
    BLOCK_ALIGNMENT,
    GROUP,
    TENSOR_ALIGNMENT,
    ArraySpec,
    FlatLayout,
    Segment,
)

TENSORS = [
    ("w", (3, 50), True),
    ("w.bias", (50,), False),
    ("norm", (7,), False),
    ("v", (64, 2), True),
    ("scalar", (), False),
]


def test_tensors_are_aligned_in_order_and_apart():
    layout = FlatLayout.pack(TENSORS)
    assert [(t.name, t.shape, t.decay) for t in layout.tensors] == TENSORS
    end = 0
    for tensor in layout.tensors:
        assert tensor.offset % TENSOR_ALIGNMENT == 0
        assert tensor.offset >= end
        end = tensor.offset + tensor.numel
    assert layout.numel % BLOCK_ALIGNMENT == 0
    assert end <= layout.numel < end + TENSOR_ALIGNMENT + BLOCK_ALIGNMENT
    assert layout.parameters == 150 + 50 + 7 + 128 + 1


def test_views_are_the_flat_array_itself():
    for dtype in [torch.float32, torch.bfloat16, torch.int16]:
        layout = FlatLayout.pack(TENSORS)
        flat = torch.zeros(layout.numel, dtype=dtype)
        views = layout.views(flat)
        assert {name: tuple(view.shape) for name, view in views.items()} == {
            name: shape for name, shape, _ in TENSORS
        }
        for number, view in enumerate(views.values(), start=1):
            assert view.is_contiguous()
            view.fill_(number)
        assert [int((flat == number).sum()) for number in range(1, 6)] == [150, 50, 7, 128, 1]
        assert int((flat == 0).sum()) == layout.numel - layout.parameters


def test_segments_cover_the_block_and_join_equal_neighbours():
    layout = FlatLayout.pack(TENSORS)
    w, bias, _, v, scalar = (tensor.offset for tensor in layout.tensors)
    assert layout.segments() == [
        Segment(w, bias, True),
        Segment(bias, v, False),
        Segment(v, scalar, True),
        Segment(scalar, layout.numel, False),
    ]


def test_a_block_without_tensors_still_has_an_array_and_no_segments():
    """Nothing follows the last layer but a tied head: BART's decoder."""
    layout = FlatLayout.pack([])
    assert (layout.numel, layout.parameters, layout.segments()) == (BLOCK_ALIGNMENT, 0, [])
    assert layout.views(torch.zeros(layout.numel)) == {}


def test_tensors_and_gaps_cover_every_element_once():
    for tensors in (TENSORS, TENSORS[:1], TENSORS[:0]):
        layout = FlatLayout.pack(tensors)
        count = torch.zeros(layout.numel, dtype=torch.int)
        for view in layout.views(count).values():
            view += 1
        for start, stop in layout.gaps():
            count[start:stop] += 1
        assert bool((count == 1).all())


def test_an_array_with_an_element_per_group_has_one_wherever_the_group_lies():
    for tensors in (TENSORS, TENSORS[:1], TENSORS[:0]):
        layout = FlatLayout.pack(tensors)
        groups = layout.per("group")
        assert groups.numel * GROUP == layout.numel
        for tensor, of_groups in zip(layout.tensors, groups.tensors, strict=True):
            assert (of_groups.offset * GROUP, of_groups.name) == (tensor.offset, tensor.name)
            assert (of_groups.numel - 1) * GROUP < tensor.numel <= of_groups.numel * GROUP


def test_an_array_may_leave_out_hidden_matrices():
    tensors = [
        ("experts", (3, 5, 4), True),
        ("norm", (7,), False),
        ("matrix", (3, 4), True),
        ("b.bias", (3, 4), False),
    ]
    layout = FlatLayout.pack(tensors, layer=True)
    assert [
        (tensor.name, tensor.shape, tensor.offset) for tensor in layout.per("unhidden").tensors
    ] == [
        ("norm", (7,), 0),
        ("b.bias", (3, 4), 64),
    ]
    assert FlatLayout.pack(tensors).per("unhidden") == FlatLayout.pack(tensors)
    assert layout.per("element") is layout


def test_frozen_tensors_are_a_tail_that_only_the_weight_has():
    layout = FlatLayout.pack(TENSORS)
    frozen = layout.freeze({"w", "norm"})
    assert [spec.name for spec in frozen.tensors] == ["w.bias", "v", "scalar", "w", "norm"]
    assert [spec.frozen for spec in frozen.tensors] == [False] * 3 + [True] * 2
    assert frozen.parameters == layout.parameters
    assert frozen.trained.parameters == 50 + 128 + 1
    assert frozen.trainable == frozen.tensors[3].offset == BLOCK_ALIGNMENT
    assert all(spec.offset % TENSOR_ALIGNMENT == 0 for spec in frozen.tensors)
    assert frozen.numel % BLOCK_ALIGNMENT == 0
    weight, state = ArraySpec("weight", torch.bfloat16, whole=True), ArraySpec("m", torch.float32)
    scale = ArraySpec("scale", torch.uint8, per="group")
    assert frozen.of(weight) is frozen
    assert frozen.of(state) is frozen.trained
    assert frozen.of(scale).numel == frozen.trainable // GROUP


def test_a_block_whose_tensors_are_all_frozen_has_arrays_of_no_element():
    frozen = FlatLayout.pack(TENSORS, layer=True).freeze({name for name, *_ in TENSORS})
    for per in ("element", "group", "unhidden"):
        assert frozen.of(ArraySpec("m", torch.float32, per=per)).numel == 0
    assert (frozen.trained.segments(), frozen.trained.gaps()) == ([], [])
    assert frozen.trained.views(torch.empty(0)) == {}


def test_without_frozen_tensors_the_trained_layout_is_the_layout_itself():
    layout = FlatLayout.pack(TENSORS)
    assert layout.trained is layout.freeze(()) is layout
    nothing = FlatLayout.pack(())
    assert nothing.trained is nothing
    assert nothing.trainable == BLOCK_ALIGNMENT  # as it ever was
