"""Mask expressions as text: `causal & window(3) | first(1)`, as a command takes them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from clearhead._core import did_you_mean, type_error, value_error
from clearhead.masks import data, edgewise, ids, positional
from clearhead.masks.algebra import And, Minus, Not, Or
from clearhead.masks.mask import Mask
from clearhead.masks.positional import LARGEST

LEAVES: dict[str, Callable[..., Mask]] = {
    factory.__name__: factory
    for factory in (
        positional.everything,
        positional.nothing,
        positional.causal,
        positional.window,
        positional.chunk,
        positional.band,
        positional.diagonal,
        positional.first,
        positional.prefix,
        data.lengths,
        data.keep,
        ids.document,
        ids.same,
        ids.induction,
        ids.duplicate,
        data.dense,
        edgewise.edges,
    )
}
# Names in other libraries and papers, for hints only.
ALIASES = {
    **dict.fromkeys(("all", "full", "bidirectional", "any", "ones"), "everything()"),
    **dict.fromkeys(("none", "empty", "zeros"), "nothing()"),
    **dict.fromkeys(("tril", "autoregressive", "future", "is_causal"), "causal()"),
    **dict.fromkeys(("sliding", "sliding_window", "local"), "window(n)"),
    **dict.fromkeys(("sinks", "sink", "global"), "first(n)"),
    **dict.fromkeys(("padding", "pad"), "lengths([5, 3]), or keep(real) for padding on any side"),
    **dict.fromkeys(("key_padding", "left_padding", "real"), "keep(real)"),
    **dict.fromkeys(("documents", "packed", "segments"), "document(ids)"),
    **dict.fromkeys(("tensor", "from_tensor", "bool"), "dense(tensor)"),
    **dict.fromkeys(("pairs", "edge", "from_pairs"), "edges([(3, 0)])"),
    "previous": "diagonal(1)",
    "prefix_lm": "causal() | prefix(n)",
}
# How to write calls that are often written differently.
CALLS = {
    "lengths": "lengths([5, 3]), a length for each sample; lengths(5, query=3) empties rows too",
    "edges": "edges([(3, 0), (3, 1)]), pairs of query and source",
}
BARE = ("everything", "nothing", "causal")
# In these, 1 and 0 may stand for True and False.
BOOLS = ("keep", "dense")
SIGNS = {ast.BitAnd: And, ast.BitOr: Or, ast.Sub: Minus}
LONGEST, DEEPEST = 10_000, 100
OPERATORS = "masks compose with & (both), | (either), - (without), ~ (all other edges)"
SHOWN = 72
# The rule of a mask argument, as errors state it.
MAY_ATTEND = "is a Mask or a bool tensor (True = may attend)"


def parse(expression: str) -> Mask:
    """Make a mask from its expression, as `repr` writes it.

    >>> parse("causal & window(3) | first(1)")
    causal(align="end") & window(3, align="end") | first(1)
    >>> parse("lengths([2, 1]) - diagonal(0)").own.batch
    2

    Operators bind as in Python: `~`, then `-`, then `&`, then `|`. `everything`, `nothing` and
    `causal` need no parentheses. Nothing is executed: only the names of masks, numbers, lists,
    True and False are known. A ValueError points at the part that is wrong.
    """
    if not isinstance(expression, str):
        raise type_error("expression", "takes a string", got=type(expression).__name__)
    # Line breaks count as spaces, so that a place in the text is one number.
    text = "".join(" " if sign.isspace() else sign for sign in expression)
    if not text.strip():
        raise value_error("expression", "is empty", hint="for example: causal & window(3)")
    if len(text) > LONGEST:
        raise value_error("expression", f"has at most {LONGEST} characters", got=len(text))
    if hidden := next((sign for sign in text if not sign.isprintable()), None):
        raise _Reader(text).error(f"has the character {hidden!r}", text.index(hidden))
    if number := re.search(r"\d[\d_]{19,}", text):
        raise _Reader(text).error(f"numbers go up to {LARGEST}", *number.span())
    return _Reader(text).read()


def guess(name: str) -> str:
    """Suggest masks for an unknown name; empty where no name is close."""
    if name.lower() in ALIASES:
        return ALIASES[name.lower()]
    import difflib

    return " or ".join(difflib.get_close_matches(name[:40].lower(), LEAVES, n=3, cutoff=0.5))


def no_mask(name: str, given: Any, rule: str = MAY_ATTEND) -> TypeError:
    """Build the TypeError for what is neither a mask nor a tensor, with how to express it."""
    hint = "for example masks.causal(), or a bool tensor with True where a query may attend"
    got = type(given).__name__
    if isinstance(given, str):
        hint = f"masks.parse({given!r}) reads an expression, such as that of masks.causal()"
    elif isinstance(given, list | tuple):
        hint = "masks.edges(pairs) takes (query, source) pairs, masks.dense(rows) rows of bools; "
        hint += "most masks have a name, as masks.causal()"
    elif callable(given):
        got = f"the {got} {getattr(given, '__name__', '')}".rstrip()
        ours = str(getattr(given, "__module__", "")).startswith("clearhead.masks")
        hint = f"add (): masks.{given.__name__}()" if ours else "masks.where takes such functions"
    return type_error(name, rule, got=got, hint=hint)


class _Reader:
    """Reads one expression; errors point into its text."""

    def __init__(self, text: str):
        self.text = text

    def read(self) -> Mask:
        lead = len(self.text) - len(self.text.lstrip())
        try:
            tree = ast.parse(self.text.strip(), mode="eval")
        except SyntaxError as error:
            at = lead + max(error.offset or 1, 1) - 1
            raise self.error(f"cannot be read: {error.msg}", at, hint=OPERATORS) from None
        except (RecursionError, MemoryError):
            raise self.error("is nested too deeply", lead) from None
        self.lead = lead
        return self.mask(tree.body)

    def error(self, problem: str, at: int, stop: int | None = None, hint: str | None = None):
        """Build the ValueError that shows the text with a line of carets under the place."""
        at = min(at, len(self.text))
        start = max(0, min(at - SHOWN // 2, len(self.text) - SHOWN))
        shown = self.text[start : start + SHOWN].rstrip()
        before, after = "… " if start else "", " …" if start + SHOWN < len(self.text) else ""
        room = max(1, len(shown) - (at - start))
        carets = "^" * max(1, min((stop or at + 1) - at, room))
        place = " " * (len(before) + at - start) + carets
        return value_error(
            "expression", f"{problem}\n  {before}{shown}{after}\n  {place}", hint=hint
        )

    def wrong(self, node: ast.AST, problem: str, hint: str | None = None) -> ValueError:
        return self.error(problem, *self.place(node), hint=hint)

    def place(self, node: Any) -> tuple[int, int]:
        # Python counts offsets in bytes of UTF-8.
        coded = self.text.strip().encode()
        start, stop = (
            len(coded[:offset].decode(errors="ignore")) + self.lead
            for offset in (node.col_offset, node.end_col_offset)
        )
        return start, stop

    def mask(self, node: ast.AST, depth: int = 0) -> Mask:
        if depth > DEEPEST:
            raise self.wrong(node, f"is nested more than {DEEPEST} deep")
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            return self.chain(node, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return Not(self.mask(node.operand, depth + 1))
        if isinstance(node, ast.Name):
            return self.leaf(node, node, [], [])
        if isinstance(node, ast.Call):
            return self.leaf(node, node.func, node.args, node.keywords)
        raise self.wrong(node, f"{_kind(node)} is not a mask", hint=_advice(node))

    def chain(self, node: ast.BinOp, depth: int) -> Mask:
        """Read a - b - c from its left end: such a chain is not nested."""
        links: list[ast.BinOp] = []
        first: ast.AST = node
        while isinstance(first, ast.BinOp) and type(first.op) in SIGNS:
            links.append(first)
            first = first.left
        mask = self.mask(first, depth + 1)
        for link in reversed(links):
            mask = self.made(link, SIGNS[type(link.op)], mask, self.mask(link.right, depth + 1))
        return mask

    def leaf(
        self, node: ast.AST, name: ast.AST, given: list[ast.expr], named: list[ast.keyword]
    ) -> Mask:
        if not isinstance(name, ast.Name):
            raise self.wrong(name, "only masks can be called", hint=f"masks: {', '.join(LEAVES)}")
        factory = LEAVES.get(name.id)
        if factory is None:
            raise self.unknown(name)
        call = (
            CALLS.get(name.id) or f"{name.id}({', '.join(inspect.signature(factory).parameters)})"
        )
        if node is name and name.id not in BARE:
            raise self.wrong(node, f"{name.id} takes arguments", hint=f"write {call}")
        bools = name.id in BOOLS
        values = [self.value(each, bools) for each in given]
        options = {str(each.arg): self.option(each, call, factory, bools) for each in named}
        try:
            inspect.signature(factory).bind(*values, **options)
        except TypeError as error:
            raise self.wrong(node, f"{name.id}: {error}", hint=f"write {call}") from None
        return self.made(node, factory, *values, **options)

    def made(self, node: ast.AST, factory: Callable[..., Mask], *given: Any, **named: Any) -> Mask:
        """Call a factory; its errors point at the node."""
        try:
            return factory(*given, **named)
        except (ValueError, TypeError) as error:
            problem, *more = str(error).split("\n")
            hints = [line.split("to do: ")[1] for line in more if "to do: " in line]
            raise self.wrong(node, problem, hint=hints[0] if hints else None) from None

    def unknown(self, name: ast.Name) -> ValueError:
        meant, hint = guess(name.id), None
        if name.id == "where":
            hint = "where(function) takes a Python function, which an expression cannot hold"
        elif not meant:
            hint = f"masks: {', '.join(LEAVES)}"
        problem = f"{_cut(name.id)!r} is not a mask{did_you_mean(meant)}"
        return self.wrong(name, problem, hint=hint)

    def option(
        self, option: ast.keyword, call: str, factory: Callable[..., Mask], bools: bool
    ) -> Any:
        if option.arg not in inspect.signature(factory).parameters:
            name = "**" if option.arg is None else _cut(option.arg)
            raise self.wrong(option, f"{factory.__name__} takes no {name}", hint=f"write {call}")
        value = option.value
        if option.arg == "align" and isinstance(value, ast.Name) and value.id in ("end", "start"):
            # Quotes are awkward inside a shell's quotes.
            return value.id
        return self.value(value, bools)

    def value(self, node: ast.AST, bools: bool, depth: int = 0) -> Any:
        if isinstance(node, ast.List | ast.Tuple) and depth < 4:
            return [self.value(item, bools, depth + 1) for item in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.value(node.operand, False, depth)
            if type(value) is int:
                return -value
        if isinstance(node, ast.Constant):
            value = node.value
            if bools and depth and type(value) is int and value in (0, 1):
                return bool(value)
            if type(value) is int and value > LARGEST:
                raise self.wrong(node, f"numbers go up to {LARGEST}")
            if isinstance(value, bool | int) or value in ("end", "start"):
                return value
        hint = 'numbers, lists, True, False, align="start" and align="end" are known'
        raise self.wrong(node, f"{_kind(node)} is not a value here", hint=hint)


def _kind(node: ast.AST) -> str:
    names = {
        ast.BoolOp: "and/or",
        ast.Compare: "a comparison",
        ast.List: "a list",
        ast.Tuple: "a list",
    }
    if isinstance(node, ast.Constant):
        return _cut(repr(node.value)) if not isinstance(node.value, int) else "a number"
    if isinstance(node, ast.Name):
        return repr(_cut(node.id))
    if isinstance(node, ast.UnaryOp):
        return {ast.Not: "not", ast.USub: "-", ast.UAdd: "+"}.get(type(node.op), "this")
    return names.get(type(node), "this")


def _advice(node: ast.AST) -> str:
    if isinstance(node, ast.BoolOp | ast.UnaryOp):
        return "write & for and, | for or, ~ for not; a - b is a without b"
    if isinstance(node, ast.BinOp):
        return OPERATORS
    return f"masks: {', '.join(LEAVES)}"


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "…"
