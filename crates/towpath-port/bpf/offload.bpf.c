// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The kernel's part of flow offload (src/offload): packets of decided flows are redirected to their egress interface.
 *
 * A received frame passes the packet sockets of its interface before the tc ingress hook (net/core/dev.c,
 * __netif_receive_skb_core). The socket filter therefore decides: it looks the flow up once, leaves the decision in a per-CPU place
 * and returns 0, so that the socket does not receive the frame. The tc program carries out the decision. Both run for one frame after
 * the other on one CPU, without another frame between them, so each frame is either received by the socket or redirected.
 *
 * Without an engine there is no socket, and so no decision: then the tc program, whose link may be pinned, decides itself on entries that
 * have not expired. It does so only if no filter has seen the frame and the engine's heartbeat is old, so that no frame has two paths.
 *
 * An entry of `flows` names a slot of `slots`. The engine maps the slots into its memory: it reads counters and ends an entry without
 * a system call. It uses a slot again only a second after its entry ended, so a decision never refers to another flow's slot.
 *
 * Build: clang-14 -O2 -g -target bpf, see `.ci/run bpf`. The object is checked in.
 */
#include <linux/bpf.h>
#include <linux/types.h>

#define SEC(name) __attribute__((section(name), used))
#define __uint(name, value) int (*name)[value]
#define __type(name, value) typeof(value) *name
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))

#define swap16(value) ((__u16)__builtin_bswap16(value))

/* linux/if_ether.h, linux/in.h, linux/if_packet.h, linux/pkt_cls.h */
#define ETH_HLEN 14
#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define PROTO_TCP 6
#define PROTO_UDP 17
#define PACKET_HOST 0
#define NEXT (-1)

/* RFC 9293 section 3.1 */
#define FIN 0x01
#define SYN 0x02
#define RST 0x04
#define ACK 0x10

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*bpf_skb_load_bytes)(const void *skb, __u32 offset, void *to, __u32 len) = (void *)BPF_FUNC_skb_load_bytes;
static long (*bpf_skb_store_bytes)(void *skb, __u32 offset, const void *from, __u32 len, __u64 flags) =
	(void *)BPF_FUNC_skb_store_bytes;
static long (*bpf_l3_csum_replace)(void *skb, __u32 offset, __u64 from, __u64 to, __u64 size) =
	(void *)BPF_FUNC_l3_csum_replace;
static __u64 (*bpf_ktime_get_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;
static long (*bpf_redirect)(__u32 ifindex, __u64 flags) = (void *)BPF_FUNC_redirect;

/* The layout of src/offload/mod.rs. Multi-byte fields of packets are in network byte order. */
struct key {
	__u32 src[4]; /* IPv4: the first word; the others are 0 */
	__u32 dst[4];
	__u32 ifindex; /* ingress; with it, the zone is known */
	__u16 src_port;
	__u16 dst_port;
	__u16 vlan; /* 0: untagged; otherwise the VLAN with bit 15 */
	__u8 proto;
	__u8 family; /* 4 or 6 */
};

/* Two cache lines: the first one is read, the second one written. */
struct slot {
	__u64 epoch; /* 0: the entry has ended */
	__u32 ifindex;
	__u32 mtu;
	__u32 flags;
	__u8 macs[12]; /* of a route: destination, source */
	__u64 deadline; /* without an engine: the entry's end on CLOCK_MONOTONIC; 0: it ends with the engine */
	__u64 lifetime; /* the time from a packet to the deadline */
	__u8 unused[16];
	__u64 packets;
	__u64 bytes;
	__u32 ack; /* the last TCP acknowledgement number */
	__u32 rst_seq; /* of the last RST */
	__u32 rst_ack;
	__u32 rst; /* flags of the last RST */
	__u8 unused_too[32];
};

#define ROUTE 1
/* Also for frames with a VLAN tag: the engine treats all tags alike. They keep it. */
#define ANY_VLAN 2

/* The age at which a heartbeat is old. The engine writes it at least every 4 ms. */
#define SILENCE 100000000ULL
/* The lifetime after an RST without an engine. */
#define AFTER_RST 1000000000ULL

/* The indices of `stats`, in the order of `Reason` of src/offload/mod.rs. */
enum { HIT, HIT_BYTES, NO_ENTRY, STALE, CONTROL, NOT_PLAIN, TTL, MTU, OTHER_HOST, STATS };

struct decision {
	__u32 seen; /* a filter has seen the frame */
	__u32 slot; /* plus one; 0: the socket receives the frame */
	__u32 ifindex;
	__u32 len;
	__u32 hash;
	__u32 ttl_at; /* offset of the hop limit */
	__u32 ack;
	__u32 bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, struct key);
	__type(value, __u32);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct slot);
} slots SEC(".maps");

