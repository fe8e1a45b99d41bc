/* A test inspector that uses every function: `verdicts MODE`. */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <towpath.h>

static towpath_inspector *queue;

static void check(int fits, const char *what)
{
    if (!fits) {
        fprintf(stderr, "verdicts: %s: %s\n", what, towpath_error());
        exit(1);
    }
}
#define CHECK(what) check(what, #what)

/* One frame at a time, with each way of waiting; a second verdict fails. */
static int single(void)
{
    struct towpath_frame frame, other;
    int got, odd = 0;
    while ((got = towpath_inspector_recv(queue, &frame, -1)) == 1) {
        CHECK(frame.kind == TOWPATH_PACKET && frame.queue == 1 && frame.wire_len >= frame.len);
        CHECK(frame.network >= 14 && frame.data > frame.network && frame.link_type == 1);
        CHECK(towpath_inspector_verdict(queue, &frame, 0) == -EINVAL);
        CHECK(towpath_inspector_verdict(queue, &frame, 4) == -EINVAL);
        CHECK(towpath_inspector_verdict(queue, &frame, TOWPATH_PASS | 0x200) == -EINVAL);
        CHECK(towpath_inspector_verdict(queue, &frame, TOWPATH_PASS | 1 << 16) == -EINVAL);
        CHECK(towpath_inspector_verdict(queue, NULL, TOWPATH_PASS) == -EINVAL);
        other = frame;
        other.ticket.lane += 100;
        CHECK(towpath_inspector_verdict(queue, &other, TOWPATH_PASS) == -ESTALE);
        other = frame;
        other.ticket.at = UINT32_MAX;
        CHECK(towpath_inspector_verdict(queue, &other, TOWPATH_PASS) == -ESTALE);
        other = frame;
        other.ticket.at = UINT32_MAX;
        CHECK(towpath_inspector_replace(queue, &other, "x", 1) == -ESTALE);
        if (odd++ % 2 == 0)
            CHECK(towpath_inspector_verdict(queue, &frame, TOWPATH_DROP) == 0);
        else
            CHECK(towpath_inspector_verdict_mark(queue, &frame, TOWPATH_PASS, 5, 7) == 0);
        CHECK(towpath_inspector_verdict(queue, &frame, TOWPATH_PASS) == -ESTALE);
        CHECK(towpath_inspector_replace(queue, &frame, "x", 1) == -ESTALE);
    }
    CHECK(towpath_inspector_recv(queue, &frame, 0) == 0);
    return got;
}

/* Batches decided in one write. */
static int upto(void)
{
    struct towpath_frame batch[32];
    int count;
    CHECK(towpath_inspector_recv_batch(queue, NULL, 32, 0) == -EINVAL);
    CHECK(towpath_inspector_recv_batch(queue, batch, 0, 0) == -EINVAL);
    CHECK(towpath_inspector_recv_batch(queue, batch, 32, -2) == -EINVAL);
    for (;;) {
        while ((count = towpath_inspector_recv_batch(queue, batch, 32, 60000)) == -EAGAIN)
            ;
        if (count <= 0)
            return count;
        CHECK(count <= 32);
        CHECK(towpath_inspector_verdict_upto(queue, &batch[count - 1], TOWPATH_HOLD) == -EINVAL);
        CHECK(towpath_inspector_verdict_all(queue, TOWPATH_HOLD) == -EINVAL);
        CHECK(towpath_inspector_verdict(queue, &batch[0], TOWPATH_DROP) == 0);
        if (count % 2)
            CHECK(towpath_inspector_verdict_upto(queue, &batch[count - 1], TOWPATH_PASS) == 0);
        else
            CHECK(towpath_inspector_verdict_all(queue, TOWPATH_PASS) == 0);
        CHECK(towpath_inspector_verdict(queue, &batch[count - 1], TOWPATH_PASS) == -ESTALE);
    }
}

/* Frames held, and decided in reverse order. */
static int hold(void)
{
    struct towpath_frame batch[16];
    int count;
    while ((count = towpath_inspector_recv_batch(queue, batch, 16, -1)) > 0) {
        for (int i = 0; i < count; i++)
            CHECK(towpath_inspector_verdict(queue, &batch[i], TOWPATH_HOLD) == 0);
        for (int i = count - 1; i >= 0; i--)
            CHECK(towpath_inspector_verdict(queue, &batch[i], TOWPATH_PASS) == 0);
    }
    return count;
}

/* Replaces each payload with capitals. */
static int upper(void)
{
    static uint8_t bytes[65536];
    struct towpath_frame frame;
    int got;
    while ((got = towpath_inspector_recv(queue, &frame, -1)) == 1) {
        CHECK(frame.len <= sizeof bytes && frame.data <= frame.len);
        memcpy(bytes, frame.payload, frame.len);
        for (size_t i = frame.data; i < frame.len; i++)
            bytes[i] = (uint8_t)toupper(bytes[i]);
        CHECK(towpath_inspector_replace(queue, &frame, NULL, 1) == -EINVAL);
        CHECK(towpath_inspector_replace(queue, &frame, bytes, (size_t)1 << 30) == -EMSGSIZE);
        CHECK(towpath_inspector_replace(queue, &frame, bytes, frame.len) == 0);
    }
    return got;
}

/* Uses an event loop. */
static int looping(void)
{
    struct pollfd ready = {.fd = towpath_inspector_fd(queue), .events = POLLIN};
    struct towpath_ring_stats stats;
    uint64_t seen = 0;
    CHECK(ready.fd >= 0);
    for (;;) {
        struct towpath_frame frame;
        int armed = towpath_inspector_arm(queue), got;
        CHECK(armed >= 0);
        if (armed)
            CHECK(poll(&ready, 1, -1) >= 0);
        CHECK(towpath_inspector_disarm(queue) == 0);
        while ((got = towpath_inspector_recv(queue, &frame, 0)) == 1) {
            seen++;
            CHECK(towpath_inspector_verdict(queue, &frame, TOWPATH_PASS | TOWPATH_FLOW) == 0);
        }
        CHECK(towpath_inspector_flush(queue) == 0);
        if (got == -EAGAIN)
            continue;
        CHECK(towpath_inspector_stats(queue, &stats) == 0 && stats.received == seen && stats.lost == 0);
        return got;
    }
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(void);
    } modes[] = {{"single", single}, {"upto", upto}, {"hold", hold}, {"upper", upper}, {"loop", looping}};
    CHECK(argc == 2);
    CHECK(towpath_inspector_attach(NULL, "verdicts", TOWPATH_NO_GAPS, &queue) == 0);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (strcmp(modes[i].name, argv[1]) == 0) {
            int ended = modes[i].run();
            check(ended == 0, argv[1]);
            towpath_inspector_close(queue);
            /* The mark file shows that it completed. */
            FILE *mark = getenv("TOWPATH_MARK") ? fopen(getenv("TOWPATH_MARK"), "w") : NULL;
            return mark == NULL || fclose(mark) != 0;
        }
    check(0, "no such mode");
}
