"""Ways to break blocks of several passes, ends, split backward passes, and what blocks gather and sum."""

from dataclasses import replace

from hypothesis import assume

from braid.scheduling.lowering.named import PairMethod
from braid.scheduling.schedule import (
    Await,
    Block,
    Gather,
    Instruction,
    Pass,
    PassKind,
    Prefetch,
    Receive,
    Reduce,
    Step,
    passes_in,
    sums_in,
)
from tests.scheduling.cases import PAIRED, SPLIT, pairs_of
from tests.scheduling.damages import (
    NOT_GATHERED,
    NOT_HERE,
    Place,
    alone,
    block_of,
    damage,
    only,
    other_strand,
    turned,
)

PAIRED_AND_SPLIT = tuple(name for name in PAIRED if name in SPLIT)
ORDERED = tuple(name for name in PAIRED if pairs_of(name) is PairMethod.ORDER)
"""Schedules that may leave ends."""
TWINS = ("braid:twins",)
PAIRS = tuple(name for name in PAIRED if name not in TWINS)


def paired(instruction: Instruction) -> bool:
    """Whether an instruction is a block of a forward and a backward pass."""
    kinds = [one.kind for one in passes_in(instruction)]
    return kinds[:2] == [PassKind.FORWARD, PassKind.BACKWARD]


def a_pair(at: Place) -> tuple[int, Pass, Pass, tuple[Pass, ...]]:
    """The position of some paired block, its passes, and the ends that it takes up."""
    n = at.find(Block, where=paired)
    forward, backward, *ends = at.list[n].passes
    return n, forward, backward, tuple(ends)


# -- blocks of several passes --------------------------------------------------------------------------------


@damage(f"{NOT_HERE}|has left an end", PAIRED)
def drop_a_pair(at: Place) -> None:
    assume(sum(paired(i) for stage in at.schedule.stages for i in stage) > 1)
    del at.list[at.find(Block, where=paired)]


@damage("is on strand (alpha|beta) elsewhere|both directions are on strand", PAIRED)
def pair_two_passes_of_one_strand(at: Place) -> None:
    n, forward, backward, ends = a_pair(at)
    moved = [(other_strand(forward), backward), (forward, other_strand(backward))]
    at.list[n] = Block((*moved[at.number(0, 1)], *ends))


@damage("is on strand (alpha|beta) elsewhere", PAIRED)
def pair_on_the_strands_of_each_other(at: Place) -> None:
    n, forward, backward, ends = a_pair(at)
    at.list[n] = Block((other_strand(forward), other_strand(backward), *ends))


@damage("never run|runs twice|no program is for|has left an end|not gathered", PAIRED)
def pair_two_forward_passes(at: Place) -> None:
    n, forward, backward, ends = a_pair(at)
    at.list[n] = Block((forward, turned(backward), *ends))


@damage("never run|runs twice|no program is for|has left an end|not gathered", PAIRED)
def pair_two_backward_passes(at: Place) -> None:
    n, forward, backward, ends = a_pair(at)
    at.list[n] = Block((turned(forward), backward, *ends))


@damage("no program is for B beside F", PAIRED)
def pair_the_wrong_way_round(at: Place) -> None:
    n, forward, backward, ends = a_pair(at)
    at.list[n] = Block((backward, forward, *ends))


@damage("no program is for F beside (W|I)", PAIRED_AND_SPLIT)
def pair_with_half_a_backward_pass(at: Place) -> None:
    n, forward, backward, ends = a_pair(at)
    half = [PassKind.WEIGHT, PassKind.INPUT][at.number(0, 1)]
    at.list[n] = Block((forward, backward._replace(kind=half), *ends))


@damage("a block has a pass twice", PAIRED)
def run_both_halves_in_one_block(at: Place) -> None:
    n, forward, backward, ends = a_pair(at)
    halves = (backward._replace(kind=kind) for kind in (PassKind.INPUT, PassKind.WEIGHT))
    at.list[n] = Block((forward, *halves, *ends))


@damage("its input from stage . has not arrived", PAIRS)
def pair_without_waiting_for_an_input(at: Place) -> None:
    together = {one for i in at.list if paired(i) for one in i.passes}
    del at.list[
        at.find(Await, where=lambda i: isinstance(i.transfer, Receive) and i.transfer.moved in together)
    ]


