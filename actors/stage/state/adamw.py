"""AdamW: torch's, and torchao's with moments in 8 bits and a scale for every 256 elements.

Matrices of hidden layers have moments in 8 bits. Tables keep moments in fp32: the second moment of a token
that is rare would round to 0 beside frequent tokens' moments, and the row's next step is the first moment
over ``eps``. A master that a rank updates is flat: its whole blocks of 256 elements have moments in 8 bits,
the rest (or all, if the master has fewer than 4,096 elements) in fp32. With ZeRO masters are shards, which
begin anywhere in a tensor, so blocks differ from layout to layout, and with them the rounding of moments.
Checkpoints and copies hold the moments' values in fp32, and in the layout that wrote them they are restored
bit for bit.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from braid.scheduling.schedule.states import BLOCK, MOMENTS, quantised_elements

_NEIGHBOURS = range(-4, 5)
"""Distances, in representable numbers, at which a block's scale is looked for."""


class TorchAdamW:
    """`torch.optim.AdamW`, with states in the masters' dtype; gradients are in ``Tensor.grad``."""

    def __init__(self, masters: Sequence[tuple[Tensor, bool]], weight_decay: float, **settings: Any) -> None:
        """``masters``: at least one, each with whether it decays. ``settings``: ``lr``, ``betas``,
        ``eps``."""
        self.states: dict[Tensor, dict[str, Any]] = {}
        """A state of every kind (`MOMENTS`), by master."""
        for master, _ in masters:
            self.states[master] = {kind: torch.zeros_like(master) for kind in MOMENTS}
        self._adamw: torch.optim.Optimizer
        self._adamw = torch.optim.AdamW(decay_groups(masters, weight_decay), fused=True, **settings)
        for master, _ in masters:
            step = torch.tensor(0.0, device=master.device)
            self._adamw.state[master] = {"step": step, **self.states[master]}

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def count(self, updates: int) -> None:
        """Set the number of updates that led to the moments, for the correction of their bias."""
        for state in self._adamw.state.values():
            state["step"].fill_(updates)


def decay_groups(tensors: Sequence[tuple[Tensor, bool]], weight_decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups: tensors that decay, and tensors that do not."""
    decayed, plain = ([tensor for tensor, decays in tensors if decays is which] for which in (True, False))
    groups = [(decayed, weight_decay), (plain, 0.0)]
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def _torchao_optim() -> Any:
    """Import torchao, which warns of kernels of its own that this machine has not; none is needed here."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    import torchao.optim

    return torchao.optim


def _parts(flat: Tensor) -> list[Tensor]:
    """Cut a 1-dim tensor into its whole blocks and the rest; empty parts are left out."""
    count = quantised_elements(flat.numel())
    return [part for part in (flat[:count], flat[count:]) if part.numel()]


class QuantisedMoment:
    """A moment of one master: in 8 bits as far as `quantised_elements` says, else in fp32."""

    def __init__(self, master: Tensor, *, signed: bool) -> None:
        self._shape = master.shape
        self.parts: list[Any] = []
        """torchao's tensors in 8 bits, and tensors in fp32."""
        in_8_bits = _torchao_optim().subclass_8bit.OptimState8bit.zeros
        for part in _parts(master.detach().view(-1)):
            whole = quantised_elements(part.numel()) > 0
            moment = in_8_bits(part.shape, signed, BLOCK, part.device, torch.float32) if whole else None
            self.parts.append(torch.zeros_like(part) if moment is None else moment)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, tables of codes, and of the part in fp32."""
        held = ((p.codes, p.scale, p.qmap) if _quantised(p) else (p,) for p in self.parts)
        return sum(tensor.nbytes for tensors in held for tensor in tensors)

    def read(self) -> Tensor:
        """Return the values in the host's memory, in the master's shape."""
        values = (part.dequantize() if _quantised(part) else part for part in self.parts)
        return torch.cat([value.cpu() for value in values]).view(self._shape)

    def write(self, values: Tensor) -> None:
        """Set the values; values that `read` returned are restored bit for bit."""
        for part, given in zip(self.parts, _parts(values.reshape(-1)), strict=True):
            here = given.to(device=part.device, dtype=torch.float32)
            part.copy_(here)
            if _quantised(part):
                _restore_scales(part, here)


def _quantised(part: Any) -> bool:
    return hasattr(part, "codes")


def _restore_scales(moment: Any, values: Tensor) -> None:
    """Mend the blocks whose scale `copy_` has not met, though ``values`` come from 8 bits.

    torchao's codes reach from -0.993 to 1, so a block whose largest value was negative has lost the scale
    that it was divided by; it is the largest value over -0.993, or a neighbour of this number.
    """
    quantise = _torchao_optim().quant_utils.quantize_8bit_with_qmap
    wanted = values.view(-1, BLOCK)
    codes = moment.codes.view(-1, BLOCK)
    for distance in _NEIGHBOURS:
        odd = (moment.dequantize().view(-1, BLOCK) != wanted).any(dim=1).nonzero().view(-1)
        if not odd.numel():
            return
        scales = wanted[odd].amin(dim=1) / moment.qmap[0]
        scales = (scales.view(torch.int32) + distance).view(torch.float32)
        found = quantise(wanted[odd] / scales.view(-1, 1), moment.qmap)
        fits = (moment.qmap[found.int()] * scales.view(-1, 1) == wanted[odd]).all(dim=1)
        codes[odd[fits]] = found[fits]
        moment.scale[odd[fits]] = scales[fits]


class EightBitAdamW(TorchAdamW):
    """`torchao.optim.AdamW8bit`. On a CPU its update runs uncompiled, as compiling takes a C++ compiler."""

    def __init__(self, masters: Sequence[tuple[Tensor, bool]], weight_decay: float, **settings: Any) -> None:
        self._on_cpu = masters[0][0].device.type == "cpu"
        self.states = {}
        parts: list[tuple[Tensor, bool]] = []
        states: dict[Tensor, dict[str, Any]] = {}
        for master, decays in masters:
            assert master.grad is not None
            moments = {kind: QuantisedMoment(master, signed=kind == MOMENTS[0]) for kind in MOMENTS}
            self.states[master] = dict(moments)
            gradients = _parts(master.grad.view(-1))
            for number, part in enumerate(_parts(master.detach().view(-1))):
                part.grad = gradients[number]
                parts.append((part, decays))
                states[part] = {kind: moment.parts[number] for kind, moment in moments.items()}
                states[part]["step"] = torch.tensor(0.0)
        groups = decay_groups(parts, weight_decay)
        self._adamw = _torchao_optim().AdamW8bit(groups, block_size=BLOCK, **settings)
        self._adamw.state.update(states)

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"].fill_(lr)
        with torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext():
            self._adamw.step()
