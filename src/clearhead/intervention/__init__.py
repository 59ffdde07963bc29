"""Cut attention in a running model, and measure what changes."""

from __future__ import annotations

from clearhead.intervention.comparing import Effect, Effects, effects
from clearhead.intervention.cutting import ablate, head_importance, knockout, zero_weights

__all__ = ["Effect", "Effects", "ablate", "effects", "head_importance", "knockout", "zero_weights"]
