"""Schedules as text, and back: `parse` reads what `write` writes, with comments and white space.

The sides of programs and the steps of orders in plans are text of the same kind: ``F:layer|B:layer|L:layer``,
``1:qkv``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeVar

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.mesh.mesh import TensorAxis
from braid.scheduling.mesh.partition import parse_partition
from braid.scheduling.model.operators import OperatorKey
from braid.scheduling.schedule.gone import GONE, replacement
from braid.scheduling.schedule.operations import (
    Barrier,
    Compute,
    Gather,
    Message,
    Norm,
    Operation,
    Pass,
    PassKind,
    Receive,
    Reduce,
    Send,
    Start,
    Step,
    Strand,
    Wait,
)
from braid.scheduling.schedule.schedule import Block, Instruction, Prefetch, Program, Schedule, Side, Sides

VERSION: Final = 6
COLUMNS: Final = 120
"""Most columns of a line in a schedule's text that holds more than one instruction."""

_Result = TypeVar("_Result")
_NUMBER = r"(0|[1-9][0-9]*)"
_PASS: Final = re.compile(rf"([FBIWL]){_NUMBER}\.{_NUMBER}(b?)")
_TOKEN: Final = re.compile(r"(?:[A-Z]+\([^)]*\)|\S)+")
_TRANSFER: Final = re.compile(r"(SEND|RECV|REDUCE)([( ])(.*)\)")
_SHARED: Final = re.compile(r"(GATHER|REDUCE)\((.*)\)")
_AXIS: Final = re.compile(rf"({_NUMBER}|norm) ([a-z0-9_]+)")
_INSIDE_TENSOR: Final = re.compile(r"tp(_beyond_)?[0-9]+")


# -- writing -------------------------------------------------------------------------------------------------


def write(schedule: Schedule) -> str:
    """Return the schedule as text that `parse` reads back to an equal object."""
    lines = [
        f"braid schedule {VERSION}",
        f"name {schedule.name}",
        f"stages {len(schedule.stages)}",
        f"chunks {schedule.chunks}",
        f"micro_batches {schedule.micro_batches}",
        f"unit {schedule.unit_layers}",
    ]
    lines += [f"{key} {value}" for key in _OPTIONAL if (value := getattr(schedule, key))]
    lines += [f"partition {partition}" for partition in schedule.partitions]
    for number, stage in enumerate(schedule.stages):
        lines += ["", f"stage {number}", *_stage_lines(stage)]
    for sides, program in schedule.programs.items():
        lines += ["", f"program {write_sides(sides)}"]
        lines += [f"  {_operation_text(op, len(sides) > 1)}" for op in program]
    return "\n".join(lines) + "\n"


def write_sides(sides: Iterable[Side]) -> str:
    """Return the text of a program's passes: ``F:layer|B:layer``."""
    return "|".join(map(str, sides))


def write_step(turn: int, operator: str, *, several: bool = True) -> str:
    """Return the text of an operator in a program, with the number of its pass if the program has
    ``several``."""
    return f"{turn}:{operator}" if several else operator


def _operation_text(operation: Operation, several: bool) -> str:
    """Return an operation as a line of a program's text; ``several``: whether the program has several
    passes."""
    if not isinstance(operation, Compute | Start | Wait):
        return "barrier"
    verb = type(operation).__name__.lower()
    name = write_step(operation.turn, str(operation.what), several=several)
    where = f" on {operation.stream}" if isinstance(operation, Start) and operation.stream else ""
    return f"{verb} {name}{where}"


def _stage_lines(stage: tuple[Instruction, ...]) -> list[str]:
    """Return a stage's instructions as lines. A block shares its line with the messages that it waits for and
    sends."""
    lines: list[str] = []
    behind = False
    for position, instruction in enumerate(stage):
        token = str(instruction)
        if _same_line(stage, position, behind) and len(lines[-1]) + 1 + len(token) <= COLUMNS:
            lines[-1] += f" {token}"
        else:
            lines.append(f"  {token}")
            behind = False
        behind = behind or isinstance(instruction, Block)
    return lines


