/* Tests invalid calls: error number and message. No engine is needed. */
#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <towpath.h>

static int failures;

static void expect(const char *what, int got, int wanted, const char *said)
{
    if (got == wanted && strstr(towpath_error(), said) != NULL)
        return;
    fprintf(stderr, "%s: %d instead of %d: %s\n", what, got, wanted, towpath_error());
    failures++;
}
#define EXPECT(call, wanted, said) expect(#call, call, wanted, said)

/* A destructor of an exiting thread may still close handles. */
static void ends(void *value)
{
    (void)value;
    if (towpath_mux_done(NULL) != -EINVAL || towpath_error() == NULL)
        failures++;
}

static void *fails(void *key)
{
    pthread_setspecific(*(pthread_key_t *)key, key);
    EXPECT(towpath_mux_done(NULL), -EINVAL, "handle is NULL");
    return NULL;
}

/* A rejected close leaves the handle valid. */
static void kept(void)
{
    towpath_mux *mux;
    towpath_sender *sender;
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 ||
        getsockname(fd, (struct sockaddr *)&address, &length) != 0 ||
        connect(fd, (struct sockaddr *)&address, length) != 0)
        failures++;

    EXPECT(towpath_sender_open(fd, NULL, &sender), 0, "");
    EXPECT(towpath_sender_close(sender, -1, NULL, 0, NULL), -EINVAL, "infinite");
    EXPECT(towpath_sender_close(sender, -2, NULL, 0, NULL), -EINVAL, "timeout");
    EXPECT(towpath_sender_queue(sender, 1, "x", 1), 0, "");
    EXPECT(towpath_sender_close(sender, 10000, NULL, 0, NULL), 1, "");
    close(fd);

    EXPECT(towpath_mux_socket(2, "line", 0, &mux), 0, "");
    EXPECT(towpath_mux_close(mux, -1), -EINVAL, "infinite");
    EXPECT(towpath_mux_close(mux, -2), -EINVAL, "timeout");
    EXPECT(towpath_mux_send(mux, NULL, "x", (size_t)INT_MAX + 1, 0), -EMSGSIZE, "2 GiB");
    EXPECT(towpath_mux_arm(mux, NULL, 2), -EINVAL, "flags");
    EXPECT(towpath_mux_done(mux), 0, "");
    EXPECT(towpath_mux_close(mux, 10000), 1, "");
}

