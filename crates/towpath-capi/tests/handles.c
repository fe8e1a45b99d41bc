/* Tests towpath_mux over socket pairs; no engine is needed. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <towpath.h>

static void check(int fits, const char *what)
{
    if (!fits) {
        fprintf(stderr, "handles: %s: %s\n", what, towpath_error());
        exit(1);
    }
}
#define CHECK(what) check(what, #what)

static void says(int fd, const char *text)
{
    CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
}

static void hears(int fd, const char *text)
{
    char bytes[100];
    size_t length = strlen(text), at = 0;
    while (at < length) {
        ssize_t got = read(fd, bytes + at, length - at);
        CHECK(got > 0);
        at += (size_t)got;
    }
    CHECK(memcmp(bytes, text, length) == 0);
}

static void datagrams(void)
{
    int pair[2];
    towpath_mux *mux, *other;
    struct towpath_connection connection;
    struct towpath_mux_message message;
    char buffer[100];
    size_t length = 9;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(towpath_mux_socket(SOCK_DGRAM, "delimiter=\"\\n\"", 0, &mux) == 0);
    CHECK(towpath_mux_attach(mux, pair[0], "lime", NULL) == -EINVAL);
    CHECK(towpath_mux_attach(mux, -1, NULL, NULL) == -EBADF);
    CHECK(towpath_mux_attach(mux, pair[0], NULL, &connection) == 0);
    close(pair[0]);

    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, MSG_DONTWAIT, NULL) == -EAGAIN);
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, MSG_OOB, NULL) == -EINVAL);
    CHECK(towpath_mux_send(mux, NULL, "x\n", 2, 0) == -EDESTADDRREQ);
    CHECK(towpath_mux_set_timeouts(mux, -2, 0) == -EINVAL && towpath_mux_set_timeouts(mux, 1, -1) == 0);
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, 0, NULL) == -EAGAIN);
    CHECK(towpath_mux_set_timeouts(mux, -1, -1) == 0);

    says(pair[1], "hello\nworld\n");
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, MSG_PEEK, &message) == 6 && message.length == 6);
    CHECK(message.connection.index == connection.index && message.connection.generation == connection.generation);
    CHECK(towpath_mux_recv(mux, NULL, 5, 0, NULL) == -EINVAL);
    CHECK(towpath_mux_recv(mux, buffer, 3, 0, &message) == 3 && memcmp(buffer, "hel", 3) == 0);
    CHECK(message.flags & MSG_TRUNC && message.length == 6);
    CHECK(towpath_mux_send(mux, NULL, "an", 2, MSG_MORE) == 2);
    CHECK(towpath_mux_send(mux, NULL, "swer\n", 5, 0) == 5);
    hears(pair[1], "answer\n");
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, 0, &message) == 6 && memcmp(buffer, "world\n", 6) == 0);
    CHECK(towpath_mux_send(mux, &connection, "named\n", 6, 0) == 6);
    hears(pair[1], "named\n");
    CHECK(towpath_mux_done(mux) == 0);

    /* Another handle receives what this one does not. */
    CHECK(towpath_mux_clone(mux, &other) == 0 && towpath_mux_set_receive(mux, 0) == 0);
    says(pair[1], "other\n");
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, 0, NULL) == -EAGAIN);
    CHECK(towpath_mux_recv(other, buffer, sizeof buffer, 0, NULL) == 6 && memcmp(buffer, "other\n", 6) == 0);
    CHECK(towpath_mux_set_receive(mux, 1) == 0 && towpath_mux_close(other, 1000) == 1);

    says(pair[1], "last\n");
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, 0, NULL) == 5);
    says(pair[1], "begun");
    int fd = towpath_mux_unattach(mux, &connection, -1, buffer, sizeof buffer, &length);
    CHECK(fd >= 0 && length <= 5 && memcmp(buffer, "begun", length) == 0);
    CHECK(towpath_mux_unattach(mux, &connection, -1, NULL, 0, NULL) == -ENOENT);
    CHECK(towpath_mux_send(mux, &connection, "gone\n", 5, 0) == -EPIPE);
    says(fd, "raw");
    hears(pair[1], "raw");
    close(fd);
    close(pair[1]);
    CHECK(towpath_mux_close(mux, 10000) == 1);
}

