/* Calls the packet helpers with arguments outside of the packet. Every call fails without an effect. */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/ip6.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <libnetfilter_queue/libnetfilter_queue.h>
#include <libnetfilter_queue/libnetfilter_queue_ipv4.h>
/* Two headers of version 1.0.5 have the same guard. */
#undef _LIBNFQUEUE_H_
#include <libnetfilter_queue/libnetfilter_queue_ipv6.h>
#include <libnetfilter_queue/libnetfilter_queue_tcp.h>
#include <libnetfilter_queue/libnetfilter_queue_udp.h>
#include <libnetfilter_queue/pktbuff.h>

static void check(bool fits, const char *what, int line)
{
    if (!fits) {
        fprintf(stderr, "bounds.c:%d: %s\n", line, what);
        exit(1);
    }
}
#define CHECK(what) check(what, #what, __LINE__)

/* UDP over IPv4 with a payload of 12 bytes. */
static const uint8_t udp[40] = {0x45, 0, 0, 40, 0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2, 0, 53, 0, 54, 0, 20, 0, 0, 'h', 'e', 'l', 'l', 'o'};

/* A replacement that does not fit changes nothing. */
static void replacements(void)
{
    static const struct {
        unsigned offset, len, new_len;
    } invalid[] = {{0, 0, 21}, {0, 5, 26}, {13, 0, 0}, {0, 13, 0}, {12, 1, 1}, {0xffffffff, 1, 1}, {1, 0xffffffff, 0}, {0, 0, 0xffffffff}, {0x7fffffff, 0x7fffffff, 1}};
    char bytes[64] = "";
    struct pkt_buff *packet = pktb_alloc(AF_INET, (void *)udp, sizeof udp, 20);
    CHECK(packet != NULL && nfq_ip_set_transport_header(packet, nfq_ip_get_hdr(packet)) == 0);
    for (size_t i = 0; i < sizeof invalid / sizeof *invalid; i++) {
        CHECK(nfq_udp_mangle_ipv4(packet, invalid[i].offset, invalid[i].len, bytes, invalid[i].new_len) == 0);
        CHECK(nfq_udp_mangle_ipv6(packet, invalid[i].offset, invalid[i].len, bytes, invalid[i].new_len) == 0);
        CHECK(nfq_ip_mangle(packet, 28, invalid[i].offset, invalid[i].len, bytes, invalid[i].new_len) == 0);
        CHECK(pktb_mangle(packet, 28, invalid[i].offset, invalid[i].len, bytes, invalid[i].new_len) == 0);
    }
    CHECK(pktb_mangle(packet, -1, 0, 1, bytes, 1) == 0 && pktb_mangle(packet, INT32_MIN, 0, 1, bytes, 1) == 0);
    CHECK(nfq_ip_mangle(packet, 0xffffffff, 1, 1, bytes, 1) == 0);
    CHECK(!pktb_mangled(packet) && pktb_len(packet) == sizeof udp && memcmp(pktb_data(packet), udp, sizeof udp) == 0);
    /* The whole room. */
    CHECK(nfq_udp_mangle_ipv4(packet, 12, 0, bytes, 20) == 1 && pktb_tailroom(packet) == 0 && pktb_mangled(packet));
    CHECK(nfq_udp_mangle_ipv4(packet, 0, 0, bytes, 1) == 0 && pktb_len(packet) == 60);
    /* The new bytes may be a part of the packet. */
    CHECK(nfq_udp_mangle_ipv4(packet, 0, 5, (char *)pktb_data(packet) + 30, 2) == 1);
    pktb_free(packet);
}

static void buffers(void)
{
    struct pkt_buff *packet = pktb_alloc(AF_INET, (void *)udp, sizeof udp, 10);
    pktb_push(packet, 1);
    pktb_pull(packet, 41);
    pktb_put(packet, 11);
    pktb_put(packet, 0xffffffff);
    pktb_trim(packet, 51);
    CHECK(pktb_len(packet) == 40 && pktb_tailroom(packet) == 10 && pktb_data(packet) == pktb_network_header(packet));
    pktb_pull(packet, 15);
    CHECK(pktb_len(packet) == 25 && pktb_tailroom(packet) == 10);
    pktb_put(packet, 10);
    pktb_push(packet, 15);
    CHECK(pktb_len(packet) == 50 && pktb_tailroom(packet) == 0);
    pktb_free(packet);
    errno = 0;
    CHECK(pktb_alloc(AF_INET, (void *)udp, 10, SIZE_MAX) == NULL && errno == ENOMEM);
    CHECK(pktb_alloc(AF_INET, (void *)udp, 10, SIZE_MAX / 2) == NULL && errno == ENOMEM);
}

