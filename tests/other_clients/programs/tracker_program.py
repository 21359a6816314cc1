"""Trains with one experiment tracker, offline, and prints what the tracker's own package reads back."""

import atexit
import json
import os
import struct
import sys
from pathlib import Path

name, data, output, *tinkex_paths = sys.argv[1:]
sys.path += tinkex_paths  # last: what the tracker needs is its own

directory = Path(output)
found = {}
atexit.register(lambda: print(json.dumps(found)))  # last: trackers print at exit, too
os.environ |= {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "TRACKIO_DIR": str(directory.parent / "trackio"),
    "MLFLOW_TRACKING_URI": (directory.parent / "mlflow").as_uri(),
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "TINKEX_TELEMETRY": "0",
}

import tinkex  # noqa: E402
from tinkex import train  # noqa: E402

with tinkex.ServiceClient(base_url=os.environ["SERVER_URL"], api_key=os.environ["SERVER_KEY"]) as service:
    settings = train.SftSettings(
        data=Path(data), output=directory, model="tiny/llama", rank=4, steps=3, eval_every=2, eval_fraction=0.3,
        sample_tokens=4, batch_size=2, track=(name,),
    )  # fmt: skip
    train.run(service, settings)


def tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {tag: [[one.step, one.value] for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def records(content):
    """The records of a file of wandb, which has no public reader: parts in blocks of 32 KiB, after the header."""
    place, record = 7, b""
    while place + 7 <= len(content):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb():
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = directory.glob("wandb/offline-run-*/*.wandb")
    read = {}
    for content in records(file.read_bytes()):
        items = Record.FromString(content).history.item
        values = {"/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for tag, value in values.items():
            if not tag.startswith("_"):
                read.setdefault(tag, []).append([values["_step"], value])
    return read


def trackio():
    from trackio.sqlite_storage import SQLiteStorage

    read = {}
    for line in SQLiteStorage.get_logs("tinkex", directory.name):
        for tag, value in line.items():
            if tag not in {"step", "timestamp"} and isinstance(value, int | float):
                read.setdefault(tag, []).append([line["step"], value])
    return read


def mlflow():
    from mlflow import MlflowClient

    client = MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("tinkex").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["rank"] == "4"
    return {
        tag: [[one.step, one.value] for one in client.get_metric_history(run.info.run_id, tag)]
        for tag in run.data.metrics
    }


found.update({"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio, "mlflow": mlflow}[name]())
