"""What was loaded, and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lily.config import Config
from lily.html import table_html
from lily.loading import Kv, Precision
from lily.memory import MemoryPlan, in_columns
from lily.sampling import Sampling


@dataclass(frozen=True)
class ModelInfo:
    """What was loaded, and how.

    Attributes:
        source: as it was asked for.
        folder: where the files are.
        revision: commit of a hub checkpoint.
        form: "mlx" or "published".
        n_parameters: weights of the text model.
        config: dimensions.
        device: what runs it.
        precision, kv: element types of activations and of the KV cache.
        context: tokens of a session that asks for no other number.
        memory: bytes taken.
        sampling: the defaults, as the checkpoint recommends them.
        stop_ids: ids that end a text.
        load_s: seconds that loading took.
        ablated: techniques that its plans leave out.
        weights_id: hash that tells these weights from others.
    """

    source: str
    folder: Path
    revision: str | None
    form: str
    n_parameters: int
    config: Config
    device: str
    precision: Precision
    kv: Kv
    context: int
    memory: MemoryPlan
    sampling: Sampling
    stop_ids: tuple[int, ...]
    load_s: float
    ablated: tuple[str, ...] = ()
    weights_id: str = ""

    def _rows(self) -> list[tuple[str, str]]:
        c = self.config
        n_full = c.layer_types.count("full_attention")
        return [
            ("model", self.source + (f" @ {self.revision}" if self.revision else "")),
            ("form", f"{self.form}, {self._size} parameters"),
            (
                "layers",
                f"{c.num_hidden_layers}: {c.num_hidden_layers - n_full} delta net,"
                f" {n_full} attention",
            ),
            ("experts", f"{c.num_experts_per_tok} of {c.num_experts}, and a shared one"),
            ("device", self.device),
            ("precision", f"{self.precision}, kv cache {self.kv}"),
            ("context", f"{self.context:,} tokens"),
            *self.memory._rows(),
        ]

    @property
    def _size(self) -> str:
        n = self.n_parameters
        return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"

    def __str__(self) -> str:
        return in_columns(self._rows())

    def __repr__(self) -> str:
        return (
            f"ModelInfo({self.source!r}, {self.form}, {self._size} parameters,"
            f" {self.device}, {self.precision}, context {self.context:,})"
        )

    def _repr_html_(self) -> str:
        return table_html(self._rows())
