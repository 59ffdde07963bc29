"""The modules of a model while it runs: which one makes a call, and what is known of it."""

from __future__ import annotations

from clearhead._capture.modules.inventory import Inventory
from clearhead._capture.modules.mixers import moves_positions
from clearhead._capture.modules.sites import Sites
from clearhead._capture.modules.stack import Modules

__all__ = ["Inventory", "Modules", "Sites", "moves_positions"]
