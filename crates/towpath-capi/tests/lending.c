/* Lends buffers to a sender and reclaims each once: `lending PORT CHOICE COUNT`. With `lending PORT reset` the peer disconnects. */
#include <arpa/inet.h>
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
        fprintf(stderr, "lending: %s: %s\n", what, towpath_error());
        exit(1);
    }
}
#define CHECK(what) check(what, #what)

enum { BUFFERS = 16, SIZE = 100000 };
static uint8_t buffers[BUFFERS][SIZE];
static int lent[BUFFERS];
static towpath_sender *sender;

static int reclaim(void)
{
    uint64_t ids[4];
    int count = towpath_sender_reclaim(sender, ids, 4);
    CHECK(count >= 0);
    for (int i = 0; i < count; i++) {
        CHECK(ids[i] < BUFFERS && lent[ids[i]]);
        lent[ids[i]] = 0;
    }
    return count;
}

static int first_free(void)
{
    for (int i = 0; i < BUFFERS; i++)
        if (!lent[i])
            return i;
    return -1;
}

static void send_all(int count)
{
    for (int n = 0; n < count; n++) {
        int free;
        while ((free = first_free()) < 0)
            if (reclaim() == 0)
                CHECK(towpath_sender_drain(sender, -1) == 1);
        /* A late read by the kernel would send wrong data. */
        memset(buffers[free], n, SIZE);
        CHECK(towpath_sender_queue(sender, (uint64_t)free, buffers[free], SIZE) == 0);
        lent[free] = 1;
        if (n == BUFFERS - 1)
            CHECK(towpath_sender_queue(sender, 99, buffers[0], 1) == -EAGAIN);
    }
    CHECK(towpath_sender_flush(sender) == 0);
    CHECK(towpath_sender_drain(sender, 60000) == 1);
    while (reclaim() > 0)
        ;
    for (int i = 0; i < BUFFERS; i++)
        CHECK(!lent[i]);
    struct towpath_sender_counters counted;
    CHECK(towpath_sender_counters(sender, &counted) == 0);
    CHECK(counted.zerocopy_bytes + counted.plain_bytes == (uint64_t)count * SIZE);
    CHECK(counted.calls == counted.completed && counted.tampered == 0);
    size_t pinned = 9;
    CHECK(towpath_sender_close(sender, 60000, NULL, 0, &pinned) == 1 && pinned == 0);
}

/* The peer has disconnected: the error is reported, and every buffer is accounted for. */
static void reset(void)
{
    struct pollfd end = {.fd = towpath_sender_fd(sender), .events = 0};
    CHECK(poll(&end, 1, -1) == 1);
    int said = towpath_sender_queue(sender, 1, buffers[1], SIZE);
    if (said == 0)
        said = towpath_sender_flush(sender);
    CHECK(said == -EPIPE || said == -ECONNRESET);
    CHECK(strstr(towpath_error(), "gone") != NULL);
    uint64_t ids[BUFFERS];
    size_t pinned = 9;
    CHECK(towpath_sender_close(sender, 0, ids, BUFFERS, &pinned) == 0 && pinned <= 1);
}

int main(int argc, char **argv)
{
    struct sockaddr_in peer;
    struct towpath_sender_options options;
    CHECK(argc >= 3);
    memset(&peer, 0, sizeof peer);
    memset(&options, 0, sizeof options);
    peer.sin_family = AF_INET;
    peer.sin_port = htons((uint16_t)atoi(argv[1]));
    peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd, (struct sockaddr *)&peer, sizeof peer) == 0);

    CHECK(towpath_sender_open(-1, NULL, &sender) == -EBADF);
    CHECK(towpath_sender_open(STDIN_FILENO, NULL, &sender) == -ENOTSOCK);
    CHECK(towpath_sender_open(fd, NULL, NULL) == -EINVAL);
    options.choice = 3;
    CHECK(towpath_sender_open(fd, &options, &sender) == -EINVAL);
    options.choice = (uint32_t)atoi(argv[2]);
    options.max_buffers = BUFFERS;
    options.tamper_check = 1;
    CHECK(towpath_sender_open(fd, &options, &sender) == 0);
    close(fd);
    CHECK(towpath_sender_queue(sender, 0, NULL, 1) == -EINVAL);
    CHECK(towpath_sender_reclaim(sender, NULL, 1) == -EINVAL);
    CHECK(towpath_sender_drain(sender, -2) == -EINVAL);
    if (argc == 3)
        reset();
    else
        send_all(atoi(argv[3]));
    return 0;
}
