"""Writes docs/api before the pages are read: every public name of every module, from its declaration.

An op's entry is its signature and docstring, what its declaration says (dims, dtypes, autocast, sharding rule, what
backward keeps, the in-place and method forms) and the page of PaddlePaddle's documentation about the same name; the
commands come from the command line's own parser, the settings from the models that check them.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent
API = DOCS / "api"
WIDE = 70  # names; a namespace with more is cut into pages by where its names are declared
OURS = {
    "polyreme.models": "Model families",
    "polyreme.generation": "Writing with decoders",
    "polyreme.trainer": "Fine-tuning from Python",
    "polyreme.mesh": "Meshes, plans and schedules",
    "polyreme.planner": "The planner's arithmetic",
    "polyreme.export": "Artefacts",
    "polyreme.compression": "Compression of decoders",
    "polyreme.evaluation": "Evaluation of decoders",
    "polyreme.distributed.pipeline": "Pipelines",
    "polyreme.distributed.protein_folding": "Branches over devices",
    "polyreme.errors": "Error classes",
}
"""Public modules that PaddlePaddle has no counterpart of."""
SECTIONS = {
    "Tensors and math": "paddle paddle.Tensor paddle.linalg paddle.fft paddle.signal paddle.special paddle.random "
    "paddle.functional paddle.sparse paddle.sparse.nn paddle.sparse.nn.functional paddle.geometric "
    "paddle.distribution",
    "Layers, training and derivatives": "paddle.nn paddle.nn.functional paddle.nn.initializer paddle.nn.utils "
    "paddle.nn.attention paddle.nn.quant paddle.optimizer paddle.optimizer.lr paddle.regularizer paddle.amp "
    "paddle.autograd paddle.metric paddle.callbacks paddle.io paddle.quantization paddle.quantization.observers "
    "paddle.quantization.quanters polyreme.trainer",
    "Programs and deployment": "paddle.jit paddle.static paddle.static.nn paddle.inference polyreme.export",
    "Many devices": "paddle.distributed polyreme.mesh polyreme.planner polyreme.distributed.pipeline "
    "polyreme.distributed.protein_folding",
    "Models and fields": "polyreme.models polyreme.generation polyreme.compression polyreme.evaluation "
    "paddle.vision paddle.audio paddle.text",
}
"""Heading -> modules; a module belongs where the longest of these names begins its own, else to the last section."""
REST = "Incubating, compatible and small modules"

_ESCAPED = re.compile(r"([\\*_<>\[\]|$#{}~])")


def prose(text):
    """Docstring text as Markdown: what is code stays, the rest shows as it is written."""
    parts, code = [], []

    def flush():
        if code:
            parts.extend(["```pycon", *inspect.cleandoc("\n".join(code)).splitlines(), "```"])
            code.clear()

    for line in text.splitlines():
        if line.lstrip().startswith(">>>") or (code and line.strip()):
            code.append(line)
            continue
        flush()
        if line.startswith("    "):
            parts.append(line)
            continue
        pieces = re.split(r"(`+[^`]+`+)", line)
        parts.append("".join(p if p.startswith("`") else _ESCAPED.sub(r"\\\1", p) for p in pieces))
    flush()
    return "\n".join(parts)


def first_sentence(value):
    """What a name is, in a line; nothing for what has no docstring of its own."""
    doc = docstring(value)
    return " ".join(doc.split("\n\n")[0].split())


def docstring(value):
    """The docstring of a function or class, not that of a value's class."""
    if not (inspect.isclass(value) or inspect.isroutine(value) or hasattr(value, "op")):
        return ""
    if inspect.isclass(value) and "__doc__" not in vars(value):
        return ""
    return inspect.getdoc(value) or ""


def _default(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, tuple) and all(isinstance(v, (int, float, str)) for v in value):
        return repr(value)
    name = getattr(value, "__name__", "")
    return name if name.isidentifier() else "..."


