/* Framed Thrift: four bytes of length in network order, then the message. The shape of KCM's documented example. */
#include "bpf.h"

SEC("socket_kcm")
int frame(struct __sk_buff *skb)
{
	return load_word(skb, 0) + 4;
}
