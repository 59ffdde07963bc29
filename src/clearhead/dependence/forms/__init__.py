"""The forms of an audit beside the plain one."""

from __future__ import annotations

__all__ = []
