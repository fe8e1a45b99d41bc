// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The programs of flow offload for `af_packet` ports: packets of decided flows are redirected to their egress interface.
 *
 * A received frame passes the packet sockets of its interface before the tc ingress hook (net/core/dev.c,
 * __netif_receive_skb_core). The socket filter therefore decides: it looks the flow up once, leaves the decision in a per-CPU place
 * and returns 0, so that the socket does not receive the frame. The tc program carries out the decision. Both run for one frame after
 * the other on one CPU, without another frame between them, so each frame is either received by the socket or redirected.
 *
 * Without an engine there is no socket, and so no decision: then the tc program, whose link may be pinned, decides itself on entries that
 * have not expired. It does so only if no filter has seen the frame and the engine's heartbeat is old, so that no frame has two paths.
 */
#define CONTEXT struct __sk_buff
#include "offload.h"

/* linux/if_packet.h, linux/pkt_cls.h */
#define PACKET_HOST 0
#define NEXT (-1)
#define SHOT 2

static long (*bpf_skb_load_bytes)(const void *skb, __u32 offset, void *to, __u32 len) = (void *)BPF_FUNC_skb_load_bytes;
static long (*bpf_skb_store_bytes)(void *skb, __u32 offset, const void *from, __u32 len, __u64 flags) =
	(void *)BPF_FUNC_skb_store_bytes;
static long (*bpf_l3_csum_replace)(void *skb, __u32 offset, __u64 from, __u64 to, __u64 size) =
	(void *)BPF_FUNC_l3_csum_replace;
static long (*bpf_redirect)(__u32 ifindex, __u64 flags) = (void *)BPF_FUNC_redirect;

struct decision {
	__u32 seen; /* a filter has seen the frame */
	__u32 slot; /* plus one; 0: none */
	__u32 denied; /* the counters of a rule that denies it, plus one; 0: none. Without both, the socket receives the frame */
	__u32 ifindex;
	__u32 len;
	__u32 hash;
	__u32 ttl_at; /* offset of the hop limit */
	__u32 ack;
	__u32 bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct decision);
} decisions SEC(".maps");

/* For socket filters of the engine that continue with `flow_filter`. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, 4);
	__uint(value_size, 4);
} filters SEC(".maps");

#define LOADER(type)                                                                                                                               \
	static __always_inline int load_##type(struct __sk_buff *skb, __u32 at, struct type *to)                                                   \
	{                                                                                                                                          \
		return bpf_skb_load_bytes(skb, at, to, sizeof(*to));                                                                               \
	}
LOADER(ip4)
LOADER(ip6)
LOADER(tcp)
LOADER(udp)

static __always_inline int is_foreign(struct __sk_buff *skb, const __u8 *own)
{
	return skb->pkt_type != PACKET_HOST;
}

/* Leaves the decision on a frame. Returns true if it is redirected or dropped. `now` is that of `decide`. */
static __always_inline int prepare(struct __sk_buff *skb, struct decision *to, __u64 now)
{
	struct packet packet = {};
	__u32 at = 0;

	if (skb->vlan_present)
		packet.key.vlan = (skb->vlan_tci & 0xfff) | 0x8000;
	packet.key.ifindex = skb->ifindex;
	if (!parse(skb, skb->protocol, ETH_HLEN, skb->len - ETH_HLEN, &packet))
		return 0;
	__u32 longest = skb->gso_size ? packet.network + packet.header + skb->gso_size : skb->len - ETH_HLEN;
	if (!now && is_denied(skb, &packet, &at))
		to->denied = at + 1;
	else if (decide(skb, &packet, longest, now, &at))
		to->slot = at + 1;
	else
		return 0;
	to->ack = packet.ack;
	to->bytes = packet.length;
	to->ttl_at = packet.ttl_at;
	to->ifindex = skb->ifindex;
	to->len = skb->len;
	to->hash = skb->hash;
	return 1;
}

/* The filter of the engine's packet sockets: 0 bytes of a frame that is redirected or dropped, otherwise all. */
SEC("socket")
int flow_filter(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct decision *decision = bpf_map_lookup_elem(&decisions, &zero);
	if (!decision)
		return -1;
	decision->slot = 0;
	decision->denied = 0;
	decision->seen = 1;
	return prepare(skb, decision, 0) ? 0 : -1;
}

/* The program at the ingress hook. A frame without a decision continues with the next program, or with the network stack. */
SEC("classifier")
int flow_redirect(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct decision *decision = bpf_map_lookup_elem(&decisions, &zero);
	if (!decision)
		return NEXT;
	if (!decision->seen) {
		__u64 now = without_engine();
		decision->slot = 0;
		decision->denied = 0;
		if (now)
			prepare(skb, decision, now);
	}
	decision->seen = 0;
	if (!decision->slot && !decision->denied)
		return NEXT;
	__u32 at = decision->slot - 1, denied_at = decision->denied - 1;
	int denies = decision->denied != 0;
	decision->slot = 0;
	decision->denied = 0;
	/* A decision on a frame that did not come here: another program of the hook has taken it. */
	if (decision->ifindex != skb->ifindex || decision->len != skb->len || decision->hash != skb->hash)
		return NEXT;
	if (denies) {
		count_denied(denied_at, decision->bytes);
		return SHOT;
	}
	struct slot *slot = bpf_map_lookup_elem(&slots, &at);
	if (!slot)
		return NEXT;
	if (slot->flags & DROP) {
		count_hit(slot, decision->bytes, decision->ack, DROPPED);
		return SHOT;
	}
	if (slot->flags & ROUTE) {
		__u32 ttl_at = decision->ttl_at;
		__u16 word;
		if (bpf_skb_load_bytes(skb, ttl_at, &word, 2))
			return NEXT;
		if (ttl_at == ETH_HLEN + __builtin_offsetof(struct ip4, ttl)) {
			/* The hop limit is the first byte of the word. */
			__u16 less = swap16(swap16(word) - 0x100);
			bpf_l3_csum_replace(skb, ETH_HLEN + __builtin_offsetof(struct ip4, checksum), word, less, 2);
			bpf_skb_store_bytes(skb, ttl_at, &less, 1, 0);
		} else {
			__u8 less = (word & 0xff) - 1;
			bpf_skb_store_bytes(skb, ttl_at, &less, 1, BPF_F_RECOMPUTE_CSUM);
		}
		bpf_skb_store_bytes(skb, 0, slot->macs, sizeof(slot->macs), 0);
	}
	count_hit(slot, decision->bytes, decision->ack, HIT);
	return bpf_redirect(slot->ifindex, 0);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