static void packets(void)
{
    int pair[2];
    towpath_mux *mux;
    struct towpath_mux_message message;
    char buffer[100];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(towpath_mux_socket(SOCK_SEQPACKET, "line", TOWPATH_CONNECTED, &mux) == 0);
    CHECK(towpath_mux_send(mux, NULL, "x\n", 2, MSG_EOR) == -ENOTCONN);
    CHECK(towpath_mux_attach(mux, pair[0], "delimiter=\"\\n\"", NULL) == 0);
    close(pair[0]);
    says(pair[1], "hello\n");
    CHECK(towpath_mux_recv(mux, buffer, 3, 0, &message) == 3 && memcmp(buffer, "hel", 3) == 0);
    CHECK(!(message.flags & (MSG_TRUNC | MSG_EOR)) && message.length == 6);
    CHECK(towpath_mux_recv(mux, buffer, 100, 0, &message) == 3 && memcmp(buffer, "lo\n", 3) == 0);
    CHECK(message.flags & MSG_EOR && message.length == 3);
    CHECK(towpath_mux_send(mux, NULL, "an", 2, 0) == 2);
    CHECK(towpath_mux_send(mux, NULL, "swer\n", 5, MSG_EOR) == 5);
    hears(pair[1], "answer\n");
    close(pair[1]);
    CHECK(towpath_mux_close(mux, 10000) == 1);
}

static void looping(void)
{
    int pair[2];
    towpath_mux *mux;
    struct towpath_connection connection;
    char buffer[1024];
    size_t sent = 0;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(towpath_mux_socket(SOCK_DGRAM, "line", 0, &mux) == 0);
    CHECK(towpath_mux_attach(mux, pair[0], NULL, &connection) == 0);
    close(pair[0]);
    struct pollfd ready = {.fd = towpath_mux_fd(mux), .events = POLLIN};
    CHECK(ready.fd >= 0);

    CHECK(towpath_mux_arm(mux, NULL, 0) == 1 && poll(&ready, 1, 0) == 0);
    says(pair[1], "hello\n");
    CHECK(poll(&ready, 1, 30000) == 1);
    CHECK(towpath_mux_disarm(mux) == 0 && poll(&ready, 1, 0) == 0);
    CHECK(towpath_mux_arm(mux, NULL, 0) == 0);
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, MSG_DONTWAIT, NULL) == 6);
    CHECK(towpath_mux_arm(mux, NULL, TOWPATH_ROOM) == 0);
    CHECK(towpath_mux_send(mux, NULL, "answer\n", 7, 0) == 7);
    hears(pair[1], "answer\n");
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, MSG_DONTWAIT, NULL) == -EAGAIN);

    memset(buffer, 'x', sizeof buffer);
    CHECK(towpath_mux_arm(mux, &connection, TOWPATH_ROOM) == 0);
    while (towpath_mux_send(mux, &connection, buffer, sizeof buffer, MSG_DONTWAIT) > 0)
        sent += sizeof buffer;
    CHECK(towpath_mux_arm(mux, &connection, TOWPATH_ROOM) == 1 && poll(&ready, 1, 0) == 0);
    while (sent > 0) {
        ssize_t got = read(pair[1], buffer, sizeof buffer);
        CHECK(got > 0);
        sent -= (size_t)got;
    }
    CHECK(poll(&ready, 1, 30000) == 1 && towpath_mux_disarm(mux) == 0);
    CHECK(towpath_mux_arm(mux, &connection, TOWPATH_ROOM) == 0);
    close(pair[1]);
    CHECK(towpath_mux_close(mux, 10000) == 1);
}

/* Checks that the peer sees the end of its connection. */
static void ends(int peer)
{
    struct pollfd end = {.fd = peer, .events = POLLIN};
    char byte;
    CHECK(poll(&end, 1, 30000) == 1);
    CHECK(read(peer, &byte, 1) <= 0);
    close(peer);
}

static int attach(towpath_mux *mux)
{
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(towpath_mux_attach(mux, pair[0], NULL, NULL) == 0);
    close(pair[0]);
    return pair[1];
}

