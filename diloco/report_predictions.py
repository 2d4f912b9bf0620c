"""What a measured run would do on links of other speeds: the columns ``predicted_...`` and the curves over bandwidth."""

from typing import Any

from diloco.link_model import Link, Pace, Prediction, RoundLoad, data_parallel, predict
from diloco.report_measures import DATA_PARALLEL, Measures
from diloco.report_traffic import GRADIENT_BYTES
from diloco.reduction import num_chunks

#: Of the columns: bandwidth by the name that it has in them, at one round-trip time.
BANDWIDTHS = {"10mbit": 10e6, "100mbit": 100e6, "1gbit": 1e9, "10gbit": 10e9}
RTT_SECONDS = 0.08
RTT_LABEL = "80 ms"
#: Round-trip times and bandwidths of the curves.
CURVE_RTTS = {"10 ms": 0.01, "80 ms": 0.08, "200 ms": 0.2}
CURVE_BANDWIDTHS = [10 ** (7 + step / 12) for step in range(37)]  # 10 Mbit/s to 10 Gbit/s


def prediction(row: Measures, link: Link) -> Prediction | None:
    """Of the run that ``row`` measured, its islands (or replicas) one behind each such link; None where too little is known of it."""
    if not row.get("step_seconds") or not row.get("parameters") or (row.get("islands") or 0) < 2:
        return None
    if row["kind"] == DATA_PARALLEL:
        return data_parallel(link, row["islands"], GRADIENT_BYTES * row["parameters"], row["replica_step_seconds"])
    numbers = ("bytes_each_way_per_round", "encode_seconds", "decode_seconds", "outer_step_seconds")
    if any(row.get(key) is None for key in numbers) or not isinstance(row.get("sync_every"), int):
        return None
    chunks = num_chunks(-(-row["parameters"] // row["fragments"]))
    load = RoundLoad(row["islands"], *(row[key] for key in numbers), chunks=chunks, copy_seconds=row.get("copy_seconds") or 0.0)
    overlap = row["overlap"] if isinstance(row["overlap"], int) else row["sync_every"]  # eager: until the next round
    return predict(link, load, Pace(row["step_seconds"], row["sync_every"], row["fragments"], overlap))


def add_predictions(rows: list[Measures]) -> None:
    """Give each row of a table its columns. A data-parallel replica steps as fast as an island with the same share of the batch."""
    for row in rows:
        if row["kind"] == DATA_PARALLEL:
            row["replica_step_seconds"] = _replica_step_seconds(row, rows)
        for name, bits in BANDWIDTHS.items():
            found = prediction(row, Link(bits, RTT_SECONDS))
            row[f"predicted_utilization_{name}"] = found and found.utilization
            row[f"predicted_seconds_{name}"] = found and found.seconds_per_step * row["steps"]


def _replica_step_seconds(row: Measures, rows: list[Measures]) -> Any:
    same = [
        other["step_seconds"]
        for other in rows
        if other.get("baseline") == row["cell"] and other["islands"] == row["islands"] and other.get("step_seconds")
    ]
    if same:
        return sum(same) / len(same)
    return row["step_seconds"] / row["islands"] if row.get("step_seconds") else None
