"""Writes the operators of a mixture of experts into a layer's graph."""

from dataclasses import dataclass, replace

from braid.scheduling.model.collectives import CollectiveBuilder
from braid.scheduling.model.graph import Dims, gradient_of
from braid.scheduling.model.operators import Kind, Precision


@dataclass(frozen=True)
class Routed:
    """Names of a router's results, which say to which experts tokens go and to which ranks their rows."""

    gates: str
    choice: str
    sent: str
    """Value with the number of rows that this rank sends to every rank of ep, on the way to the experts."""
    returned: str
    shares: str
    """Value with the number of rows of every tensor-parallel rank that holds the same experts."""
    sources: str
    """Value with the number of rows from every source (rank of tp and ep) for every expert of this rank."""
    sizes: str
    """Value with the number of rows of every expert of this rank."""


class ExpertBuilder(CollectiveBuilder):
    """Writes the router, and the operators that bring tokens' rows to experts and back."""

    def router(self, name: str, x: str) -> Routed:
        """Write the router: score the experts for every token, choose the best, and compute where rows go.

        If no token is dropped, ranks first exchange their numbers of rows for every expert.
        """
        shape, tokens = self.shape, self.dims(x).tokens
        gates = self._value(f"{name}.out", Dims(tokens, shape.top_k), Precision.STATISTIC)
        choice = self._value(f"{name}.choice", Dims(tokens, shape.top_k), Precision.INDEX)
        counts = self._value(f"{name}.counts", Dims(1, shape.experts), Precision.INDEX)
        scores = self._value(f"{name}.scores", Dims(tokens, shape.experts), Precision.STATISTIC)
        flops = 2 * self.dims(x).elements * shape.experts
        op = self._emit(name, Kind.ROUTER, (x,), (gates, choice, counts, scores), flops=flops)
        self._holds(name, self.dims(x).width * shape.experts, "whole")
        self._holds(name, shape.experts if shape.balance_rate > 0 else 0, "whole")
        for_losses: tuple[str, ...] = ()
        if shape.balance_loss or shape.z_loss:
            for_losses = (self._load(f"{name}_load", counts), self._loss_scale())
        self._both_gradients(op, (f"d.{gates}", scores, choice), (x,), (x,), for_losses)
        return self._routed(f"{name}_rows", gates, choice, counts)

    def _load(self, name: str, counts: str) -> str:
        """Write the computation of each expert's load: its share of all routed rows of the micro-batch,
        summed over the ranks that hold its tokens. ``counts``: name of this rank's row counts."""
        load = self._value(f"{name}.out", self.dims(counts), Precision.STATISTIC)
        self._emit(name, Kind.ROUTER, (counts,), (load,))
        for axis in ("tp", "cp"):
            if self.sizes.degree(axis) > 1:
                result = self.dims(load)
                (load,) = self._collective(f"{name}_{axis}", Kind.ALL_REDUCE, load, axis, result).writes
        return load

    def _loss_scale(self) -> str:
        return "loss_scale" if "loss_scale" in self._values else self.factor("loss_scale")

    def _routed(self, name: str, gates: str, choice: str, counts: str) -> Routed:
        """Write the computation of the row counts in `Routed`, from all ranks' counts; with a capacity they
        are constant, so that ranks exchange nothing."""
        shape, sizes = self.shape, self.sizes
        if not shape.capacity_factor:
            for axis in ("ep", sizes.tensor_axis):
                if (degree := sizes.degree(axis)) > 1:
                    result = replace(self.dims(counts), tokens=self.dims(counts).tokens * degree)
                    gathered = self._collective(f"{name}_{axis}", Kind.ALL_GATHER, counts, axis, result)
                    (counts,) = gathered.writes
        sources, experts = sizes.tensor * sizes.ep, shape.experts // sizes.ep
        extents = {
            "there": 0,  # a list of numbers on the host: no device memory
            "back": 0,
            "shares": 0,
            "sources": sources * experts,
            "sizes": 0,
        }
        extent_names = [
            self._value(f"{name}.{key}", Dims(1, count), Precision.INDEX) for key, count in extents.items()
        ]
        self._emit(name, Kind.ROUTER, (counts,), tuple(extent_names))
        return Routed(gates, choice, *extent_names)

    def permute(self, name: str, x: str, choice: str) -> str:
        """Write the copy of tokens' rows into the order of their experts, one row for each chosen expert.

        The size assumes balanced routing, in which a rank works on as many rows as it sends: ``top_k`` times
        its tokens. With a capacity every expert takes a fixed number of rows from each rank; more rows are
        dropped, fewer are padded.
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
        """Write the reordering of received rows from the order (source, expert) to the order of experts, or
        back.

        ``sources``: name of the row counts `Routed.sources`. Nothing is written if rows have a single source,
        or if a rank has a single expert.
        """
        sizes = self.sizes
        if sizes.tensor * sizes.ep == 1 or self.shape.experts == sizes.ep:
            return x
        y = self._value(f"{name}.out", self.dims(x))
        op = self._emit(name, Kind.PERMUTE, (x, sources), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", sources)), (x,))
        return y

    def unpermute(self, name: str, x: str, gates: str, choice: str) -> str:
        """Write the sum of the experts' results for every token, weighted by its gates, in the tokens'
        order."""
        y = self._value(f"{name}.out", Dims(self.dims(choice).tokens, self.dims(x).width))
        op = self._emit(name, Kind.PERMUTE, (x, gates, choice), (y,))
        self._one_gradient(gradient_of(op, (f"d.{y}", x, gates, choice)), (x, gates))
        return y
