"""Batches of whole epochs over two streams of one space: each epoch is in one batch, and a batch can be done again."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_borrower.planner.atomic_plans import steps
from sublet_borrower.planner.micro_batch import Most
from sublet_protocol.domain.epochs import ConsumedFrontier, Epoch, LowerFrontier
from sublet_storage.readers.epoch_steps import Step, WholeEpochs
from tests.property.test_whole_epochs_laws import MOST, Log, epochs

STREAMS = (0, 1)


@dataclass
class Query:
    """Two streams, what a query knows of them, and its batches: {stream: offsets} of each."""

    logs: tuple[Log, Log]
    plans: dict[int, WholeEpochs] = field(init=False)
    batches: list[dict[int, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plans = {stream: WholeEpochs(0, ConsumedFrontier(0)) for stream in STREAMS}

    def advance(self, by: list[Epoch]) -> None:
        for log in self.logs:
            log.advance(by)

    def batch(self, most: Most) -> bool:
        """One batch, and once more as another process would do it, from what a checkpoint and the rows say."""
        for stream, plan in self.plans.items():
            plan.note(self.logs[stream].look(plan.scanned, 1_000))
        found = steps(self.plans, most)
        if not found:
            return False
        given = {stream: self._read(stream, step) for stream, step in found.items()}
        for stream, step in found.items():
            assert self._again(stream, step) == given[stream], "done again it has other messages"
            self.plans[stream].take(step)
        self.batches.append(given)
        return True

    def _again(self, stream: int, step: Step) -> list[int]:
        log, before = self.logs[stream], self.plans[stream]
        log.compact()
        plan = WholeEpochs(before.position, before.consumed)
        plan.note(log.look(plan.scanned, 1_000))
        return self._read(stream, plan.step_to(step.consumed.upto, step.consumed.lower))

    def _read(self, stream: int, step: Step) -> list[int]:
        log = self.logs[stream]
        return [
            offset
            for run in step.runs
            for offset in step.sift(run, log.rows(run.start, min(run.end + 2, len(log.messages))))
            .column("offset")
            .to_pylist()
        ]

    def check(self) -> None:
        """Everything was given once, and each epoch in one batch."""
        for stream in STREAMS:
            given = [offset for batch in self.batches for offset in batch.get(stream, ())]
            assert sorted(given) == list(range(len(self.logs[stream].messages)))
        of_batch: dict[Epoch, set[int]] = {}
        for number, batch in enumerate(self.batches):
            for stream, offsets in batch.items():
                for offset in offsets:
                    if (epoch := self.logs[stream].messages[offset]) is not None:
                        of_batch.setdefault(epoch, set()).add(number)
        assert all(len(numbers) == 1 for numbers in of_batch.values()), of_batch


def acts(numbers: int) -> st.SearchStrategy[list[tuple[str, int, list[Epoch | None], int]]]:
    block = st.lists(st.none() | epochs(numbers), min_size=1, max_size=4)
    word = st.sampled_from(["append", "append", "append", "advance", "batch"])
    return st.lists(st.tuples(word, st.sampled_from(STREAMS), block, st.sampled_from([0, 1, 3, 9])), max_size=40)


@pytest.mark.conforms("S11")
@pytest.mark.parametrize("numbers", [1, 2])
@settings(max_examples=300)
@given(data=st.data())
def test_each_epoch_is_in_one_batch_and_a_batch_can_be_done_again(numbers: int, data: st.DataObject) -> None:
    lower = LowerFrontier(((0,) * numbers,))
    query = Query((Log(numbers, lower), Log(numbers, lower)))
    for word, stream, block, most in data.draw(acts(numbers)):
        if word == "append":
            query.logs[stream].append(block)
        elif word == "advance":
            by = [epoch for epoch in block if epoch is not None]
            query.advance(by or [(0,) * numbers])
        else:
            query.batch(Most(messages=most or None))
    query.advance([(MOST + 1,) * numbers])
    for _ in range(200):
        if not query.batch(Most(messages=2)):
            break
    query.check()