static void bridge(void)
{
    uint8_t frame[14 + sizeof udp] = {0};
    memcpy(frame + 14, udp, sizeof udp);
    for (size_t len = 0; len <= 14; len++) {
        errno = 0;
        CHECK(pktb_alloc(AF_BRIDGE, frame, len, 0) == NULL && errno == EPROTONOSUPPORT);
    }
    frame[12] = 8;
    CHECK(pktb_alloc(AF_BRIDGE, frame, 13, 0) == NULL);
    struct pkt_buff *packet = pktb_alloc(AF_BRIDGE, frame, sizeof frame, 0);
    CHECK(packet != NULL && pktb_mac_header(packet) == pktb_data(packet) && pktb_network_header(packet) == pktb_data(packet) + 14);
    CHECK((uint8_t *)nfq_ip_get_hdr(packet) == pktb_data(packet) + 14);
    CHECK(nfq_ip_set_transport_header(packet, nfq_ip_get_hdr(packet)) == 0 && nfq_udp_get_payload_len(nfq_udp_get_hdr(packet), packet) == 12);
    CHECK(pktb_mangle(packet, -14, 0, 6, "abcdef", 6) == 1 && memcmp(pktb_data(packet), "abcdef", 6) == 0);
    pktb_free(packet);
}

/* Sets the transport header of an IPv6 packet to protocol `target`; returns its offset behind the IPv6 header, or -1. */
static int find(uint8_t next, const uint8_t *extensions, size_t len, uint8_t target)
{
    uint8_t bytes[40 + 256] = {0x60, 0, 0, 0, 0, (uint8_t)len, next};
    memcpy(bytes + 40, extensions, len);
    struct pkt_buff *packet = pktb_alloc(AF_INET6, bytes, 40 + len, 0);
    int found = nfq_ip6_set_transport_header(packet, nfq_ip6_get_hdr(packet), target);
    uint8_t *header = pktb_transport_header(packet);
    CHECK((header != NULL) == (found == 1));
    int offset = header == NULL ? -1 : (int)(header - pktb_data(packet)) - 40;
    pktb_free(packet);
    return offset;
}

static void extensions(void)
{
    static const uint8_t kinds[] = {IPPROTO_HOPOPTS, IPPROTO_ROUTING, IPPROTO_DSTOPTS, 135, 139, 140};
    uint8_t one[64] = {IPPROTO_TCP, 2};
    for (size_t i = 0; i < sizeof kinds; i++) {
        CHECK(find(kinds[i], one, 64, IPPROTO_TCP) == 24 && find(kinds[i], one, 24, IPPROTO_TCP) == 24);
        for (size_t len = 0; len < 24; len++)
            CHECK(find(kinds[i], one, len, IPPROTO_TCP) == -1);
        CHECK(find(kinds[i], one, 64, kinds[i]) == 0 && find(kinds[i], one, 64, IPPROTO_UDP) == -1);
    }
    /* A chain that never ends, and another upper layer. */
    uint8_t zero[64] = {0};
    CHECK(find(IPPROTO_HOPOPTS, zero, 64, IPPROTO_TCP) == -1 && find(IPPROTO_UDP, zero, 64, IPPROTO_TCP) == -1);
    /* Fragments: the first one, the first one with an identification, another one. */
    uint8_t fragment[64] = {IPPROTO_TCP};
    CHECK(find(IPPROTO_FRAGMENT, fragment, 64, IPPROTO_TCP) == 8);
    memset(fragment + 4, 0xff, 4);
    fragment[3] = 1;
    CHECK(find(IPPROTO_FRAGMENT, fragment, 64, IPPROTO_TCP) == 8);
    fragment[3] = 8;
    CHECK(find(IPPROTO_FRAGMENT, fragment, 64, IPPROTO_TCP) == -1);
    /* AH beyond the packet. */
    uint8_t ah[64] = {IPPROTO_TCP, 4};
    CHECK(find(IPPROTO_AH, ah, 24, IPPROTO_TCP) == 24 && find(IPPROTO_AH, ah, 23, IPPROTO_TCP) == -1);
}

