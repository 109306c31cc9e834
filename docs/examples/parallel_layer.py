"""A layer of your own: attention and MLP side by side, from one norm, into one sum (as in PaLM).

    model: {layer: "docs/examples/parallel_layer.py:ParallelLayer"}

Under tensor parallelism it needs one all-gather and one reduce-scatter where the built-in layer needs two of
each. A layer definition gives two things that fit each other: the operator graph, written forward (its
backward pass, saved values, recomputation and schedules follow from it), and a module for every operator.
"""

import torch
from torch import Tensor, nn

from braid.actors.stage.layers import ModuleContext
from braid.actors.stage.parameters import OperatorModule
from braid.kernels.operators.autograd import AutogradOperator
from braid.kernels.operators.residual import Residual
from braid.scheduling.graph_builder import GraphBuilder
from braid.scheduling.layers import PartSizes
from braid.scheduling.operators import Part


class SquaredReLU(nn.Module):
    """An ordinary module: autograd is its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Square what is positive (Primer, So et al. 2021)."""
        return torch.relu(x).square()


class ParallelLayer:
    """y = x + attention(norm(x)) + mlp(norm(x)), with a squared ReLU between two matrices."""

    def part(self, sizes: PartSizes) -> Part:
        """The operator graph. Gathered values have all T tokens; the others this rank's t = T / tp."""
        shape, tp = sizes.shape, sizes.tp
        tokens, local = sizes.tokens, sizes.local_tokens
        qkv = shape.query_width + 2 * shape.kv_width
        scores = 2 * tokens * shape.sequence * shape.query_width // tp
        saved = tokens * qkv // tp  # rotated q, k and v; beside them a log-sum-exp of each query head
        partition = tokens * shape.heads // tp

        g = GraphBuilder("layer", sizes.axes)
        x = g.input("x", local * shape.hidden)
        n = g.norm("norm", x, local, statistics_each=sizes.norm_statistics)
        n = g.gather("gather", n, "tp")
        a = g.gemm("qkv", n, tokens * qkv // tp, sizes.gemm_flops(shape.hidden, qkv))
        a = g.attention(
            "attention", a, tokens * shape.query_width // tp, scores, saved, saved_statistics=partition
        )
        a = g.gemm("projection", a, tokens * shape.hidden, sizes.gemm_flops(shape.query_width, shape.hidden))
        m = g.gemm("mlp_in", n, tokens * shape.ffn // tp, sizes.gemm_flops(shape.hidden, shape.ffn))
        m = g.custom("activation", (m,), tokens * shape.ffn // tp, saved_elements=tokens * shape.ffn // tp)
        m = g.gemm("mlp_out", m, tokens * shape.hidden, sizes.gemm_flops(shape.ffn, shape.hidden))
        both = g.scatter("scatter", g.residual("sum", a, m), "tp")
        return g.build(g.residual("residual", both, x))

    def modules(self, context: ModuleContext, index: int) -> dict[str, OperatorModule]:
        """A module for every operator but the collectives; names of parameters are global."""
        shape, name = context.shape, f"layers.{index}"
        widths = {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}
        qkv = {f"{name}.qkv.{part}": width for part, width in widths.items()}
        plain_sum = Residual(hidden=shape.hidden, bias=False, device=context.device, dtype=context.dtype)
        return {
            "norm": context.norm(f"{name}.norm"),
            "qkv": context.columns(qkv, shape.hidden, bias=False),
            "attention": context.attention(),
            "projection": context.rows(f"{name}.projection", shape.query_width, shape.hidden),
            "mlp_in": context.columns({f"{name}.mlp_in.up": shape.ffn}, shape.hidden, bias=False),
            "activation": OperatorModule(module=AutogradOperator(module=SquaredReLU())),
            "mlp_out": context.rows(f"{name}.mlp_out", shape.ffn, shape.hidden),
            "sum": OperatorModule(module=plain_sum),
            "residual": OperatorModule(module=plain_sum),
        }
