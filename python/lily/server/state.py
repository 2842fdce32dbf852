"""What the routes of one server share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lily.sampling import Sampling
from lily.server.metrics import Metrics
from lily.server.settings import Settings
from lily.server.work import Crew

if TYPE_CHECKING:
    from lily.model import Model


class State:
    """One model, what runs on it, and what was counted.

    Attributes:
        sampling: how tokens are drawn where a request says nothing.

    Raises:
        ValueError: a default of sampling is unknown or out of range.
    """

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self.sampling: Sampling = model.sampling.merged(settings.sampling)
        self.metrics = Metrics()
        self.crew = Crew(settings.parallel, settings.queue, self.metrics)