def _same_line(stage: tuple[Instruction, ...], position: int, behind: bool) -> bool:
    """Return whether the instruction at ``position`` continues the line of the instruction before it.

    ``behind``: whether that line already contains a block.
    """
    instruction, before = stage[position], stage[position - 1] if position else None
    arrives = _is(before, Start, Receive) or isinstance(before, Wait)
    match instruction:
        case Start(Receive()) | Wait(Receive()) | Block():
            return arrives and not behind
        case Wait(Send()) if isinstance(before, Block):
            after = next((i for i in stage[position:] if not isinstance(i, Wait)), None)
            return _is(after, Start, Send)
        case Wait(Send()):
            return arrives
        case Start(Send()):
            return isinstance(before, Block | Wait) or _is(before, Start, Send)
        case Wait(transfer):
            return _is(before, Wait, type(transfer))
        case Start(transfer):
            return _is(before, Start, type(transfer))
        case Compute(what):
            return isinstance(before, Compute) and type(before.what) is type(what)
        case _:
            return type(before) is type(instruction)


def _is(instruction: Instruction | None, kind: type, transfer: type) -> bool:
    """Return whether an instruction is a ``kind`` (`Start` or `Wait`) of a transfer of the type
    ``transfer``."""
    return (
        isinstance(instruction, Start | Wait)
        and isinstance(instruction, kind)
        and isinstance(instruction.what, transfer)
    )


# -- reading -------------------------------------------------------------------------------------------------


def parse_pass(token: str) -> Pass:
    """Parse a pass such as ``F3.1b``; raise `ValueError` if the text is not exactly one pass."""
    if not (match := _PASS.fullmatch(token)):
        raise ValueError(f"{token!r} is not a pass (F3.1, B3.1, I3.1, W3.1, L3.1, with b for strand beta)")
    kind, micro_batch, chunk, mark = match.groups()
    return Pass(PassKind(kind), int(micro_batch), int(chunk), Strand.BETA if mark else Strand.ALPHA)


def parse_instruction(token: str) -> Instruction:
    """Parse the text of one instruction; raise `ValueError` if it is not exactly one instruction."""
    if token == "STEP":
        return Compute(Step())
    if token == "NORM":
        return Compute(Norm())
    if token == "PREFETCH":
        return Prefetch()
    if token.startswith("WAIT(") and token.endswith(")"):
        return Wait(_transfer(token, token.removeprefix("WAIT("), " "))
    if _TRANSFER.fullmatch(token):
        return Start(_transfer(token, token, "("))
    if token.startswith("[") and token.endswith("]"):
        return _block(token)
    if _PASS.fullmatch(token):
        return Block((parse_pass(token),))
    raise ValueError(f"{token!r} is not an instruction (F3.1, [F5.0b|B1.1], SEND(F3.2>1), REDUCE(1 dp), ...)")


def _block(token: str) -> Block:
    texts = token[1:-1].split("|")
    count = next((n for n, shared in enumerate(texts) if _SHARED.fullmatch(shared)), len(texts))
    passes = tuple(map(parse_pass, texts[:count]))
    if len(texts) < 2:
        raise ValueError(f"{token!r} holds one pass; write it without brackets")
    gathers: list[Gather] = []
    sums: list[Reduce] = []
    for shared in texts[count:]:
        match = _SHARED.fullmatch(shared)
        axis = match and _AXIS.fullmatch(match[2])
        if not match or not axis or axis[1] == "norm" or not passes or (sums and match[1] == "GATHER"):
            raise ValueError(
                f"{token!r}: behind the passes stand gathers of parameters and then sums of gradients "
                f"([B3.1|GATHER(1 dp)|REDUCE(1 dp)])"
            )
        if match[1] == "GATHER":
            gathers.append(Gather(int(axis[1]), _axis(axis[3])))
        else:
            sums.append(Reduce(int(axis[1]), _axis(axis[3])))
    return Block(passes, tuple(sums), tuple(gathers))


