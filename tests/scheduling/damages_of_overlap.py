"""Ways to break paired blocks, split backward passes and gathered parameters, for `test_validate`."""

from dataclasses import replace

from hypothesis import assume

from braid.scheduling.schedule import (
    Block,
    Direction,
    Gather,
    Gradients,
    Pair,
    Reduce,
    WaitGather,
    WaitReceive,
    blocks_in,
)
from tests.scheduling.cases import PAIRED, SPLIT
from tests.scheduling.damages import NOT_HERE, Place, damage, other_strand

PAIRED_AND_SPLIT = tuple(name for name in PAIRED if name in SPLIT)

# -- paired blocks -----------------------------------------------------------------------------------------


@damage(NOT_HERE, PAIRED)
def drop_a_pair(at: Place) -> None:
    assume(sum(isinstance(i, Pair) for stage in at.schedule.stages for i in stage) > 1)
    del at.list[at.find(Pair)]


@damage("both are on strand (alpha|beta)|does not run .* on strand (alpha|beta)", PAIRED)
def pair_two_passes_of_one_strand(at: Place) -> None:
    n = at.find(Pair)
    forward, backward = at.list[n].forward, at.list[n].backward
    moved = [Pair(other_strand(forward), backward), Pair(forward, other_strand(backward))]
    at.list[n] = moved[at.number(0, 1)]


@damage("does not run on this stage: .* on strand (alpha|beta)", PAIRED)
def pair_on_the_strands_of_each_other(at: Place) -> None:
    n = at.find(Pair)
    at.list[n] = Pair(other_strand(at.list[n].forward), other_strand(at.list[n].backward))


@damage("F.* is not a backward pass; the second of a paired block is", PAIRED)
def pair_two_forward_passes(at: Place) -> None:
    n = at.find(Pair)
    pair = at.list[n]
    at.list[n] = Pair(pair.forward, replace(pair.backward, direction=Direction.FORWARD))


@damage("B.* is not a forward pass; the first of a paired block is", PAIRED)
def pair_two_backward_passes(at: Place) -> None:
    n = at.find(Pair)
    pair = at.list[n]
    at.list[n] = Pair(replace(pair.forward, direction=Direction.BACKWARD), pair.backward)


@damage("is not a forward pass", PAIRED)
def pair_the_wrong_way_round(at: Place) -> None:
    n = at.find(Pair)
    at.list[n] = Pair(at.list[n].backward, at.list[n].forward)


@damage("weight gradients alone have nothing to be paired for", PAIRED_AND_SPLIT)
def pair_with_weight_gradients(at: Place) -> None:
    n = at.find(Pair)
    at.list[n] = replace(at.list[n], backward=replace(at.list[n].backward, gradients=Gradients.WEIGHT))


@damage("the weight gradients of B.* never run", PAIRED_AND_SPLIT)
def pair_with_input_gradients_alone(at: Place) -> None:
    n = at.find(Pair)
    at.list[n] = replace(at.list[n], backward=replace(at.list[n].backward, gradients=Gradients.INPUT))


@damage("[FB].*: its input from stage . has not arrived", PAIRED)
def pair_without_waiting_for_an_input(at: Place) -> None:
    paired = {b for i in at.list if isinstance(i, Pair) for b in i.blocks}
    del at.list[at.find(WaitReceive, where=lambda i: i.block in paired)]


@damage("B.*: its forward F.* has not run", PAIRED)
def pair_a_backward_before_its_forward(at: Place) -> None:
    n = at.find(Pair)
    pair = at.list.pop(n)
    place = at.running(replace(pair.backward, direction=Direction.FORWARD))
    assume(place < n)
    at.list.insert(place, pair)


@damage("F.*: F.* does not run on this stage|B.*: B.* does not run on this stage", PAIRED)
def pair_a_pass_of_another_chunk(at: Place) -> None:
    n = at.find(Pair)
    pair, chunk = at.list[n], at.foreign_chunk()
    moved = [
        replace(pair, forward=replace(pair.forward, chunk=chunk)),
        replace(pair, backward=replace(pair.backward, chunk=chunk)),
    ]
    at.list[n] = moved[at.number(0, 1)]


@damage("[FB].*: the block runs twice|the block runs twice", PAIRED)
def pair_a_block_that_also_runs_alone(at: Place) -> None:
    n = at.find(Pair)
    at.list.insert(n + 1, at.list[n].blocks[at.number(0, 1)])


# -- split backward passes ---------------------------------------------------------------------------------


def weight_gradients(at: Place) -> int:
    """The position of some weight gradients that run alone."""
    return at.find(Block, where=lambda i: i.gradients is Gradients.WEIGHT)


