/* A test worker: `messages MODE` echoes each line. */
#define _GNU_SOURCE /* struct ucred */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <towpath.h>

static towpath_worker *worker;
static volatile sig_atomic_t rang;

static void check(int fits, const char *what)
{
    if (!fits) {
        fprintf(stderr, "messages: %s: %s\n", what, towpath_error());
        exit(1);
    }
}
#define CHECK(what) check(what, #what)

static void answer(const struct towpath_message *message)
{
    /* In one piece: other messages may be sent between two answers. */
    size_t length = message->len + 2;
    uint8_t *bytes = malloc(length);
    CHECK(bytes != NULL);
    memcpy(bytes, "a ", 2);
    memcpy(bytes + 2, message->bytes, message->len);
    /* The framing strips the end of the line from the payload only. */
    CHECK(message->len == message->payload_len + 1 && message->bytes[message->len - 1] == '\n');
    CHECK(memcmp(message->bytes, message->payload, message->payload_len) == 0);
    CHECK(message->time > 0);
    CHECK(towpath_worker_reply(worker, message, NULL, 1) == -EINVAL);
    CHECK(towpath_worker_reply_part(worker, message, NULL, 1) == -EINVAL);
    CHECK(towpath_worker_reply_part(worker, message, bytes, 2) == 0);
    CHECK(towpath_worker_reply(worker, message, bytes + 2, length - 2) == 0);
    free(bytes);
    CHECK(towpath_worker_send(worker, &message->connection, "sent\n", 5) == 0);
    CHECK(towpath_worker_done(worker, message) == 0);
    CHECK(towpath_worker_done(worker, message) == -ESTALE);
    CHECK(towpath_worker_reply(worker, message, "late\n", 5) == -ESTALE);
}

static int waiting(void)
{
    struct towpath_message message;
    int got;
    CHECK(towpath_worker_recv(worker, &message, -2) == -EINVAL);
    CHECK(towpath_worker_recv(worker, NULL, 0) == -EINVAL);
    while ((got = towpath_worker_recv(worker, &message, -1)) == 1)
        answer(&message);
    return got;
}

/* Greets, closes after `quit`, resets at `reset`, answers `ends` with the causes of the ended connections. */
static int events(void)
{
    static char ends[4096];
    struct towpath_worker_event event;
    int got;
    CHECK(towpath_worker_recv_event(worker, NULL, 0) == -EINVAL);
    CHECK(towpath_worker_close_connection(worker, NULL) == -EINVAL);
    while ((got = towpath_worker_recv_event(worker, &event, -1)) == 1) {
        char line[8192];
        if (event.kind == TOWPATH_ON_ENDED) {
            CHECK(event.text[0] != 0 && towpath_worker_done(worker, &event.message) == -ESTALE);
            snprintf(ends + strlen(ends), sizeof(ends) - strlen(ends), "%u ", event.cause);
            continue;
        }
        if (event.kind == TOWPATH_ON_OPENED) {
            char *name = event.client_names;
            CHECK(event.message.len == 0 && !event.resumed && !event.starttls);
            while ((name = strchr(name, '\n')) != NULL)
                *name = ',';
            snprintf(line, sizeof(line), "hello %s %s %d/%s/%s/%s\n", event.peer, event.listener, event.tls, event.server_name, event.protocol,
                     event.client_names);
            CHECK(towpath_worker_reply(worker, &event.message, line, strlen(line)) == 0);
        } else if (event.message.payload_len == 4 && memcmp(event.message.payload, "quit", 4) == 0) {
            CHECK(towpath_worker_reply(worker, &event.message, "bye\n", 4) == 0);
            CHECK(towpath_worker_close_after(worker, &event.message) == 0);
        } else if (event.message.payload_len == 5 && memcmp(event.message.payload, "reset", 5) == 0) {
            CHECK(towpath_worker_reset_connection(worker, &event.message.connection) == 0);
        } else {
            snprintf(line, sizeof(line), "%s\n", ends);
            CHECK(towpath_worker_reply(worker, &event.message, line, strlen(line)) == 0);
        }
        CHECK(towpath_worker_done(worker, &event.message) == 0);
    }
    return got;
}

static int is(const struct towpath_message *message, const char *word)
{
    return message->payload_len == strlen(word) && memcmp(message->payload, word, message->payload_len) == 0;
}

