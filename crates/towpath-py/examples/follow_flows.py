"""Follows all flows of an engine and writes them to an SQLite database: one row for each state, its end included.

    python3 follow_flows.py /run/towpath/ctl.sock.ring flows.db
    sqlite3 flows.db "select src, dst, dst_port, bytes_out + bytes_in from flows order by 4 desc limit 10"
"""

import json
import sqlite3
import sys

import towpath
from towpath import Inspector, Verdict

SCHEMA = """
create table if not exists flows (
    id integer, start text, end text, reason text, rule integer, proto integer,
    src text, src_port integer, dst text, dst_port integer,
    packets_out integer, packets_in integer, bytes_out integer, bytes_in integer
);
create unique index if not exists open_flows on flows (id) where end is null;
create table if not exists lost (events integer);
"""

CREATED = """insert or replace into flows
    (id, start, rule, proto, src, src_port, dst, dst_port, packets_out, packets_in, bytes_out, bytes_in)
    values (:id, :time, :rule, :proto, :src, :src_port, :dst, :dst_port, :packets_out, :packets_in, :bytes_out, :bytes_in)"""

ENDED = """update flows set end = :time, reason = :reason, packets_out = :packets_out, packets_in = :packets_in,
    bytes_out = :bytes_out, bytes_in = :bytes_in where id = :id and end is null"""


def store(database: sqlite3.Connection, event: dict) -> None:
    event["packets_out"], event["packets_in"] = event["packets"]
    event["bytes_out"], event["bytes_in"] = event["bytes"]
    database.execute(CREATED if event["event"] == "created" else ENDED, event)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: follow_flows.py CONTROL_SOCKET.ring DATABASE")
    database = sqlite3.connect(sys.argv[2])
    database.executescript(SCHEMA)
    with Inspector(sys.argv[1], name="follow-flows") as ring:
        ring.request(towpath.GROUP_EVENTS, b'{"events":["created","ended"]}')
        # Ends with the engine. One transaction for each batch.
        while batch := ring.recv_batch(256):
            for frame in batch:
                if frame.kind == towpath.EVENT:
                    store(database, json.loads(frame.payload))
                elif frame.kind == towpath.GAP:
                    database.execute("insert into lost values (?)", (frame.gap[0],))
                elif frame.kind == towpath.ERROR:
                    sys.exit(f"the engine refused the request: errno {frame.mark}")
                elif frame.kind == towpath.DONE:
                    print("follow-flows: the engine sends events", file=sys.stderr, flush=True)
                frame.verdict(Verdict.PASS)
            database.commit()


if __name__ == "__main__":
    main()
