"""Operators of a mixture of experts in a layer's graph."""

from dataclasses import dataclass, replace

from braid.scheduling.model.collectives import CollectiveBuilder
from braid.scheduling.model.graph import Dims, gradient_of
from braid.scheduling.model.operators import Kind, Precision


@dataclass(frozen=True)
class Routed:
    """Values that say which tokens go to which experts, and which rows to which ranks."""

    gates: str
    choice: str
    there: str
    """Rows to and from every rank of ep, on the way to the experts."""
    back: str
    shares: str
    """Rows of every rank of tp that has the same experts."""
    sources: str
    """Rows by source (tp and ep) and expert of this rank."""
    sizes: str
    """Rows of every expert of this rank."""


class ExpertBuilder(CollectiveBuilder):
    """Routing, and rows of tokens on their way to experts and back."""

    def router(self, name: str, x: str) -> Routed:
        """Score the experts for every token, choose the best, and find which rows go where.

        Where none is dropped, ranks tell each other first how many rows they have for every expert.
        """
        shape, tokens = self.shape, self.dims(x).tokens
        gates = self._value(f"{name}.out", Dims(tokens, shape.top_k), Precision.STATISTIC)
        choice = self._value(f"{name}.choice", Dims(tokens, shape.top_k), Precision.INDEX)
        counts = self._value(f"{name}.counts", Dims(1, shape.experts), Precision.INDEX)
        scores = self._value(f"{name}.scores", Dims(tokens, shape.experts), Precision.STATISTIC)
        flops = 2 * self.dims(x).elements * shape.experts
        op = self._emit(name, Kind.ROUTER, (x,), (gates, choice, counts, scores), flops=flops)
        self._holds(name, whole=(self.dims(x).width + (shape.balance_rate > 0)) * shape.experts)
        more: tuple[str, ...] = ()
        if shape.balance_loss or shape.z_loss:
            more = (self._load(f"{name}_load", counts), self._loss_scale())
        self._both_gradients(op, (f"d.{gates}", scores, choice), (x,), (x,), more)
        return self._routed(f"{name}_rows", gates, choice, counts)

    def _load(self, name: str, counts: str) -> str:
        """The share of the micro-batch's visits that every expert gets, over all ranks that have tokens."""
        load = self._value(f"{name}.out", self.dims(counts), Precision.STATISTIC)
        self._emit(name, Kind.ROUTER, (counts,), (load,))
        for axis in ("tp", "cp"):
            if self.sizes.degree(axis) > 1:
                made = self.dims(load)
                (load,) = self._collective(f"{name}_{axis}", Kind.ALL_REDUCE, load, axis, made).writes
        return load

    def _loss_scale(self) -> str:
        return "loss_scale" if "loss_scale" in self._values else self.factor("loss_scale")

    def _routed(self, name: str, gates: str, choice: str, counts: str) -> Routed:
        """Rows by source and expert, from every rank's counts; static where experts have a capacity."""
        shape, sizes = self.shape, self.sizes
        if not shape.capacity_factor:
            for axis in ("ep", sizes.tensor_axis):
                if (degree := sizes.degree(axis)) > 1:
                    made = replace(self.dims(counts), tokens=self.dims(counts).tokens * degree)
                    gathered = self._collective(f"{name}_{axis}", Kind.ALL_GATHER, counts, axis, made)
                    (counts,) = gathered.writes
        sources, held = sizes.tensor * sizes.ep, shape.experts // sizes.ep
        extents = {
            "there": 0,  # numbers, which take no memory of a device
            "back": 0,
            "shares": 0,
            "sources": sources * held,
            "sizes": 0,
        }
        made_of = [
            self._value(f"{name}.{key}", Dims(1, count), Precision.INDEX) for key, count in extents.items()
        ]
        self._emit(name, Kind.ROUTER, (counts,), tuple(made_of))
        return Routed(gates, choice, *made_of)

    def permute(self, name: str, x: str, choice: str) -> str:
        """Bring a copy of every token into the order of each expert that it visits.

        With balanced routing every rank works on as many tokens as it sends, ``top_k`` times its own. With a
        capacity every expert takes as many of each rank, whether there are fewer tokens for it or more.
        """
        dims, shape = self.dims(x), self.shape
        visits = dims.tokens * shape.top_k
        if shape.capacity_factor:
            visits = shape.experts * shape.capacity(dims.tokens)
        y = self._value(f"{name}.out", Dims(visits, dims.width))
        op = self._emit(name, Kind.PERMUTE, (x, choice), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", choice)), (x,))
        return y

    def regroup(self, name: str, x: str, sources: str) -> str:
        """Rows that come by source and by expert within it, put by expert, or back (`Routed.sources`)."""
        sizes = self.sizes
        if sizes.tensor * sizes.ep == 1 or self.shape.experts == sizes.ep:
            return x
        y = self._value(f"{name}.out", self.dims(x))
        op = self._emit(name, Kind.PERMUTE, (x, sources), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", sources)), (x,))
        return y

    def unpermute(self, name: str, x: str, gates: str, choice: str) -> str:
        """Bring tokens back into their order and add what their experts made of them, weighted."""
        y = self._value(f"{name}.out", Dims(self.dims(choice).tokens, self.dims(x).width))
        op = self._emit(name, Kind.PERMUTE, (x, gates, choice), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", x, gates, choice)), (x, gates))
        return y
