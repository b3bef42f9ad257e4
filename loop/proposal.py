"""Looking at the train.py that is to be tried."""

import ast
import collections
import contextlib
import copy
import functools
import hashlib
import io
import os
import re
import sys
import tokenize
import warnings

from .files import ROOT, Refusal
from .repository import git


@functools.lru_cache(maxsize=4)
def parse(source):
    """The syntax tree of a train.py, not to be changed: a turn looks at two programs several times."""
    try:
        with warnings.catch_warnings(action="ignore") if sys.version_info >= (3, 11) else contextlib.nullcontext():
            compile(source, "train.py", "exec", dont_inherit=True)
            return ast.parse(source)
    except (RecursionError, MemoryError):
        raise Refusal("train.py does not compile: something in it is nested too deeply") from None
    except (SyntaxError, ValueError) as e:
        line = f", line {e.lineno}" if getattr(e, "lineno", None) else ""
        raise Refusal(f"train.py does not compile{line}: {getattr(e, 'msg', e)}") from None


class _WithoutDocstrings(ast.NodeTransformer):
    def visit(self, node):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)


def digest_of(tree):
    """Equal for two programs that differ in nothing that runs: in comments, docstrings and layout alone."""
    return hashlib.sha256(ast.dump(_WithoutDocstrings().visit(copy.deepcopy(tree))).encode()).hexdigest()[:16]


def parts(tree):
    """Name → content of what train.py defines: constants (also in an if), functions, methods."""
    found = {}

    def add(name, node):
        found[name] = found.get(name, "") + ast.dump(node)

    def visit(body, prefix=""):
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")
                add(node.name, ast.Module([*node.bases, *node.decorator_list], []))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                add(prefix + node.name, node)
            elif isinstance(node, ast.If):
                visit(node.body, prefix)
                visit(node.orelse, prefix)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                for target, value in zip(node.targets[0].elts, node.value.elts):
                    add(prefix + ast.unparse(target), value)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                add(prefix + ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target), node)
            elif not isinstance(node, (ast.Import, ast.ImportFrom)):
                add("the rest", node)

    visit(tree.body)
    return found


def changed_names(old, new):
    old, new = parts(old), parts(new)
    return [name for name in {**new, **old} if old.get(name) != new.get(name)] or ["imports"]


FIXED = ("prepare", "harness")


def is_fixed(module):
    return module is not None and module.split(".")[0] in FIXED


def fixed_names(tree):
    """Name → module.name of what a program imports from the fixed modules."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and is_fixed(node.module)]
    return {a.asname or a.name: f"{node.module}.{a.name}" for node in imports for a in node.names}


# What no model needs, and with which a program changes others than itself, by the name of an attribute or a function.
REACHING = {"__globals__", "__code__", "__wrapped__", "__closure__", "__builtins__", "__subclasses__", "_getframe", "currentframe",
            "f_back", "f_globals", "f_locals", "gi_frame", "get_objects", "get_referrers", "__setattr__"}  # fmt: skip
BY_TEXT = {"exec", "eval", "compile"}
OF_OTHERS = {"ctypes", "builtins", "inspect"}  # modules that are for nothing else
SWITCHES = ("torch.backends.", "torch._dynamo.config.", "torch._inductor.config.", "os.environ[")  # what torch has to be set
DATA = {"make_dataloader", "packed_rows", "open_shard", "opened_shard", "evaluate_bpb", "check_model"}
FIXED_RULE = "data, metric, time budget and seed are fixed"
ADVICE = {
    "stores into ": "a program may change itself alone: write a function of your own and call it",
    "reaches ": "a program may change itself alone: write a function of your own and call it",
    "imports by name": "write an import statement, so that what is tried can be read",
    "runs code from text": "write the code itself, so that what is tried can be read",
    "asks for the validation text": "a model is trained on the training text, which run() hands it",
    "reads the data by ": "run() hands the model its batches, and times them: change the model, the optimizer or the schedule",
}


def _root(node):
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node


def imported_modules(tree):
    """Name → module for the modules, and what is taken out of modules, that a program imports; its own files aside."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {name: module for name, module in found.items() if not is_fixed(module)}


def of_a_module(function, tree):
    """Whether what is called is a module's own function, or taken out of one, and no object's."""
    root = _root(function)
    return isinstance(root, ast.Name) and root.id in imported_modules(tree)


