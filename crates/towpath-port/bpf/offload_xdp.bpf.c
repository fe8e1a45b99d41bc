// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The programs of flow offload for `af_xdp` ports: packets of decided flows are redirected to their egress interface, all others to the
 * socket of their queue, as without offload. A frame has one path, because one program decides.
 *
 * A queue without a socket has no engine, or is none of its queues. Then only entries that have not expired count, and only if the
 * engine's heartbeat is old: after the engine was killed, a pinned program forwards flows until their lifetime ends.
 *
 * XDP does not tell that a frame is to be segmented, or that its checksum is to be completed. A frame to be segmented exceeds the MTU. A
 * checksum that is the sum of the pseudo header is to be completed: the engine does so.
 */
#define CONTEXT struct xdp_md
#include "offload.h"

/* linux/if_ether.h */
#define ETH_P_8021Q 0x8100
/* A frame of this length has one buffer: a page has room for it besides the driver's data. */
#define BUFFER 3000

static long (*bpf_redirect_map)(void *map, __u64 key, __u64 flags) = (void *)BPF_FUNC_redirect_map;
static long (*bpf_xdp_load_bytes)(struct xdp_md *context, __u32 offset, void *to, __u32 len) = (void *)BPF_FUNC_xdp_load_bytes;
static long (*bpf_xdp_store_bytes)(struct xdp_md *context, __u32 offset, const void *from, __u32 len) = (void *)BPF_FUNC_xdp_store_bytes;
static __u64 (*bpf_xdp_get_buff_len)(struct xdp_md *context) = (void *)BPF_FUNC_xdp_get_buff_len;

struct ethernet {
	__u16 to[3], from[3], type;
};

struct tag {
	__u16 tci, type;
};

/* The sockets of the port, by queue. Each port has a map of its own. */
struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, 64);
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

/* The interfaces of all ports with offload, by index. */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u32);
} egress SEC(".maps");

#define START(context) ((void *)(long)(context)->data)
#define END(context) ((void *)(long)(context)->data_end)

/* The object at a pointer is in the first buffer. Without CAP_PERFMON, the verifier permits only constant offsets of such pointers. */
#define IN(context, here) ((void *)((here) + 1) <= END(context))

#define LOADER(type)                                                                                                                               \
	static __always_inline int load_##type(struct xdp_md *context, __u32 at, struct type *to)                                                  \
	{                                                                                                                                          \
		struct type *here = START(context) + at;                                                                                           \
		if (!IN(context, here))                                                                                                            \
			return bpf_xdp_load_bytes(context, at, to, sizeof(*to));                                                                   \
		*to = *here;                                                                                                                       \
		return 0;                                                                                                                          \
	}
LOADER(ip4)
LOADER(ip6)
LOADER(tcp)
LOADER(udp)

static __always_inline int is_foreign(struct xdp_md *context, const __u8 *address)
{
	struct ethernet *ethernet = START(context);
	const __u16 *own = (const __u16 *)address;
	return !IN(context, ethernet) || ethernet->to[0] != own[0] || ethernet->to[1] != own[1] || ethernet->to[2] != own[2];
}

/* The checksum of a packet is the sum of its pseudo header. */
static __always_inline int is_partial(struct packet *packet)
{
	__u64 sum = swap16(packet->covered) + swap16((__u16)packet->key.proto);
#pragma unroll
	for (int word = 0; word < 4; word++)
		sum += (__u64)packet->key.src[word] + packet->key.dst[word];
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return packet->checksum && packet->checksum == sum;
}

/* One hop less, and other Ethernet addresses. Returns false if the frame is unchanged. */
static __always_inline int route(struct xdp_md *context, struct slot *slot, struct packet *packet)
{
	__u8 less = packet->ttl - 1;
	if (bpf_xdp_store_bytes(context, packet->ttl_at, &less, sizeof(less)))
		return 0;
	if (packet->key.family == 4) {
		__u32 at = packet->ttl_at - __builtin_offsetof(struct ip4, ttl) + __builtin_offsetof(struct ip4, checksum);
		/* RFC 1624: the hop limit is the first byte of its word. */
		__u32 sum = packet->header_sum + swap16(0x100);
		__u16 checksum = sum + (sum >= 0xffff);
		bpf_xdp_store_bytes(context, at, &checksum, sizeof(checksum));
	}
	bpf_xdp_store_bytes(context, 0, slot->macs, sizeof(slot->macs));
	return 1;
}

/* `miss` is the action for a frame without an entry whose queue has no socket. */
static __always_inline int forward(struct xdp_md *context, int miss)
{
	struct packet packet = {};
	__u32 queue = context->rx_queue_index, at = ETH_HLEN, number = 0;
	__u64 now = 0;

	packet.key.ifindex = context->ingress_ifindex;
	if (!bpf_map_lookup_elem(&sockets, &queue)) {
		now = without_engine();
		if (!now)
			return miss;
	}
	__u32 len = bpf_xdp_get_buff_len(context);
	struct ethernet *ethernet = START(context);
	if (!IN(context, ethernet))
		goto miss;
	__u16 protocol = ethernet->type;
	if (protocol == swap16(ETH_P_8021Q)) {
		struct tag *tag = START(context) + ETH_HLEN;
		if (!IN(context, tag))
			goto miss;
		packet.key.vlan = (swap16(tag->tci) & 0xfff) | 0x8000;
		at += sizeof(*tag);
		if (!parse(context, tag->type, ETH_HLEN + sizeof(*tag), len - at, &packet))
			goto miss;
	} else if (!parse(context, protocol, ETH_HLEN, len - at, &packet)) {
		goto miss;
	}
	if (!now && is_denied(context, &packet, &number)) {
		count_denied(number, packet.length);
		return XDP_DROP;
	}
	struct slot *slot = decide(context, &packet, len - at, now, &number);
	if (!slot)
		goto miss;
	if (slot->flags & DROP) {
		count_hit(slot, packet.length, packet.ack, DROPPED);
		return XDP_DROP;
	}
	if (is_partial(&packet)) {
		count(PARTIAL, 1);
		goto miss;
	}
	if (slot->flags & ONE_BUFFER && len > BUFFER) {
		count(MTU, 1);
		goto miss;
	}
	/* Only remembers the interface: the frame leaves after this program. */
	if (bpf_redirect_map(&egress, slot->ifindex, 0) != XDP_REDIRECT)
		goto miss;
	if (slot->flags & ROUTE && !route(context, slot, &packet))
		goto miss;
	count_hit(slot, packet.length, packet.ack, HIT);
	return XDP_REDIRECT;
miss:
	return bpf_redirect_map(&sockets, queue, miss);
}

/* A port with `fail = "open"`. */
SEC("xdp.frags")
int flow_open(struct xdp_md *context)
{
	return forward(context, XDP_PASS);
}

/* A port with `fail = "closed"`. */
SEC("xdp.frags")
int flow_closed(struct xdp_md *context)
{
	return forward(context, XDP_DROP);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