def _transfer(token: str, text: str, opening: str) -> Message | Reduce:
    """Parse a message or gradient sum, such as ``SEND(F3.2>1)``.

    ``token``: the whole instruction, for errors; ``opening``: the character behind the transfer's name.
    """
    match = _TRANSFER.fullmatch(text)
    if match is None or match[2] != opening:
        raise ValueError(f"{token!r} waits for no transfer (WAIT(SEND F3.2>1), WAIT(REDUCE 1 dp), ...)")
    kind, _, inside = match.groups()
    if kind in ("SEND", "RECV"):
        moved, arrow, stage = inside.partition(">" if kind == "SEND" else "<")
        if not arrow or not re.fullmatch(_NUMBER, stage):
            raise ValueError(f"{token!r} names no stage (SEND(F3.2>1), RECV(F3.2<0))")
        pass_ = parse_pass(moved)
        return Send(pass_, int(stage)) if kind == "SEND" else Receive(pass_, int(stage))
    axis = _AXIS.fullmatch(inside)
    if axis is None:
        raise ValueError(f"{token!r} names no chunk and axis (REDUCE(1 dp), REDUCE(norm tp))")
    return Reduce(None if axis[1] == "norm" else int(axis[1]), _axis(axis[3]))


def _axis(name: str) -> str:
    return TensorAxis(name) if _INSIDE_TENSOR.fullmatch(name) else name


def parse_sides(text: str) -> Sides:
    """Parse the passes of a program, such as ``F:layer|B:layer``; raise `ValueError` for any other text."""
    sides = []
    for side in text.split("|"):
        kind, colon, unit = side.partition(":")
        if not colon or not unit or kind not in set(PassKind):
            raise ValueError(f"{text!r} does not say what the program is for (F:layer, F:layer|B:layer, ...)")
        sides.append(Side(PassKind(kind), unit))
    return tuple(sides)


def parse_step(text: str, count: int) -> tuple[int, str]:
    """Parse an operator such as ``1:qkv`` in a program of ``count`` passes; return (pass number,
    operator)."""
    if count == 1:
        return 0, text
    turn, colon, operator = text.partition(":")
    if not colon or not operator or not re.fullmatch(_NUMBER, turn) or int(turn) >= count:
        raise ValueError(f"{text!r}: operators of {count} passes are written 0:NAME to {count - 1}:NAME")
    return int(turn), operator


def operator_key(unit: str, operator: str) -> OperatorKey:
    """Return the key of an operator in profiles, given its unit and its name in a program's text."""
    prefix, slash, rest = operator.partition("/")
    part, name = (prefix.partition(".")[2], rest) if slash else (unit, operator)
    return OperatorKey(part, name.removesuffix(".again"))


def parse_operation(line: str, count: int) -> Operation:
    """Parse one line of a program of ``count`` passes; raise `ValueError` if it is not an operation."""
    match line.split():
        case ["compute", name]:
            turn, operator = parse_step(name, count)
            return Compute(operator, turn=turn)
        case ["start", name, "on", stream]:
            if stream not in set(Stream):
                raise ValueError(f"{stream!r} is not a stream; use one of {', '.join(Stream)}")
            turn, operator = parse_step(name, count)
            return Start(operator, Stream(stream), turn=turn)
        case ["wait", name]:
            turn, operator = parse_step(name, count)
            return Wait(operator, turn=turn)
        case ["barrier"] if count > 1:
            return Barrier()
    raise ValueError(f"{line!r} is not an operation (compute NAME, start NAME on STREAM, wait NAME)")


Line = tuple[int, str]
"""A line of a schedule's text: its number, and its text without comment and outer white space."""

_HEADER: Final = ("name", "stages", "chunks", "micro_batches", "unit")
_OPTIONAL: Final = ("prefetch", "keep")
"""Keys that are written behind the header, each only if its value is not 0."""


