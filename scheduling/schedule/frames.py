"""Registers of a chunk: the register of each value, the operators that must run before each operator, and the
registers that each operation touches last."""

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
    """The names of a chunk's units, the frame that lays out their registers, and their operators."""

    units: tuple[str, ...]
    frame: Frame
    nodes: Mapping[tuple[int, bool, str], Node]
    """(index of the unit, whether the graph is the forward one, operator name) -> node."""


def laid_out(parts: Sequence[Part], trains: bool) -> ChunkLayout:
    """Assign registers and bits to the values and operators of a chunk.

    ``parts``: units of the chunk in forward order; ``trains``: whether backward graphs run too.
    """
    registers: dict[tuple[int, str], int] = {}
    names: list[str] = []
    values: list[Value] = []
    owners: list[int] = []
    constants: dict[str, tuple[int, ...]] = {}
    for index, part in enumerate(parts):
        x = next((name for name in part.inputs if name not in part.constants), None)
        if index:
            assert x is not None
            before = parts[index - 1].output
            for name_here, name_before in ((x, before), (f"d.{x}", f"d.{before}")):
                if name_here in part.values:
                    registers[index, name_here] = registers[index - 1, name_before]
        for name, value in part.values.items():
            if (index, name) not in registers:
                registers[index, name] = len(names)
                names.append(name)
                values.append(value)
                owners.append(len(owners))
            if name in part.constants:
                constants[name] = (*constants.get(name, ()), registers[index, name])
        for name, value in part.values.items():
            if value.alias_of is not None:
                owners[registers[index, name]] = registers[index, value.alias_of]
    keeps = {
        registers[index, name]: registers[index, value.keeps]
        for index, part in enumerate(parts)
        for name, value in part.values.items()
        if value.keeps is not None
    }
    owners = [_root(owners, register) for register in range(len(owners))]
    first, last = parts[0], parts[-1]
    x = next((name for name in first.inputs if name not in first.constants), None)
    end = len(parts) - 1
    graphs = [
        (index, forward, graph)
        for index, part in enumerate(parts)
        for forward, graph in _graphs(part, trains)
    ]
    bits = {
        (index, forward, op.name): number
        for number, (index, forward, op) in enumerate(
            (index, forward, op) for index, forward, graph in graphs for op in graph.operators
        )
    }
    writers = _writers(graphs, bits, registers)
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
            writers[True].get(registers[end, last.output], 0),
            0
            if input_gradient is None
            else writers[False].get(input_gradient, 0) or writers[True].get(input_gradient, 0),
        ),
    )
    nodes = _nodes(parts, graphs, frame, registers, writers)
    return ChunkLayout(tuple(part.name for part in parts), frame, nodes)


def _root(owners: Sequence[int], register: int) -> int:
    while owners[register] != register:
        register = owners[register]
    return register


def _graphs(part: Part, trains: bool) -> tuple[tuple[bool, Graph], ...]:
    if not trains:
        return ((True, part.evaluation),)
    return (True, part.forward), (False, part.backward)


def _writers(
    graphs: Sequence[tuple[int, bool, Graph]],
    bits: Mapping[tuple[int, bool, str], int],
    registers: Mapping[tuple[int, str], int],
) -> dict[bool, dict[int, int]]:
    """Return {whether forward: {register: bit mask of the operator that writes it}}.

    ``graphs``: (index of the unit, whether forward, graph); ``bits``: bit numbers as in `Frame.bits`.
    """
    writers: dict[bool, dict[int, int]] = {True: {}, False: {}}
    for index, forward, graph in graphs:
        for op in graph.operators:
            for name in op.writes:
                writers[forward][registers[index, name]] = 1 << bits[index, forward, op.name]
    return writers


