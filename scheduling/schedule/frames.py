"""Registers of a chunk: which value of which unit is where, what has to be done before an operator, and what
each operation is the last to touch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from braid.scheduling.mesh.cluster import Stream
from braid.scheduling.model.operators import Graph, Part, Phase, Value
from braid.scheduling.schedule.code import Frame
from braid.scheduling.schedule.operations import Compute, Node, Operation, Pass, PassKind, Start, Wait
from braid.scheduling.schedule.schedule import Side


@dataclass(frozen=True)
class ChunkLayout:
    """The units of a chunk with their registers and operators."""

    units: tuple[str, ...]
    frame: Frame
    nodes: Mapping[tuple[int, bool, str], Node]
    """By place of the unit, whether of the forward pass, and name."""


def laid_out(parts: Sequence[Part], trains: bool) -> ChunkLayout:
    """Registers and operators of a chunk's units."""
    registers: dict[tuple[int, str], int] = {}
    names: list[str] = []
    values: list[Value] = []
    owners: list[int] = []
    constants: dict[str, tuple[int, ...]] = {}
    for place, part in enumerate(parts):
        x = next((name for name in part.inputs if name not in part.constants), None)
        if place:
            assert x is not None
            before = parts[place - 1].output
            for own, handed in ((x, before), (f"d.{x}", f"d.{before}")):
                if own in part.values:
                    registers[place, own] = registers[place - 1, handed]
        for name, value in part.values.items():
            if (place, name) not in registers:
                registers[place, name] = len(names)
                names.append(name)
                values.append(value)
                owners.append(len(owners))
            if name in part.constants:
                constants[name] = (*constants.get(name, ()), registers[place, name])
        for name, value in part.values.items():
            if value.alias_of is not None:
                owners[registers[place, name]] = registers[place, value.alias_of]
    keeps = {
        registers[place, name]: registers[place, value.keeps]
        for place, part in enumerate(parts)
        for name, value in part.values.items()
        if value.keeps is not None
    }
    owners = [_root(owners, register) for register in range(len(owners))]
    first, last = parts[0], parts[-1]
    x = next((name for name in first.inputs if name not in first.constants), None)
    end = len(parts) - 1
    graphs = [
        (place, forward, graph)
        for place, part in enumerate(parts)
        for forward, graph in _graphs(part, trains)
    ]
    bits = {
        (place, forward, op.name): number
        for number, (place, forward, op) in enumerate(
            (place, forward, op) for place, forward, graph in graphs for op in graph.operators
        )
    }
    made = _made(graphs, bits, registers)
    input_gradient = registers.get((0, f"d.{x}"))
    frame = Frame(
        names=tuple(names),
        values=tuple(values),
        owners=tuple(owners),
        keeps=keeps,
        constants=constants,
        bits=bits,
        operators=tuple(name for _, _, name in bits),
        input=None if x is None else registers[0, x],
        output=registers[end, last.output],
        input_gradient=input_gradient,
        output_gradient=registers.get((end, f"d.{last.output}")),
        makers=(
            made[True].get(registers[end, last.output], 0),
            0
            if input_gradient is None
            else made[False].get(input_gradient, 0) or made[True].get(input_gradient, 0),
        ),
    )
    nodes = _nodes(parts, graphs, frame, registers, made)
    return ChunkLayout(tuple(part.name for part in parts), frame, nodes)


def _root(owners: Sequence[int], register: int) -> int:
    while owners[register] != register:
        register = owners[register]
    return register


def _graphs(part: Part, trains: bool) -> tuple[tuple[bool, Graph], ...]:
    if not trains:
        return ((True, part.evaluation),)
    return (True, part.forward), (False, part.backward)


def _made(
    graphs: Sequence[tuple[int, bool, Graph]],
    bits: Mapping[tuple[int, bool, str], int],
    registers: Mapping[tuple[int, str], int],
) -> dict[bool, dict[int, int]]:
    """By pass (whether forward) and register: the bit of the operator that writes it."""
    made: dict[bool, dict[int, int]] = {True: {}, False: {}}
    for place, forward, graph in graphs:
        for op in graph.operators:
            for name in op.writes:
                made[forward][registers[place, name]] = 1 << bits[place, forward, op.name]
    return made


