"""Writes collectives and inputs into a layer's graph.

With sequence parallelism a rank holds t = T/tp tokens of full width outside the tensor-parallel region
(before a gather, after a scatter) and, inside it, T tokens of its part of the width.
"""

from dataclasses import replace

from braid.scheduling.mesh.mesh import beyond
from braid.scheduling.model.graph import Dims, GraphBuilder, gradient_of
from braid.scheduling.model.operators import Kind, Operator, Precision
from braid.scheduling.model.sizes import PartSizes
from braid.scheduling.text.pattern import TOKEN_NUMBERS


class CollectiveBuilder(GraphBuilder):
    """Writes inputs and collectives; a collective over an axis of degree one returns its input's name."""

    def __init__(self, name: str, sizes: PartSizes) -> None:
        super().__init__(name)
        self.sizes = sizes
        self.shape = sizes.shape
        self.beyond = beyond(sizes.own) if sizes.own else ""
        self._stream: set[str] = set()
        """Names of values that hold the residual stream."""
        self.frozen = sizes.shape.lora is not None

    # -- inputs --------------------------------------------------------------------------------------------

    def input(self, name: str = "x") -> str:
        """Add the residual stream as input: this rank's tokens of full width."""
        self._stream.add(name)
        return self._input(name, Dims(self.sizes.local_tokens, self.shape.hidden))

    def _token_numbers(self) -> tuple[str, ...]:
        """Add, if it is missing, the input with a number for each of this rank's tokens, from which dropout
        draws; return its name. Without dropout there is no such input, and the result is empty."""
        if not self.shape.dropout:
            return ()
        if TOKEN_NUMBERS not in self._values:
            self._input(TOKEN_NUMBERS, Dims(self.sizes.local_tokens, 1), Precision.INDEX)
        return (TOKEN_NUMBERS,)

    def token_ids(self, name: str) -> str:
        """Add an input without gradient that holds one index per token; return its name."""
        return self._input(name, Dims(self.sizes.tokens, 1), Precision.INDEX)

    def factor(self, name: str) -> str:
        """Add an input without gradient that holds a single number; return its name."""
        return self._input(name, Dims(1, 1), Precision.STATISTIC)

    # -- collectives ---------------------------------------------------------------------------------------

    def gather(self, name: str, x: str, axis: str = "", shares: str | None = None) -> str:
        """Write an all-gather of tokens over an axis; its backward pass reduce-scatters gradients.

        ``axis``: by default the axis over which the part's matrices are cut. ``shares``: name of the value
        with each rank's number of tokens (`Routed.shares`); by default all ranks have equally many.
        """
        dims, axis = self.dims(x), axis or self.sizes.tensor_axis
        result = replace(dims, tokens=dims.tokens * self.sizes.degree(axis))
        kinds = Kind.ALL_GATHER, Kind.REDUCE_SCATTER
        return self._exchange(name, x, axis, result, kinds, (shares, shares) if shares else None)

    def scatter(self, name: str, x: str, axis: str = "", shares: str | None = None) -> str:
        """Write a reduce-scatter over an axis: a sum over ranks, of which each keeps its own tokens.

        Its backward pass gathers gradients. ``axis``, ``shares``: as in `gather`.
        """
        dims, axis = self.dims(x), axis or self.sizes.tensor_axis
        result = replace(dims, tokens=dims.tokens // self.sizes.degree(axis))
        kinds = Kind.REDUCE_SCATTER, Kind.ALL_GATHER
        return self._exchange(name, x, axis, result, kinds, (shares, shares) if shares else None)

    def all_to_all(self, name: str, x: str, sent: str, returned: str) -> str:
        """Write an all-to-all of rows over ``ep``; the backward pass sends their gradients back.

        ``sent``, ``returned``: names of the values with the number of rows to and from each rank (`Routed`).
        """
        kinds = Kind.ALL_TO_ALL, Kind.ALL_TO_ALL
        return self._exchange(name, x, "ep", self.dims(x), kinds, (sent, returned))

    def _shift(self, name: str, x: str, axis: str, result: Dims) -> str:
        """Write a ring shift: send ``x`` to the next rank along ``axis``, receive a value of size ``result``
        from the previous one.

        Unlike an all-gather it holds only the values of the next step in memory.
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
        """Write a collective and its backward pass.

        ``kinds``: kinds of collective in the forward and backward pass; ``extents``: names of the values with
        the row counts of both, None if all ranks have equally many rows.
        """
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
        """Write the forward operator of a collective; the caller defines its backward pass.

        ``result``: size of the result; ``extents``: name of the value with row counts. Ring and pairwise
        algorithms send all but one rank's part of the whole; a shift sends as much as it receives.
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