/* The current epoch: entries of another one have ended. Then the engine's heartbeat, a time of CLOCK_MONOTONIC. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} epoch SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STATS);
	__type(key, __u32);
	__type(value, __u64);
} stats SEC(".maps");

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

static __always_inline void count(__u32 index, __u64 value)
{
	__u64 *sum = bpf_map_lookup_elem(&stats, &index);
	if (sum)
		*sum += value;
}

struct ip4 {
	__u8 version, tos;
	__u16 length, id, fragment;
	__u8 ttl, proto;
	__u16 checksum;
	__u32 src, dst;
};

struct ip6 {
	__u32 version;
	__u16 payload;
	__u8 next, ttl;
	__u32 src[4], dst[4];
};

/* The fields that TCP and UDP share, then those of TCP. */
struct upper {
	__u16 src_port, dst_port;
	union {
		__u32 seq;
		__u16 udp_length;
	};
	__u32 ack;
	__u8 offset, flags;
	__u16 window, checksum, urgent;
};

/*
 * Decides on a frame. Returns true if it is redirected. The conditions on a plain packet are those of towpath-wire, plain(). Without an
 * engine (`now` is the time, otherwise 0), the entries have a deadline, and a connection may end.
 */
static __always_inline int decide(struct __sk_buff *skb, struct decision *to, __u64 now)
{
	struct key key = {};
	struct upper upper = {};
	__u32 network, length, header = 8, zero = 0;
	__u8 ttl;

	if (skb->vlan_present)
		key.vlan = (skb->vlan_tci & 0xfff) | 0x8000;
	key.ifindex = skb->ifindex;
	if (skb->protocol == swap16(ETH_P_IP)) {
		struct ip4 ip;
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
			goto not_plain;
		length = swap16(ip.length);
		if (ip.version != 0x45 || (ip.fragment & swap16(0x3fff)) || length < sizeof(ip))
			goto not_plain;
		key.src[0] = ip.src;
		key.dst[0] = ip.dst;
		key.proto = ip.proto;
		key.family = 4;
		ttl = ip.ttl;
		network = sizeof(ip);
		to->ttl_at = ETH_HLEN + __builtin_offsetof(struct ip4, ttl);
	} else if (skb->protocol == swap16(ETH_P_IPV6)) {
		struct ip6 ip;
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
			goto not_plain;
		length = sizeof(ip) + swap16(ip.payload);
		if (*(__u8 *)&ip.version >> 4 != 6 || !ip.payload)
			goto not_plain;
		__builtin_memcpy(key.src, ip.src, 16);
		__builtin_memcpy(key.dst, ip.dst, 16);
		key.proto = ip.next;
		key.family = 6;
		ttl = ip.ttl;
		network = sizeof(ip);
		to->ttl_at = ETH_HLEN + __builtin_offsetof(struct ip6, ttl);
	} else {
		goto not_plain;
	}
	if (length > skb->len - ETH_HLEN)
		goto not_plain;
	to->ack = 0;
	if (key.proto == PROTO_TCP) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + network, &upper, sizeof(upper)))
			goto not_plain;
		header = (upper.offset >> 4) * 4;
		if (header < sizeof(upper) || network + header > length)
			goto not_plain;
	} else if (key.proto == PROTO_UDP) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + network, &upper, 8))
			goto not_plain;
		if (swap16(upper.udp_length) < 8 || network + swap16(upper.udp_length) > length)
			goto not_plain;
	} else {
		goto not_plain;
	}
	key.src_port = upper.src_port;
	key.dst_port = upper.dst_port;

	__u32 *index = bpf_map_lookup_elem(&flows, &key), tagged = 0;
	if (!index && key.vlan) {
		tagged = 1;
		key.vlan = 0;
		index = bpf_map_lookup_elem(&flows, &key);
	}
	if (!index) {
		count(NO_ENTRY, 1);
		return 0;
	}
	__u32 at = *index;
	struct slot *slot = bpf_map_lookup_elem(&slots, &at);
	__u64 *current = bpf_map_lookup_elem(&epoch, &zero);
	if (!slot || !current)
		return 0;
	if (tagged && !(slot->flags & ANY_VLAN)) {
		count(NO_ENTRY, 1);
		return 0;
	}
	if (slot->epoch != *current || !slot->epoch) {
		count(STALE, 1);
		return 0;
	}
	if (now) {
		if (now >= slot->deadline)
			return 0;
		slot->deadline = now + (upper.flags & RST && key.proto == PROTO_TCP ? AFTER_RST : slot->lifetime);
	}
	if (key.proto == PROTO_TCP) {
		if (now ? upper.flags & SYN : (upper.flags & (SYN | FIN | RST | ACK)) != ACK) {
			/* The state's end is decided by the engine, with the acknowledgement numbers of the packets that it did not see. */
			if (upper.flags & RST) {
				slot->rst_seq = upper.seq;
				slot->rst_ack = upper.ack;
				slot->rst = upper.flags;
			}
			/* Another connection: the decision was for the earlier one. */
			if (upper.flags & SYN)
				slot->epoch = 0;
			count(CONTROL, 1);
			return 0;
		}
		to->ack = upper.ack;
	}
	__u32 longest = skb->gso_size ? network + header + skb->gso_size : skb->len - ETH_HLEN;
	if (longest > slot->mtu) {
		count(MTU, 1);
		return 0;
	}
	if (slot->flags & ROUTE) {
		if (ttl <= 1) {
			count(TTL, 1);
			return 0;
		}
		if (skb->pkt_type != PACKET_HOST) {
			count(OTHER_HOST, 1);
			return 0;
		}
	}
	to->bytes = length;
	to->ifindex = skb->ifindex;
	to->len = skb->len;
	to->hash = skb->hash;
	to->slot = at + 1;
	return 1;
