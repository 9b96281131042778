"""TensorBoard: event files in a folder, which ``tensorboard --logdir`` shows.

They are written by the package ``tensorboard`` alone; neither PyTorch nor TensorFlow is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from aiops.trackers import RunMetrics, Tracker


class TensorBoardTracker:
    """Writes a scalar for each number, and the settings as a text."""

    def __init__(self, folder: str, settings: Mapping[str, str]) -> None:
        self._writer = EventFileWriter(folder)
        rows = "".join(f"| {name} | `{value}` |\n" for name, value in settings.items())
        table = f"| setting | |\n|---|---|\n{rows}"
        text = TensorProto(dtype=DT_STRING, string_val=[table.encode()])
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag="settings", tensor=text, metadata=about)
        self._writer.add_event(Event(summary=Summary(value=[value])))

    def on_metrics(self, metrics: RunMetrics) -> None:
        """Write the numbers, and have them on disk."""
        values = [Summary.Value(tag=n, simple_value=v) for n, v in metrics.values.items()]
        summary = Summary(value=values)
        self._writer.add_event(Event(wall_time=metrics.time, step=metrics.step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()


def open_tracker(target: str, settings: Mapping[str, str]) -> Tracker:
    """Begin an event file in the folder ``target``."""
    return TensorBoardTracker(target, settings)
