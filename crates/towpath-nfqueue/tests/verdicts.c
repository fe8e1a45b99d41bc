/* An unmodified NFQUEUE program: callbacks and single verdicts, in the modes that the test names.
 *
 * verdicts MODE QUEUE: reads packets until the socket ends or is silent for half a second after the first packet, and prints one line of counts. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <libnetfilter_queue/libnetfilter_queue.h>
#include <linux/netfilter.h>

#define KEPT 64

static const char *mode;
static unsigned packets, refused, wrong, headers, last_id, kept_count, nonzero_marks;
static unsigned kept[KEPT];

static int is(const char *name) { return strcmp(mode, name) == 0; }

static void expect(int result, int wanted)
{
    if (wanted == 0 ? result < 0 : result != -1 || errno != wanted) {
        fprintf(stderr, "packet %u: result %d, errno %d, not %d\n", packets, result, errno, wanted);
        wrong++;
    }
}

static int handle(struct nfq_q_handle *queue, struct nfgenmsg *message, struct nfq_data *data, void *context)
{
    static unsigned char changed[65536];
    struct nfqnl_msg_packet_hdr *header = nfq_get_msg_packet_hdr(data);
    struct nfqnl_msg_packet_hw *hardware = nfq_get_packet_hw(data);
    unsigned char *payload = NULL;
    struct timeval time;
    unsigned id = ntohl(header->packet_id);
    int length = nfq_get_payload(data, &payload);

    if (context != &packets || message->nfgen_family != AF_INET || (id != ++last_id && !is("small")))
        wrong++;
    packets++;
    if (ntohs(header->hw_protocol) == 0x0800 && hardware && ntohs(hardware->hw_addrlen) == 6 &&
        nfq_get_timestamp(data, &time) == 0 && time.tv_sec > 0)
        headers++;
    if (is("meta")) {
        if (length != -1)
            wrong++;
        return nfq_set_verdict(queue, id, NF_ACCEPT, 0, NULL);
    }
    if (length < 20 || payload[0] >> 4 != 4)
        wrong++;
    if (is("range") && length > 28)
        wrong++;
    if (is("marks")) {
        nonzero_marks += nfq_get_nfmark(data) != 0;
        return nfq_set_verdict2(queue, id, NF_ACCEPT, 0x11220000 + id, 0, NULL);
    }
    if (is("twice")) {
        expect(nfq_set_verdict(queue, id, id % 2 ? NF_DROP : NF_ACCEPT, 0, NULL), 0);
        expect(nfq_set_verdict(queue, id, NF_ACCEPT, 0, NULL), ENOENT);
        expect(nfq_set_verdict(queue, id + 1000000, NF_ACCEPT, 0, NULL), ENOENT);
        return 0;
    }
    if (is("stolen")) {
        expect(nfq_set_verdict(queue, id, NF_STOLEN, 0, NULL), EINVAL);
        return nfq_set_verdict(queue, id, NF_ACCEPT, 0, NULL);
    }
    if (is("longer") || is("shorter")) {
        int change = is("longer") ? 40 : -4;
        /* The lengths of the IPv4 and of the UDP header; rules read the packet again. */
        memcpy(changed, payload, length);
        memset(changed + length, 'x', 40);
        changed[2] = (length + change) >> 8;
        changed[3] = length + change;
        changed[24] = (length + change - 20) >> 8;
        changed[25] = length + change - 20;
        return nfq_set_verdict(queue, id, NF_ACCEPT, length + change, changed);
    }
    if (is("same"))
        return nfq_set_verdict(queue, id, NF_ACCEPT, length, payload);
    if (is("reverse")) {
        kept[kept_count++] = id;
        while (kept_count == KEPT || (kept_count && id % 97 == 0))
            expect(nfq_set_verdict(queue, kept[--kept_count], NF_ACCEPT, 0, NULL), 0);
        return 0;
    }
    if (is("batch")) {
        if (id % 8 == 0) {
            expect(nfq_set_verdict_batch(queue, id, id % 16 ? NF_DROP : NF_ACCEPT), 0);
            expect(nfq_set_verdict_batch(queue, id, NF_ACCEPT), ENOENT);
        }
        return 0;
    }
    if (is("kept")) { /* The first packet waits behind 600 others. */
        if (id == 1)
            return 0;
        if (id == 600)
            expect(nfq_set_verdict(queue, 1, NF_DROP, 0, NULL), 0);
        return nfq_set_verdict(queue, id, NF_ACCEPT, 0, NULL);
    }
    if (is("error")) /* A negative result does not lose the other packets of the datagram. */
        return nfq_set_verdict(queue, id, NF_ACCEPT, 0, NULL) > 0 ? -1 : 0;
    return nfq_set_verdict(queue, id, NF_ACCEPT, 0, NULL);
}

