"""How far a batch of whole epochs goes."""

from __future__ import annotations

from sublet_borrower.planner.atomic_plans import first_completed, steps
from sublet_borrower.planner.micro_batch import Most
from sublet_protocol.domain.epochs import ConsumedFrontier, LowerFrontier
from sublet_storage.log.block import Epochs
from sublet_storage.readers.epoch_steps import Mark, Marks, WholeEpochs


def lower(epoch: int) -> LowerFrontier:
    return LowerFrontier(((epoch,),))


def stream(completed: int | None, *epochs: int) -> WholeEpochs:
    """A block of ten messages of each epoch, written when all before it was completed."""
    blocks = tuple(
        Mark(10 * number, 10 * number + 10, 100, lower(epoch), Epochs(((epoch,),), ((epoch,),)))
        for number, epoch in enumerate(epochs)
    )
    whole = WholeEpochs(0, ConsumedFrontier(0))
    whole.note(Marks(blocks, 10 * len(blocks), False, None if completed is None else lower(completed)))
    return whole


def test_of_streams_that_were_looked_at_one_after_the_other_the_least_counts() -> None:
    streams = {1: stream(4, 1, 2, 3), 2: stream(3, 1, 2)}
    assert first_completed(streams) == lower(3)
    assert {s: step.messages for s, step in steps(streams, Most()).items()} == {1: 20, 2: 20}


def test_without_epochs_all_is_given() -> None:
    whole = WholeEpochs(0, ConsumedFrontier(0))
    whole.note(Marks((Mark(0, 10, 100, None, None),), 10, False, None))
    assert first_completed({1: whole}) is None
    assert {s: step.messages for s, step in steps({1: whole}, Most()).items()} == {1: 10}
    assert steps({}, Most()) == {}


def test_a_limit_ends_a_batch_behind_an_epoch() -> None:
    streams = {1: stream(9, 1, 2, 3), 2: stream(9, 1, 2, 3)}
    assert {s: step.messages for s, step in steps(streams, Most(messages=40)).items()} == {1: 20, 2: 20}
    assert {s: step.messages for s, step in steps(streams, Most(bytes=250)).items()} == {1: 10, 2: 10}


def test_an_epoch_that_is_larger_than_the_limit_is_given_whole() -> None:
    streams = {1: stream(9, 1, 2, 3), 2: stream(9, 1, 2, 3)}
    assert {s: step.messages for s, step in steps(streams, Most(messages=1)).items()} == {1: 10, 2: 10}


def test_a_query_that_ends_goes_no_further_than_it_was_to() -> None:
    streams = {1: stream(9, 1, 2, 3)}
    assert {s: step.messages for s, step in steps(streams, Most(), lower(2)).items()} == {1: 10}
