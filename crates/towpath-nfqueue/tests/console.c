/* Executes the calls that standard input names, and prints each call with its result and errno.
 *
 * open QUEUE | recv | verdict ID V | mark ID V MARK | oldmark ID V MARK | batch ID V | batchmark ID V MARK | replace ID TEXT MARK |
 * flags MASK FLAGS | mode MODE | maxlen N | wait | destroy | daemon | child | raw | bytes. recv prints a packet. daemon
 * continues in a grandchild, child makes a child that ends with this process. raw reads a
 * datagram and ignores it; bytes prints the length of the last one. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <libnetfilter_queue/libnetfilter_queue.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

static int print(struct nfq_q_handle *queue, struct nfgenmsg *message, struct nfq_data *data, void *context)
{
    struct nfqnl_msg_packet_hdr *header = nfq_get_msg_packet_hdr(data);
    unsigned char *payload;
    int length = nfq_get_payload(data, &payload);
    (void)queue, (void)message, (void)context;
    printf("%u hook=%d in=%u out=%u phys=%u,%u mark=%u len=%d\n", ntohl(header->packet_id), header->hook, nfq_get_indev(data),
           nfq_get_outdev(data), nfq_get_physindev(data), nfq_get_physoutdev(data), nfq_get_nfmark(data), length);
    return 0;
}

int main(void)
{
    static char line[256], buffer[65536 + 4096], call[32], text[64];
    struct nfq_handle *handle = nfq_open();
    struct nfq_q_handle *queue = NULL;
    unsigned a, b, c;
    int length = 0;

    while (fgets(line, sizeof line, stdin)) {
        int result = 0;
        errno = 0;
        a = b = c = 0;
        sscanf(line, "%31s %u %u %u", call, &a, &b, &c);
        if (!strcmp(call, "recv")) {
            length = recv(nfq_fd(handle), buffer, sizeof buffer, 0);
            if (length < 0 || nfq_handle_packet(handle, buffer, length) < 0)
                return 2;
        } else if (!strcmp(call, "open")) {
            struct nfq_q_handle *opened = nfq_create_queue(handle, a, print, NULL);
            result = opened ? nfq_set_mode(queue = opened, NFQNL_COPY_PACKET, 0xffff) : -1;
        } else if (!strcmp(call, "verdict"))
            result = nfq_set_verdict(queue, a, b, 0, NULL);
        else if (!strcmp(call, "mark"))
            result = nfq_set_verdict2(queue, a, b, c, 0, NULL);
        else if (!strcmp(call, "oldmark"))
            result = nfq_set_verdict_mark(queue, a, b, c, 0, NULL);
        else if (!strcmp(call, "batch"))
            result = nfq_set_verdict_batch(queue, a, b);
        else if (!strcmp(call, "batchmark"))
            result = nfq_set_verdict_batch2(queue, a, b, c);
        else if (!strcmp(call, "replace")) {
            sscanf(line, "%*s %u %63s %u", &a, text, &c);
            result = nfq_set_verdict2(queue, a, 1, c, strlen(text), (unsigned char *)text);
        } else if (!strcmp(call, "flags"))
            result = nfq_set_queue_flags(queue, a, b);
        else if (!strcmp(call, "mode"))
            result = nfq_set_mode(queue, a, 0xffff);
        else if (!strcmp(call, "maxlen"))
            result = nfq_set_queue_maxlen(queue, a);
        else if (!strcmp(call, "wait")) { /* Waits until the socket is readable. */
            struct pollfd readable = { .fd = nfq_fd(handle), .events = POLLIN };
            result = poll(&readable, 1, 10000);
        } else if (!strcmp(call, "raw"))
            length = recv(nfq_fd(handle), buffer, sizeof buffer, 0);
        else if (!strcmp(call, "bytes"))
            result = length;
        else if (!strcmp(call, "daemon")) {
            if (fork() || (setsid() > 0 && fork()))
                _exit(0);
        } else if (!strcmp(call, "child")) {
            if (!fork()) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                for (;;)
                    pause();
            }
        } else if (!strcmp(call, "destroy"))
            result = nfq_destroy_queue(queue);
        if (strcmp(call, "recv"))
            printf("%s %d %d\n", call, result, result < 0 ? errno : 0);
        fflush(stdout);
    }
    return nfq_close(handle);
}
