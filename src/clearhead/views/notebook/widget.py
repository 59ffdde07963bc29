"""The page as a notebook's widget, which asks the kernel for what is looked at."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

from clearhead.views import page

__all__ = ["in_kernel", "widget_of"]

VIEW = "application/vnd.jupyter.widget-view+json"


def in_kernel() -> bool:
    """Whether widgets can be shown: this is the kernel of a notebook, and has anywidget."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel") and find_spec("anywidget") is not None


def widget_of(content: Any) -> Any:
    """Make the widget of a page's header and chunks; a chunk is made when it is asked for."""
    if find_spec("anywidget") is None:
        raise ImportError('widgets need anywidget: pip install "clearhead[notebook]"')
    return _widget_class()(content)


@cache
def _widget_class() -> Any:
    import anywidget
    import traitlets

    class PageWidget(anywidget.AnyWidget):
        """Answers the messages of the page: {chunk: name, id: number}."""

        _esm = page.bundle("widget")
        header = traitlets.Dict().tag(sync=True)

        def __init__(self, content: Any) -> None:
            super().__init__(header=_encodable(content.header))
            self._content = content
            self.on_msg(self._answer)

        def _answer(self, _: Any, asked: Any, buffers: Any) -> None:
            try:
                data = self._content.chunk(str(asked["chunk"]))
            except Exception as error:
                self.send({"id": asked.get("id"), "error": f"{type(error).__name__}: {error}"})
            else:
                self.send({"id": asked["id"]}, buffers=[data])

    return PageWidget


def _encodable(value: Any) -> Any:
    """Lone surrogates, which UTF-8 cannot carry to the browser, written as their code points."""
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", lambda match: f"<U+{ord(match[0]):04X}>", value)
    if isinstance(value, dict):
        return {key: _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, (list, tuple)) else value
