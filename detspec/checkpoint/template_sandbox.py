"""jinja2's sandbox for chat templates, which come with checkpoints and may be hostile: their work is counted and bounded.

1. Steps. A pass through the body of a loop, macro or block costs as many as it has nodes. A call, a filter, a test, a list, a
   comparison and a slice cost one more for each value that goes in or comes out.
2. Characters of all texts that are made or read on the way. The text whose method is called counts, and so do all texts inside
   arguments; a filter that hands values on (`WALKING_FILTERS`) does not read what is inside them.

An operation that may make a huge value of small ones (`*`, `**`, `replace`, `join`, widths in formats) is rejected before it
runs. Filters are left out that are slow or give another result each time; no chat template needs them.
"""

import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from detspec.checkpoint.template_limits import (
    CHEAP,
    ENTRIES,
    INTEGER,
    MAX_SOURCE,
    TEXT,
    Allowance,
    Overrun,
    check_format,
    check_result,
    method_cost,
)

MAX_OPTION = 10_000  # widths, precisions and counts that filters take

LEFT_OUT_FILTERS = {"filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"}
LEFT_OUT_METHODS = {"encode", "expandtabs", "maketrans", "striptags", "to_bytes", "translate"}
SHALLOW_FILTERS = {"count", "d", "default", "first", "last", "length"}  # look at no entry, or at one
LISTING_FILTERS = {"batch", "list", "map", "reject", "rejectattr", "select", "selectattr", "slice"}  # list a text's characters
WALKING_FILTERS = {*LISTING_FILTERS, "items", "reverse", "tojson"}  # the last one counts what it writes
NUMERIC = {"divisibleby", "even", "odd", "round"}  # compute with their value, which would repeat or format another one
READING_TESTS = {"lower", "upper", *NUMERIC}
COMPARING_TESTS = {"!=", "<", "<=", "==", ">", ">=", "eq", "ge", "gt", "in", "le", "lt", "ne"}
COMPARING_TESTS |= {"equalto", "greaterthan", "lessthan"}
COUNTING_FILTERS = {"batch", "center", "indent", "round", "slice", "truncate"}


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, whose work is counted and bounded as above."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=self._as_text, **options)
        self.allowance = Allowance()
        kept: dict[str, Any] = {name: fn for name, fn in self.filters.items() if name not in LEFT_OUT_FILTERS}
        kept["tojson"] = self._tojson
        self.filters = {name: self._bounded(name, fn, shallow=name in SHALLOW_FILTERS) for name, fn in kept.items()}
        self.filters |= {"_step": self._step, "_weigh": self.allowance.weigh, "_concat": self._concat_values}
        self.filters["_read"] = functools.partial(self.allowance.weigh, whole=True)
        tests: dict[str, Any] = self.tests
        self.tests = {
            name: self._bounded(name, fn, shallow=name not in COMPARING_TESTS | READING_TESTS) for name, fn in tests.items()
        }
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _Dict()
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise Overrun(f"it has {len(source)} characters, accepted are up to {MAX_SOURCE}")
        return _Counted().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def concat(self, texts: Iterable[str]) -> str:  # type: ignore[override]
        """The parts of one output, joined."""
        parts = []
        size = 0
        for text in texts:
            self.allowance.read(len(text))
            size += len(text)
            TEXT.check(size)
            parts.append(text)
        return "".join(parts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also refuses the methods of texts whose results cannot be bounded by their arguments."""
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str | int) and attr in LEFT_OUT_METHODS)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, its widths and its result bounded."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @functools.wraps(formatted)
        def bounded(*args: Any, **kwargs: Any) -> str:
            self.allowance.weigh((value.__self__, args, kwargs), whole=True)
            check_format(value.__self__.replace("{{", "").replace("}}", ""), "{", (args, kwargs))
            return formatted(*args, **kwargs)

        return bounded

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in a template: of a method, a macro or a global function."""
        receiver = getattr(obj, "__self__", None)
        if isinstance(receiver, str):
            args = tuple(_as_list(arg) for arg in args)
        if receiver is not None:  # a method
            self.allowance.weigh((args, kwargs), whole=True)
        if isinstance(receiver, list | tuple | range):  # it is searched
            self.allowance.weigh(receiver, whole=True)
        if isinstance(receiver, str):
            self.allowance.read(method_cost(obj.__name__, receiver, (*args, *kwargs.values())))
            check_result(obj.__name__, receiver, args)
        return self.allowance.weigh(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+ - * / // % **`."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            INTEGER.check(bits)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, Collection) and isinstance(times, int):
                    (TEXT if isinstance(value, str) else ENTRIES).check(len(value) * times)
        elif operator == "%" and isinstance(left, str):
            self.allowance.weigh((left, right), whole=True)
            check_format(left, "%", right)
        return self.allowance.weigh(super().call_binop(context, operator, left, right))

    def _as_text(self, value: Any) -> str:
        """The text that is written of an expression."""
        self.allowance.weigh(value, whole=True)
        text = str(value)
        self.allowance.read(len(text))
        return text

    def _bounded(self, name: str, fn: Callable[..., Any], *, shallow: bool) -> Callable[..., Any]:
        """The filter or test `fn`, whose result is weighed, and its arguments too unless it is `shallow`."""
        first = 1 if hasattr(fn, "jinja_pass_arg") else 0  # before the value comes the context or the environment

        @functools.wraps(fn)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            args = (*args[:first], *(_as_list(arg) for arg in args[first:]))
            self.allowance.step(2)
            value = args[first] if len(args) > first else None
            options = (*args[first + 1 :], *kwargs.values())
            for arg in () if shallow else (value, *options):
                self.allowance.weigh(arg, whole=name not in WALKING_FILTERS)
            if name in LISTING_FILTERS and isinstance(value, str):
                self.allowance.step(len(value))
            if name in NUMERIC and not isinstance(value, int | float):
                raise Overrun(f"{name} takes a number, got {type(value).__name__}")
            if isinstance(value, Collection) and not isinstance(value, str):  # options may be paths of attributes
                self.allowance.step(
                    len(value) * sum(option.count(".") + option.count(",") for option in options if isinstance(option, str))
                )
            if name in COUNTING_FILTERS and any(isinstance(option, int) and abs(option) > MAX_OPTION for option in options):
                raise Overrun(f"the filter {name} takes numbers up to {MAX_OPTION}")
            if name == "sum" and any(isinstance(option, Collection) and not isinstance(option, str) for option in options):
                raise Overrun("the filter sum adds numbers")
            if name == "format":
                check_format(str(value), "%", options)
            if isinstance(value, str) and name == "trim":
                self.allowance.read(method_cost(name, value, options))
            if isinstance(value, str) and name in ("indent", "replace"):
                check_result(name, value, options)
            if name == "join":
                check_result(name, str(options[0]) if options else "", (value,))
            return self.allowance.weigh(fn(*args, **kwargs))

        return bounded

    def _tojson(self, value: Any, ensure_ascii: bool = False, indent: int | None = None, **layout: Any) -> str:
        """Plain JSON; jinja2's own filter escapes for HTML."""
        if indent is not None and not 0 <= indent <= 16:
            raise Overrun(f"the filter tojson indents by 0 to 16, got {indent!r}")
        parts = []
        for part in json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **layout).iterencode(value):
            self.allowance.read(len(part))
            parts.append(part)
        return "".join(parts)

    def _step(self, count: int) -> None:
        self.allowance.step(max(1, count))

    def _concat_values(self, values: list[Any]) -> str:
        self.allowance.weigh(values)
        for value in values:
            if not isinstance(value, str):
                self.allowance.weigh(value, whole=True)
        text = "".join(map(str, values))
        TEXT.check(len(text))
        self.allowance.read(len(text) // CHEAP)  # a text is made longer piece by piece, and all of it is copied each time
        return text


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`. Python's own class has more: `dict["x"]` is a type, which can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """An object with `keys`, all of one value."""
        return dict.fromkeys(keys, value)

    def __repr__(self) -> str:
        return "<dict>"


class _Namespace(Namespace):
    """`namespace(...)`; its text is short, whatever it holds: namespaces may hold each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _as_list(value: Any) -> Any:
    """A list of what a lazy filter gives, so that it can be weighed; everything else as it is."""
    return list(value) if isinstance(value, Iterator) and not isinstance(value, LoopContext) else value


class _Counted(NodeTransformer):
    """Puts the counting into a syntax tree, as filters of the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count_body(node)
        if node.test is not None:
            node.test = _filtered(node.test, "_weigh")
        return node

    def _count_body(self, node: Any) -> nodes.Node:
        cost = sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        step = nodes.ExprStmt(_filtered(nodes.Const(cost, lineno=node.lineno), "_step"), lineno=node.lineno)
        node.body.insert(0, step)
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_Block = _count_body

    def _weigh_whole(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_weigh")

    visit_List = visit_Dict = _weigh_whole

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._weigh_whole(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int):
            INTEGER.check(node.value.bit_length())
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice):
            return self._weigh_whole(node)
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Const):  # a key is compared
            node.arg = _filtered(node.arg, "_read")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_read")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_read")
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
