#!/bin/sh
# Runs the guide "Replace an NFQUEUE program" between two network namespaces.
. "$(dirname "$0")/netns.sh"
host client 10.0.0.1/24 10.0.0.254
host server 10.0.1.1/24 10.0.1.254
ip addr add 10.0.0.254/24 dev wan
ip addr add 10.0.1.254/24 dev lan
echo 1 >/proc/sys/net/ipv4/ip_forward
iptables=$(command -v iptables-legacy || command -v iptables)
"$iptables" -A FORWARD -j NFQUEUE --queue-num 5 --queue-bypass
start nfqueue

on server '
import socket
server = socket.create_server(("10.0.1.1", 80))
while True:
    connection = server.accept()[0]
    connection.sendall(connection.recv(100))
    connection.close()' &
sleep 1
ask='
import socket
def ask(text):
    try:
        connection = socket.create_connection(("10.0.1.1", 80), timeout=2)
        connection.sendall(text)
        return connection.recv(100).decode()
    except OSError:
        return "blocked"
'
echo "hello: $(on client "$ask"'print(ask(b"hello"))')"
echo "password=1234: $(on client "$ask"'print(ask(b"password=1234"))')"
towpath ctl show queues
