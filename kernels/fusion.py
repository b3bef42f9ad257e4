"""torch.compile(model, backend=fuse): this package's kernels wherever a model's plain PyTorch computes what they do.

    import kernels
    model.compile(backend=kernels.fuse)          # any model; what is left goes to torch's own compiler
    print(kernels.explain(model, x, y))          # what was fused, what was not and why, by line

What torch.compile captures is read in one spelling (_graph.py), the rules (_rules.py) put operations in the place of what they compute, and
each new graph is run once against its original (_proof.py). A graph that is not the same is left as it was, and so is one that writes into
tensors or switches gradients or autocast, whose operations depend on when they are run.
"""

import collections
import copy
import hashlib
import os

import torch

from . import _proof, _rules
from ._graph import kind, op, sort, stateful, tidy, value, where, without_idle_switches, without_in_place_sums
from ._proof import REFERENCES


def _sources():
    """What compiled code depends on beside its graph: this package's own text."""
    folder, digest = os.path.dirname(os.path.abspath(__file__)), hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "rb") as f:
                digest.update(f.read())
    return digest.hexdigest()


class Graph:
    """What was done with one captured graph."""

    def __init__(self):
        self.fused = []  # (name, {(file, line, text)} of what it took the place of)
        self.left = []  # (name of the operation, where, reason or None)
        self.rejected = None  # why the whole graph is as it was captured


class Fusion:
    """A backend for torch.compile.

    attention: what computes attention, for a list of cases (window or None, (B, T, n_head, n_kv_head, head_dim), bounded, device) a list
        of "kernels", "flash" (torch's flash operator) or "sdpa" (torch's own choice); None: the kernels. bounded: q and k are normed, so
        that no score leaves ±60.
    products: told of the weights' products before they are used, by `([(out, in)], rows, device)`; None: nobody is.
    backend: the name of torch's backend that compiles what comes out.
    """

    def __init__(self, attention=None, products=None, backend="inductor"):
        self.attention, self.products, self.backend = attention, products, backend
        self.graphs = []

    def __call__(self, gm, example_inputs):
        graph = Graph()
        self.graphs.append(graph)
        gm = _fused(gm, example_inputs, self, graph)
        if self.backend == "inductor":
            _prepare_inductor()
        return torch._dynamo.lookup_backend(self.backend)(gm, example_inputs)

    def report(self):
        """Lines for people: what was fused where, what was left and why."""
        return report(self.graphs)


def _fused(gm, example_inputs, fusion, graph):
    """The graph with this package's operations in it, or as it was; `graph` learns which and why."""
    values = [value(n) for n in gm.graph.nodes]
    fake = next((v for v in values if isinstance(v, torch._subclasses.FakeTensor)), None)
    if fake is None:
        return gm
    if any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in values):
        graph.rejected = "sizes or numbers vary from call to call: compile with dynamic=False, and keep numbers that change in tensors"
        return gm
    new = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    without_idle_switches(new.graph)
    without_in_place_sums(new.graph)
    if bad := next(filter(stateful, new.graph.nodes), None):
        graph.rejected = f"{_name(bad)}{_at(where(bad))} writes into a tensor or switches gradients or autocast"
        return gm
    tidy(new.graph)
    rw = _rules.Rewriter(new.graph, fake.fake_mode, fusion.attention)
    for rule in _rules.RULES:
        graph.fused += _applied(rule, rw)
        sort(new.graph)
        new.graph.eliminate_dead_code()
    new.graph.lint()
    new.recompile()
    if graph.fused and (wrong := _proof.difference(gm, new, example_inputs)):
        graph.rejected, graph.fused = f"the fused graph is not the same: {wrong}", []
        return gm
    for device, found in _rules.products(new.graph).items() if fusion.products else ():
        for rows in sorted({rows for *_, rows in found}):
            fusion.products([(out, in_) for out, in_, r in sorted(found) if r == rows], rows, device)
    for n in new.graph.nodes:
        if n.op.startswith("call") and n not in rw.made and n.users:
            graph.left.append((_name(n), where(n), rw.reasons.get(n) or _rules.unfused(n)))
    return new


def _applied(rule, rw):
    """[(name, places)] of what a rule has put into a graph."""
    done, nodes = [], list(rw.graph.nodes)
    rw.position = {n: i for i, n in enumerate(nodes)}
    for n in nodes:
        if not n.op.startswith("call") or not n.users:
            continue
        try:
            name = rule(rw, n)
        except ValueError as e:  # an operation refuses these shapes or dtypes
            rw.reasons.setdefault(n, " ".join(str(e).split())[:160])
            continue
        if name:
            done.append((name, {where(old) for old in rw.gone()}))
    return done


def _prepare_inductor():
    """Let what is compiled be found again by the next process, as long as this package's text is the same.

    Before torch 2.13 Inductor forms, for a log, the text of all that an operator of ours reads, and of all that this was computed from: for
    a whole model that takes longer than anybody waits.
    """
    import torch._inductor.config as config
    import torch._inductor.exc

    if torch.__version__ < "2.13":
        torch._inductor.exc.OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"target: {target}")
    key = _sources()
    marks = {f"{f.__module__}.{f.__qualname__}": key for f in REFERENCES if getattr(f, "__module__", "").startswith(__package__)}
    config.unsafe_marked_cacheable_functions = {**config.unsafe_marked_cacheable_functions, **marks}


# ---- words -------------------------------------------------------------------------------------------------------------------------------


def _name(n):
    return op(n) or kind(n) or (n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target)))


def _at(place):
    return f" ({os.path.basename(place[0])}:{place[1]})" if place else ""


def _lines(places):
    """ "train.py:43, 84-87" of some places."""
    files = collections.defaultdict(set)
    for place in filter(None, places):
        files[os.path.basename(place[0])].add(place[1])
    return ", ".join(f"{file}:{_ranges(sorted(lines))}" for file, lines in sorted(files.items())) or "?"


def _ranges(numbers):
    runs = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def report(graphs):
    lines = []
    fused, left, reasons = collections.defaultdict(list), collections.defaultdict(list), {}
    for graph in graphs:
        if graph.rejected:
            lines.append(f"Not fused: {graph.rejected}")
        for name, places in graph.fused:
            fused[name].append(places)
        for name, place, reason in graph.left:
            if reason:
                reasons.setdefault((name, reason), []).append(place)
            elif kind_of_left(name):
                left[name].append(place)
    for name, places in fused.items():
        lines.append(f"Fused: {name} × {len(places)} ({_lines(set().union(*places))})")
    for (name, reason), places in reasons.items():
        lines.append(f"Not fused: {name} ({_lines(places)}): {reason}")
    if left:
        lines.append("Left to torch.compile: " + "; ".join(f"{name} ({_lines(places)})" for name, places in sorted(left.items())))
    return lines


def kind_of_left(name):
    """Whether an operation computes: views and parts cost nothing."""
    return name not in ("item", "getitem", "shape", "transpose", "split", "chunk")


fuse = Fusion()


def explain(model, *inputs, **keywords):
    """What `fuse` does with a model that is called with these inputs, as text: what is fused, what is not and why, by line.

    The model is run once, forward, without compiling what comes out; it stays as it was.
    """
    fusion = Fusion(backend="eager")
    torch._dynamo.reset()
    torch.compile(model, backend=fusion, dynamic=False)(*inputs, **keywords)
    return "\n".join(fusion.report())
