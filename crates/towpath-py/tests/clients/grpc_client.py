"""grpcio: unary calls one by one and many at once, long requests and answers, status codes, several channels."""

import hashlib
import sys

import grpc

OPTIONS = [("grpc.max_receive_message_length", 1 << 24), ("grpc.use_local_subchannel_pool", 1)]


def check(channel, name):
    upper, digest, repeat, fail, unknown = [
        channel.unary_unary(f"/towpath.Words/{method}") for method in ("Upper", "Digest", "Repeat", "Fail", "None")
    ]
    for number in range(50):
        assert upper(b"word %d" % number, timeout=60) == b"WORD %d" % number
    calls = [upper.future(b"channel %d call %d" % (name, number), timeout=60) for number in range(200)]
    for number, call in enumerate(calls):
        assert call.result() == b"CHANNEL %d CALL %d" % (name, number)
    assert upper(b"", timeout=60) == b""
    # Long enough for several frames and for both windows.
    long = bytes(range(256)) * 8000
    metadata = [(f"name-{number}", "value " * 40) for number in range(10)]
    assert digest(long, timeout=60, metadata=metadata).decode() == hashlib.sha256(long).hexdigest()
    assert repeat(b"2000000", timeout=60) == b"x" * 2_000_000
    for method, code, text in (
        (fail, grpc.StatusCode.INVALID_ARGUMENT, "a reason"),
        (unknown, grpc.StatusCode.UNIMPLEMENTED, "no such method"),
    ):
        try:
            method(b"a reason", timeout=60)
        except grpc.RpcError as error:
            assert (error.code(), error.details()) == (code, text), error
        else:
            raise AssertionError("it fails")


port = sys.argv[1]
for name in range(3):
    with grpc.insecure_channel(f"127.0.0.1:{port}", OPTIONS) as channel:
        check(channel, name)
print("ok")