def _nodes(
    parts: Sequence[Part],
    graphs: Sequence[tuple[int, bool, Graph]],
    frame: Frame,
    registers: Mapping[tuple[int, str], int],
    made: Mapping[bool, Mapping[int, int]],
) -> dict[tuple[int, bool, str], Node]:
    """Every operator with what has to be done before it."""
    counts = [1 + max((op.place for op in part.forward.operators), default=0) for part in parts]
    offsets = [sum(counts[:place]) for place in range(len(parts))]
    arrivals = {
        register: frame.arrival(forward)
        for forward in (True, False)
        if (register := frame.entry(forward)) is not None
    }
    nodes = {}
    for place, forward, graph in graphs:
        for op in graph.operators:
            needs = 0
            reads = tuple(registers[place, name] for name in op.reads)
            wholes = (parts[place].values[name].piece_of for name in op.writes)
            written = dict.fromkeys((*op.writes, *(name for name in wholes if name is not None)))
            for register in reads:
                own = made[forward].get(register)
                needs |= own or (0 if forward else made[True].get(register)) or arrivals.get(register, 0)
            others = 0
            for other in graph.operators if op.completes else ():
                if other.completed_by(op):
                    others |= 1 << frame.bits[place, forward, other.name]
            nodes[place, forward, op.name] = Node(
                operator=op,
                unit=parts[place].name,
                place=place,
                part=offsets[place] + op.place,
                reads=reads,
                writes=tuple(registers[place, name] for name in written),
                bit=1 << frame.bits[place, forward, op.name],
                needs=needs,
                others=others,
            )
    return nodes


# -- operations ----------------------------------------------------------------------------------------------

Placed = tuple[Operation, int, int]
"""An operation of a program, the turn and the place that it is for."""


def operations_of(
    steps: list[Placed], passes: Sequence[Pass], chunks: Sequence[ChunkLayout]
) -> list[Operation]:
    """The operations of steps, one behind the other. `ValueError` for what the graphs do not have."""
    operations: list[Operation] = []
    for (operation, turn, place), following in zip_longest(steps, steps[1:]):
        if not isinstance(operation, Compute | Start | Wait):
            operations.append(operation)
            continue
        chunk, name = chunks[turn], str(operation.what)
        node = chunk.nodes.get((place, passes[turn].kind is PassKind.FORWARD, name))
        side = Side(passes[turn].kind, chunk.units[place])
        if node is None:
            raise ValueError(f"program {side}: the graph has no operator {name!r}")
        op = node.operator
        if op.kind.communicates == isinstance(operation, Compute):
            article = "a" if op.kind.communicates else "not a"
            raise ValueError(f"program {side}: {op.name} is {article} collective")
        reads, writes = node.reads, node.writes
        match operation:
            case Compute():
                operations.append(Compute(node, turn=turn, reads=reads, writes=writes))
            case Start(_, stream):
                if stream is Stream.COMPUTE:
                    raise ValueError(f"program {side}: {op.name}: no collective runs on the compute stream")
                lone = following == (Wait(name, turn=operation.turn), turn, place)
                operations.append(Start(node, turn=turn, reads=reads, writes=writes[:1], lone=lone))
            case Wait():
                last = operations[-1] if operations else None
                lone = isinstance(last, Start) and last.what is node and last.turn == turn
                operations.append(Wait(node, turn=turn, reads=reads, writes=writes, lone=lone))
    return operations


def kept_after(
    one: Pass, chunk: ChunkLayout, ends: Collection[str], place: int, *, passes_on: bool
) -> set[int]:
    """Registers that what comes after a pass still reads; ``ends``: operators of a unit that it leaves."""
    later = [node for (_, ahead, _), node in chunk.nodes.items() if not ahead]
    if one.kind is PassKind.INPUT:
        later = [node for node in later if node.operator.phase is Phase.WEIGHT_GRADIENT]
    elif not one.forward:
        later = [chunk.nodes[place, False, name] for name in ends]
    kept = {register for node in later for register in node.reads}
    kept -= {register for node in later for register in node.writes}
    if passes_on and (out := chunk.frame.exit(one.forward)) is not None:
        kept.add(out)
    if one.forward and chunk.frame.input_gradient is not None:
        kept.add(chunk.frame.input_gradient)  # that of a head which runs its backward pass at once
    return kept


def freeing(operations: Sequence[Operation], keeps: Sequence[set[int]]) -> list[Operation]:
    """The operations with what each of them is the last to touch; a transfer's input lives until its wait."""
    seen = [set(kept) for kept in keeps]
    result: list[Operation] = []
    for operation in reversed(operations):
        if isinstance(operation, Compute | Wait):
            touched = dict.fromkeys((*operation.reads, *operation.writes))
            frees = tuple(register for register in touched if register not in seen[operation.turn])
            seen[operation.turn].update(frees)
            operation = replace(operation, frees=frees)
        result.append(operation)
    return result[::-1]