def signature(value):
    """A signature with readable types and defaults; empty for what has none."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters, star = [], False
    for p in found.parameters.values():
        shown = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        if p.kind is p.KEYWORD_ONLY and not star:
            parameters.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        annotation = _annotation(p.annotation)
        shown += f": {annotation}" if annotation else ""
        if p.default is not p.empty:
            shown += (" = " if annotation else "=") + _default(p.default)
        parameters.append(shown)
    result = _annotation(found.return_annotation)
    return f"({', '.join(parameters)})" + (f" -> {result}" if result else "")


def _annotation(annotation):
    """An annotation as users read it: an array in an op's declaration is a Tensor where it is called."""
    if annotation is inspect.Signature.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\w+\[Array, *(['\"]).*?\1\]", "Array", text)
    text = re.sub(r"\b(?:polyreme|typing|collections\.abc|numpy)(?:\.\w+)*\.(\w+)", r"\1", text)
    text = re.sub(r"\b(jax\.)?Array\b|\b(Any)?Tensor\b", "paddle.Tensor", text)
    if text == "Any" or not _parses(text):
        return ""
    return text


def _parses(text):
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return "<" not in text


AUTOCAST = {
    "low": "computed in 16 bits",
    "fp32": "computed in float32",
    "widest": "in the widest dtype of its inputs",
}


def facts(value, gradient):
    """(what, how) pairs that an op's declaration says."""
    op = getattr(value, "op", None)
    if op is None:
        return (
            [("Made of", "other ops; its parts follow their own declarations")] if hasattr(value, "composite") else []
        )
    rows = []
    for name in op.names:
        dims, dtypes = op.dims.get(name), op.dtypes.get(name)
        if dims or dtypes:
            rows.append((f"`{name}`", " of ".join(filter(None, [f"`[{dims}]`" if dims else "", _listed(dtypes)]))))
    lists = [n for n, kind in zip(op.names, op.kinds, strict=True) if kind == "tensors"]
    rows += [(f"`{name}`", "a list of Tensors") for name in lists]
    rows.append(("Under autocast", AUTOCAST[op.amp]))
    if op.name in gradient:
        rows.append(("Gradient", gradient[op.name]))
    elif op.saves:
        rows.append(("Gradient", "any order; the forward pass keeps what backward needs"))
    else:
        rows.append(("Gradient", "any order; backward computes again what it needs of the forward pass"))
    rule = op.declared_rule
    if isinstance(rule, str):
        rows.append(("Over a mesh", f"`{rule}`"))
    elif rule is not None:
        family = rule.__qualname__.partition(".")[0]
        rows.append(("Over a mesh", "by a rule of its own" if family.startswith("_") else f"by `{family}`"))
    else:
        rows.append(("Over a mesh", "by the primitives that it is made of"))
    forms = [f"`Tensor.{op.name}`"] if op.method else []
    forms += [f"`{op.name}_`, in place"] if op.inplace else []
    if forms:
        rows.append(("Also as", ", ".join(forms)))
    errors = []
    if op.dims:
        errors.append("ShapeError where dims of one name differ")
    if op.dtypes:
        errors.append("DTypeError for a dtype that is not listed")
    if errors:
        rows.append(("Errors", "; ".join(errors)))
    return rows


def _listed(dtypes):
    return ", ".join(dtypes) if dtypes and len(dtypes) <= 8 else ""


def paddle_page(full):
    """The page of PaddlePaddle's documentation about a name of its API."""
    path = full.replace(".", "/")
    return f"[{path}](https://www.paddlepaddle.org.cn/documentation/docs/en/api/{path}_en.html)"


class Reference:
    """The names, and where each is described: a name that is another's second one points there."""

    def __init__(self):
        import polyreme
        from polyreme.conformance.rows import ROWS
        from polyreme.core.op import OPS
        from tools import write_api_coverage as coverage

        polyreme.to_tensor  # noqa: B018  loads the root
        self.coverage, self.ops = coverage, OPS
        self.gradient = {}
        for row in ROWS:
            self.gradient.setdefault(row.name, []).append(row.no_grad)
        # none where no row of the contract table has one
        self.gradient = {
            name: f"none: {reasons[0]}" for name, reasons in self.gradient.items() if reasons and all(reasons)
        }
        self.modules = {}
        for module, listed in coverage.names().items():
            there = {name: coverage.found(module, name) for name in listed}
            self.modules[module] = {n: v for n, v in there.items() if v is not None}
        for module in OURS:
            loaded = importlib.import_module(module)
            public = getattr(loaded, "__all__", None) or [
                n for n, v in vars(loaded).items() if not n.startswith("_") and getattr(v, "__module__", "") == module
            ]
            self.modules[module] = {n: getattr(loaded, n) for n in public if not inspect.ismodule(getattr(loaded, n))}
        self.modules = {m: names for m, names in self.modules.items() if names}
        self.home = {}
        for module, names in sorted(self.modules.items(), key=lambda item: item[0] == "paddle.Tensor"):
            for name, value in names.items():
                if inspect.isclass(value) or inspect.isroutine(value) or hasattr(value, "op"):
                    self.home.setdefault(id(value), f"{module}.{name}")

    def page_of(self, module, value):
        """The part of a wide namespace that a name is described in."""
        where = getattr(value, "__module__", None) or ""
        return where.removeprefix("polyreme.").rpartition(".")[2] if where.startswith("polyreme.") else ""

    def entry(self, module, name, value):
        """Lines about one name."""
        full = f"{module}.{name}"
        home = self.home.get(id(value), full)
        if home != full:
            return [f"````{{py:data}} {full}", f"The same as {{py:obj}}`{home}`.", "````", ""]
        if inspect.isclass(value):
            head, kind = f"{full}{signature(value).partition(' -> ')[0]}", "py:class"
        elif inspect.isroutine(value) or hasattr(value, "op"):
            head, kind = f"{full}{signature(value)}", "py:function"
        else:
            shown = repr(value)
            shown = shown if len(shown) < 60 and " at 0x" not in shown and "\n" not in shown else type(value).__name__
            return [f"````{{py:data}} {full}", f"`{shown}`", "````", ""]
        lines = [f"``````{{{kind}}} {head}", prose(docstring(value)), ""]
        # an in-place form is described by the function that it is a form of
        rows = [] if name.endswith("_") and name[:-1] in self.modules[module] else facts(value, self.gradient)
        theirs = self.coverage.names().get(module, {})
        if name in theirs:
            rows.append(("PaddlePaddle", paddle_page(full) + self._difference(module, name, theirs[name])))
        if inspect.isclass(value):
            lines += self.methods(value)
        if rows:
            lines += ["", *(f":{what.replace('`', '')}: {how}" for what, how in rows)]
        return [*lines, "``````", ""]

    def _difference(self, module, name, parameters):
        what = self.coverage.differences(module, name, parameters)
        if not what:
            return ""
        kind = self.coverage.reason(f"{module}.{name}", self.coverage.KINDS[2:]) or ("", "")
        return f"; here {', '.join(what)}" + (f": {kind[1]}" if kind[1] else "")

    def methods(self, value):
        """A table of the methods that a class adds to its bases."""
        rows = []
        for name, member in sorted(vars(value).items()):
            call = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if isinstance(member, property):
                call = member.fget
            doc = inspect.getdoc(call) if inspect.isfunction(call) else None
            if name.startswith("_") or not doc:
                continue
            shown = name if isinstance(member, property) else name + "()"
            rows.append(f"| `{shown}` | {prose(' '.join(doc.split(chr(10) * 2)[0].split()))} |")
        return ["", "| | |", "|---|---|", *rows, ""] if rows else []

    def pages(self):
        """Name of each page -> its text; those of a section begin with the section's list."""
        texts = {}
        for module, names in self.modules.items():
            described = OURS.get(module)
            about = first_paragraph(module)
            title = f"# {module}" + (f": {described[0].lower()}{described[1:]}" if described else "")
            lines = [title, "", *([prose(about), ""] if about else [])]
            if module.startswith("paddle"):
                lines += [f"`import polyreme as paddle`; {len(names)} names.", ""]
            groups = {}
            for name, value in sorted(names.items(), key=lambda item: item[0].lower()):
                groups.setdefault(self.page_of(module, value) if len(names) > WIDE else "", []).append((name, value))
            if len(groups) > 1:
                small = [g for g, entries in groups.items() if len(entries) < 4 and g]
                for group in small:
                    groups.setdefault("", []).extend(groups.pop(group))
                links = {g: f"{module}/{g or 'others'}" for g in sorted(groups, key=lambda g: (not g, g))}
                lines += ["| page | names |", "|---|---|"]
                for group, page in links.items():
                    listed = ", ".join(f"{{py:obj}}`{n} <{module}.{n}>`" for n, _ in sorted(groups[group]))
                    lines.append(f"| [{group or 'others'}]({page}.md) | {listed} |")
                    said = first_paragraph(groups[group][0][1].__module__) if group else ""
                    lead = [f"# {module}: {group or 'others'}", "", prose(said), ""]
                    texts[page] = "\n".join([*lead, *self.entries(module, sorted(groups[group]))])
                lines += ["", "```{toctree}", ":hidden:", "", *links.values(), "```", ""]
            else:
                lines += self.entries(module, groups.popitem()[1])
            texts[module] = "\n".join(lines)
        return texts

    def entries(self, module, names):
        """Lines about names, those of Tensor's methods that are ops as one table."""
        lines = []
        for name, value in names:
            lines += self.entry(module, name, value)
        return lines

    def sections(self):
        """Heading -> modules, in the order of SECTIONS."""
        owner = {m: heading for heading, modules in SECTIONS.items() for m in modules.split()}
        placed = {heading: [] for heading in [*SECTIONS, REST]}
        for module in self.modules:
            best = max((m for m in owner if f"{module}.".startswith(f"{m}.") and m != "paddle"), key=len, default=None)
            best = "paddle" if module == "paddle" else best
            placed[owner[best] if best else REST].append(module)
        rank = {m: i for i, m in enumerate(owner)}
        return {h: sorted(ms, key=lambda m: (rank.get(m, len(rank)), m)) for h, ms in placed.items()}


def first_paragraph(module):
    """What a module's docstring says first."""
    name = module.replace("paddle", "polyreme", 1)
    try:
        loaded = importlib.import_module(name)
    except ModuleNotFoundError:
        return ""
    said = " ".join((inspect.getdoc(loaded) or "").split("\n\n")[0].split()).removeprefix(f"{name}: ")
    return said[:1].upper() + said[1:]


def commands():
    """The page about the command line, of its parser."""
    import typer

    from polyreme.cli.main import app

    lines = [
        "# Commands",
        "",
        "`polyreme COMMAND --help` says the same. Exit codes: "
        "2 for a setting, 3 for data, 4 for a checkpoint, 1 for the rest.",
        "",
    ]

    def describe(command, path, depth):
        if hasattr(command, "commands"):
            if path != "polyreme":
                lines.extend([f"## {path}", "", prose(command.help or ""), ""])
            for name, below in command.commands.items():
                if not below.hidden:
                    describe(below, f"{path} {name}", depth + 1)
            return
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
        usage = " ".join(
            [path, *(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments), "[OPTIONS]"]
        )
        lines.extend([f"{'#' * (depth + 1)} {path}", "", "```text", usage, "```", "", prose(command.help or ""), ""])
        if options:
            lines.extend(["| option | default | |", "|---|---|---|"])
            for p in options:
                default = "" if p.default in (None, False, ()) or callable(p.default) else f"`{p.default}`"
                names = ", ".join(f"`{o}`" for o in [*p.opts, *p.secondary_opts])
                lines.append(f"| {names} | {default} | {prose(p.help or '')} |")
            lines.append("")

    describe(typer.main.get_command(app), "polyreme", 0)
    return "\n".join(lines)


def settings():
    """The page about configurations, of the models that check them."""
    from polyreme.recipes.config import PretrainConfig
    from polyreme.recipes.finetune_config import FinetuneConfig

    lines = [
        "# Settings",
        "",
        "What a configuration for `polyreme pretrain` or `finetune` may say, and what holds "
        "where it says nothing. `--dry-run` prints the settings of a run with where each came from; any of them "
        "may be given on the command line: `train.steps=100`.",
        "",
    ]
    for command, model in (("pretrain", PretrainConfig), ("finetune", FinetuneConfig)):
        lines += [f"## {command}", ""]
        plain = {n: f for n, f in model.model_fields.items() if not hasattr(f.annotation, "model_fields")}
        sections = {n: f for n, f in model.model_fields.items() if n not in plain}
        lines += _table(plain)
        for name, field in sections.items():
            lines += [f"### {command}: {name}", "", prose(inspect.getdoc(field.annotation) or ""), ""]
            lines += _table(field.annotation.model_fields)
    return "\n".join(lines)


def _table(fields):
    lines = ["| setting | type | default | |", "|---|---|---|---|"]
    for name, field in fields.items():
        kind = _annotation(field.annotation) or getattr(field.annotation, "__name__", "")
        bounds = [str(m) for m in field.metadata if type(m).__name__ in ("Ge", "Gt", "Le", "Lt")]
        kind = " ".join([f"`{kind}`" if kind else "", *(re.sub(r"(\w)\w*\((\w+)=(.*)\)", _bound, b) for b in bounds)])
        default = "" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        default = default if len(default) < 60 else "see its parts"
        cells = [f"`{name}`", kind, default, prose(field.description or "")]
        lines.append("| " + " | ".join(c.replace("\n", " ").replace("|", "\\|") for c in cells) + " |")
    return [*lines, ""]


def _bound(match):
    sign = {"ge": "at least", "gt": "over", "le": "at most", "lt": "below"}[match[2]]
    return f"{sign} {match[3]}"


def write(app):
    """Write all pages, touching those only whose text changed, so that the next build reads little."""
    reference = Reference()
    texts = reference.pages() | {"commands": commands(), "settings": settings()}
    index = "By module; the search field finds single names, and so does {ref}`the index of names <genindex>`."
    lines = ["# Every public name", "", index, ""]
    for heading, modules in reference.sections().items():
        lines += [f"## {heading}", "", "| module | |", "|---|---|"]
        for module in modules:
            about = OURS.get(module) or first_paragraph(module)
            lines.append(f"| [{module}]({module}.md) | {prose(about)} |")
        lines += ["", "```{toctree}", ":hidden:", "", *modules, "```", ""]
    texts["index"] = "\n".join(lines)
    for page in {p.relative_to(API).with_suffix("") for p in API.rglob("*.md")} if API.exists() else ():
        if str(page) not in texts:
            API.joinpath(f"{page}.md").unlink()
    for page, text in texts.items():
        path = API / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app):
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
