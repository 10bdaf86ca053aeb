"""Write the model as one file for ``trust_remote_code``: the very source that trains, joined, without its own imports.

There is no second implementation to keep in step; what is exported is what runs here.
"""

import ast
import importlib
import inspect

MODULES = (  # in the order of who needs whom
    "moe_zoo.spec.errors",
    "moe_zoo.spec.numbers",
    "moe_zoo.spec.attention",
    "moe_zoo.spec.feed_forward",
    "moe_zoo.spec.architecture",
    "moe_zoo.ops.noise",
    "moe_zoo.ops.routing",
    "moe_zoo.ops.experts",
    "moe_zoo.ops.rope",
    "moe_zoo.ops.attention",
    "moe_zoo.ops.relative",
    "moe_zoo.layers.norm",
    "moe_zoo.layers.attention",
    "moe_zoo.layers.latent_attention",
    "moe_zoo.layers.feed_forward",
    "moe_zoo.layers.rows",
    "moe_zoo.layers.router",
    "moe_zoo.layers.experts",
    "moe_zoo.layers.dispatch.local",
    "moe_zoo.layers.moe",
    "moe_zoo.layers.block",
    "moe_zoo.layers.relative",
    "moe_zoo.models.decoder",
    "moe_zoo.models.switch",
    "moe_zoo.models.config",
    "moe_zoo.models.pretrained",
    "moe_zoo.models.causal_lm",
    "moe_zoo.models.seq2seq_lm",
)
HEADER = (
    '"""A moe-zoo model in one file, written by save_pretrained. Apache-2.0, https://github.com/moe-zoo/moe-zoo."""\n'
)


def bundle() -> str:
    """The source of ``modeling_moe_zoo.py``."""
    imports: dict[str, None] = {}
    bodies, names = [], set()
    for module in MODULES:
        source = inspect.getsource(importlib.import_module(module))
        body = _split(source, imports)
        defined = _top_level_names(source)
        assert not names & defined, f"{module} defines {names & defined} again; one file can hold a name once"
        names |= defined
        bodies.append(f"# {'-' * 20} {module}\n\n{body}")
    return "\n\n".join([HEADER, "\n".join(imports), *bodies]) + "\n"


def _split(source: str, imports: dict[str, None]) -> str:
    """Move the imports of others to ``imports``, drop our own and the docstring, return the rest."""
    lines, dropped = source.splitlines(), set()
    for index, node in enumerate(ast.parse(source).body):
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_import and "moe_zoo" not in ast.unparse(node):
            imports[ast.unparse(node)] = None
        if is_import or is_docstring:
            dropped.update(range(node.lineno - 1, node.end_lineno))
    return "\n".join(line for number, line in enumerate(lines) if number not in dropped).strip()


def _top_level_names(source: str) -> set[str]:
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