int main(void)
{
    pthread_t thread;
    pthread_key_t key;
    towpath_inspector *inspector = NULL;
    towpath_worker *worker = NULL;
    struct towpath_frame frame;
    struct towpath_message message;
    struct towpath_ring_stats stats;

    memset(&frame, 0, sizeof frame);
    memset(&message, 0, sizeof message);
    if (*towpath_error() != '\0' || strcmp(towpath_version(), TOWPATH_VERSION) != 0)
        failures++;

    unsetenv("TOWPATH_SOCKET");
    EXPECT(towpath_inspector_attach(NULL, NULL, 0, &inspector), -EDESTADDRREQ, "TOWPATH_SOCKET is not set");
    EXPECT(towpath_worker_attach(NULL, NULL, &worker), -EDESTADDRREQ, "TOWPATH_SOCKET is not set");
    EXPECT(towpath_inspector_attach("/nonexistent/socket", "me", 0, &inspector), -ENOENT, "/nonexistent/socket");
    EXPECT(towpath_worker_attach("/nonexistent/socket", "me", &worker), -ENOENT, "/nonexistent/socket");
    EXPECT(towpath_inspector_attach("/nonexistent/socket", NULL, 2, &inspector), -EINVAL, "flags");
    EXPECT(towpath_inspector_attach("/nonexistent/socket", NULL, 0, NULL), -EINVAL, "is NULL");
    EXPECT(towpath_worker_attach("/nonexistent/socket", NULL, NULL), -EINVAL, "is NULL");
    if (inspector != NULL || worker != NULL)
        failures++;

    EXPECT(towpath_inspector_recv(NULL, &frame, 0), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_recv_batch(NULL, &frame, 1, 0), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_verdict(NULL, &frame, TOWPATH_PASS), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_verdict_mark(NULL, &frame, TOWPATH_PASS, 0, 0), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_verdict_upto(NULL, &frame, TOWPATH_PASS), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_verdict_all(NULL, TOWPATH_PASS), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_replace(NULL, &frame, "x", 1), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_flush(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_fd(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_arm(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_disarm(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_stats(NULL, &stats), -EINVAL, "handle is NULL");
    towpath_inspector_close(NULL);

    EXPECT(towpath_worker_recv(NULL, &message, 0), -EINVAL, "handle is NULL");
    EXPECT(towpath_worker_reply(NULL, &message, "x", 1), -EINVAL, "handle is NULL");
    EXPECT(towpath_worker_done(NULL, &message), -EINVAL, "handle is NULL");
    EXPECT(towpath_worker_send(NULL, NULL, "x", 1), -EINVAL, "handle is NULL");
    EXPECT(towpath_worker_serve(NULL, 1, NULL, NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_reply_append(NULL, "x", 1), -EINVAL, "reply is NULL");
    EXPECT(towpath_worker_flush(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_worker_fd(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_worker_arm(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_worker_disarm(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_worker_stats(NULL, &stats), -EINVAL, "handle is NULL");
    towpath_worker_close(NULL);

    uint64_t id;
    struct towpath_sender_counters counters;
    EXPECT(towpath_sender_open(0, NULL, NULL), -EINVAL, "is NULL");
    EXPECT(towpath_sender_queue(NULL, 0, "x", 1), -EINVAL, "handle is NULL");
    EXPECT(towpath_sender_flush(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_sender_reclaim(NULL, &id, 1), -EINVAL, "handle is NULL");
    EXPECT(towpath_sender_drain(NULL, 0), -EINVAL, "handle is NULL");
    EXPECT(towpath_sender_fd(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_sender_counters(NULL, &counters), -EINVAL, "handle is NULL");
    struct towpath_metric metric;
    EXPECT(towpath_sender_metrics(NULL, &metric, 1), -EINVAL, "handle is NULL");
    EXPECT(towpath_worker_metrics(NULL, &metric, 1), -EINVAL, "handle is NULL");
    EXPECT(towpath_inspector_metrics(NULL, &metric, 1), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_metrics(NULL, &metric, 1), -EINVAL, "handle is NULL");
    if (towpath_sender_close(NULL, 0, NULL, 0, NULL) != 1)
        failures++;

    towpath_mux *mux = NULL;
    struct towpath_connection connection = {0, 0};
    EXPECT(towpath_mux_socket(1, "line", 0, &mux), -EPROTONOSUPPORT, "SOCK_DGRAM");
    EXPECT(towpath_mux_socket(2, "lime", 0, &mux), -EINVAL, "line");
    EXPECT(towpath_mux_socket(2, NULL, 0, &mux), -EINVAL, "framing is NULL");
    EXPECT(towpath_mux_socket(2, "line", 2, &mux), -EINVAL, "flags");
    EXPECT(towpath_mux_socket(2, "line", 0, NULL), -EINVAL, "is NULL");
    EXPECT(towpath_mux_clone(NULL, &mux), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_listen(NULL, "127.0.0.1:0", NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_attach(NULL, 0, NULL, NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_unattach(NULL, &connection, 0, NULL, 0, NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_set_receive(NULL, 0), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_set_timeouts(NULL, 0, 0), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_recv(NULL, NULL, 0, 0, NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_send(NULL, NULL, "x", 1, 0), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_done(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_fd(NULL), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_arm(NULL, NULL, 0), -EINVAL, "handle is NULL");
    EXPECT(towpath_mux_disarm(NULL), -EINVAL, "handle is NULL");
    if (mux != NULL || towpath_mux_close(NULL, 0) != 1)
        failures++;
    kept();
    if (pthread_key_create(&key, ends) != 0 || pthread_create(&thread, NULL, fails, &key) != 0 ||
        pthread_join(thread, NULL) != 0)
        failures++;
    return failures != 0;
}
