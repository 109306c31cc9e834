"""All that a layer of your own needs: `docs/examples/parallel_layer.py` is written with these four names.

`LayerBuilder` writes the graph of the layer's operators; `ModuleContext` builds their modules for a rank's shard;
`OperatorModule` holds a module and the parameters that it owns; `AutogradOperator` wraps an `nn.Module`.
"""

from braid.actors.stage.model.context import ModuleContext
from braid.actors.stage.state.parameters import OperatorModule
from braid.kernels.operators.autograd import AutogradOperator
from braid.scheduling.model.builder import LayerBuilder

__all__ = ["AutogradOperator", "LayerBuilder", "ModuleContext", "OperatorModule"]
