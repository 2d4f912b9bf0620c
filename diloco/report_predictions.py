"""What a measured run would do on links of other speeds: the columns ``predicted_...`` and the curves over bandwidth."""

from collections.abc import Sequence
from dataclasses import replace

from diloco.link_model import GRADIENT_BYTES, Link, Pace, Prediction, RoundLoad, data_parallel, predict
from diloco.report_measures import DATA_PARALLEL, Measures
from diloco.reduction import num_chunks
from diloco.sweep_cells import SEED
from islands.config import OUTER_SECTIONS

#: Of the columns: bandwidth by the name that it has in them, at one round-trip time.
BANDWIDTHS = {"10mbit": 10e6, "100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9}
RTT_SECONDS = 0.08
RTT_LABEL = "80 ms"
#: Of the curves.
CURVE_BANDWIDTHS = [10 ** (7 + step / 12) for step in range(37)]  # 10 Mbit/s to 10 Gbit/s


#: Seconds that a prediction begins with, and the columns in which runs have to be alike to take as long for them; beside those of
#: swept keys that say what an island computes in a step, whatever they are.
_SECONDS = {
    "step_seconds": ("global_batch_size",),
    "encode_seconds": ("codec", "fragments", "outer.error_feedback"),
    "decode_seconds": ("codec", "fragments", "islands"),
    "outer_step_seconds": ("fragments", "outer.optimizer.type"),
    "copy_seconds": ("fragments",),
}
_MODEL = ("kind", "parameters", "seq_len")
_CODEC = "outer.codec."


def prediction(row: Measures, link: Link) -> Prediction | None:
    """Of the run that ``row`` measured, its islands (or replicas) one behind each such link; None where too little is known of it."""
    seconds = {key: row.get(f"least_{key}") for key in _SECONDS}
    if not seconds["step_seconds"] or not row.get("parameters") or (row.get("islands") or 0) < 2:
        return None
    if row["kind"] == DATA_PARALLEL:
        return data_parallel(link, row["islands"], GRADIENT_BYTES * row["parameters"], row["replica_step_seconds"])
    if None in seconds.values() or row.get("bytes_each_way_per_round") is None or not isinstance(row.get("sync_every"), int):
        return None
    load = RoundLoad(
        row["islands"],
        row["bytes_each_way_per_round"],
        seconds["encode_seconds"],
        seconds["decode_seconds"],
        seconds["outer_step_seconds"],
        chunks=num_chunks(-(-row["parameters"] // row["fragments"])),
        copy_seconds=seconds["copy_seconds"],
    )
    link = replace(link, daemons=row["exchange"] != "process_group")
    overlap = row["overlap"] if isinstance(row["overlap"], int) else row["sync_every"]  # eager: until the next round
    return predict(link, load, Pace(seconds["step_seconds"], row["sync_every"], row["fragments"], overlap))


def add_predictions(rows: list[Measures], keys: Sequence[str], one_machine: bool) -> None:
    """Give each row of a table its columns, and the seconds that they begin with: ``least_...``.

    A data-parallel replica steps as fast as an island with the same share of the batch.

    Args:
        keys: swept ones, of which each row has the values.
        one_machine: all runs were on it: what runs have alike takes as long as in the fastest, as what else the machine does can only
            add to it.
    """
    common = (*_MODEL, *(key for key in keys if key != SEED and key.split(".")[0] not in OUTER_SECTIONS))
    codec = tuple(key for key in keys if key.startswith(_CODEC))
    for row in rows:
        for key, own in _SECONDS.items():
            alike = (*common, *own, *(codec if "codec" in own else ()))
            same = [other for other in rows if one_machine and all(other.get(each) == row.get(each) for each in alike)]
            row[f"least_{key}"] = min((other[key] for other in (*same, row) if other.get(key) is not None), default=None)
    for row in rows:
        if row["kind"] == DATA_PARALLEL:
            row["replica_step_seconds"] = _replica_step_seconds(row, rows)
        for name, bits in BANDWIDTHS.items():
            found = prediction(row, Link(bits, RTT_SECONDS))
            row[f"predicted_utilization_{name}"] = found and found.utilization
            row[f"predicted_seconds_{name}"] = found and found.seconds_per_step * row["steps"]


def _replica_step_seconds(row: Measures, rows: list[Measures]) -> float | None:
    same = [
        other["least_step_seconds"]
        for other in rows
        if other.get("baseline") == row["cell"] and other["islands"] == row["islands"] and other["least_step_seconds"]
    ]
    if same:
        return min(same)
    return row["least_step_seconds"] / row["islands"] if row["least_step_seconds"] else None
