"""Reads schedules from text, strictly: what `Schedule.to_text` writes, comments and white space apart."""

import re
from dataclasses import dataclass, field
from typing import Final

from braid.scheduling.operators import Stream
from braid.scheduling.schedule import (
    VERSION,
    Barrier,
    Block,
    Compute,
    Direction,
    Gather,
    Gradients,
    Instruction,
    Late,
    Pair,
    PairAction,
    PairKey,
    PairProgram,
    Program,
    ProgramKey,
    Receive,
    Reduce,
    Schedule,
    Send,
    Side,
    Start,
    Step,
    Strand,
    Twin,
    Twins,
    Wait,
    WaitGather,
    WaitReceive,
    WaitReduce,
    WaitSend,
)

_NUMBER = r"(0|[1-9][0-9]*)"
_BLOCK = rf"([FBIW]){_NUMBER}\.{_NUMBER}(b?)"
_INSTRUCTIONS: Final = {
    "block": re.compile(_BLOCK),
    "pair": re.compile(rf"\[{_BLOCK}\|{_BLOCK}\]"),
    "send": re.compile(rf"SEND\({_BLOCK}>{_NUMBER}\)"),
    "receive": re.compile(rf"RECV\({_BLOCK}<{_NUMBER}\)"),
    "reduce": re.compile(rf"REDUCE\({_NUMBER}\)"),
    "wait_send": re.compile(rf"WAIT\(SEND {_BLOCK}\)"),
    "wait_receive": re.compile(rf"WAIT\(RECV {_BLOCK}\)"),
    "wait_reduce": re.compile(rf"WAIT\(REDUCE {_NUMBER}\)"),
    "gather": re.compile(rf"GATHER\({_NUMBER}\)"),
    "wait_gather": re.compile(rf"WAIT\(GATHER {_NUMBER}\)"),
    "step": re.compile(r"STEP"),
}
_TOKEN: Final = re.compile(r"(?:WAIT\([^)]*\)|\S)+")


def _block(groups: tuple[str, ...]) -> Block:
    letter, micro_batch, chunk, mark = groups
    strand = Strand.BETA if mark else Strand.ALPHA
    if letter == "F":
        return Block(Direction.FORWARD, int(micro_batch), int(chunk), strand)
    return Block(Direction.BACKWARD, int(micro_batch), int(chunk), strand, Gradients(letter))


def parse_instruction(token: str) -> Instruction:
    """Parse one instruction; `ValueError` for anything that is not exactly one."""
    for kind, pattern in _INSTRUCTIONS.items():
        if match := pattern.fullmatch(token):
            groups = match.groups()
            match kind:
                case "block":
                    return _block(groups)
                case "pair":
                    first, second = _block(groups[:4]), _block(groups[4:])
                    alike = first.direction is second.direction
                    return Twins(first, second) if alike else Pair(first, second)
                case "send":
                    return Send(_block(groups[:4]), int(groups[4]))
                case "receive":
                    return Receive(_block(groups[:4]), int(groups[4]))
                case "reduce":
                    return Reduce(int(groups[0]))
                case "wait_send":
                    return WaitSend(_block(groups))
                case "wait_receive":
                    return WaitReceive(_block(groups))
                case "wait_reduce":
                    return WaitReduce(int(groups[0]))
                case "gather":
                    return Gather(int(groups[0]))
                case "wait_gather":
                    return WaitGather(int(groups[0]))
                case _:
                    return Step()
    raise ValueError(f"{token!r} is not an instruction (F3.1, B3.1, SEND(F3.2>1), RECV(F3.2<0), ...)")


Sides = tuple[Side, ...]
"""Whose operators a program holds: of two passes, and of what the program before has left."""

OF_PAIRS: Final[Sides] = (*Direction, *Late)
OF_TWINS: Final[Sides] = tuple(Twin)
OF_ENDS: Final[Sides] = tuple(Late)
"""Of one pass, whose own operators need no letter."""


def parse_action(line: str, sides: Sides | None = None) -> PairAction:
    """Parse one line of an operator program (``sides``: of two passes); `ValueError` for anything else."""
    match line.split():
        case ["compute", name]:
            return Compute(*_operator(name, sides))
        case ["start", name, "on", stream]:
            if stream not in set(Stream):
                raise ValueError(f"{stream!r} is not a stream; use one of {', '.join(Stream)}")
            operator, side = _operator(name, sides)
            return Start(operator, Stream(stream), side)
        case ["wait", name]:
            return Wait(*_operator(name, sides))
        case ["barrier"] if sides is OF_PAIRS:
            return Barrier()
    raise ValueError(f"{line!r} is not an action (compute NAME, start NAME on STREAM, wait NAME)")


def _operator(name: str, sides: Sides | None) -> tuple[str, Side | None]:
    if sides is None:
        return name, None
    letter, separator, operator = name.partition(":")
    if sides is OF_ENDS and not separator:
        return name, None
    side = next((side for side in sides if side.value == letter), None)
    if not separator or not operator or side is None:
        letters = " or ".join(f"{side.value}:NAME" for side in sides)
        what = {OF_PAIRS: "a paired program", OF_ENDS: "a block before"}.get(sides, "twins")
        raise ValueError(f"{name!r}: operators of {what} are written {letters}")
    return operator, side


Line = tuple[int, str]
"""A line's number and its text, without comment and outer white space."""


