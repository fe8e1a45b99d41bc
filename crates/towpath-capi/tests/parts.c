/* A test worker of `http1 body=stream`: `parts MODE` answers the first part of an upload with 100, and the last one with the number of bytes
 * after the head, their checksum (FNV-1a), and the number of parts. Uploads that were cut are written to stderr. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <towpath.h>

static const char more[] = "HTTP/1.1 100 Continue\r\n\r\n";

static towpath_worker *worker;

static struct upload {
    uint32_t generation, parts;
    uint64_t bytes, sum;
} uploads[64]; /* by the index of the connection */

static void check(int fits, const char *what)
{
    if (!fits) {
        fprintf(stderr, "parts: %s: %s\n", what, towpath_error());
        exit(1);
    }
}
#define CHECK(what) check(what, #what)

/* Adds a part. Writes the answer to it, or "". */
static void add(const struct towpath_message *message, char *answer, size_t size)
{
    const uint8_t *bytes = message->bytes;
    size_t len = message->len;
    CHECK(message->connection.index < sizeof uploads / sizeof *uploads);
    CHECK(message->payload == bytes && message->payload_len == len);
    struct upload *upload = &uploads[message->connection.index];
    if (message->part <= 1) {
        size_t head = 4;
        while (head <= len && memcmp(bytes + head - 4, "\r\n\r\n", 4) != 0)
            head++;
        CHECK(head <= len);
        CHECK(message->more == message->part && !message->cut);
        *upload = (struct upload){message->connection.generation, 0, 0, 0xcbf29ce484222325};
        bytes += head;
        len -= head;
    } else {
        CHECK(message->connection.generation == upload->generation && message->part == upload->parts + 1);
        CHECK(!message->more || (len >= 16 << 10 && len <= 256 << 10));
    }
    upload->parts++;
    upload->bytes += len;
    for (size_t i = 0; i < len; i++)
        upload->sum = (upload->sum ^ bytes[i]) * 0x100000001b3;
    answer[0] = 0;
    if (message->cut) {
        CHECK(message->len == 0 && !message->more);
        fprintf(stderr, "cut after %" PRIu64 " bytes\n", upload->bytes);
    } else if (message->more && message->part == 1) {
        snprintf(answer, size, "%s", more);
    } else if (!message->more) {
        char text[100];
        int length = snprintf(text, sizeof text, "%" PRIu64 " %" PRIx64 " %u", upload->bytes, upload->sum, upload->parts);
        snprintf(answer, size, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", length, text);
    }
}

static int receiving(void)
{
    struct towpath_message message;
    char answer[256];
    int got;
    while ((got = towpath_worker_recv(worker, &message, -1)) == 1) {
        add(&message, answer, sizeof answer);
        if (message.more && answer[0])
            CHECK(towpath_worker_reply_part(worker, &message, answer, strlen(answer)) == 0);
        else if (answer[0])
            CHECK(towpath_worker_reply(worker, &message, answer, strlen(answer)) == 0);
        CHECK(towpath_worker_done(worker, &message) == 0);
        CHECK(towpath_worker_done(worker, &message) == -ESTALE);
    }
    return got;
}

static void serve_one(const struct towpath_message *message, towpath_reply *reply, void *context)
{
    char answer[256];
    (void)context;
    add(message, answer, sizeof answer);
    CHECK(towpath_reply_append(reply, answer, strlen(answer)) == 0);
}

int main(int argc, char **argv)
{
    int ended = -1;
    CHECK(argc == 2);
    CHECK(towpath_worker_attach_with(NULL, "parts", strcmp(argv[1], "whole") == 0 ? 0 : TOWPATH_PARTS, &worker) == 0);
    if (strcmp(argv[1], "serve") == 0)
        ended = towpath_worker_serve(worker, 16, serve_one, NULL);
    else
        ended = receiving();
    check(ended == 0, argv[1]);
    towpath_worker_close(worker);
    return 0;
}
