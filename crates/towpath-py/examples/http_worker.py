"""An HTTP/1.1 server for one function, which returns status, header fields and body.

    towpath mux 127.0.0.1:8080 --framing http1 --workers 4 --worker "python3 http_worker.py"
"""

import io
from http.client import parse_headers

from towpath import Worker


def application(method: str, target: str, headers, body: bytes) -> tuple[str, dict[str, str], bytes]:
    return "200 OK", {"Content-Type": "text/plain"}, body or b"%s %s\n" % (method.encode(), target.encode())


def unchunked(stream: io.BytesIO) -> bytes:
    body = b""
    while size := int(stream.readline().partition(b";")[0], 16):
        body += stream.read(size)
        stream.readline()
    return body


def respond(request: bytes) -> tuple[bytes, bool]:
    """The response, and whether the connection ends after it."""
    stream = io.BytesIO(request)
    method, target, version = stream.readline().decode("latin-1").split()
    headers = parse_headers(stream)
    body = unchunked(stream) if "Transfer-Encoding" in headers else stream.read()
    status, fields, body = application(method, target, headers, body)
    # After a request with Upgrade, the mux sends no further requests.
    ends = version == "HTTP/1.0" or "close" in headers.get("Connection", "").lower() or "Upgrade" in headers
    fields = {**fields, "Content-Length": len(body), "Connection": "close" if ends else "keep-alive"}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + (body if method != "HEAD" else b""), ends


with Worker() as worker:
    for message in worker:
        response, ends = respond(message.bytes) if message.mark == 0 else (b"", True)
        message.reply(response, close=ends)
