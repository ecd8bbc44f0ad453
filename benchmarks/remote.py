"""Overhead of one message to the verifier, on loopback and without model time."""

import argparse
import statistics
import sys
import time
from pathlib import Path

from stored import store

sys.path.insert(0, str(Path(__file__).parents[1]))

from blockcompact_jax.remote import wire
from blockcompact_jax.remote.client import RemoteClient
from tests.remote.tiny import TOKEN, serving


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    parser.add_argument("--messages", type=int, default=2000)
    options = parser.parse_args()
    with serving("llama") as server:
        client = RemoteClient(server.url, token=TOKEN)
        samples = measure(client, options.messages)
        client.close()
    rows = []
    for name, microseconds in samples.items():
        cuts = statistics.quantiles(microseconds, n=100)
        print(f"{name}: p50 {cuts[49]:.0f} us, p99 {cuts[98]:.0f} us of {len(microseconds)}")
        row = {"message": name, "p50_us": cuts[49], "p99_us": cuts[98], "samples_us": microseconds}
        rows.append(row)
    if options.json:
        store(options.json, rows)


def measure(client, num_messages):
    """Times a heartbeat, and an upload of 64 rows with its ACK, which do no model work."""
    epoch = client._answer("GET", "/v1/health", None, wire.HealthAnswer).process_epoch
    names = {"process_epoch": epoch, "request_id": "benchmark", "request_epoch": 1}
    client.call(
        "prefill",
        wire.PrefillWire(
            **names,
            operation_id=0,
            token_ids=list(range(64)) + [1] * 576,
            max_tokens=800,
            num_draft_tokens=8,
        ),
        wire.PrefillAnswer,
    )
    beat = wire.FinishWire(**names)
    samples = {"heartbeat": [], "upload": [], "ack": []}
    for number in range(1, num_messages + 1):
        samples["heartbeat"].append(timed(client, "heartbeat", beat, wire.DoneAnswer))
        key = wire.KeyWire(**names, operation_id=number, pool_generation=0, map_revision=0)
        upload = wire.CompactionUploadWire(
            key=key, selection_revision=1, source_kind="source_only", num_tokens=640, rows=rows()
        )
        samples["upload"].append(timed(client, "compaction_upload", upload, wire.UploadAnswer))
        samples["ack"].append(timed(client, "ack", wire.AckWire(key=key), wire.DoneAnswer))
    client.call("finish", beat, wire.DoneAnswer)
    return samples


def rows():
    blocks = [number // 4 for number in range(64)]
    return wire.UploadRowsWire(
        layer=[number % 4 for number in range(64)],
        group=[0] * 64,
        logical_block=blocks,
        source_block=blocks,
        cpu_destination_block=[-1] * 64,
        physical_block=blocks,
        valid_tokens=[32] * 64,
    )


def timed(client, path, message, answer):
    begin = time.perf_counter()
    client.call(path, message, answer)
    return (time.perf_counter() - begin) * 1e6


if __name__ == "__main__":
    main()