@damage("the weight gradients of B.* never run", SPLIT)
def drop_the_weight_gradients(at: Place) -> None:
    del at.list[weight_gradients(at)]


@damage("W.*: it runs twice or I.* has not run before it|it runs twice or I", SPLIT)
def run_weight_gradients_twice(at: Place) -> None:
    n = weight_gradients(at)
    after = at.last_of(at.list[n].chunk)
    at.list.insert(at.number(n, after), at.list[n])


@damage("it runs twice or I.* has not run before it", SPLIT)
def run_weight_gradients_first(at: Place) -> None:
    block = at.list.pop(weight_gradients(at))
    place = at.running(block)
    at.list.insert(place, block)


@damage(f"it runs twice or I.* has not run before it|{NOT_HERE}", SPLIT)
def drop_the_input_gradients(at: Place) -> None:
    del at.list[at.running(at.list[weight_gradients(at)])]


@damage("the weight gradients of B.* never run", SPLIT)
def run_input_gradients_instead_of_both(at: Place) -> None:
    n = at.find(Block, where=lambda i: str(i).startswith("B"))
    at.list[n] = replace(at.list[n], gradients=Gradients.INPUT)


@damage("it runs twice or I.* has not run before it", SPLIT)
def run_both_gradients_instead_of_those_of_the_input(at: Place) -> None:
    n = at.find(Block, where=lambda i: i.gradients is Gradients.INPUT)
    at.list[n] = replace(at.list[n], gradients=Gradients.BOTH)


@damage("still has blocks to run", SPLIT)
def reduce_before_the_last_weight_gradients(at: Place) -> None:
    block = at.list.pop(weight_gradients(at))
    at.list.insert(at.number(at.position(Reduce(block.chunk)) + 1, len(at.list)), block)


# -- gathered parameters -----------------------------------------------------------------------------------


@damage("no gather of chunk . is under way")
def drop_a_gather(at: Place) -> None:
    others = [i for number, stage in enumerate(at.schedule.stages) for i in stage if number != at.stage]
    assume(any(isinstance(i, Gather) for i in others))
    del at.list[at.find(Gather)]


@damage("the parameters of chunk . have not been gathered, as those of others are")
def drop_a_gather_and_its_wait(at: Place) -> None:
    chunk = at.list[at.find(Gather)].chunk
    at.list = [i for i in at.list if i not in (Gather(chunk), WaitGather(chunk))]
    stages = [at.list if n == at.stage else stage for n, stage in enumerate(at.schedule.stages)]
    assume(any(isinstance(i, Gather) for stage in stages for i in stage))


@damage("chunk . is gathered twice")
def gather_twice(at: Place) -> None:
    n = at.find(Gather)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("chunk .* is not on this stage")
def gather_a_foreign_chunk(at: Place) -> None:
    at.list[at.find(Gather)] = Gather(at.foreign_chunk())


@damage("the parameters of chunk . have not been gathered")
def gather_after_a_block(at: Place) -> None:
    gather = at.list.pop(at.find(Gather))
    wait = WaitGather(gather.chunk)
    at.list.remove(wait)
    first = min(n for n, i in enumerate(at.list) for b in blocks_in(i) if b.chunk == gather.chunk)
    place = at.number(first + 1, len(at.list))
    at.list[place:place] = [gather, wait]


@damage("the parameters of chunk . have not been waited for")
def do_not_wait_for_a_gather(at: Place) -> None:
    del at.list[at.find(WaitGather)]


@damage("the parameters of chunk . have not been waited for")
def wait_for_a_gather_after_a_block(at: Place) -> None:
    wait = at.list.pop(at.find(WaitGather))
    first = min(n for n, i in enumerate(at.list) for b in blocks_in(i) if b.chunk == wait.chunk)
    at.list.insert(at.number(first + 1, len(at.list)), wait)


@damage("no gather of chunk . is under way")
def wait_for_a_gather_twice(at: Place) -> None:
    n = at.find(WaitGather)
    at.list.insert(at.number(n, len(at.list)), at.list[n])


@damage("no gather of chunk . is under way")
def wait_before_the_gather(at: Place) -> None:
    wait = at.list.pop(at.find(WaitGather))
    at.list.insert(at.number(0, at.position(Gather(wait.chunk))), wait)


@damage("the gather of chunk . is never waited for", ("bidirectional",))
def gather_what_no_block_needs(at: Place) -> None:
    """Where so few micro-batches run that the second copy of the model has none."""
    assume(any(isinstance(i, Gather) for i in at.list))
    used = {b.chunk for i in at.list for b in blocks_in(i)}
    idle = [c for c in at.layout.chunks_of(at.stage) if c not in used]
    assume(idle)
    at.list.insert(at.number(0, len(at.list)), Gather(idle[0]))