@damage(f"B.*of its forward pass has not run|has left an end|its input|{NOT_GATHERED}", PAIRED)
def pair_a_backward_before_its_forward(at: Place) -> None:
    n, _, backward, _ = a_pair(at)
    block = at.list.pop(n)
    place = at.running(turned(backward))
    assume(place < n)
    at.list.insert(place, block)


@damage("[FB].* does not run on this stage", PAIRED)
def pair_a_pass_of_another_chunk(at: Place) -> None:
    n, forward, backward, ends = a_pair(at)
    chunk = at.foreign_chunk()
    moved = [
        (forward._replace(chunk=chunk), backward),
        (forward, backward._replace(chunk=chunk)),
    ]
    at.list[n] = Block((*moved[at.number(0, 1)], *ends))


@damage("[FB].* runs twice", PAIRED)
def pair_a_block_that_also_runs_alone(at: Place) -> None:
    n, forward, backward, _ = a_pair(at)
    at.list.insert(n + 1, block_of([forward, backward][at.number(0, 1)]))


@damage("gradients are added up in the order of micro-batches", TWINS, ends=False)
def turn_twins_round(at: Place) -> None:
    n = at.find(Block, where=lambda i: [one.kind.value for one in i.passes] == ["B", "B"])
    at.list[n] = Block(at.list[n].passes[::-1])


@damage("a block has a pass twice", TWINS)
def twins_of_one_micro_batch(at: Place) -> None:
    n = at.find(Block, where=lambda i: len({one.kind for one in i.passes}) < len(i.passes))
    at.list[n] = Block((at.list[n].passes[0],) * 2)


# -- ends ----------------------------------------------------------------------------------------------------


def end_of(one: Pass) -> Pass:
    """What is left of a backward pass."""
    return one._replace(kind=PassKind.END)


def takes_up(instruction: Instruction) -> bool:
    """Whether a block takes up an end."""
    return any(one.kind is PassKind.END for one in passes_in(instruction))


def an_end(at: Place) -> tuple[int, Pass]:
    """The position of some block that takes up an end, and the end."""
    n = at.find(Block, where=takes_up)
    return n, at.list[n].passes[-1]


@damage("no block before it has left an end of B.* for L", ORDERED)
def take_up_an_end_that_no_block_left(at: Place) -> None:
    """Of a backward pass that ran alone, and so to its end."""
    whole = [only(i) for i in at.list if isinstance(i, Block) and alone(i) and not only(i).forward]
    assume(whole)
    end = end_of(whole[at.number(0, len(whole) - 1)].whole)
    n = at.find(Block, where=lambda i: not takes_up(i) and end.whole not in [one.whole for one in i.passes])
    at.list[n] = Block((*at.list[n].passes, end))


@damage("no block before it has left an end of B.* for L|a block has a pass twice", ORDERED, ends=True)
def take_up_an_end_twice(at: Place) -> None:
    n, end = an_end(at)
    m = at.find(Block, where=lambda i: at.position(i) >= n)
    at.list[m] = Block((*at.list[m].passes, end))


@damage("no block before it has left an end of B.* for L|a block has a pass twice", ORDERED, ends=True)
def take_up_an_end_too_early(at: Place) -> None:
    n, end = an_end(at)
    m = at.find(Block, where=lambda i: at.position(i) <= at.running(end))
    at.list[n] = Block(at.list[n].passes[:-1])
    at.list[m] = Block((*at.list[m].passes, end))


@damage("an end has nothing to run beside", ORDERED, ends=True)
def run_an_end_alone(at: Place) -> None:
    n, end = an_end(at)
    at.list[n] = Block(at.list[n].passes[:-1])
    at.list.insert(at.number(at.running(end) + 1, n), block_of(end))


@damage("is on strand (alpha|beta) elsewhere", ORDERED, ends=True)
def take_up_an_end_on_the_other_strand(at: Place) -> None:
    n, end = an_end(at)
    at.list[n] = Block((*at.list[n].passes[:-1], other_strand(end)))