def reaching(tree):
    """[(what, line)]: where train.py reaches for what is not its own: other modules, frames and code, the validation text."""
    modules, found = imported_modules(tree), []

    def stored(target, line):
        root, text = _root(target), ast.unparse(target)
        if isinstance(root, ast.Name) and root.id in modules:
            path = modules[root.id] + text[len(root.id) :]
            if not path.startswith(SWITCHES):
                found.append((f"stores into {path}", line))
        elif isinstance(root, ast.Call) and getattr(root.func, "id", "") in ("globals", "vars", "locals"):
            found.append((f"stores into {text}", line))

    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            stored(node, line)
        if isinstance(node, ast.Attribute) and node.attr in REACHING:
            found.append((f"reaches {node.attr}", line))
        elif isinstance(node, ast.Name) and node.id in ("__builtins__", *OF_OTHERS & set(modules)):
            found.append((f"reaches {node.id}", line))
        elif isinstance(node, ast.Call):
            named = node.func.id if isinstance(node.func, ast.Name) else ""
            called = node.func.attr if isinstance(node.func, ast.Attribute) else named
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            if called in ("__import__", "import_module"):
                found.append(("imports by name", line))
            elif named in BY_TEXT - set(modules):
                found.append(("runs code from text", line))
            elif named in ("setattr", "delattr") and node.args and isinstance(_root(node.args[0]), (ast.Name, ast.Call)):
                root = _root(node.args[0])
                if isinstance(root, ast.Call) or root.id in modules:
                    found.append((f"stores into {ast.unparse(node.args[0])}", line))
            if any(isinstance(value, ast.Constant) and value.value == "val" for value in values):
                found.append(("asks for the validation text", line))
            if called in DATA:
                found.append((f"reads the data by {called}", line))
    return found


def meddling(tree, base=None):
    """[(what, line)]: where train.py changes what is fixed: the modules beside it, what it or `base` imports from them, the seed."""
    modules, names, found = {}, (fixed_names(base) if base else {}) | fixed_names(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names if is_fixed(a.name)
            }
        elif isinstance(node, ast.ImportFrom) and is_fixed(node.module) and any(a.name == "*" for a in node.names):
            found.append((f"imports * from {node.module}", node.lineno))  # then what it changes can't be told
    read_from = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}  # prepare in prepare.x
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            root = node
            while isinstance(root, (ast.Attribute, ast.Subscript)):
                root = root.value
            if isinstance(root, ast.Name) and root.id in {**names, **modules}:
                found.append((f"changes {names.get(root.id) or modules[root.id]}{ast.unparse(node)[len(root.id) :]}", line))
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node.id in {**names, **modules}:
            found.append((f"changes {names.get(node.id) or modules[node.id]}", line))
        elif isinstance(node, ast.Name) and node.id in modules and node not in read_from:
            found.append((f"hands on {modules[node.id]}", line))  # to setattr, vars or another name, where what it changes can't be told
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names:
            found.append((f"replaces {names[node.name]}", line))
        elif isinstance(node, ast.arg) and node.arg in names:
            found.append((f"hides {names[node.arg]}", line))
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("manual_seed", "manual_seed_all") and of_a_module(node.func, tree):  # a torch.Generator of one's own has its own
                found.append(("sets a seed", line))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
            found.append(("uses sys.modules", line))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch("AUTORESEARCH_[A-Z_]+", node.value):
            found.append((f"uses {node.value}", line))
    return found + reaching(tree)


def check_program(tree, base, tip):
    """Refuse a train.py that changes what is fixed, or needs a file that is not on the branch."""
    allowed = collections.Counter(what for what, _ in meddling(base))
    for what, line in meddling(tree, base):
        allowed[what] -= 1
        if allowed[what] < 0:
            advice = next((advice for start, advice in ADVICE.items() if what.startswith(start)), FIXED_RULE)
            raise Refusal(f"train.py, line {line}, {what}: {advice}")
    imported = {a.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    for name in sorted(imported):
        for path in (f"{name}.py", name):
            if os.path.exists(os.path.join(ROOT, path)) and not git("ls-tree", "--name-only", tip, path):
                raise Refusal(f"train.py imports {path}, which is not on the branch: only train.py may change, so write it there")


def code_size(source):
    """Words and signs of code in a program, comments left out."""
    leave_out = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return sum(t.type not in leave_out for t in tokenize.tokenize(io.BytesIO(source).readline))


def clean(description):
    """One line without tabs, of a length that a table bears."""
    text = " ".join("".join(c if c.isprintable() else " " for c in description).split())
    if not text:
        raise Refusal('say what is tried: experiment.py try "lower embedding rate"')
    if text.startswith(("noise:", "pruned:", "invalid:")):
        raise Refusal(f"a description can't begin with {text.split(':')[0]}: which the ledger uses itself")
    return text[:200]
