/* Programs with direct access to the bytes, as sk_skb stream parsers have it. */
#include "bpf.h"

/* A 16-bit length in network order at offset 2 counts the whole message. */
SEC("sk_skb/stream_parser")
int length16(struct __sk_buff *skb)
{
	u8 *data = (u8 *)(long)skb->data;
	u8 *end = (u8 *)(long)skb->data_end;

	if (data + 4 > end) {
		skb->mark = 4;
		return 0;
	}
	return data[2] << 8 | data[3];
}

/* Lines: the byte after the first newline. The scan goes on where the last run stopped. */
SEC("sk_skb/stream_parser/lines")
int lines(struct __sk_buff *skb)
{
	u8 *data = (u8 *)(long)skb->data;
	u8 *end = (u8 *)(long)skb->data_end;
	u32 at = skb->cb[0];

	if (at > 0xffff)
		return -74;
	for (u8 *here = data + at; here + 1 <= end; here++, at++) {
		if (*here == '\n') {
			skb->cb[0] = 0;
			return at + 1;
		}
	}
	skb->cb[0] = at;
	return 0;
}

/* A varint of at most five bytes at `at`: how many bytes it has, 0 when they are not all there. */
static __attribute__((noinline)) int varint(struct __sk_buff *skb, u32 at, u32 *value)
{
	u8 bytes[5];
	u32 shift = 0;

	*value = 0;
	for (int i = 0; i < 5; i++) {
		if (skb_load_bytes(skb, at + i, &bytes[i], 1) < 0)
			return 0;
		*value |= (u32)(bytes[i] & 0x7f) << shift;
		if (!(bytes[i] & 0x80))
			return i + 1;
		shift += 7;
	}
	return -74;
}

/* MQTT: a byte, a varint, then as many bytes as it says; the hash is that number. */
SEC("socket/mqtt")
int mqtt(struct __sk_buff *skb)
{
	u32 length;
	int used = varint(skb, 1, &length);

	if (used <= 0)
		return used;
	skb->hash = length;
	return 1 + used + length;
}
