"""A layer of your own: attention and MLP side by side, from one norm, into one sum (as in PaLM).

    model: {layer: "docs/examples/parallel_layer.py:ParallelLayer"}

Under tensor parallelism it needs one all-gather and one reduce-scatter where the built-in layer needs two of
each. Two things have to fit each other: the operators, and a module for every one that is no collective.
"""

from torch import Tensor, nn

from braid.layers import AutogradOperator, LayerBuilder, ModuleContext, OperatorModule


class SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # autograd is its backward pass
        return x.relu().square()


class ParallelLayer:
    def graph(self, g: LayerBuilder) -> str:
        shape = g.shape
        x = g.input()
        n = g.gather("gather", g.norm("norm", x))
        a = g.attention("attention", g.columns("qkv", n, shape.query_width + 2 * shape.kv_width))
        a = g.rows("projection", a, shape.hidden)
        m = g.custom("activation", g.columns("mlp_in", n, shape.ffn), per_token=True)
        m = g.rows("mlp_out", m, shape.hidden)
        both = g.scatter("scatter", g.residual("sum", a, m))
        return g.residual("residual", both, x)

    def modules(self, context: ModuleContext, index: int) -> dict[str, OperatorModule]:
        shape, name = context.shape, f"layers.{index}"  # parameters have global names
        qkv = {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}
        return {
            "norm": context.norm(f"{name}.norm"),
            "qkv": context.columns({f"{name}.qkv.{part}": n for part, n in qkv.items()}, shape.hidden),
            "attention": context.attention(),
            "projection": context.rows(f"{name}.projection", shape.query_width, shape.hidden),
            "mlp_in": context.columns({f"{name}.mlp_in.up": shape.ffn}, shape.hidden),
            "activation": OperatorModule(module=AutogradOperator(module=SquaredReLU())),
            "mlp_out": context.rows(f"{name}.mlp_out", shape.ffn, shape.hidden),
            "sum": context.residual(),
            "residual": context.residual(),
        }