int main(int argc, char **argv)
{
    static char buffer[0x11000] __attribute__((aligned));
    struct nfq_handle *handle_ = nfq_open();
    struct nfq_q_handle *queue;
    struct nfnl_handle *nfnl;
    int fd, epoll = -1, one = 1, ended = 0, size;
    struct timeval timeout = { 0, 500000 };

    mode = argc > 1 ? argv[1] : "accept";
    size = is("small") ? 1200 : (int)sizeof buffer;
    if (!handle_ || nfq_unbind_pf(handle_, AF_INET) < 0 || nfq_bind_pf(handle_, AF_INET) < 0)
        return 2;
    queue = nfq_create_queue(handle_, argc > 2 ? atoi(argv[2]) : 1, handle, &packets);
    if (!queue) {
        fprintf(stderr, "nfq_create_queue: %s (nfq_errno %d)\n", strerror(errno), nfq_errno);
        return 3;
    }
    fd = nfq_fd(handle_);
    nfnl = nfq_nfnlh(handle_);
    if (!nfnl || nfnl_rcvbufsiz(nfnl, 1 << 20) < (1 << 20) || nfnl_fd(nfnl) < 0)
        return 4;
    if (setsockopt(fd, SOL_NETLINK, NETLINK_NO_ENOBUFS, &one, sizeof one) < 0)
        return 5;
    if (nfq_set_queue_flags(queue, NFQA_CFG_F_GSO | NFQA_CFG_F_UID_GID, NFQA_CFG_F_GSO | NFQA_CFG_F_UID_GID) < 0)
        return 6;
    if (nfq_set_queue_maxlen(queue, 8192) < 0)
        return 7;
    if (nfq_set_mode(queue, is("meta") ? NFQNL_COPY_META : NFQNL_COPY_PACKET, is("range") ? 28 : 0xffff) < 0)
        return 8;
    if (is("nonblock") || is("epoll"))
        fcntl(fd, F_SETFL, O_NONBLOCK);
    else if (!is("poll"))
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    if (is("epoll")) {
        struct epoll_event event = { .events = EPOLLIN };
        epoll = epoll_create1(0);
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
    }
    while (!ended) {
        struct pollfd readable = { .fd = fd, .events = POLLIN };
        struct epoll_event event;
        int length;
        if (is("poll") || is("nonblock"))
            ended = poll(&readable, 1, packets ? 500 : 10000) == 0;
        else if (is("epoll"))
            ended = epoll_wait(epoll, &event, 1, packets ? 500 : 10000) == 0;
        if (ended)
            break;
        length = is("nonblock") ? read(fd, buffer, size) : recv(fd, buffer, size, 0);
        if (length < 0) {
            if (errno != EAGAIN || is("poll"))
                return 9;
            ended = !is("nonblock") && !is("epoll") && packets;
            continue;
        }
        refused += nfq_handle_packet(handle_, buffer, length) < 0;
    }
    if (is("batch"))
        nfq_set_verdict_batch(queue, last_id, NF_ACCEPT);
    while (kept_count)
        expect(nfq_set_verdict(queue, kept[--kept_count], NF_ACCEPT, 0, NULL), 0);
    printf("packets=%u wrong=%u headers=%u refused=%u marks=%u\n", packets, wrong, headers, refused, nonzero_marks);
    fflush(stdout);
    if (is("close"))
        return 0;
    nfq_destroy_queue(queue);
    return nfq_close(handle_);
}
