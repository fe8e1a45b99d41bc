#!/bin/sh
# Runs the guide "A router with keep-state" between two network namespaces.
. "$(dirname "$0")/netns.sh"
host client 10.0.0.1/24 10.0.0.254
host server 10.0.1.1/24 10.0.1.254
start router

listen='
import socket, sys
def listen(address, port):
    server = socket.create_server((address, port))
    while True:
        connection = server.accept()[0]
        connection.sendall(b"hello\n")
        connection.close()
'
connect='
import socket
def connect(address, port):
    try:
        return socket.create_connection((address, port), timeout=2).recv(6).decode().strip()
    except OSError:
        return "blocked"
'
on client "$listen"'listen("10.0.0.1", 8080)' &
on server "$listen"'listen("10.0.1.1", 8080)' &
on server "$listen"'listen("10.0.1.1", 22)' &
sleep 1
echo "lan to wan, port 8080: $(on server "$connect"'print(connect("10.0.0.1", 8080))')"
echo "wan to lan, port 8080: $(on client "$connect"'print(connect("10.0.1.1", 8080))')"
echo "wan to lan, port 22: $(on client "$connect"'print(connect("10.0.1.1", 22))')"
towpath ctl show states
