"""Syntax trees of chat templates, into which the counting of their work is put."""

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from detspec.checkpoint.template_budget import check_int


def count_work(tree: nodes.Template) -> nodes.Template:
    """Puts the counting into a syntax tree, as filters of `template_sandbox.BoundedEnvironment`."""
    return _Counted().visit(tree)  # type: ignore[no-any-return]


class _Counted(NodeTransformer):
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
            check_int(node.value.bit_length())
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
