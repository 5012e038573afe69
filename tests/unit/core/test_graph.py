"""ggml's allocator, rebuilt: what is given back is used again, and what may be overwritten is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.graph import Graph, Node


def test_a_chain_needs_two_results_at_a_time() -> None:
    """A result is given back once its last reader has run."""
    graph = Graph()
    node = graph.input(1024)
    for _ in range(10):
        node = graph.op(1024, node)
    graph.expand(node)
    assert graph.buffer_bytes() == 2 * 1024


def test_an_element_wise_operation_overwrites_its_only_source() -> None:
    """It needs no memory of its own where nobody else reads the source."""
    graph = Graph()
    node = graph.op(1024, graph.input(1024))
    for _ in range(5):
        node = graph.over(node)
    graph.expand(node)
    assert graph.buffer_bytes() == 2 * 1024


def test_a_source_with_another_reader_is_kept() -> None:
    """What will be read again is not overwritten."""
    graph = Graph()
    node = graph.op(1024, graph.input(32))
    graph.expand(graph.op(32, graph.over(node), node))
    assert graph.buffer_bytes() == 32 + 2 * 1024


def test_what_is_seen_through_a_view_is_not_overwritten() -> None:
    """As in ggml, which holds that a view has no memory that it could hand on."""
    graph = Graph()
    node = graph.op(1024, graph.input(32))
    graph.expand(graph.over(graph.view(node)))
    assert graph.buffer_bytes() == 32 + 2 * 1024


def test_a_view_keeps_its_root() -> None:
    """The memory is given back after the last reader of the last view."""
    graph = Graph()
    node = graph.op(1024, graph.input(32))
    small = graph.op(32, graph.view(node, 512))
    graph.expand(small, graph.op(1024, graph.view(node), small))
    assert graph.buffer_bytes() == 32 + 1024 + 1024  # the small one lies where the input was


def test_an_input_that_nobody_reads_stays() -> None:
    """Its memory is taken from the start and never given back."""
    graph = Graph()
    graph.input(1000)
    graph.expand(graph.op(64, graph.input(64)))
    assert graph.buffer_bytes() == 1024 + 64 + 64  # 1000, rounded up to the alignment


def test_the_smallest_gap_that_fits_is_taken() -> None:
    """Best fit: a small result leaves the large gap to a large one."""
    graph = Graph()
    source = graph.input(32)
    large, wall, small, end = (graph.op(size, source) for size in (4096, 32, 512, 32))
    used = graph.op(32, large, small)  # frees both
    graph.expand(large, wall, small, end, used, graph.op(32, graph.op(512, used), graph.op(4096, used), wall, end))
    assert graph.buffer_bytes() == 32 + 4096 + 32 + 512 + 32  # the last small ones lie where the input was


def rows(count: int, leak: int = 0, moves: bool = False) -> tuple[Graph, list[int]]:
    """A graph of so many layers, and where each begins."""
    graph = Graph()
    node = graph.input(1024)
    begins = []
    for _ in range(count):
        begins.append(len(graph.order))
        if leak:
            graph.expand(graph.op(leak, node))
        node = graph.op(1024, node) if moves else graph.over(graph.over(node))
        graph.expand(node)
    graph.expand(graph.op(32, node))
    return graph, begins


def test_layers_that_leave_the_buffer_as_they_found_it() -> None:
    """What waits for its readers is another result of the same place, made as much later as the layers are apart."""
    graph, begins = rows(6)
    _, (earlier, later) = graph.lay_out([begins[2], begins[4]])
    assert later.is_like(earlier)


def test_layers_that_never_give_something_back() -> None:
    """The buffer is never again as it was."""
    graph, begins = rows(6, leak=64)
    _, (earlier, later) = graph.lay_out([begins[2], begins[4]])
    assert not later.is_like(earlier)


def test_layers_whose_results_change_places() -> None:
    """Every second time it is as it was."""
    graph, begins = rows(6, moves=True)
    _, (first, second, third) = graph.lay_out(begins[2:5])
    assert third.is_like(first) and not second.is_like(first)


@given(st.data())
def test_results_that_are_alive_do_not_overlap(data: st.DataObject) -> None:
    """Whatever the graph, each result has its memory for itself from its node to its last reader."""
    graph = Graph()
    nodes: list[Node] = [graph.input(data.draw(st.integers(0, 300)))]
    for _ in range(data.draw(st.integers(1, 25))):
        sources = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3, unique_by=id))
        kind = data.draw(st.sampled_from(["op", "over", "view"]))
        if kind == "view":
            nodes.append(graph.view(sources[0]))
        elif kind == "over":
            nodes.append(graph.over(*sources))
        else:
            nodes.append(graph.op(data.draw(st.integers(0, 300)), *sources))
        graph.expand(nodes[-1])
    size = graph.buffer_bytes()
    last = {id(node.root): at for at, node in enumerate(graph.order)}
    for at, node in enumerate(graph.order):
        for source in node.sources:
            last[id(source.root)] = at
    places = [(at, last[id(node)], node) for at, node in enumerate(graph.order) if node.root is node and node.bytes]
    assert all(node.at + node.bytes <= size for _, _, node in places)
    for at, end, node in places:
        for other_at, _, other in places:
            if at < other_at < end:
                assert node.at + node.bytes <= other.at or other.at + other.bytes <= node.at