def parse(text: str) -> Schedule:
    """Parse the text of a schedule; raise `ValueError` that names the wrong line."""
    lines: list[Line] = [
        (number, stripped)
        for number, line in enumerate(text.splitlines(), start=1)
        if (stripped := line.split("#", 1)[0].strip())
    ]
    header = _parse_header(lines)
    body = lines[1 + len(header) :]
    cut = next((n for n, (_, line) in enumerate(body) if line.split()[0] != "partition"), len(body))
    partitions = [_at(number, parse_partition, " ".join(line.split()[1:])) for number, line in body[:cut]]
    for (number, _), partition in zip(body, partitions, strict=False):
        if sum(partition.what == other.what for other in partitions) > 1:
            raise _wrong(number, f"partition {partition.what} stands twice")
    body = body[cut:]
    cut = next((n for n, (_, line) in enumerate(body) if line.split()[0] == "program"), len(body))
    stages = _parse_stages(body[:cut])
    if str(len(stages)) != header["stages"]:
        number = lines[_HEADER.index("stages") + 1][0]
        raise _wrong(number, f"the header says {header['stages']} stages, {len(stages)} follow")
    return Schedule(
        name=header["name"],
        chunks=int(header["chunks"]),
        micro_batches=int(header["micro_batches"]),
        stages=stages,
        programs=_parse_programs(body[cut:]),
        unit_layers=int(header["unit"]),
        partitions=tuple(partitions),
        **{key: int(header[key]) for key in _OPTIONAL if key in header},
    )


def _parse_header(lines: list[Line]) -> Mapping[str, str]:
    number, first = lines[0] if lines else (1, "")
    if first != f"braid schedule {VERSION}":
        raise _wrong(
            number,
            f"expected 'braid schedule {VERSION}', found {first!r}; "
            f"if another version of Braid wrote the file, make it anew with 'braid schedule'",
        )
    entries = {}
    for index, key in enumerate(_HEADER, start=1):
        number, line = lines[index] if index < len(lines) else (number + 1, "")
        words = line.split()
        if len(words) != 2 or words[0] != key or not (key == "name" or re.fullmatch(_NUMBER, words[1])):
            expected = "one word" if key == "name" else "a number"
            raise _wrong(number, f"expected '{key}' and {expected}, found {line!r}")
        entries[key] = words[1]
    if entries["name"] in GONE:
        raise _wrong(lines[1][0], f"schedule {entries['name']!r} {replacement(entries['name'])}")
    optional: tuple[str, ...] = _OPTIONAL
    for number, line in lines[1 + len(_HEADER) :]:
        words = line.split()
        if words[0] not in optional:
            break
        optional = optional[optional.index(words[0]) + 1 :]
        if len(words) != 2 or not re.fullmatch(_NUMBER, words[1]) or words[1] == "0":
            raise _wrong(number, f"expected '{words[0]}' and a number above 0, found {line!r}")
        entries[words[0]] = words[1]
    return entries


def _parse_stages(lines: list[Line]) -> tuple[tuple[Instruction, ...], ...]:
    stages: list[list[Instruction]] = []
    for number, line in lines:
        if line.split()[0] == "stage":
            if line.split() != ["stage", str(len(stages))]:
                raise _wrong(number, f"expected 'stage {len(stages)}', found {line!r}")
            stages.append([])
        elif not stages:
            raise _wrong(number, f"expected 'stage 0', found {line!r}")
        else:
            stages[-1] += [_at(number, parse_instruction, token) for token in _TOKEN.findall(line)]
    return tuple(tuple(stage) for stage in stages)


def _parse_programs(lines: list[Line]) -> dict[Sides, Program]:
    programs: dict[Sides, Program] = {}
    heads = [n for n, (_, line) in enumerate(lines) if line.split()[0] == "program"]
    for begin, end in zip(heads, [*heads, len(lines)][1:], strict=True):
        number, head = lines[begin]
        words = head.split()
        if len(words) != 2:
            raise _wrong(number, f"expected 'program' and what it is for, found {head!r}")
        sides = _at(number, parse_sides, words[1])
        if sides in programs:
            raise _wrong(number, f"{head} stands twice")
        operations: list[Operation] = []
        for line_number, line in lines[begin + 1 : end]:
            if line.split()[0] == "stage":
                raise _wrong(line_number, f"{line!r} after a program; stages come first")
            operations.append(_at(line_number, partial(parse_operation, count=len(sides)), line))
        programs[sides] = tuple(operations)
    return programs


def _at(number: int, read: Callable[[str], _Result], text: str) -> _Result:
    try:
        return read(text)
    except ValueError as error:
        raise _wrong(number, str(error)) from None


def _wrong(number: int, cause: str) -> ValueError:
    return ValueError(f"schedule, line {number}: {cause}")
