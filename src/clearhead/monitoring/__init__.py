"""Every head of a model at every training step, as one small tensor a step.

>>> import torch, clearhead as ch
>>> model = ch.models.GPT(50, layers=2, heads=2, width=32, length=16)
>>> with ch.monitor(model) as seen:
...     _ = model(torch.randint(50, (3, 7)))
>>> [(row["layer"], row["head"], row["rows"]) for row in seen.table()]
[(0, 0, 21), (0, 1, 21), (1, 0, 21), (1, 1, 21)]
"""

from __future__ import annotations

from clearhead.monitoring.alarms import PATIENCE, THRESHOLDS, Alarm
from clearhead.monitoring.attaching import Monitor, monitor
from clearhead.monitoring.statistics import STATISTICS
from clearhead.monitoring.trainings import recorded

__all__ = ["PATIENCE", "STATISTICS", "THRESHOLDS", "Alarm", "Monitor", "monitor", "recorded"]
