"""Finds in CPython's frames and bytecode the loop that advances an iterator, and where it drops it."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import opcode
from collections.abc import Iterator
from types import CodeType, FrameType


def _get_opcodes(*names: str) -> frozenset[int]:
    return frozenset(opcode.opmap[name] for name in names if name in opcode.opmap)


POLLS = _get_opcodes("FOR_ITER", "GET_ANEXT", "SEND")
_AWAITS = _get_opcodes("GET_AWAITABLE")
_NEXTS = _get_opcodes("GET_ANEXT")
_DROPS = _get_opcodes("POP_TOP", "POP_ITER")
_CLOSES = _get_opcodes("YIELD_VALUE", "RESUME", "RERAISE")
_RAISES = _get_opcodes("RAISE_VARARGS")
_CACHE = opcode.opname.index("CACHE") if "CACHE" in opcode.opname else -1
CALLS = _get_opcodes("PRECALL", "CALL", "CALL_FUNCTION_EX", "CALL_KW")
_ENDS = _get_opcodes("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")
_JUMPS = frozenset(code for name, code in opcode.opmap.items() if name.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")))
NEXT_NAMES = frozenset({"next", "__next__", "anext", "__anext__"})
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def find_loop_frame(frame: FrameType) -> FrameType:
    """Return the frame of the loop that advances an iterator by this frame's call: the nearest frame that is at the
    head of a `for`, this one or one around it; else the nearest that is not a wrapper's `__next__`.
    """
    others = (each for each in walk_back(frame) if each.f_code.co_name not in NEXT_NAMES)
    return next(filter(is_at_loop_head, walk_back(frame)), None) or next(others, frame)


def is_at_loop_head(frame: FrameType) -> bool:
    """Return whether the frame is where a `for` takes the next item, or `yield from` does, and not `await`."""
    code, index = frame.f_code.co_code, get_offset(frame)
    return code[index] in POLLS and code[index - 4] not in _AWAITS


def find_called_name(frame: FrameType) -> str:
    """Return the name under which the function that the frame calls now was looked up; empty where it calls nothing."""
    return _find_called_name_at(frame.f_code, get_offset(frame)) if get_opcode(frame) in CALLS else ""


@functools.lru_cache(maxsize=256)
def _find_called_name_at(code: CodeType, offset: int) -> str:
    steps = {step.offset: step for step in dis.get_instructions(code)}
    begin = _get_begin(steps[offset])
    before = itertools.takewhile(lambda step: step.offset != offset, steps.values())
    loads = [step for step in before if step.opname.startswith("LOAD_") and _get_begin(step) == begin]
    return str(loads[-1].argval) if loads else ""


def _get_begin(step: dis.Instruction) -> tuple[int | None, int | None]:
    """Return line and column where the expression begins of which the instruction is."""
    positions = step.positions or dis.Positions()
    return positions.lineno, positions.col_offset


@functools.lru_cache(maxsize=256)
def find_body_end(code: CodeType, head: int) -> int:
    """Return where the loop ends that advances at offset `head`, with its exception handlers; `head` if it is none."""
    steps = dis.get_instructions(code)
    jumps: Iterator[tuple[int, int]] = ((step.offset, step.argval) for step in steps if step.opcode in dis.hasjrel)
    return max([head, *itertools.chain.from_iterable(jump for jump in jumps if head in jump)])


@functools.lru_cache(maxsize=256)
def find_drop_offsets(code: CodeType, head: int) -> frozenset[int]:
    """Return the offsets where the loop that advances at offset `head` drops its own iterator, by `break` or `return`.

    They are found by following the code and how much is on the stack above the iterator. What an exception handler
    does is not followed: a loop that is left there has failed.
    """
    steps = {step.offset: step for step in dis.get_instructions(code)}
    next_offsets = dict(itertools.pairwise(steps))
    if steps[head].opcode not in POLLS:
        return frozenset()
    drops, visited, ahead = set[int](), {head}, [(next_offsets[head], 1)]
    while ahead:
        offset, above = ahead.pop()
        if offset in visited:
            continue
        visited.add(offset)
        step = steps[offset]
        if not above and step.opcode in _DROPS:
            drops.add(offset)
            continue
        if step.opname == "SWAP" and (above == 0 or step.arg == above + 1):
            above = (step.arg or 1) - 1 if above == 0 else 0
        successors = [(step.argval, True)] if step.opcode in dis.hasjrel else []
        if step.opcode not in _ENDS | _JUMPS:
            successors.append((next_offsets[offset], False))
        for target, jump in successors:
            left = above + dis.stack_effect(step.opcode, step.arg, jump=jump)
            if left >= 0:
                ahead.append((target, left))
    return frozenset(drops)


@functools.lru_cache(maxsize=256)
def find_loop_variables(code: CodeType, head: int) -> frozenset[str]:
    """Return the variables in which the loop that advances at that offset puts what it takes."""
    names = set[str]()
    for step in dis.get_instructions(code):
        if step.offset <= head or step.opname in ("END_SEND", "NOP") or step.opname.startswith("UNPACK_"):
            continue
        if not step.opname.startswith(("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")):
            break
        names |= {step.argval} if isinstance(step.argval, str) else set(step.argval)
    return frozenset(names)


def get_loop_offsets(frame: FrameType) -> dict[tuple[int, int], int]:
    """Return {frame's identity: where it advances} of a loop's frame and those over it, see `walk_over`."""
    return {get_frame_id(each): _get_head(each) for each in walk_over(frame)}


def _get_head(frame: FrameType) -> int:
    """Return the offset of the instruction that is being executed; of an `async for` that awaits a coroutine, at its
    SEND, where it asked for that."""
    index = get_offset(frame)
    return index - 4 if frame.f_code.co_code[index - 4] in _NEXTS else index


def is_generator(frame: FrameType) -> bool:
    """Return whether the frame is a generator's."""
    return bool(frame.f_code.co_flags & _GENERATOR)


def is_closing(frame: FrameType) -> bool:
    """Return whether a generator's frame ends as it is closed: at its `yield`, or behind a `finally` or an `except`
    that passes the `GeneratorExit` on. Another exception would have reached the loop over the generator."""
    executed = get_opcode(frame)
    return executed in _CLOSES or (executed in _RAISES and frame.f_code.co_code[get_offset(frame) + 1] == 0)


def walk_back(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield this frame and those around it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def walk_over(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield this frame and, while they are of generators, those over it."""
    while frame is not None:
        yield frame
        frame = frame.f_back if is_generator(frame) else None


def find_caller(frame: FrameType) -> FrameType:
    """Return the function in which the loop is, or the one over the generator in which it is."""
    *_, last = walk_over(frame)
    return last


def get_frame_id(frame: FrameType) -> tuple[int, int]:
    """Return the identity of the frame, as long as it exists."""
    return id(frame), id(frame.f_code)


def get_call_site(frame: FrameType) -> tuple[int, int]:
    """Return the identity of the frame's code, and the offset of its last instruction."""
    return id(frame.f_code), frame.f_lasti


def get_opcode(frame: FrameType) -> int:
    """Return the instruction that is being executed."""
    return frame.f_code.co_code[get_offset(frame)]


def get_offset(frame: FrameType) -> int:
    """Return the offset of the instruction that is being executed; a call points behind itself, at its caches."""
    code, index = frame.f_code.co_code, frame.f_lasti
    while code[index] == _CACHE:
        index -= 2
    return index
