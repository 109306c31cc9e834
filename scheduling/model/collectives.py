"""The collectives and the inputs of a layer's graph.

With sequence parallelism a rank holds t = T/tp tokens of full width outside the tensor-parallel region
(before a gather, after a scatter) and, inside it, T tokens of its part of the width.
"""

from dataclasses import replace

from braid.scheduling.mesh.mesh import beyond
from braid.scheduling.model.graph import Dims, GraphBuilder, gradient_of
from braid.scheduling.model.operators import Kind, Operator, Precision
from braid.scheduling.model.sizes import PartSizes


class CollectiveBuilder(GraphBuilder):
    """Writes inputs and collectives; a collective over an axis of degree one returns its input's name."""

    def __init__(self, name: str, sizes: PartSizes) -> None:
        super().__init__(name)
        self.sizes = sizes
        self.shape = sizes.shape
        self.beyond = beyond(sizes.own) if sizes.own else ""

    # -- inputs --------------------------------------------------------------------------------------------

    def input(self, name: str = "x") -> str:
        """Add the residual stream as input: this rank's tokens of full width."""
        return self._input(name, Dims(self.sizes.local_tokens, self.shape.hidden))

    def token_ids(self, name: str) -> str:
        """Add an input that holds an index for every token and has no gradient."""
        return self._input(name, Dims(self.sizes.tokens, 1), Precision.INDEX)

    def factor(self, name: str) -> str:
        """Add an input that holds one number and has no gradient."""
        return self._input(name, Dims(1, 1), Precision.STATISTIC)

    # -- collectives ---------------------------------------------------------------------------------------

    def gather(self, name: str, x: str, axis: str = "", shares: str | None = None) -> str:
        """Write a gather of tokens over an axis; its backward pass reduce-scatters gradients.

        By default the axis of the ranks that cut the part. ``shares``: the value with the tokens of each rank
        (`Routed.shares`); by default all have equally many.
        """
        dims, axis = self.dims(x), axis or self.sizes.tensor_axis
        result = replace(dims, tokens=dims.tokens * self.sizes.degree(axis))
        kinds = Kind.ALL_GATHER, Kind.REDUCE_SCATTER
        return self._exchange(name, x, axis, result, kinds, (shares, shares) if shares else None)

    def scatter(self, name: str, x: str, axis: str = "", shares: str | None = None) -> str:
        """Write a sum over all ranks along an axis; each rank keeps the sums of its own tokens."""
        dims, axis = self.dims(x), axis or self.sizes.tensor_axis
        result = replace(dims, tokens=dims.tokens // self.sizes.degree(axis))
        kinds = Kind.REDUCE_SCATTER, Kind.ALL_GATHER
        return self._exchange(name, x, axis, result, kinds, (shares, shares) if shares else None)

    def all_to_all(self, name: str, x: str, sent: str, returned: str, axis: str = "ep") -> str:
        """Write an exchange of rows among all ranks along an axis; the backward pass returns their gradients.

        ``sent``, ``returned``: the values with the number of rows to and from each rank (`Routed`).
        """
        kinds = Kind.ALL_TO_ALL, Kind.ALL_TO_ALL
        return self._exchange(name, x, axis, self.dims(x), kinds, (sent, returned))

    def _shift(self, name: str, x: str, axis: str, result: Dims) -> str:
        """Write a ring shift of values of size ``result``: send to the next rank, receive from the previous.

        Unlike a whole all-gather it holds only the values of the next step in memory.
        """
        op = self._collective(name, Kind.SEND_RECEIVE, x, axis, result)
        self._one_gradient(gradient_of(op, (f"d.{name}.out",)), (x,))
        return op.writes[0]

    def _exchange(
        self,
        name: str,
        x: str,
        axis: str,
        result: Dims,
        kinds: tuple[Kind, Kind],
        extents: tuple[str, str] | None,
    ) -> str:
        """Write a collective; ``kinds`` and ``extents`` (row counts) hold (forward, backward)."""
        if self.sizes.degree(axis) == 1:
            return x
        sent, returned = extents or ("", "")
        op = self._collective(name, kinds[0], x, axis, result, sent)
        reads = (f"d.{name}.out", returned) if returned else (f"d.{name}.out",)
        self._one_gradient(replace(gradient_of(op, reads), kind=kinds[1]), (x,))
        return op.writes[0]

    def _collective(
        self, name: str, kind: Kind, x: str, axis: str, result: Dims, extents: str = ""
    ) -> Operator:
        """Write a collective whose result has size ``result``; the caller defines its backward pass.

        A ring or pairwise transfer sends all but one part of the whole; a shift sends its result's size.
        """
        degree, precision = self.sizes.degree(axis), self._values[x].precision
        whole = result.elements if kind is Kind.ALL_GATHER else self.dims(x).elements
        width = precision.bytes_each(2)
        shifts = kind is Kind.SEND_RECEIVE
        sent_bytes = width * result.elements if shifts else width * whole * (degree - 1) // degree
        if kind is Kind.ALL_REDUCE:
            sent_bytes *= 2
        in_place = x if kind is Kind.ALL_REDUCE else None
        y = self._value(f"{name}.out", result, precision, alias=in_place)
        return self._emit(
            name,
            kind,
            (x, extents) if extents else (x,),
            (y,),
            axis=axis,
            stream=self.sizes.stream(axis),
            sent_bytes=sent_bytes,
        )
