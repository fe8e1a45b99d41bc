/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What the programs of flow offload share (src/offload): the maps, and the decision on a packet. `offload.bpf.c` has the programs of
 * `af_packet` ports, `offload_xdp.bpf.c` those of `af_xdp` ports.
 *
 * An entry of `flows` names a slot of `slots`. The engine maps the slots into its memory: it reads counters and ends an entry without
 * a system call. It uses a slot again only a second after its entry ended, so a decision never refers to another flow's slot.
 *
 * A program defines CONTEXT, the type of its argument, and the functions that are declared here without a body.
 *
 * Build: clang-14 -O2 -g -target bpf, see `.ci/run bpf`. The objects are checked in, each also with WEAK_ORDER for processors that reorder
 * loads: see `read_barrier`.
 */
#include <linux/bpf.h>
#include <linux/types.h>

#define SEC(name) __attribute__((section(name), used))
#define __uint(name, value) int (*name)[value]
#define __type(name, value) typeof(value) *name
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))

#define swap16(value) ((__u16)__builtin_bswap16(value))

/* linux/if_ether.h, linux/in.h */
#define ETH_HLEN 14
#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86dd
#define PROTO_TCP 6
#define PROTO_UDP 17

/* RFC 9293 section 3.1 */
#define FIN 0x01
#define SYN 0x02
#define RST 0x04
#define ACK 0x10

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static __u64 (*bpf_ktime_get_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;

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
	__u8 own[6]; /* of a route: the Ethernet address of the ingress interface */
	__u8 unused[10];
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
/* The egress cannot take frames of several buffers from a native XDP program. */
#define ONE_BUFFER 4
/* Packets are dropped. */
#define DROP 8

/* An address, and a prefix of addresses: `len` counts the bits of the family, too. */
struct address {
	__u32 family; /* 4 or 6; of a destination, with DESTINATION */
	__u32 bits[4]; /* IPv4: the first word; the others are 0 */
};

struct prefix {
	__u32 len;
	struct address address;
};

struct port {
	__u32 ifindex;
	__u32 vlan; /* as in struct key */
};

#define DESTINATION 0x100

/* Rules that deny packets of a class by an address, at one port. */
struct denying {
	__u64 epoch; /* 0: none */
	struct port port;
	__u32 sources; /* rules by their source, by bit, in order: the first one denies */
	__u32 destinations; /* and by their destination */
	__u16 flags; /* ROUTE, ANY_VLAN */
	__u8 own[6]; /* of ROUTE: the Ethernet address of the interface */
};

/* The packets of one rule, of a class, at one port. */
struct denied {
	__u64 packets;
	__u64 bytes;
};

#define DENYING_PORTS 64
#define DENYING_RULES 32
/* The classes of packets: IPv4 TCP, IPv4 UDP, IPv6 TCP, IPv6 UDP. */
#define DENYING_CLASSES 4

/* The age at which a heartbeat is old. The engine writes it at least every 4 ms. */
#define SILENCE 100000000ULL
/* The lifetime after an RST without an engine. */
#define AFTER_RST 1000000000ULL

/* The indices of `stats`, in the order of `Reason` of src/offload/mod.rs. */
enum { HIT, HIT_BYTES, NO_ENTRY, STALE, CONTROL, NOT_PLAIN, TTL, MTU, OTHER_HOST, PARTIAL, DROPPED, DROPPED_BYTES, STATS };

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

/*
 * The current epoch: entries of another one have ended. Then the engine's heartbeat, a time of CLOCK_MONOTONIC. Then the number of ports
 * with rules that deny by an address.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 3);
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

/* Of addresses and prefixes: which rules deny them, by bit. The engine sets the number of entries. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct address);
	__type(value, __u32);
} hosts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix);
	__type(value, __u32);
} nets SEC(".maps");

/* The index of a port: `denying` has its classes at DENYING_CLASSES times the index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, DENYING_PORTS);
	__type(key, struct port);
	__type(value, __u32);
} ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DENYING_PORTS * DENYING_CLASSES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct denying);
} denying SEC(".maps");

/* By port, class and rule. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DENYING_PORTS * DENYING_CLASSES * DENYING_RULES);
	__type(key, __u32);
	__type(value, struct denied);
} denied SEC(".maps");

/*
 * Loads after it are not carried out before those ahead of it. It pairs with the stores of src/offload/deny.rs.
 *
 * x86 carries out loads in their order, so only the compiler is held back. Other processors (arm64) need a barrier. BPF has no instruction for
 * it before Linux 6.15, but an atomic operation that returns a value is fully ordered in the kernel's memory model (atomic_t.txt).
 *
 * Not needed where one word decides: `decide` compares the epoch of a slot, which is written before the key that leads to the slot, and
 * does not change otherwise while a program may use it. Counters, times and acknowledgement numbers are words of their own. The decision of
 * a filter is read on the CPU that wrote it.
 */
static __always_inline void read_barrier(void)
{
#ifdef WEAK_ORDER
	__u64 word = 0;
	__u64 before = __sync_fetch_and_add(&word, 0);
	asm volatile("" : : "r"(before) : "memory");
#else
	asm volatile("" : : : "memory");
#endif
}

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

struct tcp {
	__u16 src_port, dst_port;
	__u32 seq, ack;
	__u8 offset, flags;
	__u16 window, checksum, urgent;
};

struct udp {
	__u16 src_port, dst_port, length, checksum;
};

/* What a program reads of a packet. */
struct packet {
	struct key key;
	__u32 seq, ack;
	__u32 network; /* length of the IP header */
	__u32 header; /* of the transport header */
	__u32 length; /* of the IP packet */
	__u32 covered; /* by the checksum of the transport protocol */
	__u32 ttl_at; /* offset of the hop limit */
	__u16 checksum; /* of the transport protocol */
	__u16 header_sum; /* the checksum of the IPv4 header */
	__u8 ttl;
	__u8 flags; /* of TCP */
};

/* Reads a header at an offset of the frame; another value than 0 if it is not there. */
static __always_inline int load_ip4(CONTEXT *context, __u32 at, struct ip4 *to);
static __always_inline int load_ip6(CONTEXT *context, __u32 at, struct ip6 *to);
static __always_inline int load_tcp(CONTEXT *context, __u32 at, struct tcp *to);
static __always_inline int load_udp(CONTEXT *context, __u32 at, struct udp *to);
/* The frame is for another Ethernet address than `own`, that of the interface. */
static __always_inline int is_foreign(CONTEXT *context, const __u8 *own);

/* Reads the header at `at` after the IP header. Returns false if the packet is not plain. */
static __always_inline int parse_transport(CONTEXT *context, __u32 at, struct packet *packet)
{
	if (packet->key.proto == PROTO_TCP) {
		struct tcp tcp;
		if (load_tcp(context, at, &tcp))
			return 0;
		packet->header = (tcp.offset >> 4) * 4;
		if (packet->header < sizeof(tcp) || packet->network + packet->header > packet->length)
			return 0;
		packet->key.src_port = tcp.src_port;
		packet->key.dst_port = tcp.dst_port;
		packet->seq = tcp.seq;
		packet->ack = tcp.ack;
		packet->flags = tcp.flags;
		packet->checksum = tcp.checksum;
		packet->covered = packet->length - packet->network;
		return 1;
	}
	if (packet->key.proto == PROTO_UDP) {
		struct udp udp;
		if (load_udp(context, at, &udp))
			return 0;
		packet->header = sizeof(udp);
		packet->covered = swap16(udp.length);
		if (packet->covered < 8 || packet->network + packet->covered > packet->length)
			return 0;
		packet->key.src_port = udp.src_port;
		packet->key.dst_port = udp.dst_port;
		packet->checksum = udp.checksum;
		return 1;
	}
	return 0;
}

static __always_inline int parse_ip4(CONTEXT *context, __u32 at, __u32 available, struct packet *packet)
{
	struct ip4 ip;
	if (load_ip4(context, at, &ip))
		return 0;
	packet->length = swap16(ip.length);
	if (ip.version != 0x45 || (ip.fragment & swap16(0x3fff)) || packet->length < sizeof(ip) || packet->length > available)
		return 0;
	packet->key.src[0] = ip.src;
	packet->key.dst[0] = ip.dst;
	packet->key.proto = ip.proto;
	packet->key.family = 4;
	packet->ttl = ip.ttl;
	packet->header_sum = ip.checksum;
	packet->network = sizeof(ip);
	packet->ttl_at = at + __builtin_offsetof(struct ip4, ttl);
	return parse_transport(context, at + sizeof(ip), packet);
}

static __always_inline int parse_ip6(CONTEXT *context, __u32 at, __u32 available, struct packet *packet)
{
	struct ip6 ip;
	if (load_ip6(context, at, &ip))
		return 0;
	packet->length = sizeof(ip) + swap16(ip.payload);
	if (*(__u8 *)&ip.version >> 4 != 6 || !ip.payload || packet->length > available)
		return 0;
	__builtin_memcpy(packet->key.src, ip.src, 16);
	__builtin_memcpy(packet->key.dst, ip.dst, 16);
	packet->key.proto = ip.next;
	packet->key.family = 6;
	packet->ttl = ip.ttl;
	packet->network = sizeof(ip);
	packet->ttl_at = at + __builtin_offsetof(struct ip6, ttl);
	return parse_transport(context, at + sizeof(ip), packet);
}

/*
 * Reads a packet of `available` bytes at `at` of the frame. Returns false if it is not plain. The conditions are those of towpath-wire,
 * plain(). `at` is a constant, so that all offsets are.
 */
static __always_inline int parse(CONTEXT *context, __u16 protocol, __u32 at, __u32 available, struct packet *packet)
{
	int is_plain = 0;
	if (protocol == swap16(ETH_P_IP))
		is_plain = parse_ip4(context, at, available, packet);
	else if (protocol == swap16(ETH_P_IPV6))
		is_plain = parse_ip6(context, at, available, packet);
	if (!is_plain)
		count(NOT_PLAIN, 1);
	return is_plain;
}

/* The rules that deny an address, by bit. */
static __always_inline __u32 rules_of(struct prefix *prefix, const __u32 *bits)
{
	__builtin_memcpy(prefix->address.bits, bits, 16);
	__u32 *found = bpf_map_lookup_elem(&hosts, &prefix->address);
	if (!found)
		found = bpf_map_lookup_elem(&nets, prefix);
	return found ? *found : 0;
}

/*
 * Returns true if a rule of the ingress port denies the source or the destination of a packet; `at` is then the index of its counters. No packet
 * that `parse` accepts, of the same class, matches another rule before.
 *
 * The engine changes the maps only after it has changed the epoch. The epoch of the port is read before them and the current one after
 * them: if both are equal, all that was read between belongs to this epoch.
 */
static __always_inline int is_denied(CONTEXT *context, struct packet *packet, __u32 *at)
{
	__u32 zero = 0, two = 2, tagged = 0, rules = 0, bit = 0;
	struct port port = { packet->key.ifindex, packet->key.vlan };
	struct prefix prefix = { 8 * sizeof(struct address), { packet->key.family } };
	volatile __u64 *current = bpf_map_lookup_elem(&epoch, &zero), *some = bpf_map_lookup_elem(&epoch, &two);

	if (!current || !some || !*some)
		return 0;
	__u32 *index = bpf_map_lookup_elem(&ports, &port);
	if (!index && port.vlan) {
		tagged = 1;
		port.vlan = 0;
		index = bpf_map_lookup_elem(&ports, &port);
	}
	if (!index)
		return 0;
	__u32 number = *index * DENYING_CLASSES + (packet->key.family == 6) * 2 + (packet->key.proto == PROTO_UDP);
	struct denying *deny = bpf_map_lookup_elem(&denying, &number);
	if (!deny)
		return 0;
	__u64 began = *(volatile __u64 *)&deny->epoch;
	read_barrier();
	if (!began || deny->port.ifindex != port.ifindex || deny->port.vlan != port.vlan)
		return 0;
	if (tagged && !(deny->flags & ANY_VLAN))
		return 0;
	if (deny->sources)
		rules = rules_of(&prefix, packet->key.src) & deny->sources;
	if (deny->destinations) {
		prefix.address.family |= DESTINATION;
		rules |= rules_of(&prefix, packet->key.dst) & deny->destinations;
	}
	if (!rules)
		return 0;
	read_barrier();
	if (began != *current)
		return 0;
	if (deny->flags & ROUTE && is_foreign(context, deny->own))
		return 0;
	/* The lowest bit. */
	rules &= -rules;
	bit = !!(rules & 0xffff0000) << 4 | !!(rules & 0xff00ff00) << 3 | !!(rules & 0xf0f0f0f0) << 2 | !!(rules & 0xcccccccc) << 1 |
	      !!(rules & 0xaaaaaaaa);
	*at = number * DENYING_RULES + bit;
	return 1;
}

/* Counts a packet that a rule denies. */
static __always_inline void count_denied(__u32 at, __u32 bytes)
{
	struct denied *sum = bpf_map_lookup_elem(&denied, &at);
	if (sum) {
		sum->packets++;
		sum->bytes += bytes;
	}
	count(DROPPED, 1);
	count(DROPPED_BYTES, bytes);
}

/*
 * Decides on a packet, of which `longest` bytes leave in one piece. Returns its slot, whose number is in `at`, if it is redirected or dropped.
 * Without an engine (`now` is the time, otherwise 0), the entries have a deadline, and a connection may end.
 */
static __always_inline struct slot *decide(CONTEXT *context, struct packet *packet, __u32 longest, __u64 now, __u32 *at)
{
	__u32 zero = 0, tagged = 0;
	int is_tcp = packet->key.proto == PROTO_TCP;
	__u32 *index = bpf_map_lookup_elem(&flows, &packet->key);

	if (!index && packet->key.vlan) {
		tagged = 1;
		packet->key.vlan = 0;
		index = bpf_map_lookup_elem(&flows, &packet->key);
	}
	if (!index) {
		count(NO_ENTRY, 1);
		return 0;
	}
	*at = *index;
	struct slot *slot = bpf_map_lookup_elem(&slots, at);
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
		slot->deadline = now + (packet->flags & RST && is_tcp ? AFTER_RST : slot->lifetime);
	}
	if (is_tcp && (now ? packet->flags & SYN : (packet->flags & (SYN | FIN | RST | ACK)) != ACK)) {
		/* The state's end is decided by the engine, with the acknowledgement numbers of the packets that it did not see. */
		if (packet->flags & RST) {
			slot->rst_seq = packet->seq;
			slot->rst_ack = packet->ack;
			slot->rst = packet->flags;
		}
		/* Another connection: the decision was for the earlier one. */
		if (packet->flags & SYN)
			slot->epoch = 0;
		count(CONTROL, 1);
		return 0;
	}
	if (slot->flags & ROUTE && is_foreign(context, slot->own)) {
		count(OTHER_HOST, 1);
		return 0;
	}
	if (slot->flags & DROP)
		return slot;
	if (longest > slot->mtu) {
		count(MTU, 1);
		return 0;
	}
	if (slot->flags & ROUTE && packet->ttl <= 1) {
		count(TTL, 1);
		return 0;
	}
	return slot;
}

/* Counts a packet that is redirected (`reason` is HIT) or dropped (DROPPED). `ack` is 0 if it is not of TCP. */
static __always_inline void count_hit(struct slot *slot, __u32 bytes, __u32 ack, __u32 reason)
{
	__sync_fetch_and_add(&slot->packets, 1);
	__sync_fetch_and_add(&slot->bytes, bytes);
	if (ack)
		slot->ack = ack;
	count(reason, 1);
	count(reason + 1, bytes);
}

/* The time, if the engine has ended; otherwise 0. */
static __always_inline __u64 without_engine(void)
{
	__u32 one = 1;
	__u64 now = bpf_ktime_get_ns();
	__u64 *heartbeat = bpf_map_lookup_elem(&epoch, &one);
	return heartbeat && now > *heartbeat + SILENCE ? now : 0;
}
