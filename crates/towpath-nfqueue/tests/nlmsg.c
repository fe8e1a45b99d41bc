/* Calls the message helpers and prints every result: two libraries are compared by their output. */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <libmnl/libmnl.h>
#include <libnetfilter_queue/libnetfilter_queue.h>

static char buffer[1 << 18];
static char value[1 << 17];

static void hex(const char *what, size_t len)
{
    printf("%s %zu ", what, len);
    for (size_t i = 0; i < len; i++)
        printf("%02x", (uint8_t)buffer[i]);
    printf("\n");
}

static void parse(const struct nlmsghdr *message)
{
    struct nlattr *attributes[64];
    for (size_t i = 0; i < 64; i++)
        attributes[i] = NULL;
    errno = 0;
    printf("parse %d", nfq_nlmsg_parse(message, attributes));
    printf(" %d:", errno);
    for (size_t i = 0; i < 64; i++)
        if (attributes[i] != NULL)
            printf(" %zu at %td", i, (char *)attributes[i] - buffer);
    printf("\n");
}

static void build(void)
{
    static const uint32_t numbers[] = {0, 1, 0x01020304, 0x7fffffff, 0xffffffff};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        uint32_t number = numbers[i];
        memset(buffer, 0xee, sizeof buffer);
        struct nlmsghdr *message = nfq_nlmsg_put(buffer, (int)(i & 3), number);
        printf("at %td\n", (char *)message - buffer);
        nfq_nlmsg_verdict_put(message, (int)number, (int)(number ^ 0x55aa));
        nfq_nlmsg_verdict_put_mark(message, number);
        nfq_nlmsg_cfg_put_cmd(message, (uint16_t)number, (uint8_t)number);
        nfq_nlmsg_cfg_put_params(message, (uint8_t)number, (int)number);
        nfq_nlmsg_cfg_put_qmaxlen(message, number);
        for (uint32_t len = 0; len < 9; len++)
            nfq_nlmsg_verdict_put_pkt(message, value, len);
        hex("message", message->nlmsg_len + 8);
        nfq_nlmsg_verdict_put_pkt(message, value, 65531);
        hex("message", message->nlmsg_len + 8);
    }
}

int main(void)
{
    Dl_info library;
    dladdr((void *)(uintptr_t)nfq_nlmsg_put, &library);
    fprintf(stderr, "%s\n", library.dli_fname);
    for (size_t i = 0; i < sizeof value; i++)
        value[i] = (char)(i * 7);
    build();
    /* One attribute of every type and length, between two marks. */
    for (uint16_t type = 0; type < 40; type++)
        for (size_t len = 0; len < 40; len++) {
            struct nlmsghdr *message = nfq_nlmsg_put(buffer, NFQNL_MSG_PACKET, 1);
            mnl_attr_put_u32(message, NFQA_MARK, 1);
            mnl_attr_put(message, type | (len & 1 ? NLA_F_NESTED : 0), len, value);
            mnl_attr_put_u32(message, NFQA_IFINDEX_INDEV, 1);
            mnl_attr_put_u32(message, NFQA_MARK, 2);
            printf("%u %zu: ", type, len);
            parse(message);
        }
    /* Invalid lengths, and a message that ends anywhere. Version 1.0.5 rounds the length of a message up to a multiple of 4. */
    for (unsigned len = 0; len < 70; len++) {
        struct nlmsghdr *message = nfq_nlmsg_put(buffer, NFQNL_MSG_PACKET, 1);
        mnl_attr_put_u32(message, NFQA_MARK, 1);
        mnl_attr_put(message, NFQA_PAYLOAD, 30, value);
        ((struct nlattr *)(buffer + 28))->nla_len = (uint16_t)len;
        printf("length %u: ", len);
        parse(message);
        nfq_nlmsg_put(buffer, NFQNL_MSG_PACKET, 1);
        mnl_attr_put_u32(message, NFQA_MARK, 1);
        mnl_attr_put(message, NFQA_PAYLOAD, 30, value);
        if (len >= 20 && len % 4 == 0 && len < message->nlmsg_len) {
            message->nlmsg_len = len;
            printf("cut %u: ", len);
            parse(message);
        }
    }
    return 0;
}
