"""A worker of towpath mux that answers each line in upper case. Copy it to start your own.

    towpath mux 127.0.0.1:7007 --framing line --workers 4 --worker "python3 worker.py"
"""

from towpath import Worker

# Towpath starts this program and sets TOWPATH_SOCKET.
with Worker() as worker:
    # If this process dies while it handles a message, another worker gets the message.
    for message in worker:
        message.reply(message.bytes.upper())
