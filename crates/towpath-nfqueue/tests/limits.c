/* An unmodified NFQUEUE program that uses the library at its limits, in the modes that the test names.
 *
 * limits MODE: reads packets until the socket is silent for half a second after the first packet, and prints one line of counts.
 * limits range FIRST LAST: the same with several queues, each with a handle. */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <libnetfilter_queue/libnetfilter_queue.h>
#include <linux/netfilter.h>

#define READERS 4

static const char *mode;
static struct nfq_handle *handle;
static struct nfq_q_handle *queue;
static atomic_uint packets, wrong;
static atomic_int closed, ended;

static int is(const char *name) { return strcmp(mode, name) == 0; }

static void expect(int fits)
{
    wrong += !fits;
}

static int callback(struct nfq_q_handle *of, struct nfgenmsg *message, struct nfq_data *data, void *context);

/* A queue again, with everything that it needs. */
static void create(void)
{
    queue = nfq_create_queue(handle, 1, callback, NULL);
    if (!queue || nfq_set_mode(queue, NFQNL_COPY_PACKET, 0xffff) < 0)
        exit(3);
}

static int callback(struct nfq_q_handle *of, struct nfgenmsg *message, struct nfq_data *data, void *context)
{
    unsigned id = ntohl(nfq_get_msg_packet_hdr(data)->packet_id), number = ++packets;
    (void)message;
    (void)context;
    expect(of == queue || is("threads") || is("range"));
    if (is("unknown")) {
        /* Ids that the program never had, or has no more. */
        static const unsigned strange[] = {0, 0x7fffffff, 0x80000000, 0xffffffff};
        for (unsigned at = 0; at < 4; at++) {
            errno = 0;
            expect(nfq_set_verdict(of, strange[at], NF_ACCEPT, 0, NULL) == -1 && errno == ENOENT);
            errno = 0;
            expect(nfq_set_verdict(of, id + 1000000 + at, NF_DROP, 4, (const unsigned char *)"none") == -1 && errno == ENOENT);
        }
        expect(nfq_set_verdict(of, id, NF_ACCEPT, 1, NULL) == -1 && errno == EFAULT);
        expect(nfq_set_verdict(of, id, 77, 0, NULL) == -1 && errno == EINVAL);
        errno = 0;
        expect(nfq_set_verdict_batch(of, 0xffffffff, NF_DROP) == -1 && errno == ENOENT);
        expect(nfq_set_verdict_batch(of, 0, NF_DROP) == -1 && errno == ENOENT);
    }
    if (is("large") && number == 1) {
        static unsigned char bytes[(1 << 20) + 1];
        expect(nfq_set_verdict(of, id, NF_ACCEPT, sizeof bytes, bytes) == -1 && errno == EMSGSIZE);
    }
    if (is("rebuild") && number % 100 == 0) {
        /* The packets without a verdict come again, this one too. */
        nfq_destroy_queue(of);
        create();
        return 0;
    }
    if (is("later") && number % 100 == 0) {
        /* The main loop creates the queue again. The other packets of the datagram have no callback. */
        nfq_destroy_queue(of);
        queue = NULL;
        return 0;
    }
    if (is("forks") && number % 250 == 0) {
        /* A child that does not use the queue. */
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        expect(child > 0 && waitpid(child, NULL, 0) == child);
    }
    int result = nfq_set_verdict(of, id, NF_ACCEPT, 0, NULL);
    expect(result >= 0);
    if (is("close") && number == 500) {
        closed = 1;
        nfq_close(handle);
    }
    return result;
}

/* Several threads read one socket. */
static void *reader(void *none)
{
    static _Thread_local char buffer[0x11000] __attribute__((aligned));
    (void)none;
    while (!ended && !closed) {
        int length = recv(nfq_fd(handle), buffer, sizeof buffer, 0);
        if (length < 0)
            ended = packets > 0;
        else
            nfq_handle_packet(handle, buffer, length);
    }
    return NULL;
}

/* Reads the queues of a range, each with a handle, and prints `ready` before. */
static void range(unsigned first, unsigned last)
{
    static char buffer[0x11000] __attribute__((aligned));
    struct nfq_handle *handles[8];
    struct nfq_q_handle *queues[8];
    unsigned count = last - first + 1;
    for (unsigned at = 0; at < count; at++) {
        handles[at] = nfq_open();
        queues[at] = nfq_create_queue(handles[at], first + at, callback, NULL);
        if (!queues[at] || nfq_set_mode(queues[at], NFQNL_COPY_PACKET, 0xffff) < 0)
            exit(3);
    }
    fprintf(stderr, "ready\n");
    for (;;) {
        fd_set readable;
        struct timeval limit = {packets ? 0 : 10, 500000};
        FD_ZERO(&readable);
        for (unsigned at = 0; at < count; at++)
            FD_SET(nfq_fd(handles[at]), &readable);
        if (select(FD_SETSIZE, &readable, NULL, NULL, &limit) <= 0)
            break;
        for (unsigned at = 0; at < count; at++) {
            if (!FD_ISSET(nfq_fd(handles[at]), &readable))
                continue;
            int length = recv(nfq_fd(handles[at]), buffer, sizeof buffer, MSG_DONTWAIT);
            expect(length > 0 && nfq_handle_packet(handles[at], buffer, length) >= 0);
        }
    }
    fprintf(stderr, "packets=%u wrong=%u\n", packets, wrong);
    for (unsigned at = 0; at < count; at++) {
        nfq_destroy_queue(queues[at]);
        nfq_close(handles[at]);
    }
    exit(0);
}

int main(int argc, char **argv)
{
    static char buffer[0x11000] __attribute__((aligned));
    struct timeval timeout = {0, 500000};
    pthread_t threads[READERS];

    mode = argc > 1 ? argv[1] : "unknown";
    if (argc > 3)
        range(strtoul(argv[2], NULL, 10), strtoul(argv[3], NULL, 10));
    handle = nfq_open();
    if (!handle)
        return 2;
    create();
    if (is("maxlen")) /* The program takes as many packets as there are; one at a time would do, too. */
        expect(nfq_set_queue_maxlen(queue, 0xffffffff) >= 0);
    if (is("one"))
        expect(nfq_set_queue_maxlen(queue, 1) >= 0);
    if (is("threads")) {
        setsockopt(nfq_fd(handle), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
        for (unsigned at = 0; at < READERS; at++)
            pthread_create(&threads[at], NULL, reader, NULL);
        for (unsigned at = 0; at < READERS; at++)
            pthread_join(threads[at], NULL);
        ended = 1;
    }
    while (!ended && !closed) {
        fd_set readable;
        struct timeval limit = {packets ? 0 : 10, 500000};
        int fd = nfq_fd(handle);
        FD_ZERO(&readable);
        FD_SET(fd, &readable);
        if (select(fd + 1, &readable, NULL, NULL, &limit) <= 0)
            break;
        int length = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
        if (length > 0)
            nfq_handle_packet(handle, buffer, length);
        if (!queue)
            create();
    }
    fprintf(stderr, "packets=%u wrong=%u\n", packets, wrong);
    if (closed)
        return 0;
    nfq_destroy_queue(queue);
    return nfq_close(handle);
}