def _nodes(
    parts: Sequence[Part],
    graphs: Sequence[tuple[int, bool, Graph]],
    frame: Frame,
    registers: Mapping[tuple[int, str], int],
    writers: Mapping[bool, Mapping[int, int]],
) -> dict[tuple[int, bool, str], Node]:
    """Return the node of every operator, with its registers and the mask of operators that must run
    before."""
    counts = [1 + max((op.place for op in part.forward.operators), default=0) for part in parts]
    offsets = [sum(counts[:index]) for index in range(len(parts))]
    arrivals = {
        register: frame.arrival(forward)
        for forward in (True, False)
        if (register := frame.entry(forward)) is not None
    }
    nodes = {}
    for index, forward, graph in graphs:
        for op in graph.operators:
            needs = 0
            reads = tuple(registers[index, name] for name in op.reads)
            wholes = (parts[index].values[name].piece_of for name in op.writes)
            written = dict.fromkeys((*op.writes, *(name for name in wholes if name is not None)))
            for register in reads:
                bit = writers[forward].get(register)
                needs |= bit or (0 if forward else writers[True].get(register)) or arrivals.get(register, 0)
            others = 0
            for earlier in graph.operators if op.completes else ():
                if earlier.completed_by(op):
                    others |= 1 << frame.bits[index, forward, earlier.name]
            nodes[index, forward, op.name] = Node(
                operator=op,
                unit=parts[index].name,
                place=index,
                part=offsets[index] + op.place,
                reads=reads,
                writes=tuple(registers[index, name] for name in written),
                bit=1 << frame.bits[index, forward, op.name],
                needs=needs,
                others=others,
            )
    return nodes


# -- operations ----------------------------------------------------------------------------------------------

Placed = tuple[Operation, int, int]
"""(operation of a program, number of its pass in the block, index of its unit in the chunk)."""


def operations_of(
    steps: list[Placed], passes: Sequence[Pass], chunks: Sequence[ChunkLayout]
) -> list[Operation]:
    """Replace operator names in programs' steps by nodes and registers; return the linked operations.

    Raises `ValueError` for an operator that the graphs lack, or that the step cannot run.
    """
    operations: list[Operation] = []
    for (operation, turn, index), following in zip_longest(steps, steps[1:]):
        if not isinstance(operation, Compute | Start | Wait):
            operations.append(operation)
            continue
        chunk, name = chunks[turn], str(operation.what)
        node = chunk.nodes.get((index, passes[turn].kind is PassKind.FORWARD, name))
        side = Side(passes[turn].kind, chunk.units[index])
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
                lone = following == (Wait(name, turn=operation.turn), turn, index)
                operations.append(Start(node, turn=turn, reads=reads, writes=writes[:1], lone=lone))
            case Wait():
                last = operations[-1] if operations else None
                lone = isinstance(last, Start) and last.what is node and last.turn == turn
                operations.append(Wait(node, turn=turn, reads=reads, writes=writes, lone=lone))
    return operations


def kept_after(
    pass_: Pass, chunk: ChunkLayout, ends: Collection[str], index: int, *, passes_on: bool
) -> set[int]:
    """Return the registers that must live on after a pass.

    ``ends``: operators of unit ``index`` that the pass leaves to a later block; ``passes_on``: whether
    another pass takes the output.
    """
    later = [node for (_, ahead, _), node in chunk.nodes.items() if not ahead]
    if pass_.kind is PassKind.INPUT:
        later = [node for node in later if node.operator.phase is Phase.WEIGHT_GRADIENT]
    elif not pass_.forward:
        later = [chunk.nodes[index, False, name] for name in ends]
    registers = {register for node in later for register in node.reads}
    registers -= {register for node in later for register in node.writes}
    if passes_on and (out := chunk.frame.exit(pass_.forward)) is not None:
        registers.add(out)
    if pass_.forward and chunk.frame.input_gradient is not None:
        registers.add(chunk.frame.input_gradient)  # of a head that runs its backward pass at once
    return registers


def freeing(operations: Sequence[Operation], keeps: Sequence[set[int]]) -> list[Operation]:
    """Return the operations with ``frees``, the registers that no later operation reads or writes.

    ``keeps``: registers of each pass that must not be freed. A transfer's input is freed at its wait.
    """
    seen = [set(registers) for registers in keeps]
    result: list[Operation] = []
    for operation in reversed(operations):
        if isinstance(operation, Compute | Wait):
            touched = dict.fromkeys((*operation.reads, *operation.writes))
            frees = tuple(register for register in touched if register not in seen[operation.turn])
            seen[operation.turn].update(frees)
            operation = replace(operation, frees=frees)
        result.append(operation)
    return result[::-1]