/* `keep` keeps the connection of the message, `send` sends to the kept one, `unsent` answers what came back. */
static int unsent(void)
{
    struct towpath_message message;
    struct towpath_connection kept = {0, 0};
    struct towpath_unsent back;
    char line[100];
    int got;
    CHECK(towpath_worker_poll_unsent(worker, NULL) == -EINVAL && towpath_worker_poll_unsent(NULL, &back) == -EINVAL);
    while ((got = towpath_worker_recv(worker, &message, -1)) == 1) {
        strcpy(line, "none\n");
        if (is(&message, "keep")) {
            kept = message.connection;
            strcpy(line, "kept\n");
        } else if (is(&message, "send") && kept.generation != 0) {
            CHECK(towpath_worker_send(worker, &kept, "late", 4) == 0);
            strcpy(line, "sent\n");
        } else if (is(&message, "unsent") && towpath_worker_poll_unsent(worker, &back) == 1) {
            CHECK(back.connection.index == kept.index && back.connection.generation == kept.generation);
            CHECK(back.error == EPIPE && back.reserved == 0);
            snprintf(line, sizeof line, "unsent %.*s\n", (int)back.len, (const char *)back.bytes);
        }
        CHECK(towpath_worker_reply(worker, &message, line, strlen(line)) == 0);
        CHECK(towpath_worker_done(worker, &message) == 0);
    }
    return got;
}

static int looping(void)
{
    struct pollfd ready = {.fd = towpath_worker_fd(worker), .events = POLLIN};
    CHECK(ready.fd >= 0);
    for (;;) {
        struct towpath_message message;
        int armed = towpath_worker_arm(worker), got;
        CHECK(armed >= 0);
        if (armed)
            CHECK(poll(&ready, 1, -1) >= 0);
        CHECK(towpath_worker_disarm(worker) == 0);
        while ((got = towpath_worker_recv(worker, &message, 0)) == 1)
            answer(&message);
        CHECK(towpath_worker_flush(worker) == 0);
        if (got != -EAGAIN)
            return got;
    }
}

static void ring(int signal)
{
    (void)signal;
    rang = 1;
}

static const struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};

static void ring_often(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = ring;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &often, NULL) == 0);
}

/* As above, with a signal during a wait for room while the mux is stopped. Empty data is not a message. */
static int full(void)
{
    struct towpath_message message;
    struct ucred mux;
    socklen_t length = sizeof mux;
    int got = towpath_worker_recv(worker, &message, -1);
    if (got != 1)
        return got;
    CHECK(getsockopt(towpath_worker_fd(worker), SOL_SOCKET, SO_PEERCRED, &mux, &length) == 0);
    CHECK(kill(mux.pid, SIGSTOP) == 0);
    ring_often();
    do
        got = towpath_worker_send(worker, &message.connection, NULL, 0);
    while (got == 0);
    CHECK(kill(mux.pid, SIGCONT) == 0 && setitimer(ITIMER_REAL, &never, NULL) == 0);
    CHECK(got == -EINTR && rang);
    answer(&message);
    return waiting();
}

/* Like `wait`, with a signal that ends one wait. */
static int interrupted(void)
{
    struct towpath_message message;
    int got;
    ring_often();
    while ((got = towpath_worker_recv(worker, &message, -1)) == 1)
        answer(&message);
    CHECK(got == -EINTR && rang);
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    return waiting();
}

static void serve_one(const struct towpath_message *message, towpath_reply *reply, void *context)
{
    ++*(int *)context;
    CHECK(message->len == message->payload_len + 1);
    CHECK(towpath_reply_append(reply, NULL, 1) == -EINVAL);
    CHECK(towpath_reply_append(reply, NULL, 0) == 0);
    CHECK(towpath_reply_append(reply, "a ", 2) == 0);
    CHECK(towpath_reply_append(reply, message->bytes, message->len) == 0);
    CHECK(towpath_reply_append(reply, "sent\n", 5) == 0);
}

static int serving(void)
{
    int count = 0;
    CHECK(towpath_worker_serve(worker, 0, serve_one, &count) == -EINVAL);
    CHECK(towpath_worker_serve(worker, 65, serve_one, &count) == -EINVAL);
    CHECK(towpath_worker_serve(worker, 1, NULL, &count) == -EINVAL);
    int ended = towpath_worker_serve(worker, 16, serve_one, &count);
    struct towpath_ring_stats stats;
    CHECK(towpath_worker_stats(worker, &stats) == 0 && (uint64_t)count >= stats.received);
    return ended;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(void);
    } modes[] = {{"wait", waiting}, {"loop", looping}, {"signal", interrupted}, {"full", full}, {"serve", serving}, {"events", events}, {"unsent", unsent}};
    CHECK(argc == 2);
    if (strcmp(argv[1], "events") == 0) {
        CHECK(towpath_worker_attach_with(NULL, "messages", 4, &worker) == -EINVAL);
        CHECK(towpath_worker_attach_with(NULL, "messages", TOWPATH_EVENTS, &worker) == 0);
    } else {
        CHECK(towpath_worker_attach(NULL, "messages", &worker) == 0);
    }
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (strcmp(modes[i].name, argv[1]) == 0) {
            int ended = modes[i].run();
            check(ended == 0, argv[1]);
            towpath_worker_close(worker);
            return 0;
        }
    check(0, "no such mode");
}