@damage("does not run on this stage", ORDERED, ends=True)
def take_up_an_end_of_another_stage(at: Place) -> None:
    n, end = an_end(at)
    at.list[n] = Block((*at.list[n].passes[:-1], end._replace(chunk=at.foreign_chunk())))


@damage("still has passes to run", ORDERED, zero=(0, 1), ends=True)
def take_up_an_end_after_the_sum(at: Place) -> None:
    n, end = an_end(at)
    first = first_sum(at, end.chunk)
    m = at.find(Block, where=lambda i: at.position(i) > first)
    at.list[n] = Block(at.list[n].passes[:-1])
    at.list[m] = Block((*at.list[m].passes, end))


def first_sum(at: Place, chunk: int) -> int:
    """The position of what starts the first sum of a chunk's gradients."""
    return next(n for n, i in enumerate(at.list) for one in sums_in(i) if one.chunk == chunk)


# -- split backward passes -----------------------------------------------------------------------------------


def weight_gradients(at: Place) -> int:
    """The position of some weight gradients that run alone."""
    return at.single(lambda one: one.kind is PassKind.WEIGHT)


@damage("of B.* never runs", SPLIT)
def drop_the_weight_gradients(at: Place) -> None:
    assume(sum(one.kind is PassKind.WEIGHT for one in at.schedule.passes[at.stage]) > 1)
    del at.list[weight_gradients(at)]


@damage("W.* runs twice", SPLIT)
def run_weight_gradients_twice(at: Place) -> None:
    n = weight_gradients(at)
    after = at.last_of(only(at.list[n]).chunk)
    at.list.insert(at.number(n, after), at.list[n])


@damage(r"needs .*, which is not done yet \(does I.* come first\?\)", SPLIT)
def run_weight_gradients_first(at: Place) -> None:
    block = at.list.pop(weight_gradients(at))
    at.list.insert(at.running(only(block)), block)


@damage(rf"is not done yet \(does I.* come first|{NOT_HERE}", SPLIT)
def drop_the_input_gradients(at: Place) -> None:
    assume(sum(one.kind is PassKind.INPUT for one in at.schedule.passes[at.stage]) > 1)
    del at.list[at.running(only(at.list[weight_gradients(at)]))]


@damage("of B.* never runs", SPLIT)
def run_input_gradients_instead_of_both(at: Place) -> None:
    n = at.single(lambda one: one.kind is PassKind.BACKWARD)
    at.list[n] = block_of(only(at.list[n])._replace(kind=PassKind.INPUT))


@damage("W.* runs twice|program B:.* is missing", SPLIT)
def run_both_gradients_instead_of_those_of_the_input(at: Place) -> None:
    n = at.single(lambda one: one.kind is PassKind.INPUT)
    assume(sum(one.kind is PassKind.INPUT for one in at.schedule.passes[at.stage]) > 1)
    at.list[n] = block_of(only(at.list[n])._replace(kind=PassKind.BACKWARD))


@damage("still has passes to run", SPLIT, zero=(0, 1))
def reduce_before_the_last_weight_gradients(at: Place) -> None:
    n = weight_gradients(at)
    first = first_sum(at, only(at.list[n]).chunk)
    assume(n < first)
    block = at.list.pop(n)
    at.list.insert(at.number(first, len(at.list)), block)


# -- gathered parameters -------------------------------------------------------------------------------------

SHARED = (1, 2, 3)


def gathering(at: Place) -> int:
    """The position of some block that gathers parameters."""
    return at.find(Block, where=lambda i: bool(i.gathers))


def with_gathers(block: Block, *gathers: Gather) -> Block:
    """The block with other gathers."""
    return replace(block, gathers=gathers)


@damage(NOT_GATHERED, zero=SHARED, of_gathers=True)
def drop_a_gather(at: Place) -> None:
    n = gathering(at)
    gathers = [*at.list[n].gathers]
    del gathers[at.number(0, len(gathers) - 1)]
    at.list[n] = with_gathers(at.list[n], *gathers)


@damage("GATHER.* stands twice", zero=SHARED, of_gathers=True)
def gather_twice(at: Place) -> None:
    n = gathering(at)
    gathers = at.list[n].gathers
    at.list[n] = with_gathers(at.list[n], *gathers, gathers[at.number(0, len(gathers) - 1)])