def parse(text: str) -> Schedule:
    """Parse a schedule; `ValueError` names the line that is wrong."""
    lines: list[Line] = [
        (number, stripped)
        for number, line in enumerate(text.splitlines(), start=1)
        if (stripped := line.split("#", 1)[0].strip())
    ]
    name, stage_count, chunks, micro_batches = _parse_header(lines)
    body = lines[1 + len(_HEADER) :]
    fused = 0
    if body and (match := re.fullmatch(rf"fused {_NUMBER}", body[0][1])):
        fused, body = int(match[1]), body[1:]
    split = 1
    if body and (match := re.fullmatch(rf"split {_NUMBER}", body[0][1])):
        if int(match[1]) < 2:
            raise _wrong(body[0][0], f"{body[0][1]!r}: a split is into 2 chunks or more")
        split, body = int(match[1]), body[1:]
    cut = next((n for n, (_, line) in enumerate(body) if line.split()[0] == "program"), len(body))
    stages = _parse_stages(body[:cut])
    if len(stages) != stage_count:
        number = lines[_HEADER.index("stages") + 1][0]
        raise _wrong(number, f"the header says {stage_count} stages, {len(stages)} follow")
    programs = _parse_programs(body[cut:])
    return Schedule(
        name=name,
        chunks=chunks,
        micro_batches=micro_batches,
        stages=stages,
        programs=programs.passes,
        splits=programs.splits,
        pairs=programs.pairs,
        twins=programs.twins,
        fused=fused,
        split=split,
    )


_HEADER: Final = ("name", "stages", "chunks", "micro_batches")


def _parse_header(lines: list[Line]) -> tuple[str, int, int, int]:
    number, first = lines[0] if lines else (1, "")
    if first != f"braid schedule {VERSION}":
        raise _wrong(
            number,
            f"expected 'braid schedule {VERSION}', found {first!r}; "
            f"if another version of Braid wrote the file, make it anew with 'braid schedule'",
        )
    entries = []
    for place, key in enumerate(_HEADER, start=1):
        number, line = lines[place] if place < len(lines) else (number + 1, "")
        words = line.split()
        if len(words) != 2 or words[0] != key or not (key == "name" or re.fullmatch(_NUMBER, words[1])):
            what = "one word" if key == "name" else "a number"
            raise _wrong(number, f"expected '{key}' and {what}, found {line!r}")
        entries.append(words[1])
    name, *counts = entries
    stages, chunks, micro_batches = map(int, counts)
    return name, stages, chunks, micro_batches


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
            try:
                stages[-1] += [parse_instruction(token) for token in _TOKEN.findall(line)]
            except ValueError as error:
                raise _wrong(number, str(error)) from None
    return tuple(tuple(stage) for stage in stages)


@dataclass
class _Programs:
    """Programs as they are read: of passes, of split backward passes, of pairs, of twins."""

    passes: dict[ProgramKey, Program] = field(default_factory=dict)
    splits: dict[tuple[str, Gradients], Program] = field(default_factory=dict)
    pairs: dict[PairKey, PairProgram] = field(default_factory=dict)
    twins: dict[ProgramKey, PairProgram] = field(default_factory=dict)

    def add(self, head: list[str], actions: list[PairAction]) -> str | None:
        """Keep a program; what is wrong with its head, if anything."""
        match head:
            case [names] if names.count("|") == 1 and all(names.split("|")):
                first, second = names.split("|")
                if (first, second) in self.pairs:
                    return f"program {names} stands twice"
                self.pairs[first, second] = tuple(actions)
                return None
            case [part, ("F" | "B") as letter] if "|" not in part:
                if (part, Direction(letter)) in self.passes:
                    return f"program {part} {letter} stands twice"
                self.passes[part, Direction(letter)] = _plain(actions)
                return None
            case [part, ("FF" | "BB") as letters] if "|" not in part:
                if (part, Direction(letters[0])) in self.twins:
                    return f"program {part} {letters} stands twice"
                self.twins[part, Direction(letters[0])] = tuple(actions)
                return None
            case [part, ("I" | "W") as letter] if "|" not in part:
                if (part, Gradients(letter)) in self.splits:
                    return f"program {part} {letter} stands twice"
                self.splits[part, Gradients(letter)] = _plain(actions)
                return None
        return (
            f"expected 'program PART' and F, B, I, W, FF or BB, or 'program PART|PART', "
            f"found {' '.join(['program', *head])!r}"
        )


def _plain(actions: list[PairAction]) -> Program:
    return tuple(action for action in actions if not isinstance(action, Barrier))


def _parse_programs(lines: list[Line]) -> _Programs:
    programs = _Programs()
    heads = [n for n, (_, line) in enumerate(lines) if line.split()[0] == "program"]
    for begin, end in zip(heads, [*heads, len(lines)][1:], strict=True):
        number, head = lines[begin]
        of_one = {"FF": OF_TWINS, "BB": OF_TWINS, "B": OF_ENDS}
        sides = OF_PAIRS if "|" in head else of_one.get(head.split()[-1])
        actions: list[PairAction] = []
        for place, line in lines[begin + 1 : end]:
            if line.split()[0] == "stage":
                raise _wrong(place, f"{line!r} after a program; stages come first")
            try:
                actions.append(parse_action(line, sides))
            except ValueError as error:
                raise _wrong(place, str(error)) from None
        if cause := programs.add(head.split()[1:], actions):
            raise _wrong(number, cause)
    return programs


def _wrong(number: int, cause: str) -> ValueError:
    return ValueError(f"schedule, line {number}: {cause}")
