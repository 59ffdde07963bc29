"""Cut attention in a running model, and measure what changes."""

from __future__ import annotations

from clearhead.intervention.comparison import Effect, Effects, effects
from clearhead.intervention.importance import head_importance
from clearhead.intervention.knockouts import ablate, knockout, zero_weights

__all__ = ["Effect", "Effects", "ablate", "effects", "head_importance", "knockout", "zero_weights"]
