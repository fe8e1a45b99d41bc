/* An unmodified NFQUEUE program that parses the messages with libmnl and gives verdicts in a second thread.
 *
 * It reads packets until the socket is silent for half a second after the first packet. */
#include <arpa/inet.h>
#include <errno.h>
#include <libmnl/libmnl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <libnetfilter_queue/libnetfilter_queue.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink_queue.h>

static struct nfq_q_handle *queue;
static unsigned packets, wrong, refused;
static int ids[2];

static int attribute(const struct nlattr *attribute, void *data)
{
    const struct nlattr **table = data;
    if (mnl_attr_type_valid(attribute, NFQA_MAX) < 0)
        wrong++;
    else
        table[mnl_attr_get_type(attribute)] = attribute;
    return MNL_CB_OK;
}

static int message(const struct nlmsghdr *header, void *context)
{
    struct nlattr *table[NFQA_MAX + 1] = { 0 };
    struct nfgenmsg *generic = mnl_nlmsg_get_payload(header);
    struct nfqnl_msg_packet_hdr *packet;
    unsigned id;

    (void)context;
    if (header->nlmsg_type != (NFNL_SUBSYS_QUEUE << 8 | NFQNL_MSG_PACKET) || ntohs(generic->res_id) != 1)
        wrong++;
    mnl_attr_parse(header, sizeof *generic, attribute, table);
    if (!table[NFQA_PACKET_HDR] || !table[NFQA_PAYLOAD] || mnl_attr_get_payload_len(table[NFQA_PAYLOAD]) < 28) {
        wrong++;
        return MNL_CB_ERROR;
    }
    packet = mnl_attr_get_payload(table[NFQA_PACKET_HDR]);
    id = ntohl(packet->packet_id);
    packets++;
    if (write(ids[1], &id, sizeof id) != sizeof id)
        wrong++;
    return MNL_CB_OK;
}

static void *decide(void *unused)
{
    unsigned id;
    while (read(ids[0], &id, sizeof id) == sizeof id)
        if (nfq_set_verdict(queue, id, id % 2 ? NF_ACCEPT : NF_DROP, 0, NULL) < 0)
            refused++;
    return unused;
}

int main(void)
{
    static char buffer[4096] __attribute__((aligned));
    struct nfq_handle *handle = nfq_open();
    struct pollfd readable;
    pthread_t thread;

    if (!handle || pipe(ids) || !(queue = nfq_create_queue(handle, 1, NULL, NULL)))
        return 2;
    if (nfq_set_mode(queue, NFQNL_COPY_PACKET, 0xffff) < 0 || pthread_create(&thread, NULL, decide, NULL))
        return 3;
    readable.fd = nfq_fd(handle);
    readable.events = POLLIN;
    while (poll(&readable, 1, packets ? 500 : 10000) > 0) {
        struct iovec vector = { buffer, sizeof buffer };
        struct msghdr header = { .msg_iov = &vector, .msg_iovlen = 1 };
        ssize_t length = recvmsg(readable.fd, &header, 0);
        if (length < 0 || header.msg_flags & MSG_TRUNC || mnl_cb_run(buffer, length, 0, 0, message, NULL) < 0)
            wrong++;
    }
    close(ids[1]);
    pthread_join(thread, NULL);
    printf("packets=%u wrong=%u\n", packets, wrong + refused);
    fflush(stdout);
    return nfq_close(handle);
}
