/* An NFQUEUE program as its users write them: accepts all packets, with a verdict each or in batches.
 *
 * accept single|batch|rebuild QUEUE: prints "ready" when the queue is open, and runs until it is killed. rebuild destroys and creates the
 * queue again 1,000 times while it accepts packets, and prints "done".
 *
 * The kernel answers a verdict for a packet of the destroyed queue with an error, which the library can take for the answer to its next
 * request. The program then opens everything again. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <libnetfilter_queue/libnetfilter_queue.h>
#include <linux/netfilter.h>

/* Packets of a batch verdict. */
#define BATCH 64
/* Packets between two rebuilds. */
#define BETWEEN 20
#define REBUILDS 1000

static int batch;
static unsigned long packets;
static unsigned last, open_packets;

static int handle(struct nfq_q_handle *queue_, struct nfgenmsg *message, struct nfq_data *data, void *context)
{
    unsigned id = ntohl(nfq_get_msg_packet_hdr(data)->packet_id);
    unsigned char *payload;
    (void)message, (void)context;
    if (nfq_get_payload(data, &payload) < 20)
        return -1;
    packets++;
    if (!batch)
        return nfq_set_verdict(queue_, id, NF_ACCEPT, 0, NULL);
    last = id;
    if (++open_packets == BATCH) {
        open_packets = 0;
        return nfq_set_verdict_batch(queue_, id, NF_ACCEPT);
    }
    return 0;
}

static struct nfq_handle *library;
static struct nfq_q_handle *queue;

static int create_queue(int number)
{
    queue = nfq_create_queue(library, number, handle, NULL);
    return queue && nfq_set_mode(queue, NFQNL_COPY_PACKET, 0xffff) >= 0 && nfq_set_queue_maxlen(queue, 20000) >= 0;
}

static void open_queue(int number)
{
    int one = 1, tries = 100;
    while (!library || !create_queue(number)) {
        if (!--tries) {
            perror("the queue");
            exit(1);
        }
        if (library)
            nfq_close(library);
        library = nfq_open();
    }
    nfnl_rcvbufsiz(nfq_nfnlh(library), 32 << 20);
    setsockopt(nfq_fd(library), SOL_NETLINK, NETLINK_NO_ENOBUFS, &one, sizeof one);
}

int main(int argc, char **argv)
{
    static char buffer[0x11000] __attribute__((aligned));
    unsigned long next = BETWEEN;
    int rebuilds = 0, number;

    if (argc != 3)
        return 1;
    number = atoi(argv[2]);
    batch = !strcmp(argv[1], "batch");
    open_queue(number);
    puts("ready");
    fflush(stdout);
    for (;;) {
        ssize_t length;
        length = recv(nfq_fd(library), buffer, sizeof buffer, open_packets ? MSG_DONTWAIT : 0);
        if (length > 0) {
            nfq_handle_packet(library, buffer, length);
        } else if (errno == EAGAIN && open_packets) { /* The rest of a batch when no packet comes. */
            nfq_set_verdict_batch(queue, last, NF_ACCEPT);
            open_packets = 0;
        }
        else if (errno != EINTR && errno != ENOBUFS)
            return 1;
        if (!strcmp(argv[1], "rebuild") && rebuilds < REBUILDS && packets >= next) {
            nfq_destroy_queue(queue);
            open_queue(number);
            next = packets + BETWEEN;
            if (++rebuilds == REBUILDS) {
                puts("done");
                fflush(stdout);
            }
        }
    }
}
