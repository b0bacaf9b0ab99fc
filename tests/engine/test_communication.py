"""What ranks say to each other, over gloo: named tensors along an edge, rows among unequal numbers
of replicas."""

import communication_cases
import pytest
import torch
from communication_cases import OBJECTIVE
from ranks import run_ranks

from engine.communication import (
    HEADER_BYTES,
    gradients_of,
    pack_header,
    signature_of,
    unpack_header,
)


def test_every_dtype_and_changing_shapes_in_both_directions_at_once():
    assert run_ranks(4, communication_cases.both_directions_at_once, 6) == [True] * 4


def test_messages_of_nothing():
    assert run_ranks(2, communication_cases.empty_messages) == [[], [["a [2]"], [], ["b [0, 7]"]]]


def test_a_signature_that_both_ends_know_is_not_announced():
    sender, receiver = run_ranks(2, communication_cases.known_shapes, 3)
    assert sender == {"headers": 1, "bytes": HEADER_BYTES + 3 * (6 * 4 + 2 * 8), "failed": None}
    assert receiver == {"equal": True}


def test_a_message_that_is_not_what_the_receiver_expects_is_refused_before_it_leaves():
    sender, _ = run_ranks(2, communication_cases.known_shapes, 4)
    assert (
        sender["failed"]
        == "rank 1 expects a message of a float32 [2, 3], b int64 [2], but this stage made a float32 [2, 4], b int64 [2]"
    )


def test_a_posted_receive_takes_the_message_while_its_rank_is_busy():
    """Without a posted receive gloo holds the message back: the sender would wait for a receiver
    that waits for it."""
    assert run_ranks(2, communication_cases.posted_receives_overlap) == [True, True]


@pytest.mark.parametrize(
    "replicas, rows",
    [
        ({"image": 3, "text": 1}, {"image": [2, 5, 1], "text": [8]}),
        ({"image": 1, "text": 3}, {"image": [8], "text": [0, 4, 4]}),
        ({"image": 2, "text": 3}, {"image": [7, 0], "text": [1, 5, 1]}),
        ({"image": 3, "text": 2}, {"image": [0, 0, 0], "text": [0, 0]}),
    ],
    ids=["3+1", "1+3", "2+3", "nothing"],
)
def test_replicas_gather_and_branches_cross(replicas, rows):
    """Unequal numbers of replicas and of rows: at the end every tail has every row of both
    branches, in order."""
    total = sum(rows["image"])
    whole = {
        branch: [[offset + i, offset + 10 * i] for i in range(total)]
        for branch, offset in (("image", 0), ("text", 1000))
    }
    for rank, result in enumerate(
        run_ranks(
            sum(replicas.values()), communication_cases.gathering_and_crossing, replicas, rows
        )
    ):
        branch = "image" if rank < replicas["image"] else "text"
        assert result["branch"] == branch and result["counts"] == rows[branch]
        assert result["whole"] == whole[branch]
        assert result["crossed"] == whole
        assert result["sum"] == sum(replicas.values())
        mean = (replicas[branch] - 1) / 2
        assert result["averages"] == [[mean, mean], 10 * mean] and result["dtypes"] == [
            "torch.float32",
            "torch.float64",
        ]


# -- the header, without processes


def test_the_header_keeps_names_dtypes_shapes_and_order():
    tensors = {
        "text_β": torch.zeros(2, 0, 3, dtype=torch.bfloat16),
        "a": torch.zeros((), dtype=torch.int64),
        "image_hidden": torch.zeros(4),
    }
    header = pack_header(signature_of(tensors))
    assert header.dtype == torch.uint8 and header.shape == (HEADER_BYTES,)
    read = unpack_header(header)
    assert read == (
        ("text_β", torch.bfloat16, (2, 0, 3)),
        ("a", torch.int64, ()),
        ("image_hidden", torch.float32, (4,)),
    )
    assert gradients_of(read, OBJECTIVE, ("image", "text")) == (read[0], read[2])
    assert gradients_of(read, OBJECTIVE, ("image",)) == (read[2],)


def test_the_tensors_of_a_stage_fit_a_header_with_room_to_spare():
    """The fullest message of a merged line: both branches on their way, with their labels."""
    names = [
        f"{branch}_{part}"
        for branch in ("image", "text")
        for part in ("hidden", "features", "embeds", "position", "index")
    ]
    tensors = {
        name: torch.zeros(1, 1, 1, 1)
        for name in (*names, "attention_mask", "text_pool_position", "logit_scale")
    }
    tensors = {name: tensor.expand(4096, 512, 99, 99) for name, tensor in tensors.items()}
    pack_header(signature_of(tensors))


def test_a_dtype_that_does_not_travel():
    with pytest.raises(
        TypeError,
        match="tensor 'mask' has dtype torch.bool, which does not travel between stages; use one of .*torch.int64",
    ):
        signature_of({"mask": torch.zeros(2, dtype=torch.bool)})


def test_too_many_tensors_for_a_header():
    with pytest.raises(
        ValueError,
        match=rf"a message of 100 tensors needs a header of \d+ bytes; at most {HEADER_BYTES} fit: send fewer tensors",
    ):
        pack_header(signature_of({f"tensor {i}": torch.zeros(1) for i in range(100)}))