static void bounded(void)
{
    struct towpath_mux_options options;
    struct towpath_mux_counters counted;
    towpath_mux *mux, *other;
    char buffer[100];
    memset(&options, 0, sizeof options);
    options.message_max = 10;
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, NULL, 0, &options, &mux) == -EINVAL);
    CHECK(towpath_mux_socket_with(SOCK_STREAM, "line", 0, &options, &mux) == -EPROTONOSUPPORT);
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, "line", 2, &options, &mux) == -EINVAL);
    options.order = 6;
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, "line", 0, &options, &mux) == -EINVAL);
    options.order = TOWPATH_ORDER_KEY;
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, "line", 0, &options, &mux) == -EINVAL);
    options.order = TOWPATH_ORDER_STICKY;
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, "line", 0, &options, NULL) == -EINVAL);
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, "line", 0, &options, &mux) == 0);
    CHECK(towpath_mux_counters(NULL, &counted) == -EINVAL && towpath_mux_counters(mux, NULL) == -EINVAL);

    int peer = attach(mux);
    says(peer, "hello\nworld\n");
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, 0, NULL) == 6);
    CHECK(towpath_mux_send(mux, NULL, "answer\n", 7, 0) == 7);
    hears(peer, "answer\n");
    struct towpath_metric metrics[100];
    CHECK(towpath_mux_metrics(mux, metrics, 0) == -EINVAL && towpath_mux_metrics(mux, NULL, 1) == -EINVAL);
    int count = towpath_mux_metrics(mux, metrics, 1);
    CHECK(count > 30 && count < 100 && strcmp(metrics[0].group, "mux") == 0 && strcmp(metrics[0].name, "received") == 0);
    CHECK(metrics[0].value == 2 && metrics[0].kind == TOWPATH_COUNTER && strcmp(metrics[0].unit, "messages") == 0);
    CHECK(towpath_mux_metrics(mux, metrics, 100) == count && strlen(metrics[count - 1].help) > 10);
    CHECK(towpath_mux_counters(mux, &counted) == 0);
    CHECK(counted.connections == 1 && counted.attached == 1 && counted.ended == 0);
    CHECK(counted.received == 2 && counted.received_bytes == 12 && counted.queued == 1);
    CHECK(counted.done + counted.in_hand == 1 && counted.undone == 0 && counted.bytes > 0);
    CHECK(counted.sent == 1 && counted.sent_bytes == 7 && counted.unsent == 0);
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, 0, NULL) == 6 && towpath_mux_done(mux) == 0);
    says(peer, "longer than ten\n");
    ends(peer);
    peer = attach(mux);
    says(peer, "begun");
    shutdown(peer, SHUT_WR);
    ends(peer);
    /* Each handle reports the counters of the whole mux. */
    CHECK(towpath_mux_clone(mux, &other) == 0 && towpath_mux_counters(other, &counted) == 0);
    CHECK(counted.connections == 0 && counted.attached == 2 && counted.ended == 2);
    CHECK(counted.received == 2 && counted.done == 2 && counted.queued == 0 && counted.in_hand == 0);
    CHECK(counted.too_long == 1 && counted.inside == 1 && counted.malformed == 0 && counted.bytes == 0);
    CHECK(towpath_mux_close(other, 0) == 1 && towpath_mux_close(mux, 10000) == 1);

    memset(&options, 0, sizeof options);
    options.idle = 1;
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, "line", 0, &options, &mux) == 0);
    ends(attach(mux));
    CHECK(towpath_mux_counters(mux, &counted) == 0 && counted.idle == 1 && counted.too_long == 0);
    CHECK(towpath_mux_close(mux, 10000) == 1);

    memset(&options, 0, sizeof options);
    options.head_time = 1;
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, "line", 0, &options, &mux) == 0);
    peer = attach(mux);
    says(peer, "begun");
    ends(peer);
    CHECK(towpath_mux_counters(mux, &counted) == 0 && counted.late == 1 && counted.idle == 0);
    CHECK(towpath_mux_close(mux, 10000) == 1);

    /* An impossible length. */
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, "postgres-backend", 0, NULL, &mux) == 0);
    peer = attach(mux);
    CHECK(write(peer, "E\0\0\0\3", 5) == 5);
    ends(peer);
    CHECK(towpath_mux_counters(mux, &counted) == 0 && counted.malformed == 1);
    CHECK(counted.connections == 0 && counted.attached == 1 && counted.ended == 1);
    CHECK(towpath_mux_close(mux, 10000) == 1);

    /* NULL options select the defaults. */
    CHECK(towpath_mux_socket_with(SOCK_DGRAM, "line", 0, NULL, &mux) == 0);
    peer = attach(mux);
    says(peer, "longer than ten\n");
    CHECK(towpath_mux_recv(mux, buffer, sizeof buffer, 0, NULL) == 16);
    CHECK(towpath_mux_close(mux, 10000) == 1);
    close(peer);
}

int main(void)
{
    bounded();
    looping();
    datagrams();
    packets();
    return 0;
}
