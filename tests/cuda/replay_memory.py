"""Where the memory of work lies that is done again: as an allocator places it that reuses what was freed."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cuda.entries import Freed, Made, View, mapped

_ALIGNMENT = 64
_POISON = 0xFF
"""In every byte: not a number, as floating point goes, and no index, as integers go."""


class Placement:
    """Where a rank's memory lies."""

    def __init__(self, log: Any) -> None:
        """``log``: a rank's log or a graph: what was made and freed, and what was there before."""
        sizes, places, end = {}, {}, 0
        pools: dict[int, list[tuple[int, int]]] = defaultdict(list)
        streams = {}
        for entry in log.entries:
            if isinstance(entry, Made):
                sizes[entry.memory], streams[entry.memory] = entry.nbytes, entry.stream
                if entry.memory in log.first:
                    continue
                room = -(-max(1, entry.nbytes) // _ALIGNMENT) * _ALIGNMENT
                fitting = [block for block in reversed(pools[entry.stream]) if block[1] >= room]
                block = min(fitting, key=lambda one: one[1], default=(end, room))
                if fitting:
                    pools[entry.stream].remove(block)
                else:
                    end += room
                places[entry.memory] = block
            elif isinstance(entry, Freed) and entry.memory in places:
                pools[streams[entry.memory]].append(places[entry.memory])
        self.streams = streams
        self.arena = torch.empty(end + _ALIGNMENT, dtype=torch.uint8)
        self.there = {memory: content.clone() for memory, content in log.first.items()}
        self._first = log.first
        self._bytes = dict(self.there)
        for memory, (begin, _) in places.items():
            self._bytes[memory] = self.arena[begin : begin + sizes[memory]]
        self.reused = len({begin for begin, _ in places.values()}) < len(places)

    def reset(self) -> None:
        """As it was when the step began."""
        self.arena.fill_(_POISON)
        for memory, content in self._first.items():
            self.there[memory].copy_(content)

    def tensor(self, view: View) -> Tensor:
        """A view's tensor."""
        return view.within(self._bytes[view.memory])

    def poison(self, memory: int) -> Callable[[], object]:
        """What happens to freed memory."""
        content = self._bytes[memory]
        return lambda: content.fill_(_POISON)

    def is_own(self, memory: int) -> bool:
        """Whether it was made in the step."""
        return memory not in self._first


def placed(holder: Any, arguments: Any) -> Any:
    """Arguments of an operator, with the tensors of a graph or placement for views."""
    return mapped(arguments, View, holder.tensor)


def fresh(out: Any) -> list[Tensor]:
    """The tensors that an operator returned."""
    return [one for one in (out if isinstance(out, tuple | list) else (out,)) if isinstance(one, Tensor)]
