"""The schedule of engine, planner and simulation: slots, buffers and orders by hand."""

from __future__ import annotations

import pytest

from megatrain.memory.sizes import HUGE_PAGE, blocks_on_nvme, slab_bytes
from megatrain.schedule import (
    FORMS,
    block_order,
    graphs_of_layers,
    kept_row_bytes,
    leaving,
    own_sums,
    rings,
    slot_sizes,
    slots_of_blocks,
    sum_buffers,
    summed_blocks,
    uploads,
)

NUMELS = (4000, 10, 30, 20, 5000)  # embedding, three layers, head


def test_a_group_goes_forward_through_all_blocks_and_back_from_the_head():
    assert block_order(5) == (0, 1, 2, 3, 4, 3, 2, 1, 0)


# -- slots ---------------------------------------------------------------------------------------


def test_layers_alternate_between_two_slots_and_embedding_and_head_share_one():
    assert slots_of_blocks(7, 0, tied=False) == (2, 0, 1, 0, 1, 0, 2)
    assert slot_sizes(NUMELS, 0, tied=False) == ((30, 30), (5000,), ())


def test_a_tied_embedding_has_its_slot_until_the_head():
    assert slots_of_blocks(6, 0, tied=True) == (2, 0, 1, 0, 1, 3)
    assert slot_sizes(NUMELS, 0, tied=True) == ((30, 30), (4000, 5000), ())


def test_resident_blocks_have_no_slot():
    for tied in [False, True]:
        for resident, slots, layers, edges in [
            (1, (None, 0, 1, 0, 2), (30, 30), (5000,)),
            (2, (None, None, 0, 1, 2), (30, 30), (5000,)),
            (3, (None, None, None, 0, 1), (20,), (5000,)),
            (4, (None, None, None, None, 0), (), (5000,)),
            (5, (None, None, None, None, None), (), ()),
        ]:
            assert slots_of_blocks(5, resident, tied) == slots
            assert slot_sizes(NUMELS, resident, tied) == (layers, edges, ())


def test_replicated_blocks_have_slots_of_their_own():
    for tied in [False, True]:
        for replicated, slots, sizes in [
            (1, (3, 0, 1, 0, 2), ((30, 30), (5000,), (4000,))),
            (3, (2, 3, 4, 0, 1), ((20,), (5000,), (4000, 10, 30))),
            (4, (1, 2, 3, 4, 0), ((), (5000,), (4000, 10, 30, 20))),
            (9, (0, 1, 2, 3, 4), ((), (), NUMELS)),
        ]:
            assert slots_of_blocks(5, 0, tied, replicated) == slots
            assert slot_sizes(NUMELS, 0, tied, replicated) == sizes
            # the embedding and the first layer are resident
            here = slots_of_blocks(5, 2, tied, replicated)
            assert here[:2] == (None, None)
            assert {*here[2:]} == {0, 1, 2}


def test_every_slot_holds_its_largest_block():
    for replicated in [0, 3, 5]:
        for tied in [False, True]:
            for resident in range(6):
                slots = slots_of_blocks(5, resident, tied, replicated)
                sizes = slot_sizes(NUMELS, resident, tied, replicated)
                of_slot: dict[int, list[int]] = {}
                for block, slot in enumerate(slots):
                    if slot is not None:
                        of_slot.setdefault(slot, []).append(NUMELS[block])
                elements = [*sizes.layers, *sizes.edges, *sizes.own]
                assert sorted(of_slot) == list(range(len(elements)))
                assert all(max(numels) <= elements[slot] for slot, numels in of_slot.items())


def test_an_upload_is_asked_for_once_no_earlier_visit_needs_its_slot_for_another_block():
    """Embedding, layers a, b, c, head: a and c share a slot, and embedding and head."""
    slots = slots_of_blocks(5, 0, tied=False)
    asked = uploads(block_order(5), slots)
    assert asked == (
        (0, 1, 2),  # with the embedding: layers a and b
        (),  # c waits for a's slot
        (3, 4, 3, 2),  # a is done: c, and the head; back at c and b, they are there already
        (),  # a waits for c's slot
        (),
        (),
        (1, 0),  # c is done
        (),
        (),
    )


def test_resident_blocks_are_never_asked_for():
    asked = uploads(block_order(5), slots_of_blocks(5, 3, tied=False))
    assert {block for blocks in asked for block in blocks} == {3, 4}


