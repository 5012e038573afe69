"""A graph of ggml operations, and the size of the buffer that ggml's allocator would lay its results out in.

Only sizes and the order of things matter for that, so a node knows its bytes, what it reads, and whether it may overwrite
what it reads. The allocator is that of ggml-alloc.c: best fit over the gaps, results given back after their last reader.
"""

from __future__ import annotations

CPU_ALIGNMENT = 32


class Node:
    """One result. root is the node whose memory a view looks at; a node of its own memory is its own root."""

    __slots__ = ("allocated", "at", "bytes", "inplace", "is_input", "readers", "root", "sources", "views", "visited")

    def __init__(self, size: int, sources: tuple[Node, ...], inplace: bool, root: Node | None, is_input: bool) -> None:
        self.bytes = size
        self.sources = sources
        self.inplace = inplace
        self.root = self if root is None else root
        self.is_input = is_input
        self.visited = False
        self.readers = self.views = self.at = 0
        self.allocated = False


class Graph:
    """Nodes in the order in which they will run. Weights and caches have memory elsewhere and are left out."""

    def __init__(self, alignment: int = CPU_ALIGNMENT) -> None:
        self.alignment = alignment
        self.inputs: list[Node] = []
        self.order: list[Node] = []

    def input(self, size: int) -> Node:
        """What is filled in from outside: has its memory from the start, until its last reader; forever without one."""
        node = Node(size, (), False, None, True)
        node.visited = True
        self.inputs.append(node)
        return node

    def op(self, size: int, *sources: Node | None) -> Node:
        return Node(int(size), tuple(source for source in sources if source is not None), False, None, False)

    def over(self, *sources: Node | None, size: int | None = None) -> Node:
        """An element-wise operation, which may overwrite a source that nobody else reads."""
        known = tuple(source for source in sources if source is not None)
        return Node(int(known[0].bytes if size is None else size), known, True, None, False)

    def view(self, source: Node, size: int | None = None) -> Node:
        return Node(int(source.bytes if size is None else size), (source,), False, source.root, False)

    def expand(self, *nodes: Node | None) -> None:
        """Appends nodes after all that they depend on, depth first, as ggml_build_forward_expand() does."""
        for node in nodes:
            if node is not None and not node.visited:
                self._visit(node)

    def _visit(self, node: Node) -> None:
        stack = [(node, iter(node.sources))]
        node.visited = True
        while stack:
            current, rest = stack[-1]
            for source in rest:
                if not source.visited:
                    source.visited = True
                    stack.append((source, iter(source.sources)))
                    break
            else:
                self.order.append(current)
                stack.pop()

    def buffer_bytes(self) -> int:
        """The size of the one buffer that holds every result when it is needed."""
        space = _Space(self.alignment)
        for node in self.inputs:
            node.at = space.take(node.bytes)
            node.allocated = True
        for node in self.order:
            if node.root is not node:
                node.root.views += 1
            for source in node.sources:
                source.readers += 1
        for node in self.order:
            if node.root is node and not node.allocated:
                node.allocated = True
                if not _overwrites(node, space):
                    node.at = space.take(node.bytes)
            for source in node.sources:
                source.readers -= 1
                if source.readers == 0 and source.views == 0:
                    root = source.root
                    if root is not source:
                        root.views -= 1
                        if root.views == 0 and root.readers == 0 and root.allocated:
                            space.give(root.at, root.bytes)
                            root.allocated = False
                    elif source.allocated:
                        space.give(source.at, source.bytes)
                        source.allocated = False
        return space.most


def _overwrites(node: Node, space: _Space) -> bool:
    """Whether node takes over the memory of one of its sources. Memory that is seen through a view is never taken over."""
    if not node.inplace:
        return False
    for source in node.sources:
        if source.root is source and source.allocated and source.bytes == node.bytes and source.readers == 1 and not source.views:
            node.at = source.at
            source.allocated = False
            return True
    return False


class _Space:
    """Free blocks by address; the last one is endless."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.blocks: list[list[int]] = [[0, 1 << 62]]
        self.most = 0

    def _padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def take(self, size: int) -> int:
        size = self._padded(size)
        best = None
        for block in self.blocks[:-1]:
            if block[1] >= size and (best is None or block[1] <= best[1]):
                best = block
        if best is None:
            best = self.blocks[-1]
        at = best[0]
        best[0] += size
        best[1] -= size
        if best[1] == 0:
            self.blocks.remove(best)
        self.most = max(self.most, at + size)
        return at

    def give(self, at: int, size: int) -> None:
        self._free(at, self._padded(size))

    def _free(self, at: int, size: int) -> None:
        if size == 0:
            return
        blocks = self.blocks
        for i, block in enumerate(blocks):
            if block[0] + block[1] == at:
                block[1] += size
                if i + 1 < len(blocks) and block[0] + block[1] == blocks[i + 1][0]:
                    block[1] += blocks[i + 1][1]
                    del blocks[i + 1]
                return
            if at + size == block[0]:
                block[0] = at
                block[1] += size
                if i and blocks[i - 1][0] + blocks[i - 1][1] == at:
                    blocks[i - 1][1] += block[1]
                    del blocks[i]
                return
            if block[0] > at:
                blocks.insert(i, [at, size])
                return
