"""What every rank's host issues on CUDA while it profiles, without torch: written by hand after
`braid.actors.stage.profiling.Profiler`, for one tensor-parallel rank a stage."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.cuda.actions import COMPUTE, Action, Call, Compute, Group, Start, Synchronise, Wait


def profiled(stages: int, rounds: int = 2) -> list[list[Action]]:
    """The programs of all stages."""
    return [list(_Profiler(stage, stages).run(rounds)) for stage in range(stages)]


@dataclass(frozen=True)
class _Profiler:
    stage: int
    stages: int
    elements: int = 2048

    def run(self, rounds: int) -> Iterator[Action]:
        """`Profiler.run`. One operator stands for all that draw a message to run beside them."""
        for turn in range(-1, rounds):
            yield from self._message(f"beside an operator, {turn}")
        for turn in range(rounds):  # `Profiler._transfers`
            yield from self._message(f"alone, {turn}")
        for turn in range(rounds):
            yield from self._there_and_back(turn)
            yield from self._meet(f"the sum, {turn}")
            yield from self._alone(f"sum, {turn}", Call("all_reduce", self._line, self.elements))

    def _message(self, name: str) -> Iterator[Action]:
        """`Profiler._beside_transfer`. Of an odd number of stages none swaps: the last has no neighbour."""
        if self.stages % 2 == 0:
            yield from self._taken(name, "intra profile", self._swap(self.stage ^ 1))

    def _swap(self, peer: int) -> tuple[Call, ...]:
        """`kernels.collectives.primitives.swap`: every rank issues what it receives first."""
        receive = Call("receive", self._toward(peer, self.stage), self.elements, peer)
        return receive, Call("send", self._toward(self.stage, peer), self.elements, peer)

    def _there_and_back(self, turn: int) -> Iterator[Action]:
        """`Profiler._there_and_back`."""
        other = self.stage ^ 1
        yield from self._meet(f"a message, {turn}")
        if other < self.stages:
            out = Call("send", self._toward(self.stage, other), self.elements, other)
            back = Call("receive", self._toward(other, self.stage), self.elements, other)
            for call in (out, back) if self.stage < other else (back, out):
                yield from self._alone(f"{call.kind}, {turn}", call)

    def _toward(self, source: int, target: int) -> Group:
        """`Line.toward` of `Profiler._neighbours`: the channels of forward passes."""
        return Group(f"F {'down' if source < target else 'up'}", self._line.ranks)

    @property
    def _line(self) -> Group:
        return Group("pp alpha", tuple(range(self.stages)))

    def _meet(self, name: str) -> Iterator[Action]:
        """`Communicator.align`: a sum, for which compute waits."""
        yield Start(f"all ranks before {name}", COMPUTE, (Call("all_reduce", self._line, 1),))
        yield Wait(f"all ranks before {name}")

    def _alone(self, name: str, call: Call) -> Iterator[Action]:
        """`Profiler._alone`."""
        yield from self._taken(name, "intra ", (call,))

    def _taken(self, name: str, side: str, calls: tuple[Call, ...]) -> Iterator[Action]:
        yield Start(name, side, calls)
        yield Compute("an operator")
        yield Wait(name)
        yield Synchronise(f"the end of {name}", everything=False)  # `Profiler._between`