def test_replicated_blocks_are_asked_for_two_visits_ahead():
    visits = block_order(6)
    asked = uploads(visits, slots_of_blocks(6, 0, False, replicated=4), 4)
    # blocks 4 and 5 are not replicated; all are there when the way back begins
    assert asked[:4] == ((0, 1, 2), (3, 4, 5, 4), (), ())
    assert {block for blocks in asked[4:] for block in blocks} == {0, 1, 2, 3}
    every = uploads(visits, slots_of_blocks(6, 0, False, replicated=9), 9)
    assert every[:4] == ((0, 1, 2), (3,), (4,), (5,))


def test_a_slot_holds_what_is_visited():
    """Uploads in the order in which they are asked for, each over what its slot held before."""
    for replicated in [0, 3, 8]:
        for tied in [False, True]:
            for resident in range(6):
                slots, visits = slots_of_blocks(8, resident, tied, replicated), block_order(8) * 3
                holding: dict[int | None, int] = {}
                for block, asked in zip(visits, uploads(visits, slots, replicated), strict=True):
                    holding |= {slots[wanted]: wanted for wanted in asked}
                    assert block < resident or holding[slots[block]] == block


# -- accumulators and host memory ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "resident", "asked", "summed"),
    [(1, 2, 9, 0), (2, 0, 0, 0), (2, 3, 1, 3), (2, 1, 4, 4), (4, 0, 99, 5)],
)
def test_resident_blocks_keep_their_sums_between_groups(groups, resident, asked, summed):
    assert summed_blocks(5, groups, resident, asked) == summed


def test_a_tied_embedding_has_an_accumulator_to_itself():
    assert [own_sums(summed, tied=True) for summed in (0, 1, 3)] == [1, 1, 3]
    assert [own_sums(summed, tied=False) for summed in (0, 1, 3)] == [0, 1, 3]


def test_sums_that_travel_need_two_buffers_and_others_take_turns_in_one():
    assert sum_buffers(NUMELS, travel=True) == (5000, 5000)
    assert sum_buffers(NUMELS, travel=False) == (5000,)
    assert sum_buffers((), travel=True) == ()


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (1, 1), (HUGE_PAGE, 1), (HUGE_PAGE + 1, 2)])
def test_host_memory_is_taken_in_whole_huge_pages(nbytes, pages):
    assert slab_bytes(nbytes) == pages * HUGE_PAGE == pages * 2 * 1024 * 1024


# -- activations ---------------------------------------------------------------------------------


def test_the_last_layers_are_retained_and_those_sent_to_the_host_lie_between_recomputed_ones():
    assert graphs_of_layers(6, 2, 2) == ("nowhere", "host", "nowhere", "host", "device", "device")
    assert graphs_of_layers(3, 9, 9) == ("device",) * 3
    assert graphs_of_layers(3, 0, 9) == ("host",) * 3


@pytest.mark.parametrize(
    ("micro_batches", "layers_on_host", "places"), [(1, 0, 1), (2, 0, 3), (1, 4, 3), (8, 4, 3)]
)
def test_a_lone_micro_batch_needs_one_place_to_leave_from(micro_batches, layers_on_host, places):
    assert leaving(micro_batches, layers_on_host) == places
    graph = 100 if layers_on_host else 0
    found = rings(micro_batches, layers_on_host, checkpoint=10, graph=graph)
    assert found == (places * max(10, graph), 20, 2 * graph)


# -- NVMe and codecs -----------------------------------------------------------------------------


def test_the_last_layers_go_to_nvme_first_then_the_head_and_the_embedding():
    assert blocks_on_nvme(6, 0, 2) == (3, 4)
    assert blocks_on_nvme(6, 0, 5) == (1, 2, 3, 4, 5)
    assert blocks_on_nvme(6, 0, 99) == (0, 1, 2, 3, 4, 5)
    assert blocks_on_nvme(6, 3, 99) == (3, 4, 5)


@pytest.mark.parametrize(("codec", "nbytes"), [("int8", 132), ("int6", 100), ("int4", 54)])
def test_codes_have_a_scale_for_every_group(codec, nbytes):
    """Bytes of 96 elements, in groups of 64, 64 and 32; the last group is whole."""
    assert FORMS[codec].nbytes(96) == kept_row_bytes(codec, 96, 2) == nbytes
    assert kept_row_bytes("none", 96, 2) == 192
