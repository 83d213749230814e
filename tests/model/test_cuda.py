"""CUDA graphs are captured once for each set of arguments;
tests/gpu/test_gpu.py has real captures.
"""

from types import SimpleNamespace

from gpt2_triton.model import cuda


def test_graph_cache_captures_once_for_each_set_of_arguments(monkeypatch):
    seen = []

    def capture(function, *args):
        return SimpleNamespace(replay=lambda: seen.append(("replay", *args)))

    def launches(acc):
        seen.append(("launch", acc))

    monkeypatch.setattr(cuda, "capture", capture)
    graphs = cuda.GraphCache()
    for acc in (False, True, True, False):
        graphs(launches, acc)
    assert seen == [("launch", False), ("launch", True), ("replay", True), ("replay", False)]


def test_reset_destroys_the_captures(monkeypatch):
    seen = []
    monkeypatch.setattr(
        cuda, "capture", lambda function, *args: SimpleNamespace(reset=lambda: seen.append(args))
    )
    graphs = cuda.GraphCache()
    for acc in (False, True):
        graphs(lambda acc: None, acc)
    graphs.reset()
    assert seen == [(False,), (True,)]
    graphs.reset()
    assert len(seen) == 2
