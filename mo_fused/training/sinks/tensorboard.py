"""TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mo_fused.training.sinks.base import Sink, histograms, imported, parameter_scalars, scalars


class TensorBoard(Sink):
    """Writes event files with ``torch.utils.tensorboard``: a chart for each number, histograms, events as text.

    Histograms are of magnitudes, and TensorBoard is told the middle of each bin as its elements' value.

    Args:
        folder: for the event files; ``tensorboard --logdir`` of it, or of its parent, shows them.
        **options: of ``SummaryWriter``.

    Raises:
        InputError: the package tensorboard is missing.
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        imported("tensorboard", "tensorboard", "TensorBoard")
        writer = imported("torch.utils.tensorboard", "tensorboard", "TensorBoard").SummaryWriter
        self._summary = imported("tensorboard.compat.proto.summary_pb2", "tensorboard", "TensorBoard").Summary
        self._writer: Any = writer(str(folder), **{"flush_secs": 5, **options})

    def write(self, record: dict[str, Any]) -> None:
        """The record's numbers."""
        self._add(scalars(record), record["step"])

    def detail(self, record: dict[str, Any]) -> None:
        """Norms by parameter, and histograms."""
        step = record["step"]
        self._add(parameter_scalars(record), step)
        for tag, counts, edges in histograms(record):
            middles = [(low + high) / 2 for low, high in zip(edges, edges[1:])]
            middles[-1] = edges[-2]  # which stands for all that is larger
            filled = [n for n, count in enumerate(counts) if count]
            self._writer.add_histogram_raw(
                tag,
                min=edges[filled[0]] if filled else 0.0,
                max=middles[filled[-1]] if filled else 0.0,
                num=sum(counts),
                sum=sum(count * middle for count, middle in zip(counts, middles)),
                sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles)),
                bucket_limits=edges[1:],
                bucket_counts=counts,
                global_step=step,
            )

    def event(self, event: dict[str, Any]) -> None:
        """Text, under the watcher's name."""
        self._writer.add_text(f"events/{event['watcher']}", event["message"], event["step"])

    def flush(self) -> None:
        """What is queued goes into the file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, values: dict[str, float], step: int) -> None:
        """All in one entry: add_scalar takes 30 microseconds for each."""
        entries = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.file_writer.add_summary(self._summary(value=entries), step)