/* IP headers whose lengths are less than those of their headers. */
static void checksums(void)
{
    for (unsigned len = 0; len < 28; len++) {
        uint8_t bytes[sizeof udp];
        memcpy(bytes, udp, sizeof udp);
        bytes[3] = (uint8_t)len;
        nfq_udp_compute_checksum_ipv4((struct udphdr *)(bytes + 20), (struct iphdr *)bytes);
        nfq_tcp_compute_checksum_ipv4((struct tcphdr *)(bytes + 20), (struct iphdr *)bytes);
    }
    uint8_t bytes[80] = {0x60};
    nfq_udp_compute_checksum_ipv6((struct udphdr *)(bytes + 48), (struct ip6_hdr *)bytes);
    nfq_tcp_compute_checksum_ipv6((struct tcphdr *)(bytes + 48), (struct ip6_hdr *)bytes);
    bytes[0] = 0x40;
    nfq_ip_set_checksum((struct iphdr *)bytes);
}

static void nulls(void)
{
    char text[8] = "before";
    struct pkt_buff *none = NULL;
    pktb_free(none);
    pktb_push(none, 1);
    pktb_pull(none, 1);
    pktb_put(none, 1);
    pktb_trim(none, 1);
    CHECK(pktb_data(none) == NULL && pktb_len(none) == 0 && pktb_tailroom(none) == 0 && !pktb_mangled(none));
    CHECK(pktb_mac_header(none) == NULL && pktb_network_header(none) == NULL && pktb_transport_header(none) == NULL);
    CHECK(pktb_mangle(none, 0, 0, 0, NULL, 0) == 0 && nfq_ip_mangle(none, 0, 0, 0, NULL, 0) == 0);
    CHECK(nfq_ip_get_hdr(none) == NULL && nfq_ip6_get_hdr(none) == NULL && nfq_tcp_get_hdr(none) == NULL && nfq_udp_get_hdr(none) == NULL);
    CHECK(nfq_ip_set_transport_header(none, NULL) == -1 && nfq_ip6_set_transport_header(none, NULL, 6) == 0);
    CHECK(nfq_tcp_get_payload(NULL, none) == NULL && nfq_tcp_get_payload_len(NULL, none) == 0);
    CHECK(nfq_udp_get_payload(NULL, none) == NULL && nfq_udp_get_payload_len(NULL, none) == 0);
    nfq_ip_set_checksum(NULL);
    nfq_tcp_compute_checksum_ipv4(NULL, NULL);
    nfq_udp_compute_checksum_ipv6(NULL, NULL);
    CHECK(nfq_ip_snprintf(text, 8, NULL) == -1 && nfq_udp_snprintf(text, 8, NULL) == -1 && strcmp(text, "before") == 0);
    CHECK(nfq_nlmsg_put(NULL, 0, 0) == NULL && nfq_nlmsg_parse(NULL, NULL) == -1 && errno == EINVAL);
    nfq_nlmsg_verdict_put(NULL, 0, 0);
    CHECK(nfq_snprintf_xml(text, 8, NULL, -1) == -1);
    /* Without a transport header. */
    struct pkt_buff *packet = pktb_alloc(AF_INET, (void *)udp, sizeof udp, 0);
    CHECK(nfq_udp_get_hdr(packet) == NULL && nfq_udp_mangle_ipv4(packet, 0, 0, text, 0) == 0);
    pktb_free(packet);
}

/* A message's attribute is at most 65,535 bytes long, and ends with the message. */
static void messages(void)
{
    static char buffer[1 << 17], bytes[1 << 17];
    struct nlattr *attributes[64] = {0};
    struct nlmsghdr *message = nfq_nlmsg_put(buffer, NFQNL_MSG_VERDICT, 1);
    nfq_nlmsg_verdict_put_pkt(message, bytes, 65532);
    nfq_nlmsg_verdict_put_pkt(message, bytes, 0xffffffff);
    CHECK(message->nlmsg_len == 20);
    nfq_nlmsg_verdict_put_mark(message, 7);
    for (message->nlmsg_len = 0; message->nlmsg_len < 28; message->nlmsg_len++)
        CHECK(nfq_nlmsg_parse(message, attributes) == 1 && attributes[NFQA_MARK] == NULL);
    CHECK(nfq_nlmsg_parse(message, attributes) == 1 && attributes[NFQA_MARK] != NULL);
}

int main(void)
{
    Dl_info library;
    dladdr((void *)(uintptr_t)pktb_alloc, &library);
    fprintf(stderr, "%s\n", library.dli_fname);
    replacements();
    buffers();
    bridge();
    extensions();
    checksums();
    nulls();
    messages();
    return 0;
}
