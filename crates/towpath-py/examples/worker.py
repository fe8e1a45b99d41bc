"""A worker of towpath mux that answers each line in capitals. Copy it to start your own.

    towpath mux 127.0.0.1:7007 --framing line --workers 4 --worker "python3 worker.py"
"""

from towpath import Worker

# Towpath starts it and says in TOWPATH_SOCKET where to attach.
with Worker() as worker:
    # If this process dies at a message, another worker gets it.
    for message in worker:
        message.reply(message.bytes.upper())
