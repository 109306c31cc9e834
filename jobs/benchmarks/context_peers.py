"""The way a PyTorch user has today to train on sequences that are cut over ranks on CPU: ``torch_cp``.

PyTorch's own ``context_parallel`` (prototype, 2.13) is no such way: it replaces attention by rings of CUDA's
kernels, and knows none of ``_scaled_dot_product_flash_attention_for_cpu``, whatever sends the messages. So
this is what Llama 3 and Megatron do (Llama Team 2024, section 3.3.2; ``cp_comm_type: all_gather``), written
in public PyTorch. Of two pieces for every rank, rank r has the r-th from the front and the r-th from the
back. Keys and values of all are gathered before attention, their gradients scattered to where they are from,
and nothing computes meanwhile.

Each piece attends to all keys up to its end, in one call of ``scaled_dot_product_attention``: the first with
``is_causal``, others with a mask, as there is no other causal attention of fewer queries than keys on CPU
(``causal_lower_right`` makes a mask there). Such a call computes half a square of a piece in vain. Gradients
of keys and values go by an all-to-all and are summed where they arrive: half the bytes of gloo's
reduce-scatter.

Parameters are replicated by ``DistributedDataParallel``, as in `braid.jobs.benchmarks.replicated_peers`, in a
process group of their own.

Legend: as in `braid.jobs.benchmarks.peer_model`; S tokens of both of this rank's pieces, P of one, R ranks, A
all tokens of a sample, X key-value heads of keys and of values.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from braid.jobs.benchmarks.peer_model import Attention, Stage
from braid.jobs.benchmarks.plain_torch import PlainSizes
from braid.jobs.benchmarks.replicated_peers import DdpPeer

CP = "torch_cp"


class GatherPieces(torch.autograd.Function):
    """Both pieces of every rank, in the order of the sample; their gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x_BXSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return x_BXAH."""
        ctx.group = group
        x_BXSH = x_BXSH.contiguous()
        parts = [torch.empty_like(x_BXSH) for _ in range(group.size())]
        dist.all_gather(parts, x_BXSH, group=group)
        early, late = zip(*(part.chunk(2, dim=2) for part in parts), strict=True)
        return torch.cat((*early, *reversed(late)), dim=2)

    @staticmethod
    def backward(ctx: Any, d_BXAH: Tensor) -> tuple[Tensor, None]:
        """Return d_BXSH."""
        ranks = ctx.group.size()
        pieces = d_BXAH.chunk(2 * ranks, dim=2)
        pairs = zip(pieces[:ranks], reversed(pieces[ranks:]), strict=True)
        sent_RBXSH = torch.stack([torch.cat(pair, dim=2) for pair in pairs])
        found_RBXSH = torch.empty_like(sent_RBXSH)
        dist.all_to_all_single(found_RBXSH, sent_RBXSH, group=ctx.group)
        return found_RBXSH.sum(0), None


class ContextAttention(Attention):
    """Causal attention of two pieces of a sample to all of it."""

    def __init__(self, sizes: PlainSizes, group: dist.ProcessGroup, mask_PA: Tensor) -> None:
        """``mask``: of the last piece."""
        super().__init__(sizes)
        self.group, self.mask_PA = group, mask_PA

    def attend(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        x_BXAH = GatherPieces.apply(torch.cat((k_BKSH, v_BKSH), dim=1), self.group)
        k_BKAH, v_BKAH = x_BXAH.chunk(2, dim=1)
        first, ranks = self.group.rank(), self.group.size()
        found = []
        for index, q_BNPH in zip((first, 2 * ranks - 1 - first), q_BNSH.chunk(2, dim=2), strict=True):
            end = (index + 1) * q_BNPH.shape[2]
            found.append(
                F.scaled_dot_product_attention(
                    q_BNPH,
                    k_BKAH[:, :, :end],
                    v_BKAH[:, :, :end],
                    attn_mask=self.mask_PA[:, -end:] if index else None,
                    is_causal=index == 0,
                    enable_gqa=self.grouped,
                )
            )
        return torch.cat(found, dim=2)


class ContextPeer(DdpPeer):
    """``DistributedDataParallel`` over ranks that have pieces of the same samples."""

    def _replicate(self, model: Stage) -> None:
        sizes, group = self.settings.sizes, dist.new_group()
        pieces = torch.arange(sizes.sequence).chunk(2 * self._replicas)
        self._places_S = torch.cat((pieces[self._rank], pieces[-1 - self._rank]))
        mask_PA = torch.where(pieces[-1][:, None] >= torch.arange(sizes.sequence), 0.0, -torch.inf)
        for layer in model.layers.values():
            layer.attention = ContextAttention(sizes, group, mask_PA)
        super()._replicate(model)
        # Behind DistributedDataParallel, which makes buffers the same on all ranks when it is made.
        model.rotary.cos, model.rotary.sin = (
            table_AH[self._places_S] for table_AH in (model.rotary.cos, model.rotary.sin)
        )

    def _part(self, tokens_BS: Tensor) -> Tensor:
        return tokens_BS[:, self._places_S]
