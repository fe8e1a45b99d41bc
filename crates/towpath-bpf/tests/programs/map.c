/* Refused: it has a map. */
#include "bpf.h"

struct {
	u32 (*type)[1];
	u32 (*max_entries)[1];
	u32 *key;
	u64 *value;
} counters SEC(".maps");

static void *(*lookup)(void *map, const void *key) = (void *)1;

SEC("socket")
int count(struct __sk_buff *skb)
{
	u32 key = 0;
	u64 *value = lookup(&counters, &key);

	return value ? 4 : 0;
}