@damage("GATHER.* stands twice", zero=(1, 2), of_gathers=True)
def gather_again(at: Place) -> None:
    """What is there since an earlier block."""
    n = gathering(at)
    gather = at.list[n].gathers[0]
    readers = [m for m in range(n + 1, len(at.list)) if gather.chunk in read_by(at.list[m])]
    assume(readers)
    m = readers[at.number(0, len(readers) - 1)]
    at.list[m] = with_gathers(at.list[m], *at.list[m].gathers, gather)


def read_by(instruction: Instruction) -> set[int]:
    """The chunks whose parameters a block reads."""
    return {one.chunk for one in passes_in(instruction) if one.kind is not PassKind.WEIGHT}


@damage("no pass of the block reads the parameters of chunk", zero=SHARED, of_gathers=True)
def gather_a_foreign_chunk(at: Place) -> None:
    n = gathering(at)
    at.list[n] = with_gathers(at.list[n], *at.list[n].gathers, Gather(at.foreign_chunk(), "dp"))


@damage("no pass of the block reads the parameters of chunk", zero=SHARED, of_gathers=True)
def gather_what_another_block_reads(at: Place) -> None:
    n = at.find(Block, where=lambda i: read_by(i) != set(at.layout.chunks_of(at.stage)))
    others = [c for c in at.layout.chunks_of(at.stage) if c not in read_by(at.list[n])]
    gather = Gather(others[at.number(0, len(others) - 1)], "dp")
    at.list[n] = with_gathers(at.list[n], *at.list[n].gathers, gather)


@damage("no pass of the block reads the parameters of chunk", SPLIT, zero=SHARED, of_gathers=True)
def gather_for_weight_gradients(at: Place) -> None:
    n = weight_gradients(at)
    at.list[n] = with_gathers(at.list[n], Gather(only(at.list[n]).chunk, "dp"))


@damage(r"over (tp|pp|cp) there is nothing to gather \(but over dp\)", zero=SHARED, of_gathers=True)
def gather_over_another_axis(at: Place) -> None:
    n = gathering(at)
    first, *others = at.list[n].gathers
    moved = replace(first, axis=["tp", "pp", "cp"][at.number(0, 2)])
    at.list[n] = with_gathers(at.list[n], moved, *others)


@damage(r"over dp there is nothing to gather \(but over no axis\)", zero=(0,), of_gathers=True)
def gather_what_ranks_hold(at: Place) -> None:
    """One replica has nothing to gather, several have it all without ZeRO."""
    n = at.find(Block, where=lambda i: bool(read_by(i)))
    at.list[n] = with_gathers(at.list[n], Gather(min(read_by(at.list[n])), "dp"))


@damage(NOT_GATHERED, zero=SHARED, of_gathers=True)
def gather_after_a_block(at: Place) -> None:
    n = gathering(at)
    gather = at.list[n].gathers[0]
    readers = [m for m in range(n + 1, len(at.list)) if gather.chunk in read_by(at.list[m])]
    assume(readers)
    m = readers[at.number(0, len(readers) - 1)]
    at.list[n] = with_gathers(at.list[n], *at.list[n].gathers[1:])
    at.list[m] = with_gathers(at.list[m], *{*at.list[m].gathers, gather})


@damage(NOT_GATHERED, zero=(3,), of_gathers=True)
def gather_once_for_all_blocks(at: Place) -> None:
    """What is enough where parameters stay (ZeRO 1)."""
    n = gathering(at)
    gather = at.list[n].gathers[0]
    later = [m for m in range(n + 1, len(at.list)) if gather in getattr(at.list[m], "gathers", ())]
    assume(later)
    for m in later:
        at.list[m] = with_gathers(at.list[m], *(one for one in at.list[m].gathers if one != gather))


@damage(NOT_GATHERED, zero=SHARED, of_gathers=True)
def drop_the_prefetch(at: Place) -> None:
    at.list.remove(Prefetch())


PLACES_OF_PREFETCH = "it stands at the begin, or at the end unless parameters are in shares"
TWICE = "PREFETCH is missing, or stands twice"


