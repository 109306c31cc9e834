"""What operators of a layer send each other, and what comes into a layer.

With sequence parallelism a rank holds t = T/tp tokens of full width outside the tensor-parallel region
(before a gather, after a scatter) and T tokens of its part of the width inside.
"""

from dataclasses import replace

from braid.scheduling.mesh.mesh import beyond
from braid.scheduling.model.graph import Dims, GraphBuilder, gradient_of
from braid.scheduling.model.operators import Kind, Operator, Precision
from braid.scheduling.model.sizes import PartSizes


class CollectiveBuilder(GraphBuilder):
    """Inputs and collectives; those over an axis of degree one vanish and return what they were given."""

    def __init__(self, name: str, sizes: PartSizes) -> None:
        super().__init__(name)
        self.sizes = sizes
        self.shape = sizes.shape
        self.beyond = beyond(sizes.own) if sizes.own else ""

    # -- what comes in -------------------------------------------------------------------------------------

    def input(self, name: str = "x") -> str:
        """The residual stream, from the part before: this rank's tokens of full width."""
        return self._input(name, Dims(self.sizes.local_tokens, self.shape.hidden))

    def token_ids(self, name: str) -> str:
        """An index for every token, without a gradient."""
        return self._input(name, Dims(self.sizes.tokens, 1), Precision.INDEX)

    def factor(self, name: str) -> str:
        """A number without a gradient."""
        return self._input(name, Dims(1, 1), Precision.STATISTIC)

    # -- collectives ---------------------------------------------------------------------------------------

    def gather(self, name: str, x: str, axis: str = "", shares: str | None = None) -> str:
        """Gather the tokens of all ranks along an axis; its backward adds up and scatters gradients.

        By default over the ranks that the part is cut over. ``shares``: how many each of them has
        (`Routed.shares`); by default as many.
        """
        dims, axis = self.dims(x), axis or self.sizes.tensor_axis
        made = replace(dims, tokens=dims.tokens * self.sizes.degree(axis))
        kinds = Kind.ALL_GATHER, Kind.REDUCE_SCATTER
        return self._exchange(name, x, axis, made, kinds, (shares, shares) if shares else None)

    def scatter(self, name: str, x: str, axis: str = "", shares: str | None = None) -> str:
        """Add up what all ranks along an axis have, and keep this rank's tokens."""
        dims, axis = self.dims(x), axis or self.sizes.tensor_axis
        made = replace(dims, tokens=dims.tokens // self.sizes.degree(axis))
        kinds = Kind.REDUCE_SCATTER, Kind.ALL_GATHER
        return self._exchange(name, x, axis, made, kinds, (shares, shares) if shares else None)

    def all_to_all(self, name: str, x: str, there: str, back: str, axis: str = "ep") -> str:
        """Give every rank along an axis its rows, and take ``back`` the gradients.

        ``there``, ``back``: how many go to and come from each (`Routed`).
        """
        kinds = Kind.ALL_TO_ALL, Kind.ALL_TO_ALL
        return self._exchange(name, x, axis, self.dims(x), kinds, (there, back))

    def _shift(self, name: str, x: str, axis: str, made: Dims) -> str:
        """Send what has the size ``made`` to the next rank of a ring and receive from the one before.

        A whole all-gather would repeat: only what the next step needs is there at a time.
        """
        op = self._collective(name, Kind.SEND_RECEIVE, x, axis, made)
        self._one_gradient(gradient_of(op, (f"d.{name}.out",)), (x,))
        return op.writes[0]

    def _exchange(
        self,
        name: str,
        x: str,
        axis: str,
        made: Dims,
        kinds: tuple[Kind, Kind],
        extents: tuple[str, str] | None,
    ) -> str:
        """``kinds``, ``extents`` (of rows, where they are not equal): of both passes."""
        if self.sizes.degree(axis) == 1:
            return x
        there, back = extents or ("", "")
        op = self._collective(name, kinds[0], x, axis, made, there)
        reads = (f"d.{name}.out", back) if back else (f"d.{name}.out",)
        self._one_gradient(replace(gradient_of(op, reads), kind=kinds[1]), (x,))
        return op.writes[0]

    def _collective(
        self, name: str, kind: Kind, x: str, axis: str, made: Dims, extents: str = ""
    ) -> Operator:
        """A collective that makes a value; who emits it says what its backward pass is.

        In a ring, and pairwise, each rank sends all parts of the whole but one; in a shift, what it makes.
        """
        degree, precision = self.sizes.degree(axis), self._values[x].precision
        whole = made.elements if kind is Kind.ALL_GATHER else self.dims(x).elements
        width = precision.bytes_each(2)
        shifts = kind is Kind.SEND_RECEIVE
        sent = width * made.elements if shifts else width * whole * (degree - 1) // degree
        if kind is Kind.ALL_REDUCE:
            sent *= 2
        in_place = x if kind is Kind.ALL_REDUCE else None
        y = self._value(f"{name}.out", made, precision, alias=in_place)
        return self._emit(
            name,
            kind,
            (x, extents) if extents else (x,),
            (y,),
            axis=axis,
            stream=self.sizes.stream(axis),
            sent_bytes=sent,
        )
