"""A graph of ggml operations, and the size of the buffer that ggml's allocator would lay its results out in.

Only sizes and the order of things matter for that, so a node knows its bytes, what it reads, and whether it may overwrite
what it reads. The allocator is that of ggml-alloc.c: best fit over the gaps, results given back after their last reader.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CPU_ALIGNMENT = 32


class Node:
    """One result. seen is the node whose memory a view looks at; None: it has its own."""

    __slots__ = ("allocated", "at", "bytes", "inplace", "readers", "seen", "sources", "views", "visited")

    at: int  # once it is allocated

    def __init__(self, size: int, sources: tuple[Node, ...], inplace: bool = False, seen: Node | None = None) -> None:
        self.bytes = size
        self.sources = sources
        self.inplace = inplace
        self.seen = seen
        self.visited = self.allocated = False
        self.readers = self.views = 0  # still to come

    @property
    def root(self) -> Node:
        """The node whose memory it is; its own root for one that has its own."""
        return self.seen or self


class Graph:
    """Nodes in the order in which they will run. Weights and caches have memory elsewhere and are left out."""

    def __init__(self, alignment: int = CPU_ALIGNMENT) -> None:
        self.alignment = alignment
        self.inputs: list[Node] = []
        self.order: list[Node] = []

    def input(self, size: int) -> Node:
        """What is filled in from outside: has its memory from the start, until its last reader; forever without one."""
        node = Node(size, ())
        node.visited = True
        self.inputs.append(node)
        return node

    def op(self, size: int, *sources: Node | None) -> Node:
        return Node(size, _known(sources))

    def over(self, *sources: Node | None, size: int | None = None) -> Node:
        """An element-wise operation, which may overwrite a source that nobody else reads."""
        known = _known(sources)
        return Node(known[0].bytes if size is None else size, known, True)

    def view(self, source: Node, size: int | None = None) -> Node:
        return Node(source.bytes if size is None else size, (source,), False, source.seen or source)

    def expand(self, *nodes: Node | None) -> None:
        """Appends nodes after all that they depend on, depth first, as ggml_build_forward_expand() does."""
        for node in nodes:
            if node is not None and not node.visited:
                self._visit(node)

    def _visit(self, node: Node) -> None:
        append = self.order.append
        waiting: list[Node] = []
        node.visited = True
        while True:
            for source in node.sources:
                if not source.visited:
                    source.visited = True
                    waiting.append(node)
                    node = source
                    break
            else:
                for source in node.sources:
                    source.readers += 1
                if node.seen is not None:
                    node.seen.views += 1
                append(node)
                if not waiting:
                    return
                node = waiting.pop()

    def buffer_bytes(self) -> int:
        """The size of the one buffer that holds every result when it is needed."""
        return self.lay_out()[0]

    def lay_out(self, places: Sequence[int] = ()) -> tuple[int, list[Moment]]:
        """The size of the buffer, and how it is before the nodes at these places of the order, which ascend."""
        space = _Space(self.alignment)
        for node in self.inputs:
            space.take(node)
        begin = 0
        moments: list[Moment] = []
        for place in places:
            space.run(self.order[begin:place])
            moments.append(Moment(space, self.order[:place]))
            begin = place
        space.run(self.order[begin:])
        return space.most, moments


class Moment:
    """How the buffer is at some place of the order."""

    def __init__(self, space: _Space, before: list[Node]) -> None:
        self._gaps = [tuple(block) for block in space.blocks]
        self._awaited = {
            node: (len(before) - place, node.bytes, node.at if node.allocated else None, node.readers, node.views)
            for place, node in enumerate(before)
            if node.readers
        }

    def is_like(self, earlier: Moment) -> bool:
        """Whether the gaps are where they were, and what waits for its readers is the same, or stands where its like stood."""
        here, there = self._awaited, earlier._awaited
        new, gone = here.keys() - there, there.keys() - here
        return self._gaps == earlier._gaps and {here[node] for node in new} == {there[node] for node in gone}


def _known(sources: tuple[Node | None, ...]) -> tuple[Node, ...]:
    if None in sources:
        return tuple(source for source in sources if source is not None)
    return sources  # type: ignore[return-value]


def _overwrites(node: Node) -> bool:
    """Whether node takes over the memory of one of its sources. Memory that is seen through a view is never taken over."""
    for source in node.sources:
        if source.seen is None and source.allocated and source.bytes == node.bytes and source.readers == 1 and not source.views:
            node.at = source.at
            node.allocated = True
            source.allocated = False
            return True
    return False


class _Space:
    """Free blocks by address; the last one is endless."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.blocks: list[list[int]] = [[0, 1 << 62]]
        self.most = 0

    def run(self, nodes: list[Node]) -> None:
        take, give = self.take, self.give
        for node in nodes:
            if node.seen is None and not (node.inplace and _overwrites(node)):
                take(node)
            for source in node.sources:
                source.readers -= 1
                if source.readers or source.views:
                    continue
                root = source.seen
                if root is None:
                    if source.allocated:
                        give(source)
                else:
                    root.views -= 1
                    if root.allocated and not root.views and not root.readers:
                        give(root)

    def take(self, node: Node) -> None:
        node.allocated = True
        size = -(-node.bytes // self.alignment) * self.alignment
        if size == 0:
            node.at = 0
            return
        best = self.blocks[-1]
        for block in self.blocks:
            if size <= block[1] <= best[1]:
                best = block
        node.at = at = best[0]
        best[0] = end = at + size
        best[1] -= size
        if not best[1]:
            self.blocks.remove(best)
        if end > self.most:
            self.most = end

    def give(self, node: Node) -> None:
        node.allocated = False
        at, size = node.at, -(-node.bytes // self.alignment) * self.alignment
        if size == 0:
            return
        blocks = self.blocks
        for i, block in enumerate(blocks):
            begin = block[0]
            if begin + block[1] == at:
                block[1] += size
                after = blocks[i + 1]  # there is one: the last is endless
                if at + size == after[0]:
                    block[1] += after[1]
                    del blocks[i + 1]
                return
            if begin > at:
                if at + size == begin:
                    block[0] = at
                    block[1] += size
                else:
                    blocks.insert(i, [at, size])
                return