@damage(f"{TWICE}|{PLACES_OF_PREFETCH}", zero=SHARED, of_gathers=True)
def prefetch_twice(at: Place) -> None:
    at.list.insert(at.number(0, len(at.list)), Prefetch())


@damage(TWICE, zero=(1, 2), of_gathers=True)
def prefetch_at_the_begin_and_at_the_end(at: Place) -> None:
    at.without(Prefetch())
    at.list = [Prefetch(), *at.list, Prefetch()]


@damage(PLACES_OF_PREFETCH, zero=SHARED, of_gathers=True)
def prefetch_in_the_middle(at: Place) -> None:
    at.list.remove(Prefetch())
    at.list.insert(at.number(1, len(at.list) - 1), Prefetch())


@damage(PLACES_OF_PREFETCH, zero=(1, 2), of_gathers=True)
def prefetch_before_the_step(at: Place) -> None:
    """What is not updated yet."""
    at.list.remove(Prefetch())
    at.list.insert(at.position(Step()), Prefetch())


@damage(PLACES_OF_PREFETCH, zero=(3,), of_gathers=True)
def prefetch_in_the_step_before(at: Place) -> None:
    """Memory that the rest of that step would have to hold (ZeRO 3)."""
    at.list.remove(Prefetch())
    at.list.append(Prefetch())


@damage(PLACES_OF_PREFETCH, zero=(0,), of_gathers=True)
def prefetch_what_ranks_hold(at: Place) -> None:
    at.list.insert(at.number(0, len(at.list)), Prefetch())


# -- sums in blocks ------------------------------------------------------------------------------------------

IN_BLOCKS = (2, 3)


def summing(at: Place) -> tuple[int, list[Reduce]]:
    """The position of some block that starts sums, and these."""
    n = at.find(Block, where=lambda i: bool(i.sums))
    return n, [*at.list[n].sums]


def with_sums(at: Place, n: int, sums: list[Reduce]) -> None:
    """Give a block other sums."""
    at.list[n] = replace(at.list[n], sums=tuple(sums))


@damage(r"the gradients of chunk . are not summed over (tp|dp) \(ZeRO 2\)", zero=IN_BLOCKS)
def drop_a_sum_of_a_block(at: Place) -> None:
    n, sums = summing(at)
    del sums[at.number(0, len(sums) - 1)]
    with_sums(at, n, sums)


@damage("REDUCE.* stands twice", zero=IN_BLOCKS)
def sum_twice_in_a_block(at: Place) -> None:
    n, sums = summing(at)
    sums.insert(at.number(0, len(sums)), sums[at.number(0, len(sums) - 1)])
    with_sums(at, n, sums)


@damage("chunk . is not on this stage", zero=IN_BLOCKS)
def sum_a_foreign_chunk_in_a_block(at: Place) -> None:
    n, sums = summing(at)
    with_sums(at, n, [*sums, Reduce(at.foreign_chunk(), "dp")])


@damage("over (cp|pp|dq) there is nothing to do here", zero=IN_BLOCKS)
def sum_over_another_axis_in_a_block(at: Place) -> None:
    n, sums = summing(at)
    with_sums(at, n, [*sums, replace(sums[0], axis=["cp", "pp", "dq"][at.number(0, 2)])])


@damage("sums over (tp|dp) stand in blocks, behind what adds to the gradients", zero=IN_BLOCKS)
def sum_between_blocks(at: Place) -> None:
    sums = summing(at)[1]
    one = sums[at.number(0, len(sums) - 1)]
    at.list.insert(at.number(0, at.summed(one)), one)


@damage("sums of the same come one after the other", zero=IN_BLOCKS)
def sum_over_replicas_first(at: Place) -> None:
    """Of what only some of the replicas' ranks have then added up."""
    n, sums = summing(at)
    with_sums(at, n, sums[::-1])


@damage("REDUCE.* is not waited for", zero=IN_BLOCKS)
def wait_before_the_last_sum(at: Place) -> None:
    """Of those of several blocks."""
    n = at.wait(Reduce)
    wait = at.list[n]
    places = [m for m, i in enumerate(at.list) if isinstance(i, Block) and wait.transfer in i.sums]
    assume(len(places) > 1)
    del at.list[n]
    at.list.insert(at.number(places[0] + 1, places[-1]), wait)