not_plain:
	count(NOT_PLAIN, 1);
	return 0;
}

/* The filter of the engine's packet sockets: 0 bytes of a frame that is redirected, otherwise all. */
SEC("socket")
int flow_filter(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct decision *decision = bpf_map_lookup_elem(&decisions, &zero);
	if (!decision)
		return -1;
	decision->slot = 0;
	decision->seen = 1;
	return decide(skb, decision, 0) ? 0 : -1;
}

/* The time, if the engine has ended; otherwise 0. */
static __always_inline __u64 without_engine(void)
{
	__u32 one = 1;
	__u64 now = bpf_ktime_get_ns();
	__u64 *heartbeat = bpf_map_lookup_elem(&epoch, &one);
	return heartbeat && now > *heartbeat + SILENCE ? now : 0;
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
		if (now)
			decide(skb, decision, now);
	}
	decision->seen = 0;
	if (!decision->slot)
		return NEXT;
	__u32 at = decision->slot - 1;
	decision->slot = 0;
	/* A decision on a frame that did not come here: another program of the hook has taken it. */
	if (decision->ifindex != skb->ifindex || decision->len != skb->len || decision->hash != skb->hash)
		return NEXT;
	struct slot *slot = bpf_map_lookup_elem(&slots, &at);
	if (!slot)
		return NEXT;
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
	__sync_fetch_and_add(&slot->packets, 1);
	__sync_fetch_and_add(&slot->bytes, decision->bytes);
	if (decision->ack)
		slot->ack = decision->ack;
	count(HIT, 1);
	count(HIT_BYTES, decision->bytes);
	return bpf_redirect(slot->ifindex, 0);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
