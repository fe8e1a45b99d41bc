/* Calls the packet helpers with generated packets and prints every result. `packets SEED COUNT`: two libraries are compared by their output.
 *
 * A call whose arguments make libnetfilter_queue access memory outside of the packet is left out; tests/helpers.rs tests those. */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <netinet/ip.h>
#include <netinet/ip6.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <arpa/inet.h>
#include <errno.h>
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

static uint64_t state;

/* xorshift64*; below n. */
static uint32_t below(uint32_t n)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)((state * 0x2545f4914f6cdd1dULL >> 32) % n);
}

static bool one_in(uint32_t n)
{
    return below(n) == 0;
}

static void fill(uint8_t *bytes, size_t len)
{
    for (size_t i = 0; i < len; i++)
        bytes[i] = (uint8_t)below(256);
}

static void put16(uint8_t *at, unsigned value)
{
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

static void hex(const char *what, const uint8_t *bytes, size_t len)
{
    printf("%s %zu ", what, len);
    for (size_t i = 0; i < len; i++)
        printf("%02x", bytes[i]);
    printf("\n");
}

/* Appends a transport header with options and payload. Returns its length. */
static size_t transport(uint8_t *at, int protocol)
{
    size_t payload = one_in(4) ? 0 : below(120), header = 8;
    fill(at, 200);
    if (protocol == IPPROTO_TCP) {
        unsigned doff = one_in(3) ? 5 + below(11) : 5;
        header = doff * 4;
        if (one_in(12))
            doff = below(16);
        at[12] = (uint8_t)(doff << 4 | (at[12] & 15));
    } else if (protocol == IPPROTO_UDP) {
        put16(at + 4, one_in(12) ? below(300) : (unsigned)(8 + payload));
        if (one_in(4))
            put16(at + 6, 0);
    }
    return header + payload;
}

/* Builds an IPv4 packet; some are malformed. */
static size_t ip4(uint8_t *at, int *protocol)
{
    static const int protocols[] = {IPPROTO_TCP, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_UDP, IPPROTO_ICMP, 99};
    size_t options = one_in(3) ? below(11) * 4 : 0, header = 20 + options, len;
    *protocol = protocols[below(6)];
    fill(at, header);
    len = header + transport(at + header, *protocol);
    at[0] = (uint8_t)(0x40 | header / 4);
    put16(at + 2, (unsigned)len);
    at[9] = (uint8_t)*protocol;
    if (one_in(16))
        at[0] = (uint8_t)below(256);
    if (one_in(16))
        put16(at + 2, below(300));
    return len;
}

/* The extension headers of the last IPv6 packet: a bit for each kind, and the offset of the header after them. Version 1.0.5 advances by
 * a wrong length at the other kinds, and loops for ever at some. */
static struct {
    bool fragment, ah, other;
    size_t end;
} extensions;

/* Builds an IPv6 packet with extension headers; some are malformed. */
static size_t ip6(uint8_t *at, int *protocol)
{
    static const int protocols[] = {IPPROTO_TCP, IPPROTO_TCP, IPPROTO_UDP, IPPROTO_UDP, IPPROTO_ICMPV6, 99};
    static const uint8_t kinds[] = {IPPROTO_FRAGMENT, IPPROTO_AH, IPPROTO_NONE, IPPROTO_HOPOPTS, IPPROTO_ROUTING, IPPROTO_DSTOPTS};
    size_t len = 40;
    uint8_t *next = at + 6;
    fill(at, 40);
    at[0] = (uint8_t)(0x60 | (at[0] & 15));
    *protocol = protocols[below(6)];
    memset(&extensions, 0, sizeof extensions);
    for (unsigned i = one_in(2) ? below(4) : 0; i > 0; i--) {
        uint8_t kind = kinds[below(one_in(6) ? 6 : one_in(6) ? 3 : 2)];
        size_t size = kind == IPPROTO_FRAGMENT ? 8 : kind == IPPROTO_AH ? 8 + below(8) * 4 : 8 + below(4) * 8;
        *next = kind;
        next = at + len;
        fill(next, size);
        /* The first fragment. Version 1.0.5 reads the offset from the identification. */
        if (kind == IPPROTO_FRAGMENT)
            memset(next + 2, 0, 4);
        next[1] = (uint8_t)(kind == IPPROTO_AH ? size / 4 - 2 : size / 8 - 1);
        extensions.fragment |= kind == IPPROTO_FRAGMENT;
        extensions.ah |= kind == IPPROTO_AH;
        extensions.other |= kind != IPPROTO_FRAGMENT && kind != IPPROTO_AH && kind != IPPROTO_NONE;
        len += size;
    }
    extensions.end = len;
    *next = (uint8_t)*protocol;
    len += transport(at + len, *protocol);
    put16(at + 4, (unsigned)(len - 40));
    if (one_in(16))
        put16(at + 4, below(300));
    if (one_in(16))
        at[0] = (uint8_t)below(256);
    return len;
}

static uint8_t *base;

static void place(const char *what, const void *pointer)
{
    if (pointer == NULL)
        printf("%s null\n", what);
    else
        printf("%s %td\n", what, (const uint8_t *)pointer - base);
}

static void show(struct pkt_buff *packet)
{
    printf("len %u mangled %d\n", pktb_len(packet), pktb_mangled(packet));
    /* Version 1.0.5 does not subtract pulled bytes. */
    if (pktb_data(packet) == base)
        printf("tailroom %u\n", pktb_tailroom(packet));
    place("data", pktb_data(packet));
    place("mac", pktb_mac_header(packet));
    place("network", pktb_network_header(packet));
    place("transport", pktb_transport_header(packet));
    if (pktb_len(packet) < 4096)
        hex("bytes", pktb_data(packet), pktb_len(packet));
}

/* Calls one of the nfq_*_snprintf in buffers of several sizes. */
#define PRINT(function, header)                                        \
    do {                                                               \
        static const size_t sizes[] = {0, 1, 10, 60, 512};             \
        char text[512];                                                \
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {    \
            memset(text, '#', sizeof text);                            \
            int got = function(text, sizes[i], header);                \
            printf(#function " %zu %d '%.40s'\n", sizes[i], got, sizes[i] == 0 || sizes[i] > 60 ? "" : text); \
            if (sizes[i] == 512)                                       \
                printf("%s|\n", text);                                 \
            printf("after %d\n", sizes[i] < 512 ? text[sizes[i]] : 0); \
        }                                                              \
    } while (0)

/* What is replaced by what: offset, length, new bytes. */
struct change {
    unsigned offset, len, new_len;
    char bytes[400];
};

/* A change within `len` bytes that fits into `room`: version 1.0.5 writes beyond the buffer if it does not. */
static struct change change(unsigned len, unsigned room)
{
    struct change made;
    made.offset = below(len + 1);
    made.len = below(len - made.offset + 1);
    made.new_len = one_in(3) ? made.len : below(made.len + room + 1);
    if (made.new_len > sizeof made.bytes)
        made.new_len = sizeof made.bytes;
    fill((uint8_t *)made.bytes, sizeof made.bytes);
    return made;
}

static void tcp(struct pkt_buff *packet, struct iphdr *v4, struct ip6_hdr *v6, bool whole)
{
    struct tcphdr *header = nfq_tcp_get_hdr(packet);
    place("tcp", header);
    if (header == NULL)
        return;
    PRINT(nfq_tcp_snprintf, header);
    uint8_t *payload = nfq_tcp_get_payload(header, packet);
    place("payload", payload);
    unsigned len = nfq_tcp_get_payload_len(header, packet);
    /* Version 1.0.5 returns a number near 2^32 for a header that ends behind the packet. */
    if (len < 65536 && len > 0)
        printf("payload_len %u\n", len);
    if (payload == NULL)
        return;
    if (!whole)
        return;
    if (v4 != NULL)
        nfq_tcp_compute_checksum_ipv4(header, v4);
    else
        nfq_tcp_compute_checksum_ipv6(header, v6);
    show(packet);
    if (payload + len != pktb_data(packet) + pktb_len(packet))
        return;
    for (int i = 0; i < 3; i++) {
        struct change made = change(nfq_tcp_get_payload_len(header, packet), pktb_tailroom(packet));
        int got = (v4 != NULL ? nfq_tcp_mangle_ipv4 : nfq_tcp_mangle_ipv6)(packet, made.offset, made.len, made.bytes, made.new_len);
        printf("mangle %u %u %u: %d\n", made.offset, made.len, made.new_len, got);
        show(packet);
    }
}

static void udp(struct pkt_buff *packet, struct iphdr *v4, struct ip6_hdr *v6, bool whole)
{
    struct udphdr *header = nfq_udp_get_hdr(packet);
    place("udp", header);
    if (header == NULL)
        return;
    PRINT(nfq_udp_snprintf, header);
    uint8_t *payload = nfq_udp_get_payload(header, packet);
    place("payload", payload);
    unsigned len = nfq_udp_get_payload_len(header, packet);
    printf("payload_len %u\n", len);
    if (payload == NULL)
        return;
    if (!whole)
        return;
    if (v4 != NULL)
        nfq_udp_compute_checksum_ipv4(header, v4);
    else
        nfq_udp_compute_checksum_ipv6(header, v6);
    show(packet);
    if (payload + len != pktb_data(packet) + pktb_len(packet))
        return;
    for (int i = 0; i < 3; i++) {
        struct change made = change(nfq_udp_get_payload_len(header, packet), pktb_tailroom(packet));
        int got = (v4 != NULL ? nfq_udp_mangle_ipv4 : nfq_udp_mangle_ipv6)(packet, made.offset, made.len, made.bytes, made.new_len);
        printf("mangle %u %u %u: %d\n", made.offset, made.len, made.new_len, got);
        show(packet);
    }
}

static void buffer(struct pkt_buff *packet)
{
    unsigned head = 0, size = pktb_len(packet) + pktb_tailroom(packet);
    for (int i = 0; i < 4; i++) {
        unsigned len = pktb_len(packet), n;
        switch (below(4)) {
        case 0:
            n = below(head + 1);
            pktb_push(packet, n);
            head -= n;
            break;
        case 1:
            n = below(len + 1);
            pktb_pull(packet, n);
            head += n;
            break;
        case 2:
            pktb_put(packet, below(size - head - len + 1));
            break;
        default:
            pktb_trim(packet, below(len + 1));
        }
        show(packet);
        place("ip4", nfq_ip_get_hdr(packet));
        place("ip6", nfq_ip6_get_hdr(packet));
    }
}

static void one(void)
{
    uint8_t bytes[2048];
    int protocol;
    bool v6 = one_in(2);
    int family = one_in(30) ? AF_UNIX : v6 ? AF_INET6 : AF_INET;
    size_t len = (v6 ? ip6 : ip4)(bytes, &protocol), whole = len, extra = below(3) * below(60);
    if (one_in(6))
        len = !v6 && one_in(4) ? (bytes[0] & 15u) * 4u : below((uint32_t)len + 1);
    if (len > whole)
        len = whole;
    errno = 0;
    struct pkt_buff *packet = pktb_alloc(family, bytes, len, extra);
    printf("alloc %d %zu %zu: %d %d\n", family, len, extra, packet != NULL, errno);
    if (packet == NULL)
        return;
    base = pktb_data(packet);
    show(packet);
    if (family == AF_UNIX) {
        pktb_free(packet);
        return;
    }
    struct iphdr *iph = nfq_ip_get_hdr(packet);
    struct ip6_hdr *ip6h = nfq_ip6_get_hdr(packet);
    place("ip4", iph);
    place("ip6", ip6h);
    bool consistent = false;
    if (iph != NULL) {
        int got = nfq_ip_set_transport_header(packet, iph);
        printf("set_transport %d\n", got);
        PRINT(nfq_ip_snprintf, iph);
        consistent = got == 0 && iph->ihl >= 5 && ntohs(iph->tot_len) >= iph->ihl * 4;
        if (consistent) {
            nfq_ip_set_checksum(iph);
            show(packet);
        }
    } else if (ip6h != NULL) {
        PRINT(nfq_ip6_snprintf, ip6h);
        int target = extensions.fragment && one_in(8) ? IPPROTO_FRAGMENT : extensions.ah && one_in(8) ? IPPROTO_AH : protocol;
        if (v6 && !extensions.other && (!extensions.ah || extensions.end <= len))
            printf("set_transport %d\n", nfq_ip6_set_transport_header(packet, ip6h, (uint8_t)target));
size_t end = ntohs(ip6h->ip6_plen) + 40u;
        consistent = len == whole && end <= len && end >= extensions.end + 20;
    }
    place("transport", pktb_transport_header(packet));
    if (iph == NULL && ip6h == NULL)
        ;
    else if (one_in(10))
        (one_in(2) ? tcp : udp)(packet, iph, ip6h, false);
    else if (protocol == IPPROTO_TCP)
        tcp(packet, iph, ip6h, consistent);
    else
        udp(packet, iph, ip6h, consistent);
    if (one_in(4)) {
        struct change made = change(pktb_len(packet), pktb_tailroom(packet));
        unsigned dataoff = below(made.offset + 1);
        printf("pktb_mangle %d\n", pktb_mangle(packet, (int)dataoff, made.offset - dataoff, made.len, made.bytes, made.new_len));
        show(packet);
    } else if (one_in(4)) {
        buffer(packet);
    }
    pktb_free(packet);
}

int main(int argc, char **argv)
{
    Dl_info library;
    if (argc != 3)
        return 2;
    dladdr((void *)(uintptr_t)pktb_alloc, &library);
    fprintf(stderr, "%s\n", library.dli_fname);
    for (unsigned long i = 0, count = strtoul(argv[2], NULL, 0); i < count; i++) {
        printf("case %lu\n", i);
        state = (strtoull(argv[1], NULL, 0) << 32 | i) * 0x9e3779b97f4a7c15ULL | 1;
        one();
    }
    return 0;
}
