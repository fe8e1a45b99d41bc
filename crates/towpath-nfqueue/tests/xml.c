/* Prints packets with nfq_snprintf_xml. A record of the standard input: flags, size of the buffer, length of the message (32 bits each), and
 * the message. A record of the output: the result, the length of the text (32 bits each), and the text. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <libnetfilter_queue/libnetfilter_queue.h>

static uint32_t head[3];
static int called;

static int print(struct nfq_q_handle *queue, struct nfgenmsg *message, struct nfq_data *data, void *context)
{
    static char text[1 << 18];
    (void)queue, (void)message, (void)context;
    memset(text, '#', sizeof text);
    int got = nfq_snprintf_xml(text, head[1], data, (int)head[0]);
    uint32_t result[2] = {(uint32_t)got, head[1] == 0 ? 0 : (uint32_t)strlen(text)};
    if (head[1] < sizeof text && text[head[1]] != '#')
        abort();
    fwrite(result, sizeof result, 1, stdout);
    fwrite(text, 1, result[1], stdout);
    called = 1;
    return 0;
}

int main(void)
{
    static char message[1 << 16];
    struct nfq_handle *handle = nfq_open();
    if (handle == NULL || nfq_create_queue(handle, 0, print, NULL) == NULL) {
        perror("xml: a queue of the kernel");
        return 1;
    }
    while (fread(head, sizeof head, 1, stdin) == 1) {
        if (head[2] > sizeof message || fread(message, 1, head[2], stdin) != head[2])
            return 2;
        called = 0;
        nfq_handle_packet(handle, message, (int)head[2]);
        if (!called) {
            fprintf(stderr, "xml: a message was not parsed\n");
            return 3;
        }
    }
    return 0;
}
