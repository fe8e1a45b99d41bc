/* Sends a file over TCP without copying, a megabyte at a time, and prints the counters.
 *
 *   cc -o sender sender.c -ltowpath
 *   nc -l 7007 > copy & ./sender 127.0.0.1 7007 file */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <towpath.h>

enum { BUFFERS = 8, SIZE = 1 << 20 };
static char buffers[BUFFERS][SIZE];

static void must(int fits, const char *what, const char *why)
{
    if (!fits) {
        fprintf(stderr, "sender: %s%s%s\n", what, *why ? ": " : "", why);
        exit(1);
    }
}

/* Returns a free buffer: an unused one first, then a reclaimed one. */
static uint64_t take(towpath_sender *sender)
{
    static uint64_t fresh;
    uint64_t id;
    if (fresh < BUFFERS)
        return fresh++;
    while (towpath_sender_reclaim(sender, &id, 1) != 1)
        must(towpath_sender_drain(sender, -1) == 1, "sending", towpath_error());
    return id;
}

int main(int argc, char **argv)
{
    must(argc == 4, "usage: sender ADDRESS PORT FILE", "");
    struct sockaddr_in peer = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2]))};
    must(inet_pton(AF_INET, argv[1], &peer.sin_addr) == 1, "no IPv4 address", argv[1]);
    int file = open(argv[3], O_RDONLY), fd = socket(AF_INET, SOCK_STREAM, 0);
    must(file >= 0, "cannot read", argv[3]);
    must(connect(fd, (struct sockaddr *)&peer, sizeof peer) == 0, "cannot connect to", argv[1]);

    towpath_sender *sender;
    must(towpath_sender_open(fd, NULL, &sender) == 0, "the socket", towpath_error());
    close(fd); /* the sender has a duplicate */
    for (;;) {
        uint64_t id = take(sender);
        ssize_t length = read(file, buffers[id], SIZE);
        must(length >= 0, "cannot read", argv[3]);
        if (length == 0)
            break;
        /* The buffer is on loan until its id is reclaimed. */
        must(towpath_sender_queue(sender, id, buffers[id], (size_t)length) == 0, "sending", towpath_error());
    }
    must(towpath_sender_drain(sender, -1) == 1, "sending", towpath_error());
    struct towpath_sender_counters counted;
    towpath_sender_counters(sender, &counted);
    printf("%" PRIu64 " bytes without a copy (of these, the kernel copied %" PRIu64 "), %" PRIu64 " plain\n",
           counted.zerocopy_bytes, counted.copied_bytes, counted.plain_bytes);
    return towpath_sender_close(sender, 10000, NULL, 0, NULL) != 1;
}
